"""Trajectories of several steps, each step a row of its own."""

import jax
import jax.numpy as jnp

from kljax._checks import as_float, check_at_least, check_same_shape
from kljax._devices import auto_sharded, over_devices
from kljax._typing import (
    Array,
    ArrayLike,
    AxisName,
    Float,
    Integer,
    MaskLike,
    Real,
)
from kljax.advantages._groups import safe_ids

__all__ = ["broadcast_to_steps"]


@auto_sharded
def broadcast_to_steps(
    advantages: Real[ArrayLike, " B"],
    group_ids: Integer[ArrayLike, " B"],
    *,
    num_groups: int,
    divide_by_steps: bool = False,
    valid: MaskLike[ArrayLike, " B"] | None = None,
    axis_name: AxisName = None,
) -> Float[Array, " B"]:
    """Gives every step of a trajectory the sum of the advantages at its rows: `A_i = sum_{j in trajectory of i} a_j`.

    Usually they stand at one of them: with `valid` marking the last step of each trajectory, `grpo_advantages` compares
    trajectories of the same prompt, each once, and leaves 0 at the other steps. That is Trinity-RFT's `step_wise_grpo`.
    Its `gigpo` adds the comparison of steps that began in the same state, whose returns are those of
    `reinforce_plus_plus_returns` over the steps:
    `broadcast_to_steps(...) + omega * grpo_advantages(step_returns, state_ids, scale="none")`.

    Args:
      advantages: `[B]`, one per step; 0 where a step has none of its own.
      group_ids: `[B]` integers below `num_groups`, the trajectory of each step; negative marks a padding row.
      num_groups: static number of trajectories.
      divide_by_steps: whether to divide by the number of steps of the trajectory.
      valid: `[B]` booleans, False on padding rows; None takes every row with an id of at least 0.
      axis_name: mapped axes, as of `shard_map`, over whose parts the steps are spread, also those of one trajectory.

    Returns:
      `[B]`, float32 or float64; padding rows hold 0.

    Raises:
      ValueError: for differing shapes, or an id of `num_groups` or more. Under jit such an id cannot be seen and makes
        the row's advantage NaN.

    References:
      Trinity-RFT 0.6.0, `step_wise_grpo`; Feng et al., "Group-in-group policy optimization" (2025), eq. 8.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.broadcast_to_steps(jnp.array([0.0, 2.0, -2.0]), jnp.array([0, 0, 1]), num_groups=2))
      [ 2.  2. -2.]
    """
    check_at_least("num_groups", num_groups, 1)
    check_same_shape(advantages=advantages, group_ids=group_ids, valid=valid)
    (advantages,) = as_float(advantages)
    ids, real, unknown = safe_ids(group_ids, num_groups, valid)
    total = over_devices(jax.ops.segment_sum(jnp.where(real, advantages, 0), ids, num_segments=num_groups), axis_name)
    if divide_by_steps:
        steps = jax.ops.segment_sum(real.astype(advantages.dtype), ids, num_segments=num_groups)
        total = total / jnp.maximum(over_devices(steps, axis_name), 1)
    return jnp.where(unknown, jnp.nan, jnp.where(real, total[ids], 0))
