"""References that follow the policy: an average of it, or a copy that is refreshed every so many steps.

Of such a reference only the half that is trained is held twice, weights or adapter; it is part of the saved state.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import kljax
from train.config.schema import Config
from train.models import Decoder
from train.rl.reference import Reference
from train.rl.state import TrainState, policy_part
from train.rl.tracing import traced_once

Tree = Any
Follow = Callable[[Tree, Tree, jax.Array], Tree]


def moves(config: Config) -> bool:
    """Whether the reference follows the policy."""
    section = config.reference
    return section.source == "ema" or getattr(section, "refresh_every", None) is not None


def with_place(config: Config, state: TrainState) -> TrainState:
    """The state with shapes, types and shardings where the moving half of the reference goes, for restoring it."""
    if not (config.needs_reference() and moves(config)):
        return state
    part = state.trainable[policy_part(state.trainable)]
    place = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, _held_type(config, x.dtype), sharding=x.sharding), part
    )
    return dataclasses.replace(state, reference=place)


def start_moving(config: Config, found: Reference, trainable: dict[str, Tree]) -> tuple[Reference, Tree]:
    """The half of the reference that stays and the half that moves, as both are when the reference is new.

    An average starts as the policy is; a refreshed copy as the reference that was found, whose adapter, where it is
    off, becomes one of zeros.
    """
    name = policy_part(trainable)
    part = trainable[name]
    start = part if config.reference.source == "ema" else getattr(found.policy, name)
    if start is None:
        start = jax.tree.map(jnp.zeros_like, part)

    def own(x: jax.Array, like: jax.Array) -> jax.Array:
        copied = jnp.array(x, _held_type(config, like.dtype), copy=True)
        return jax.device_put(copied, like.sharding)

    return staying(found.model, found.policy.params, trainable), jax.tree.map(own, start, part)


def staying(model: Decoder, base: Tree, trainable: dict[str, Tree]) -> Reference:
    """The half of a moving reference that stays: the base under an adapter, else nothing."""
    return Reference(model, kljax.Policy(base if policy_part(trainable) == "adapter" else None))


def current_reference(reference: Reference | None, state: TrainState) -> Reference | None:
    """The reference as it is now: with its moving half, if it has one, in the types of the policy."""
    if reference is None or state.reference is None:
        return reference
    name = policy_part(state.trainable)
    moving = jax.tree.map(
        lambda x, like: x if x.dtype == like.dtype else x.astype(like.dtype), state.reference, state.trainable[name]
    )
    return dataclasses.replace(reference, policy=dataclasses.replace(reference.policy, **{name: moving}))


def make_follow(config: Config, moving: Tree) -> Follow:
    """`(moving, trained, step) -> moving` after so many steps, compiled once; the old one is given away."""
    section = config.reference

    def follow(moving: Tree, trained: Tree, step: jax.Array) -> Tree:
        if section.source == "ema":
            return kljax.ema_reference(moving, trained, decay=section.decay)
        return kljax.refreshed_reference(moving, trained, step, every=getattr(section, "refresh_every", None) or 1)

    shardings = jax.tree.map(lambda x: x.sharding, moving)
    return jax.jit(traced_once(follow), donate_argnums=0, out_shardings=shardings)


def _held_type(config: Config, dtype: Any) -> Any:
    """An average in bfloat16 loses every step smaller than 1/256 of a weight: it is held in float32."""
    average = config.reference.source == "ema" and jnp.issubdtype(dtype, jnp.floating)
    return jnp.promote_types(dtype, jnp.float32) if average else dtype
