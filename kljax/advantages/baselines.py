"""Rewards compared with a baseline of another kind: a soft maximum, a shifted mean, a greedy row, a running mean."""

from typing import get_args

import jax
import jax.numpy as jnp

from kljax._checks import as_float, as_groups, check_at_least, check_choice, check_numbers, check_same_shape
from kljax._devices import all_rows, auto_sharded, local_rows, same_everywhere
from kljax._typing import Array, ArrayLike, Baseline, Float, Integer, Mask, MaskLike, Real, Scalar, Singleton
from kljax.advantages._groups import SINGLETONS, centered, finish, make_groups, safe_ids
from kljax.advantages.group import broadcast_to_tokens
from kljax.advantages.temporal import reinforce_plus_plus_returns
from kljax.batches import Groups, Segments
from kljax.masking import masked

__all__ = ["asymre_advantages", "opmd_advantages", "rae_advantages", "remax_advantages"]

BASELINES = get_args(Baseline)


@auto_sharded
def opmd_advantages(
    rewards: Real[ArrayLike, " B"],
    group_ids: Integer[ArrayLike, " B"] | Groups,
    *,
    num_groups: int | None = None,
    baseline: Baseline = "logavgexp",
    tau: Scalar = 1.0,
    singleton: Singleton = "zero",
) -> Float[Array, " B"]:
    """Rewards minus the soft value of their group: `A_i = r_i - tau * log(mean_g(exp(r / tau)))`.

    The soft value is that of the policy which is optimal under a KL penalty of weight `tau`. It goes from the mean of
    the group at a large `tau` to its maximum at a small one.

    Args:
      rewards: `[B]`, one reward per row.
      group_ids: `[B]` integers below `num_groups`, negative on padding rows; or `Groups`.
      num_groups: static number of groups, unless they are `Groups`.
      baseline: "logavgexp" as above, or "mean" for the mean of the group (the default of Trinity-RFT).
      tau: temperature, in the unit of the rewards, positive; "mean" does not use it.
      singleton: advantage of a row alone in its group: "zero", or "reward" for the reward itself as in Trinity-RFT.

    Returns:
      `[B]`, float32 or float64, in the unit of the rewards; padding rows hold 0. Equal rewards get exactly 0.

    Raises:
      ValueError: as `grpo_advantages`; for an unknown baseline, or a `tau` that is not positive.

    References:
      Kimi Team, "Kimi k1.5" (2025), section 2.3.2; Trinity-RFT 0.6.0, `opmd` and `opmd_verl`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> best, worst = kljax.opmd_advantages(jnp.array([1.0, 0.0]), jnp.array([0, 0]), num_groups=1)
      >>> print(f"{best:.4f} {worst:.4f}")
      0.3799 -0.6201
    """
    check_choice("baseline", baseline, BASELINES)
    check_choice("singleton", singleton, SINGLETONS)
    check_at_least("tau", tau, 0, strict=True)
    groups = make_groups(rewards, as_groups(group_ids, num_groups))
    if baseline == "mean":
        return finish(groups, centered(groups, groups.weights()), groups.rewards, singleton)
    real = groups.real
    ids = groups.ids
    tau = jnp.asarray(tau, groups.rewards.dtype)
    below = jnp.where(real, groups.rewards - jnp.where(real, groups.highest()[ids], 0), 0)
    # Of the distances to the maximum nothing overflows, and `expm1` keeps them where `tau` is large.
    soft = tau * jnp.log1p(groups.total(jnp.expm1(below / tau)) / jnp.maximum(groups.size, 1))
    return finish(groups, below - soft[ids], groups.rewards, singleton)


@auto_sharded
def asymre_advantages(
    rewards: Real[ArrayLike, " B"],
    group_ids: Integer[ArrayLike, " B"] | Groups,
    *,
    num_groups: int | None = None,
    shift: Scalar = -0.1,
    singleton: Singleton = "zero",
) -> Float[Array, " B"]:
    """Rewards minus a baseline a little off the mean of their group: `A_i = r_i - (mean_g + shift)`.

    Off-policy a baseline is not neutral. Below the mean (`shift < 0`) successes weigh more than failures do.

    Args:
      rewards: `[B]`, one reward per row.
      group_ids: `[B]` integers below `num_groups`, negative on padding rows; or `Groups`.
      num_groups: static number of groups, unless they are `Groups`.
      shift: added to the mean, in the unit of the rewards.
      singleton: advantage of a row alone in its group: "zero", or "reward" for the reward itself as in Trinity-RFT.

    Returns:
      `[B]`, float32 or float64, in the unit of the rewards; padding rows hold 0. Equal rewards get `-shift`.

    Raises:
      ValueError: as `grpo_advantages`.

    References:
      Arnal et al., "Asymmetric REINFORCE for off-policy reinforcement learning" (2025); Trinity-RFT 0.6.0, `asymre`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.asymre_advantages(jnp.array([1.0, 0.0]), jnp.array([0, 0]), num_groups=1, shift=-0.25))
      [ 0.75 -0.25]
    """
    check_numbers(shift=shift)
    check_choice("singleton", singleton, SINGLETONS)
    groups = make_groups(rewards, as_groups(group_ids, num_groups))
    shift = jnp.asarray(shift, groups.rewards.dtype)
    return finish(groups, centered(groups, groups.weights()) - shift, groups.rewards, singleton)


