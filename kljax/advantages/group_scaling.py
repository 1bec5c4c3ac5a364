"""Group advantages `[B]` whose scale is the point: by the success rate, by the rows that teach, by the best row."""

from typing import get_args

import jax
import jax.numpy as jnp

from kljax._checks import as_groups, check_choice, check_numbers
from kljax._devices import auto_sharded, local_rows, over_devices
from kljax._typing import Array, ArrayLike, Float, Integer, Real, Scalar, Singleton, StdScale
from kljax.advantages._groups import SINGLETONS, GroupedRewards, centered, deviations, finish, make_groups
from kljax.batches import Groups

__all__ = ["gpg_advantages", "maxrl_advantages", "pass_at_k_advantages"]

SCALES = get_args(StdScale)


@auto_sharded
def maxrl_advantages(
    rewards: Real[ArrayLike, " B"],
    group_ids: Integer[ArrayLike, " B"] | Groups,
    *,
    num_groups: int | None = None,
    eps: Scalar = 0.0,
    singleton: Singleton = "zero",
) -> Float[Array, " B"]:
    """Rewards relative to the mean of their group: `A_i = (r_i - mean_g) / (mean_g + eps)`, and 0 where `mean_g <= 0`.

    Meant for rewards of at least 0, of which the mean is the success rate `p`: a prompt that is seldom solved weighs
    `1 / p`, as in maximum likelihood. SkyRL divides by a negative mean too, which turns the sign of the advantages:
    that is `grpo_advantages(..., scale="mean", eps=1e-6, singleton="reward")`.

    Args:
      rewards: `[B]`, one reward per row.
      group_ids: `[B]` integers below `num_groups`, negative on padding rows; or `Groups`.
      num_groups: static number of groups, unless they are `Groups`.
      eps: added to the mean, in the unit of the rewards.
      singleton: advantage of a row alone in its group: "zero", or "reward" for the reward itself.

    Returns:
      `[B]`, float32 or float64, without a unit; padding rows hold 0.

    Raises:
      ValueError: as `grpo_advantages`.

    References:
      "Maximum likelihood reinforcement learning" (arXiv 2602.02710, 2026); prime-rl 0.8.0, `max_rl`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.maxrl_advantages(jnp.array([1.0, 0.0, 0.0, 0.0]), jnp.zeros(4, int), num_groups=1))
      [ 3. -1. -1. -1.]
    """
    check_numbers(eps=eps)
    check_choice("singleton", singleton, SINGLETONS)
    groups = make_groups(rewards, as_groups(group_ids, num_groups))
    mean = (groups.total(groups.rewards) / jnp.maximum(groups.size, 1))[groups.ids]
    distances = centered(groups, groups.weights())
    # A NaN reward shows in its group: a comparison with NaN would make it look like a mean of at most 0.
    useless = mean <= 0
    divisor = jnp.where(useless, 1, mean + jnp.asarray(eps, mean.dtype))
    return finish(groups, jnp.where(useless, 0, distances / divisor), groups.rewards, singleton)


@auto_sharded
def gpg_advantages(
    rewards: Real[ArrayLike, " B"],
    group_ids: Integer[ArrayLike, " B"] | Groups,
    *,
    num_groups: int | None = None,
    singleton: Singleton = "zero",
) -> Float[Array, " B"]:
    """Centred rewards, made larger where few rows have a reward: `A_i = n / n_nonzero * (r_i - mean_g)`.

    `n` is the number of rows of the batch and `n_nonzero` of rows whose reward is not 0, at least 1. A further
    constant divisor, `f_norm` in verl (where it is 1), is the caller's.

    Args:
      rewards: `[B]`, one reward per row.
      group_ids: `[B]` integers below `num_groups`, negative on padding rows; or `Groups`.
      num_groups: static number of groups, unless they are `Groups`.
      singleton: advantage of a row alone in its group: "zero", or "reward" for `n / n_nonzero * r_i` as in verl.

    Returns:
      `[B]`, float32 or float64; padding rows hold 0.

    Raises:
      ValueError: as `grpo_advantages`.

    References:
      Chu et al., "GPG: a simple and strong reinforcement learning baseline" (2025), eq. 9.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.gpg_advantages(jnp.array([1.0, 0.0, 0.0, 0.0]), jnp.array([0, 0, 1, 1]), num_groups=2))
      [ 2. -2.  0.  0.]
    """
    check_choice("singleton", singleton, SINGLETONS)
    groups = make_groups(rewards, as_groups(group_ids, num_groups))
    nonzero = over_devices((groups.rewards != 0).sum(), groups.axis_name).astype(groups.rewards.dtype)
    factor = groups.size.sum() / jnp.maximum(nonzero, 1)
    return finish(groups, factor * centered(groups, groups.weights()), factor * groups.rewards, singleton)


