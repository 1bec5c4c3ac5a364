"""The reference policy: the decoder that runs it and its weights."""

import dataclasses
from typing import Any

import jax

import kljax
from train.config.plan import Plan
from train.config.schema import Config
from train.models import Decoder
from train.rl.policy import stored_head

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reference:
    """The policy that the KL is measured against. The decoder is static: part of a compiled program.

    Attributes:
      model: the policy's decoder, or a teacher's, which has the same vocabulary.
      policy: weights and adapter. `params` of None stand for the policy's own base (`drop_shared_base`).
    """

    model: Decoder = dataclasses.field(metadata={"static": True})
    policy: kljax.Policy


@dataclasses.dataclass(frozen=True)
class FrozenWeights:
    """The weights that RL reads and never updates.

    Attributes:
      base: the weights under the policy's adapter; None where RL updates all weights.
      reference: the reference policy, or the frozen part of a reference that follows the policy; None without one.
    """

    base: Tree
    reference: Reference | None


def drop_shared_base(reference: Reference | None, base: Tree) -> Reference | None:
    """Drops `params` that are the policy's base arrays; XLA would otherwise allocate the argument twice."""
    if reference is None or base is None or reference.policy.params is not base:
        return reference
    return dataclasses.replace(reference, policy=kljax.Policy(None, reference.policy.adapter))


def restore_shared_base(reference: Reference, base: Tree) -> Reference:
    """Puts the policy's base back in: the inverse of `drop_shared_base`."""
    if reference.policy.params is not None:
        return reference
    return dataclasses.replace(reference, policy=kljax.Policy(base, reference.policy.adapter))


def reference_head(config: Config, reference: Reference | None) -> kljax.Head | None:
    """Returns the reference's LM head for the exact KL, with its own layout and softcap.

    None if no term needs it, or if it is the policy's own head, which is then frozen.
    """
    plan = Plan.of(config)
    if reference is None or plan.shares_head or not (plan.exact_loss or plan.exact_reward):
        return None
    decoder = reference.model.config
    return kljax.Head(
        stored_head(reference.model, reference.policy.params),
        softcap=decoder.final_softcap,
        layout="vd" if decoder.tie_embeddings else "dv",
    )
