"""Other KL terms."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kljax.kl import LOW_VAR_VALUE_CLIP
from kljax.tools.parity.causes import Cause, make, rare
from kljax.tools.parity.losses import has_clips
from kljax.tools.parity.recipe import Kl
from kljax.tools.parity.replay import Replay

KL_ESTIMATORS: dict[str, dict[str, Any]] = {
    "k1": {"estimator": "k1"},
    "abs": {"estimator": "abs"},
    "k2": {"estimator": "k2"},
    "squared log-ratio, no half": {"estimator": "k2", "scale": 2.0},
    "k3": {"estimator": "k3"},
    "k3 clipped as low_var_kl": {"estimator": "low_var_kl"},
    "k3 with its value clipped at 10": {"estimator": "k3", "value_clip": 10.0},
}
GRADIENTS = {
    "value": "the KL's gradient is that of its estimator",
    "k2": "the KL has the straight-through gradient of k2",
    "none": "the KL has no gradient",
}

RATIOS = {
    "row": "that is the geometric mean of its row",
    "sampler": "to the sampler",
    "inverse": "of the old policy over the policy",
}


def kl_causes(replay: Replay) -> Iterator[Cause]:
    """Yields other KL terms."""
    kl = replay.plan.recipe.kl
    if kl is None:
        return
    plain = {"log_ratio_clip": None, "value_clip": None, "scale": 1.0}
    for name, settings in KL_ESTIMATORS.items():
        yield make("kl", f"estimator {name}", f"the KL is {name}", **{**plain, **settings})
    yield make("kl", "direction swapped", "the KL has its direction swapped: KL(ref || pi)", swapped=True)
    for shift, where in ((1, "right"), (-1, "left")):
        text = f"the reference's log-probs are off by one in the KL: moved to the {where}"
        yield make("kl", f"reference off by one ({where})", text, shift=shift)
    if kl.value_clip is not None:
        name = "squared log-ratio, no half"
        yield make(
            "kl", f"estimator {name}", f"the KL is {name}", estimator="k2", scale=2.0, value_clip=kl.value_clip / 2
        )
    if kl.corrected:
        yield make("kl", "importance ratio detached", "the KL's importance ratio is a constant", detached=True)
    flag = "importance ratio left out" if kl.corrected else "importance ratio multiplied"
    if replay.plan.recipe.ratio.old in replay.arrays:
        yield make("kl", flag, f"the KL has its {flag}", corrected=not kl.corrected)
        for ratio, text in RATIOS.items():
            if ratio != "sampler" or "rollout_log_probs" in replay.arrays:
                name = f"importance ratio {'of the row' if ratio == 'row' else ratio}"
                yield rare("kl", name, f"the KL has an importance ratio {text}", corrected=True, ratio=ratio)
        yield from _ratio_after_clip(replay, kl)
    samplers = [name for name in ("old_log_probs", "rollout_log_probs") if name in replay.arrays]
    for policy in ("log_probs", *samplers):
        yield make("kl", f"of {policy}", f"the KL is that of {policy}", policy=policy)
    for reference in (*(["ref_log_probs"] if "ref_log_probs" in replay.arrays else []), *samplers):
        yield make("kl", f"against {reference}", f"the KL is taken to {reference}", reference=reference)
    for gradient, text in GRADIENTS.items():
        yield make("kl", f"gradient {gradient}", text, gradient=gradient)
    yield from _coefficient_causes(replay, kl)
    yield from _place_causes(replay, kl)


def _place_causes(replay: Replay, kl: Kl) -> Iterator[Cause]:
    """Yields the KL in the loss in place of the reward, or the reverse, also with the policy that is usual there."""
    usual = {"loss": ("reward", "old_log_probs"), "reward": ("loss", "log_probs")}
    if kl.place not in usual or not {"rewards", "group_ids"} <= set(replay.arrays):
        return
    other, policy = usual[kl.place]
    for source in dict.fromkeys((policy, kl.policy)):
        if source in replay.arrays:
            text = f"the KL of {source} is in the {other}, not in the {kl.place}"
            yield rare("kl", f"in the {other}, of {source}", text, place=other, policy=source)


def _ratio_after_clip(replay: Replay, kl: Kl) -> Iterator[Cause]:
    """Yields a ratio that multiplies the clipped estimate, where that is another number than a clip of the product."""
    clip = LOW_VAR_VALUE_CLIP if kl.value_clip is None and kl.estimator == "low_var_kl" else kl.value_clip
    if kl.corrected or clip is None or kl.reference not in replay.arrays:
        return
    text = "the KL has its importance ratio multiplied after its clip"
    after = make("kl", "importance ratio multiplied after the clip", text, corrected=True, bound=clip)
    recipe = replay.plan.recipe
    clipped, multiplied = (
        replay.predict("kl", each).value for each in (recipe.changed("kl", corrected=True), after.apply(recipe))
    )
    if not np.allclose(clipped, multiplied, equal_nan=True):
        yield after


def _coefficient_causes(replay: Replay, kl: Kl) -> Iterator[Cause]:
    """Yields coefficients that are easily confused, and other ways to enter the loss, the reward or the advantage."""
    for dtype in ("bfloat16", "float16"):
        yield rare("kl", f"log-ratio in {dtype}", f"the log-ratio of the KL is rounded to {dtype}", dtype=dtype)
    if replay.plan.recipe.correction is not None and kl.place == "loss":
        text = "the correction's weights multiply the KL term"
        yield make("kl", "weighted as the policy loss", text, weighted=True)
    if "loss" in replay.plan.calls and kl.place == "loss" and has_clips(replay.plan.calls["loss"]):
        text = "the KL term is that of tokens whose ratio is within the clips of the policy loss"
        yield rare("kl", "within the clips alone", text, trusted=True)
    yield rare("kl", "of the row", "the KL of a token is that of the mean log-probs of its row", level="row")
    if kl.place == "advantage":
        text = "the KL in the advantage has the mean of its row taken off, not that of the batch"
        yield make("kl", "centered over the row", text, mean="row")
        text = "the mean KL has no epsilon in its divisor"
        yield rare("kl", "mean without epsilon", text, mean_eps=0.0)
        text = "the KL in the advantage does not have its mean over the batch taken off"
        yield make("kl", "not centered", text, centered=False)
    if kl.place == "reward":
        yield make("kl", "summed over padding", "the KL in the reward is summed over padding, too", padded=True)
        text = "the KL of a row is taken off the reward of its last token"
        yield make("kl", "at the last token", text, at_end=True)
        yield rare(
            "kl", "mean over the row", "the KL in the reward is divided by the length of its row", per_length=True
        )
        for moved, where in ((1, "right"), (-1, "left")):
            text = f"the KL in the reward is off by one: moved to the {where}"
            yield rare("kl", f"in the reward off by one ({where})", text, moved=moved)
        if "advantage" in replay.plan.calls and "subtract_kl" in repr(replay.plan.calls["advantage"]):
            text = "the KL is taken off the reward before the rewards of a group are compared"
            yield make("kl", "taken off before the comparison", text, early=True)
    yield make("kl", "coefficient missing", "the KL term has no coefficient", coef=1.0)
    yield make("kl", "term missing", "the KL term is left out", coef=0.0)
    yield make("kl", "coefficient twice", "the KL term has its coefficient squared", coef=kl.coef**2)
    yield make("kl", "sign flipped", "the KL term has the other sign", coef=-kl.coef)