@auto_sharded
def pass_at_k_advantages(
    rewards: Real[ArrayLike, " B"],
    group_ids: Integer[ArrayLike, " B"] | Groups,
    *,
    num_groups: int | None = None,
    scale: StdScale = "std",
    ddof: int = 1,
    eps: Scalar = 1e-6,
) -> Float[Array, " B"]:
    """Credits the best row with its margin: `A_best = (r_best - r_second) / (std_g + eps)`, and 0 for every other row.

    The best of `k` samples would be `r_second` without it. Where two rows share the best reward, neither adds anything.

    Args:
      rewards: `[B]`, one reward per row.
      group_ids: `[B]` integers below `num_groups`, negative on padding rows; or `Groups`.
      num_groups: static number of groups, unless they are `Groups`.
      scale: "std" divides by the standard deviation of the group; "none" does not.
      ddof: of the standard deviation, 0 or 1.
      eps: added to the standard deviation, in the unit of the rewards.

    Returns:
      `[B]`, float32 or float64; padding rows hold 0, and so does a row alone in its group.

    Raises:
      ValueError: as `grpo_advantages`.

    References:
      Tang et al., "Optimizing language models for inference time objectives using RL" (2025); verl `grpo_passk`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> rewards, groups = jnp.array([0.5, 2.0, 1.0]), jnp.array([0, 0, 0])
      >>> print(kljax.pass_at_k_advantages(rewards, groups, num_groups=1, scale="none"))
      [0. 1. 0.]
    """
    check_numbers(ddof=ddof, eps=eps)
    check_choice("scale", scale, SCALES)
    local = make_groups(rewards, as_groups(group_ids, num_groups))
    groups = local.gathered()
    rows = jnp.arange(groups.rewards.shape[0])
    first = _best_row(groups, groups.real)[groups.ids]
    second = _best_row(groups, groups.real & (rows != first))[groups.ids]
    result = groups.rewards[first] - groups.rewards[second]
    if scale == "std":
        std, varies = deviations(groups, centered(groups, groups.weights()), ddof)
        result = jnp.where(varies[groups.ids], result / (std[groups.ids] + jnp.asarray(eps, std.dtype)), 0)
    # A NaN equals nothing, so no row would be the best of its group.
    unordered = jnp.isnan(groups.total(groups.rewards))[groups.ids]
    result = jnp.where(unordered, jnp.nan, jnp.where(rows == first, result, 0))
    return local_rows(finish(groups, result, groups.rewards, "zero"), local.axis_name)


def _best_row(groups: GroupedRewards, eligible: Array) -> Array:
    """`[G]`: the first of the eligible rows with the highest reward of its group; any row where there is none."""
    count = groups.size.shape[0]
    last = groups.rewards.shape[0] - 1
    rewards = jax.lax.stop_gradient(groups.rewards)
    top = jax.ops.segment_max(jnp.where(eligible, rewards, -jnp.inf), groups.ids, num_segments=count)
    is_top = eligible & (rewards == top[groups.ids])
    rows = jnp.where(is_top, jnp.arange(last + 1), last)
    return jnp.minimum(jax.ops.segment_min(rows, groups.ids, num_segments=count), last)
