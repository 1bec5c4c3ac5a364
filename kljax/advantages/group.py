"""Advantages of whole rows, `[B]`, from the rewards of the other rows sampled from the same prompt.

Rows of a group need not be adjacent. A padding row is one whose `valid` is False or whose group id is negative: it
enters no statistic, its reward may be NaN, and its advantage is 0. Rewards are data; nothing here stops a gradient.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kljax._checks import as_float, check_at_least, check_choice, check_mask, check_same_shape
from kljax._typing import Array, ArrayLike, Scalar
from kljax.masking import masked

__all__ = [
    "broadcast_to_tokens",
    "grpo_advantages",
    "opo_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "rloo_advantages",
]

SINGLETONS = ("zero", "reward")


def grpo_advantages(
    rewards: ArrayLike,
    group_ids: ArrayLike,
    *,
    num_groups: int,
    scale: str = "std",
    ddof: int = 1,
    eps: Scalar = 1e-6,
    singleton: str = "zero",
    valid: ArrayLike | None = None,
) -> Array:
    """Group-relative advantages: `A_i = (r_i - mean_g) / (std_g + eps)`, or without the divisor.

    Args:
      rewards: `[B]`, one reward per row.
      group_ids: `[B]` integers below `num_groups`, the prompt of each row; negative marks a padding row.
      num_groups: static number of groups.
      scale: "std" divides by the standard deviation of the group; "none" only centres (Dr. GRPO).
      ddof: of the standard deviation: 1 as verl, TRL, slime and `torch.std` have it; 0 as ART has it.
      eps: added to the standard deviation, in the unit of the rewards. verl and slime 1e-6, TRL 1e-4, OpenRLHF 1e-9.
      singleton: a group of one row has no one to compare with: "zero" gives it 0; "reward" takes mean 0 and standard
        deviation 1, as verl and SkyRL do, which gives `r / (1 + eps)`, or `r` without the scale.
      valid: `[B]` booleans, False on padding rows; None takes every row with a group id of at least 0.

    Returns:
      `[B]`, float32 or float64; padding rows hold 0. A group of equal rewards gets exactly 0.

    Gradient:
      Advantages are data; rewards under `valid` get gradient 0.

    Raises:
      ValueError: for an unknown option, differing shapes, or a group id of `num_groups` or more. Under jit such an
        id cannot be seen and makes the row's advantage NaN.

    References:
      Shao et al., "DeepSeekMath" (2024), section 4.1; Liu et al., "Understanding R1-Zero-like training" (2025).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> rewards, groups = jnp.array([1.0, 0.0, 3.0, 3.0]), jnp.array([0, 0, 1, 1])
      >>> print(kljax.grpo_advantages(rewards, groups, num_groups=2, ddof=0, eps=0.0))
      [ 1. -1.  0.  0.]
    """
    check_choice("scale", scale, ("std", "none"))
    check_choice("singleton", singleton, SINGLETONS)
    if ddof not in (0, 1):
        raise ValueError(f"ddof: got {ddof!r}, expected 0 or 1")
    groups = _group(rewards, group_ids, num_groups, valid)
    centered = _centered(groups, groups.real.astype(groups.rewards.dtype))
    if scale == "none":
        return _finish(groups, centered, groups.rewards, singleton)
    eps = jnp.asarray(eps, centered.dtype)
    var = groups.total(jnp.square(centered)) / jnp.maximum(groups.size - ddof, 1)
    # A constant group: the square root of 0 has an infinite slope, and with eps 0 the quotient would be 0 / 0.
    varies = var != 0
    std = jnp.where(varies, jnp.sqrt(jnp.where(varies, var, 1)), 1)[groups.ids]
    result = jnp.where(varies[groups.ids], centered / (std + eps), 0)
    return _finish(groups, result, groups.rewards / (1 + eps), singleton)


def reinforce_plus_plus_baseline_advantages(
    rewards: ArrayLike,
    group_ids: ArrayLike,
    *,
    num_groups: int,
    singleton: str = "zero",
    valid: ArrayLike | None = None,
) -> Array:
    """Rewards minus the mean of their group: `A_i = r_i - mean_g`. REINFORCE++-baseline then whitens over the batch.

    The whitening is a step of its own: `masked_whiten(broadcast_to_tokens(A, mask), mask)`.

    Args:
      rewards: `[B]`, one reward per row.
      group_ids: `[B]` integers below `num_groups`; negative marks a padding row.
      num_groups: static number of groups.
      singleton: advantage of a row alone in its group: "zero", or "reward" for the reward itself as in verl.
      valid: `[B]` booleans, False on padding rows; None takes every row with a group id of at least 0.

    Returns:
      `[B]`, float32 or float64; padding rows hold 0.

    Gradient:
      Advantages are data.

    Raises:
      ValueError: as `grpo_advantages`.

    References:
      Hu et al., "REINFORCE++" (2025), the variant with a group baseline.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.reinforce_plus_plus_baseline_advantages(jnp.array([1.0, 0.0]), jnp.array([0, 0]), num_groups=1))
      [ 0.5 -0.5]
    """
    return grpo_advantages(rewards, group_ids, num_groups=num_groups, scale="none", singleton=singleton, valid=valid)


def rloo_advantages(
    rewards: ArrayLike,
    group_ids: ArrayLike,
    *,
    num_groups: int,
    singleton: str = "zero",
    valid: ArrayLike | None = None,
) -> Array:
    """Leave-one-out advantages: `A_i = r_i - mean of the others in its group = n / (n - 1) * (r_i - mean_g)`.

    Args:
      rewards: `[B]`, one reward per row.
      group_ids: `[B]` integers below `num_groups`; negative marks a padding row.
      num_groups: static number of groups.
      singleton: advantage of a row alone in its group: "zero" as in SkyRL, or "reward" for the reward as in verl.
      valid: `[B]` booleans, False on padding rows; None takes every row with a group id of at least 0.

    Returns:
      `[B]`, float32 or float64; padding rows hold 0.

    Gradient:
      Advantages are data.

    Raises:
      ValueError: as `grpo_advantages`.

    References:
      Ahmadian et al., "Back to basics: revisiting REINFORCE style optimization" (2024), eq. 8.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.rloo_advantages(jnp.array([3.0, 1.0, 2.0]), jnp.array([0, 0, 0]), num_groups=1))
      [ 1.5 -1.5  0. ]
    """
    check_choice("singleton", singleton, SINGLETONS)
    groups = _group(rewards, group_ids, num_groups, valid)
    centered = _centered(groups, groups.real.astype(groups.rewards.dtype))
    without_self = groups.size / jnp.maximum(groups.size - 1, 1)
    return _finish(groups, centered * without_self[groups.ids], groups.rewards, singleton)


def opo_advantages(
    rewards: ArrayLike,
    lengths: ArrayLike,
    group_ids: ArrayLike,
    *,
    num_groups: int,
    singleton: str = "zero",
    valid: ArrayLike | None = None,
) -> Array:
    """Rewards minus the length-weighted mean of their group: `A_i = r_i - sum_g len_j r_j / sum_g len_j`.

    Args:
      rewards: `[B]`, one reward per row.
      lengths: `[B]`, number of sampled tokens of each row (`mask.sum(-1)`), at least 0.
      group_ids: `[B]` integers below `num_groups`; negative marks a padding row.
      num_groups: static number of groups.
      singleton: advantage of a row alone in its group: "zero", or "reward" for the reward itself as in verl.
      valid: `[B]` booleans, False on padding rows; None takes every row with a group id of at least 0.

    Returns:
      `[B]`, float32 or float64; padding rows hold 0, and so does every row of a group without a single token.

    Gradient:
      Advantages are data.

    Raises:
      ValueError: as `grpo_advantages`, and if `lengths` has another shape.

    References:
      Hao et al., "On-policy RL with optimal reward baseline" (2025), eq. 6.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> rewards, lengths, groups = jnp.array([1.0, 0.0]), jnp.array([3, 1]), jnp.array([0, 0])
      >>> print(kljax.opo_advantages(rewards, lengths, groups, num_groups=1))
      [ 0.25 -0.75]
    """
    check_choice("singleton", singleton, SINGLETONS)
    check_same_shape(rewards=rewards, lengths=lengths)
    groups = _group(rewards, group_ids, num_groups, valid)
    weights = jnp.where(groups.real, jnp.asarray(lengths).astype(groups.rewards.dtype), 0)
    return _finish(groups, _centered(groups, weights), groups.rewards, singleton)


def broadcast_to_tokens(advantages: ArrayLike, mask: ArrayLike) -> Array:
    """Gives every unmasked token of a row the row's advantage: `A_t = m_t A`.

    Args:
      advantages: `[...]`, one per row.
      mask: `[..., T]`, boolean.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0.

    Gradient:
      To `advantages`, summed over the unmasked tokens of the row; usually data.

    Raises:
      ValueError: if `advantages` does not have the shape of the mask without its last axis.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.broadcast_to_tokens(jnp.array([2.0]), jnp.array([[1, 1, 0]])))
      [[2. 2. 0.]]
    """
    (advantages,) = as_float(advantages)
    shape = jnp.shape(mask)
    if advantages.shape != shape[:-1]:
        raise ValueError(f"advantages: got shape {list(advantages.shape)}, expected {list(shape[:-1])}, one per row")
    return masked(jnp.broadcast_to(advantages[..., None], shape), mask)


class _Groups(NamedTuple):
    """Rewards with 0 on padding rows, ids that are safe to index with, which rows are real, and rows per group."""

    rewards: Array
    ids: Array
    real: Array
    unknown: Array
    size: Array

    def total(self, values: Array) -> Array:
        """Sums `[B]` values, 0 on padding rows, into `[G]`."""
        return jax.ops.segment_sum(values, self.ids, num_segments=self.size.shape[0])


def _group(rewards: ArrayLike, group_ids: ArrayLike, num_groups: int, valid: ArrayLike | None) -> _Groups:
    check_at_least("num_groups", num_groups, 1)
    (rewards,) = as_float(rewards)
    if rewards.ndim != 1:
        raise ValueError(f"rewards: got shape {list(rewards.shape)}, expected [B], one reward per row")
    check_same_shape(rewards=rewards, group_ids=group_ids, valid=valid)
    ids = jnp.asarray(group_ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"group_ids: got dtype {ids.dtype}, expected an integer type")
    chosen = ids >= 0 if valid is None else (ids >= 0) & check_mask(valid, "valid")
    unknown = chosen & (ids >= num_groups)
    if not isinstance(unknown, jax.core.Tracer) and unknown.is_fully_addressable and unknown.any():
        raise ValueError(f"group_ids: got {ids.max()}, expected ids below num_groups = {num_groups}")
    real = chosen & ~unknown
    ids = jnp.where(real, ids, 0)
    count = jax.ops.segment_sum(real.astype(rewards.dtype), ids, num_segments=num_groups)
    return _Groups(jnp.where(real, rewards, 0), ids, real, unknown, count)


def _centered(groups: _Groups, weights: Array) -> Array:
    """`r_i - sum_g w_j r_j / sum_g w_j`, 0 on padding rows and in a group of weight 0.

    The mean is taken of the distances to the lowest reward of the group: equal rewards then centre to exactly 0, where
    the rounding of their mean, divided by a standard deviation of the same size, would become an advantage.
    """
    real, ids = groups.real, groups.ids
    low = jax.ops.segment_min(jnp.where(real, groups.rewards, jnp.inf), ids, num_segments=groups.size.shape[0])
    above = jnp.where(real, groups.rewards - jnp.where(real, jax.lax.stop_gradient(low)[ids], 0), 0)
    total = groups.total(weights)
    mean = groups.total(weights * above) / jnp.where(total > 0, total, 1)
    return jnp.where(real & (total > 0)[ids], above - mean[ids], 0)


def _finish(groups: _Groups, result: Array, alone: Array, singleton: str) -> Array:
    """Applies the rule for groups of one, and the values of rows that belong to no group."""
    only = groups.size[groups.ids] == 1
    result = jnp.where(only, alone if singleton == "reward" else 0, result)
    return jnp.where(groups.unknown, jnp.nan, jnp.where(groups.real, result, 0))
