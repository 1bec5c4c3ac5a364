"""Sampling with a policy some steps old: the ring of what was trainable, part of the saved state."""

from typing import Any

import jax
import jax.numpy as jnp

import kljax
from train.rl.state import TrainState, policy_of

Tree = Any
Past = tuple[dict[str, Tree], ...] | None


def _weights(trainable: dict[str, Tree]) -> dict[str, Tree]:
    """A copy of what sampling needs; the update gives the buffers of the original away."""
    return {name: jax.tree.map(jnp.copy, tree) for name, tree in trainable.items() if name != "value_head"}


def first_past(trainable: dict[str, Tree], lag: int) -> Past:
    """The ring before the first step: `lag` times the policy before RL."""
    return (_weights(trainable),) * lag or None


def next_past(state: TrainState) -> Past:
    """The ring after this step, made before its updates: without the oldest policy, with the current one."""
    return None if state.past is None else (*state.past[1:], _weights(state.trainable))


def sampling_policy(state: TrainState, base: Tree) -> tuple[kljax.Policy, int]:
    """The policy that samples at this step, as many steps old as the ring is long, and how many steps made it."""
    if state.past is None:
        return policy_of(state.trainable, base), int(state.step)
    return policy_of(state.past[0], base), max(int(state.step) - len(state.past), 0)
