"""Trajectories of several steps, each step a row of its own."""

import jax
import jax.numpy as jnp

from kljax._checks import as_float, as_groups, check_same_shape
from kljax._devices import auto_sharded, over_devices
from kljax._typing import Array, ArrayLike, Float, Integer, Real
from kljax.advantages._groups import safe_ids
from kljax.batches import Groups

__all__ = ["broadcast_to_steps"]


@auto_sharded
def broadcast_to_steps(
    advantages: Real[ArrayLike, " B"],
    group_ids: Integer[ArrayLike, " B"] | Groups,
    *,
    num_groups: int | None = None,
    divide_by_steps: bool = False,
) -> Float[Array, " B"]:
    """Gives every step of a trajectory the sum of the advantages at its rows: `A_i = sum_{j in trajectory of i} a_j`.

    Usually they stand at one of them: with `valid` marking the last step of each trajectory, `grpo_advantages` compares
    trajectories of the same prompt, each once, and leaves 0 at the other steps. That is Trinity-RFT's `step_wise_grpo`.
    Its `gigpo` adds the comparison of steps that began in the same state, whose returns are the returns of
    `reinforce_plus_plus_returns` over the steps:
    `broadcast_to_steps(...) + omega * grpo_advantages(step_returns, state_ids, scale="none")`.

    Args:
      advantages: `[B]`, one per step; 0 where a step has none of its own.
      group_ids: `[B]` integers below `num_groups`, the trajectory of each step, negative on padding rows; or `Groups`.
      num_groups: static number of trajectories, unless they are `Groups`.
      divide_by_steps: whether to divide by the number of steps of the trajectory.

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
    (advantages,) = as_float(advantages)
    groups = as_groups(group_ids, num_groups)
    check_same_shape(advantages=advantages, group_ids=groups.ids)
    ids, real, unknown = safe_ids(groups)

    def total(values: Array) -> Array:
        return over_devices(jax.ops.segment_sum(values, ids, num_segments=groups.count), groups.axis_name)

    sums = total(jnp.where(real, advantages, 0))
    if divide_by_steps:
        sums = sums / jnp.maximum(total(real.astype(advantages.dtype)), 1)
    return jnp.where(unknown, jnp.nan, jnp.where(real, sums[ids], 0))
