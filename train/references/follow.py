"""References that follow the policy: moving averages, or a copy refreshed every few steps.

Only the trained part of such a reference, weights or adapter, has its own arrays; they are part of the saved state.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import kljax
from train.config.plan import AVERAGES, Plan, follows_policy
from train.config.schema import BemaReference, Config
from train.rl.policy import ScoredPolicy
from train.rl.state import TrainState, policy_part
from train.rl.tracing import traced_once

Tree = Any
Follow = Callable[[Tree, Tree, jax.Array], Tree]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CorrectedAverage:
    """The arrays of a reference that is an average with a correction, each with the structure of the trained part.

    Attributes:
      reference: the weights that are scored.
      average: the average without its correction.
      initial: the policy at the start of the average.
    """

    reference: Tree
    average: Tree
    initial: Tree


def scored_part(moving: Tree) -> Tree:
    """Returns the weights of a reference that follows the policy, of all that the state has of it."""
    return moving.reference if isinstance(moving, CorrectedAverage) else moving


def with_abstract_reference(plan: Plan, state: TrainState) -> TrainState:
    """Adds shapes, dtypes and shardings of a reference that follows the policy to a state, for restoring it."""
    config = plan.config
    if not (plan.reference and follows_policy(config)):
        return state
    part = state.trainable[policy_part(state.trainable)]

    def describe() -> Tree:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, _stored_dtype(config, x.dtype), sharding=x.sharding), part
        )

    return dataclasses.replace(state, reference=_arrays_of(config, describe))


def start_following(config: Config, loaded: ScoredPolicy, trainable: dict[str, Tree]) -> Tree:
    """Returns the part of a loaded reference that follows the policy.

    An average starts at the policy; a refreshed copy at the loaded reference. A missing adapter becomes zeros.
    """
    name = policy_part(trainable)
    part = trainable[name]
    start = part if config.reference.source in AVERAGES else getattr(loaded.policy, name)
    if start is None:
        start = jax.tree.map(jnp.zeros_like, part)

    def copy(x: jax.Array, like: jax.Array) -> jax.Array:
        copied = jnp.array(x, _stored_dtype(config, like.dtype), copy=True)
        return jax.device_put(copied, like.sharding)

    return _arrays_of(config, lambda: jax.tree.map(copy, start, part))


def current_reference(reference: ScoredPolicy | None, state: TrainState) -> ScoredPolicy | None:
    """Returns the reference at this state, with the part that follows the policy cast to the policy's dtypes."""
    if reference is None or state.reference is None:
        return reference
    name = policy_part(state.trainable)
    moving = jax.tree.map(
        lambda x, like: x if x.dtype == like.dtype else x.astype(like.dtype),
        scored_part(state.reference),
        state.trainable[name],
    )
    return dataclasses.replace(reference, policy=dataclasses.replace(reference.policy, **{name: moving}))


def make_follow(config: Config, moving: Tree) -> Follow:
    """Compiles `(moving, trained, step) -> moving`, which donates its first argument."""
    section = config.reference

    def follow(moving: Tree, trained: Tree, step: jax.Array) -> Tree:
        if section.source == "ema":
            return kljax.ema_reference(moving, trained, decay=section.decay)
        if isinstance(section, BemaReference):
            return _corrected(section, moving, trained, step)
        return kljax.refreshed_reference(moving, trained, step, every=getattr(section, "refresh_every", None) or 1)

    shardings = jax.tree.map(lambda x: x.sharding, moving)
    return jax.jit(traced_once(follow), donate_argnums=0, out_shardings=shardings)


def _arrays_of(config: Config, make: Callable[[], Tree]) -> Tree:
    """Makes the arrays of a reference that follows the policy, all of them alike, each with its own buffers."""
    return CorrectedAverage(make(), make(), make()) if config.reference.source == "bema" else make()


def _corrected(section: BemaReference, old: CorrectedAverage, trained: Tree, step: jax.Array) -> CorrectedAverage:
    options = section.model_dump(include={"power", "bias_power", "multiplier", "lag", "min_rate"})
    average, reference = kljax.bema_reference(old.average, trained, old.initial, step, **options)
    before = (old.reference, old.average)
    after = (reference, average)
    reference, average = kljax.refreshed_reference(before, after, step, every=section.every)
    return CorrectedAverage(reference, average, old.initial)


def _stored_dtype(config: Config, dtype: Any) -> Any:
    """Averages are stored in float32: in bfloat16 every step smaller than 1/256 of a weight would be lost."""
    average = config.reference.source in AVERAGES and jnp.issubdtype(dtype, jnp.floating)
    return jnp.promote_types(dtype, jnp.float32) if average else dtype
