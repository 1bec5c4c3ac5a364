"""The choices of every stage that another system may have made: a fixed list. Numbers are solved in `fitting`."""

from kljax.tools.parity.causes import Cause
from kljax.tools.parity.choices.advantages import advantage_causes
from kljax.tools.parity.choices.kl import kl_causes
from kljax.tools.parity.choices.losses import gradient_causes, loss_causes
from kljax.tools.parity.choices.masks import kl_mask_causes, mask_causes
from kljax.tools.parity.choices.policies import correction_causes, ratio_causes, score_causes
from kljax.tools.parity.choices.reductions import reduction_causes
from kljax.tools.parity.recipe import Recipe
from kljax.tools.parity.replay import Replay


def causes_of(replay: Replay) -> list[Cause]:
    """Lists every hypothesis about a dump, in the order of the data; causes that change nothing are left out.

    Args:
      replay: the recorded arrays, and the plan whose recipe the causes change.

    Returns:
      The causes; of several that give the same recipe, the first.
    """
    recipe = replay.plan.recipe
    causes = [*mask_causes(replay, "mask_rule", "recorded mask"), *score_causes(replay)]
    causes += [*ratio_causes(replay), *correction_causes(replay), *kl_causes(replay)]
    causes += [*advantage_causes(replay), *loss_causes(replay), *reduction_causes(replay)]
    causes += [*mask_causes(replay, "mask", "mask of the loss"), *kl_mask_causes(replay), *gradient_causes(replay)]
    unique: dict[Recipe, Cause] = {}
    for cause in causes:
        if getattr(recipe, cause.stage, None) is not None:
            changed = cause.apply(recipe)
            if changed != recipe:
                unique.setdefault(changed, cause)
    return list(unique.values())