def remax_advantages(
    token_rewards: Real[ArrayLike, "*b T"],
    baselines: Real[ArrayLike, "..."],
    mask: MaskLike[Mask, "*b T"],
) -> tuple[Array, Array]:
    """Returns minus the reward of a greedy row for the same prompt: `A_t = sum_{u >= t} m_u R_u - b`.

    Args:
      token_rewards: `[..., T]`, rewards per token; masked ones are ignored.
      baselines: `[...]`, the reward of the greedy row of each row's prompt. With `Segments` `[..., T]`, that of each
        token's sequence.
      mask: `[..., T]`, boolean or `Segments`.

    Returns:
      `(advantages, returns)`, both `[..., T]`, float32 or float64, in the unit of the rewards; masked positions hold 0.

    Raises:
      ValueError: for differing shapes.

    References:
      Li et al., "ReMax" (2023), eq. 7.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> advantages, returns = kljax.remax_advantages(jnp.array([[0.0, 1.0]]), jnp.array([0.25]), jnp.array([[1, 1]]))
      >>> print(advantages, returns)
      [[0.75 0.75]] [[1. 1.]]
    """
    token_rewards, baselines = as_float(token_rewards, baselines)
    returns = reinforce_plus_plus_returns(token_rewards, mask)
    if not isinstance(mask, Segments):
        return returns - broadcast_to_tokens(baselines, mask), returns
    check_same_shape(baselines=baselines, mask=mask)
    return returns - masked(baselines, mask), returns


@auto_sharded
def rae_advantages(
    rewards: Real[ArrayLike, " B"],
    baselines: Real[ArrayLike, " G"],
    group_ids: Integer[ArrayLike, " B"] | Groups,
    *,
    decay: Scalar = 0.95,
) -> tuple[Array, Array]:
    """Rewards minus a running mean of each role: `A_i = r_i - b_g`, and then `b_g <- decay b_g + (1 - decay) r_i`.

    The rows are taken in their order, and each is compared with the baseline before it enters it. In self-play the mean
    of a prompt's rows says nothing, since one role's gain is the other's loss; the usual result of a role does.

    Args:
      rewards: `[B]`, one reward per row.
      baselines: `[G]`, the running mean of each role; zeros at the start, and then what the last call returned.
      group_ids: `[B]` integers below the number of baselines, the role of each row, negative on padding rows; or
        `Groups`, whose rows on several devices are gathered in the order of the devices.
      decay: weight of the old baseline, between 0 and 1.

    Returns:
      `(advantages, baselines)`: `[B]`, where padding rows hold 0, and `[G]`; float32 or float64.

    Raises:
      ValueError: for differing shapes, a negative `decay`, or a group id without a baseline. Under jit such an id
        cannot be seen and makes the row's advantage NaN.

    References:
      Liu et al., "SPIRAL" (2025), algorithm 1; prime-rl 0.8.0, `rae`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> rewards, roles = jnp.array([1.0, -1.0, 1.0]), jnp.array([0, 1, 0])
      >>> print(*kljax.rae_advantages(rewards, jnp.zeros(2), roles, decay=0.5))
      [ 1.  -1.   0.5] [ 0.75 -0.5 ]
    """
    check_at_least("decay", decay, 0)
    rewards, baselines = as_float(rewards, baselines)
    groups = as_groups(group_ids, None if isinstance(group_ids, Groups) else baselines.shape[0])
    check_same_shape(rewards=rewards, group_ids=groups.ids)
    if groups.count != baselines.shape[0]:
        raise ValueError(f"baselines: got {baselines.shape[0]}, expected {groups.count}, one for each group")
    ids, real, unknown = safe_ids(groups)
    axis_name = groups.axis_name
    decay = jnp.asarray(decay, rewards.dtype)

    def step(now: Array, row: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        reward, index, is_real = row
        mean = decay * now[index] + (1 - decay) * reward
        return now.at[index].set(jnp.where(is_real, mean, now[index])), reward - now[index]

    rows = all_rows((jnp.where(real, rewards, 0), ids, real), axis_name)
    # Zeros made from the rewards, so that inside `shard_map` the baselines vary over the same devices as they do.
    last, advantages = jax.lax.scan(step, baselines + jnp.zeros_like(rows[0].sum()), rows)
    advantages = jnp.where(real, local_rows(advantages, axis_name), 0)
    return jnp.where(unknown, jnp.nan, advantages), same_everywhere(last, axis_name)
