"""Sampling with a lagged policy: a ring of earlier trainable weights, part of the saved state."""

from typing import Any

import jax
import jax.numpy as jnp

import kljax
from train.rl.state import TrainState, policy_of

Tree = Any
LaggedWeights = tuple[dict[str, Tree], ...] | None


def _weights(trainable: dict[str, Tree]) -> dict[str, Tree]:
    """Copies the weights that sampling needs; the update donates the originals."""
    return {name: jax.tree.map(jnp.copy, tree) for name, tree in trainable.items() if name != "value_head"}


def initial_past(trainable: dict[str, Tree], lag: int) -> LaggedWeights:
    """Makes the ring before the first step: `lag` times the policy before RL."""
    return (_weights(trainable),) * lag or None


def next_past(state: TrainState) -> LaggedWeights:
    """Moves the ring one step on, before the updates: drops the oldest policy, adds the current one."""
    return None if state.past is None else (*state.past[1:], _weights(state.trainable))


def sampling_policy(state: TrainState, base: Tree) -> tuple[kljax.Policy, int]:
    """Returns the policy that samples at this step, lagged by the length of the ring, and its number of steps."""
    if state.past is None:
        return policy_of(state.trainable, base), int(state.step)
    return policy_of(state.past[0], base), max(int(state.step) - len(state.past), 0)
