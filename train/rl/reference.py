"""A reference policy and the decoder that runs it."""

import dataclasses
from typing import Any

import jax

import kljax
from train.config.schema import Config
from train.models import Decoder
from train.rl.policy import stored_head

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reference:
    """What the KL is measured against. As an argument of a compiled function, the decoder is part of the program.

    Attributes:
      model: the decoder of the policy, or another one of the same vocabulary: that of a teacher.
      policy: its weights, which may be those of the policy itself, and its adapter. Weights of None are those of the
        policy (`without_base`).
    """

    model: Decoder = dataclasses.field(metadata={"static": True})
    policy: kljax.Policy


def without_base(reference: Reference | None, base: Tree) -> Reference | None:
    """The reference without weights that are the policy's base: what is an argument twice is planned for twice."""
    if reference is None or base is None or reference.policy.params is not base:
        return reference
    return dataclasses.replace(reference, policy=kljax.Policy(None, reference.policy.adapter))


def with_base(reference: Reference, base: Tree) -> Reference:
    """The inverse of `without_base`."""
    if reference.policy.params is not None:
        return reference
    return dataclasses.replace(reference, policy=kljax.Policy(base, reference.policy.adapter))


def reference_head(config: Config, model: Decoder, reference: Reference | None) -> jax.Array | None:
    """The LM head that the exact KL needs, laid out as that of the policy's decoder `model`.

    None if nothing needs it, or if it is the policy's own, which is then frozen.
    """
    exact = config.exact_loss() or config.exact_reward()
    if reference is None or not exact or config.shares_head():
        return None
    stored = stored_head(reference.model, reference.policy.params)
    return stored if reference.model.config.tie_embeddings == model.config.tie_embeddings else stored.T
