"""The weights that RL never updates, and the LM head of the reference."""

import dataclasses
from typing import Any

import kljax
from train.config.plan import Plan
from train.models.head import stored_head
from train.rl.policy import ScoredPolicy

Tree = Any


@dataclasses.dataclass(frozen=True)
class FrozenWeights:
    """The weights that RL reads and never updates.

    Attributes:
      base: the weights under the trained adapter; None where RL updates all weights.
      reference: the reference policy, or the frozen part of a reference that follows the policy; None without one. It
        has no weights where it shares the base.
    """

    base: Tree
    reference: ScoredPolicy | None


def reference_head(plan: Plan, reference: ScoredPolicy | None) -> kljax.Head | None:
    """Returns the reference's LM head for the exact KL, with its own layout and softcap.

    None if no term or metric needs it, or if it is the policy's own head, which is then frozen.
    """
    if reference is None or plan.shares_head or not (plan.exact_kl or plan.exact_reward):
        return None
    decoder = reference.model.config
    return kljax.Head(
        stored_head(reference.model, reference.policy.params),
        softcap=decoder.final_softcap,
        layout="vd" if decoder.tie_embeddings else "dv",
    )
