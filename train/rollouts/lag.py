"""Samples of an earlier policy: the lag of each token, and the ring of earlier weights of `rollout.policy_lag`."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from train.config.plan import Plan
from train.rl.state import TrainState, policy_of
from train.sequences.token_fields import UNKNOWN

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


def token_lags(versions: Any, mask: Any, step: int) -> Any:
    """Computes the RL steps between the policy that drew each token and the one that trains on it: `step - version`.

    Args:
      versions: [B, T] int32, the field `token_versions`.
      mask: [B, T], the sampled tokens.
      step: RL steps done.

    Returns:
      [B, T] int32; -1 without a version, or with one that this run has not made yet, as in a recording of another run.

    Example:
      >>> token_lags(np.array([[-1, 2, 3, 9]]), np.array([[False, True, True, True]]), 3).tolist()
      [[-1, 1, 0, -1]]
    """
    where: Any = jnp.where if isinstance(versions, jax.Array) else np.where
    known = mask & (versions >= 0) & (versions <= step)
    return where(known, np.int32(step) - versions, np.int32(UNKNOWN))


def reads_lags(plan: Plan) -> bool:
    """Whether a correction reads the lag of each token."""
    return any("lags" in signature for signature in plan.corrections)


def lags_of_rows(lags: np.ndarray) -> dict[str, np.ndarray]:
    """Returns of each row, by name, the sum, the number and the largest of the lags that are known."""
    known = lags != UNKNOWN
    return {
        "lag_sum": np.where(known, lags, 0).sum(-1, dtype=np.int64),
        "lag_count": known.sum(-1),
        "most_lag": lags.max(-1, initial=UNKNOWN),
    }


def measure_lags(plan: Plan, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns the metrics of the lags of a batch: the mean, and the largest.

    There are none if no token has a known lag, nor for a run whose samples have no lag by its config and by themselves.

    Args:
      plan: of the run.
      rows: `lags_of_rows` of all rows.
    """
    section = plan.config.rollout
    count = int(rows["lag_count"].sum()) if "lag_count" in rows else 0
    if not count:
        return {}
    most = int(rows["most_lag"].max())
    if not (most or section.ahead or section.policy_lag or reads_lags(plan)):
        return {}
    return {"rollout_lag": float(rows["lag_sum"].sum() / count), "rollout_lag_max": float(most)}
