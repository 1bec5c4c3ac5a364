"""Advantages of whole rows, `[B]`, from the rewards of the other rows sampled from the same prompt.

Rows of a group need not be adjacent. A padding row is one whose `valid` is False or whose group id is negative: it
enters no statistic, its reward may be NaN, and its advantage is 0. Rewards are constants: no gradient is stopped here.
"""

import dataclasses
from typing import get_args

import jax.numpy as jnp

from kljax._checks import as_array, as_float, as_groups, check_choice, check_numbers, check_same_shape
from kljax._devices import auto_sharded
from kljax._typing import Array, ArrayLike, Float, Integer, Mask, MaskLike, Real, Scalar, Scale, Singleton
from kljax.advantages._groups import SINGLETONS, centered, deviations, finish, make_groups
from kljax.batches import Groups, Segments
from kljax.masking import masked
from kljax.rows import narrowed, row_any, row_count, to_sequences, to_tokens

__all__ = [
    "broadcast_to_tokens",
    "grpo_advantages",
    "opo_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "rloo_advantages",
]

SCALES = get_args(Scale)


@auto_sharded
def grpo_advantages(
    rewards: Real[ArrayLike, " B"],
    group_ids: Integer[ArrayLike, " B"] | Groups,
    *,
    num_groups: int | None = None,
    scale: Scale = "std",
    ddof: int = 1,
    eps: Scalar = 1e-6,
    singleton: Singleton = "zero",
) -> Float[Array, " B"]:
    """Group-relative advantages: `A_i = (r_i - mean_g) / (std_g + eps)`, or with another divisor, or without one.

    Args:
      rewards: `[B]`, one reward per row.
      group_ids: `[B]` integers below `num_groups`, the prompt of each row, negative on padding rows; or `Groups`.
      num_groups: static number of groups, unless they are `Groups`.
      scale: "std" divides by the standard deviation of the group; "batch_std" by that of all rewards of the batch
        (TRL, Trinity-RFT); "mean" by the mean of the group (MaxRL as SkyRL has it, see `maxrl_advantages`); "none" only
        centres (Dr. GRPO).
      ddof: of the standard deviation: 1 as verl, TRL, slime and `torch.std` have it; 0 as ART has it.
      eps: added to the divisor, in the unit of the rewards. verl and slime 1e-6, TRL 1e-4, OpenRLHF 1e-9.
      singleton: a group of one row has no one to compare with: "zero" gives it 0; "reward" takes mean 0 and the
        standard deviation 1 or that of the batch, as verl and SkyRL do: `r / (1 + eps)` with "std", `r` with "mean" and
        "none".

    Returns:
      `[B]`, float32 or float64; padding rows hold 0. A group of equal rewards gets exactly 0.

    Raises:
      ValueError: for an unknown option, differing shapes, or a group id of `num_groups` or more. Under jit such an
        id cannot be seen and makes the row's advantage NaN.

    References:
      Shao et al., "DeepSeekMath" (2024), section 4.1; Liu et al., "Understanding R1-Zero-like training" (2025), for
      "none"; Liu et al., "Part I: tricks or traps?" (2025), for "batch_std".

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> rewards, groups = jnp.array([1.0, 0.0, 3.0, 3.0]), jnp.array([0, 0, 1, 1])
      >>> print(kljax.grpo_advantages(rewards, groups, num_groups=2, ddof=0, eps=0.0))
      [ 1. -1.  0.  0.]
    """
    check_numbers(ddof=ddof, eps=eps)
    check_choice("scale", scale, SCALES)
    check_choice("singleton", singleton, SINGLETONS)
    groups = make_groups(rewards, as_groups(group_ids, num_groups))
    distances = centered(groups, groups.weights())
    alone = groups.rewards
    std, varies = deviations(groups, distances, ddof)
    eps = jnp.asarray(eps, distances.dtype)
    if scale == "none":
        return finish(groups, distances, alone, singleton)
    if scale == "mean":
        divisor = (groups.total(alone) / jnp.maximum(groups.size, 1))[groups.ids] + eps
        varies = varies[groups.ids] & (divisor != 0)
    elif scale == "std":
        divisor = std[groups.ids] + eps
        varies = varies[groups.ids]
        alone = alone / (1 + eps)
    else:
        batch = groups.as_one()
        batch_std, varies = deviations(batch, centered(batch, batch.weights()), ddof)
        divisor = batch_std + eps
        alone = alone / (batch_std + eps)
    result = jnp.where(varies, distances / jnp.where(varies, divisor, 1), 0)
    return finish(groups, result, alone, singleton)


@auto_sharded
def reinforce_plus_plus_baseline_advantages(
    rewards: Real[ArrayLike, " B"],
    group_ids: Integer[ArrayLike, " B"] | Groups,
    *,
    num_groups: int | None = None,
    singleton: Singleton = "zero",
) -> Float[Array, " B"]:
    """Rewards minus the mean of their group: `A_i = r_i - mean_g`. REINFORCE++-baseline then whitens over the batch.

    The whitening is a step of its own: `masked_whiten(broadcast_to_tokens(A, mask), mask)`.

    Args:
      rewards: `[B]`, one reward per row.
      group_ids: `[B]` integers below `num_groups`, negative on padding rows; or `Groups`.
      num_groups: static number of groups, unless they are `Groups`.
      singleton: advantage of a row alone in its group: "zero", or "reward" for the reward itself as in verl.

    Returns:
      `[B]`, float32 or float64; padding rows hold 0.

    Raises:
      ValueError: as `grpo_advantages`.

    References:
      Hu et al., "REINFORCE++" (2025), the variant with a group baseline.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.reinforce_plus_plus_baseline_advantages(jnp.array([1.0, 0.0]), jnp.array([0, 0]), num_groups=1))
      [ 0.5 -0.5]
    """
    return grpo_advantages(
        rewards,
        group_ids,
        num_groups=num_groups,
        scale="none",
        singleton=singleton,
    )


@auto_sharded
def rloo_advantages(
    rewards: Real[ArrayLike, " B"],
    group_ids: Integer[ArrayLike, " B"] | Groups,
    *,
    num_groups: int | None = None,
    singleton: Singleton = "zero",
) -> Float[Array, " B"]:
    """Leave-one-out advantages: `A_i = r_i - mean of the others in its group = n / (n - 1) * (r_i - mean_g)`.

    Args:
      rewards: `[B]`, one reward per row.
      group_ids: `[B]` integers below `num_groups`, negative on padding rows; or `Groups`.
      num_groups: static number of groups, unless they are `Groups`.
      singleton: advantage of a row alone in its group: "zero" as in SkyRL, or "reward" for the reward as in verl.

    Returns:
      `[B]`, float32 or float64; padding rows hold 0.

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
    groups = make_groups(rewards, as_groups(group_ids, num_groups))
    distances = centered(groups, groups.weights())
    without_self = groups.size / jnp.maximum(groups.size - 1, 1)
    return finish(groups, distances * without_self[groups.ids], groups.rewards, singleton)


@auto_sharded
def opo_advantages(
    rewards: Real[ArrayLike, "..."],
    group_ids: Integer[ArrayLike, "..."] | Groups,
    mask: MaskLike[Mask, "B T"],
    *,
    num_groups: int | None = None,
    singleton: Singleton = "zero",
) -> Array:
    """Subtracts the length-weighted mean of their group from the rewards: `A_i = r_i - sum_g n_j r_j / sum_g n_j`.

    Args:
      rewards: `[B]`, one reward per row.
      group_ids: `[B]` integers below `num_groups`, negative on padding rows; or `Groups`.
      mask: `[B, T]`, boolean or `Segments`, the sampled tokens; `n_i` is their number in row `i`.
      num_groups: static number of groups, unless they are `Groups`.
      singleton: advantage of a row alone in its group: "zero", or "reward" for the reward itself as in verl.

    Returns:
      `[B]`, float32 or float64; padding rows hold 0, and so does every row of a group without a single token.
      With `Segments` `[B, T]`: each unmasked token has the advantage of its sequence, and masked positions hold 0.

    Raises:
      ValueError: as `grpo_advantages`, and if `mask` is not `[B, T]`.

    References:
      Hao et al., "On-policy RL with optimal reward baseline" (2025), eq. 6.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> rewards, groups, mask = jnp.array([1.0, 0.0]), jnp.array([0, 0]), jnp.array([[1, 1, 1], [1, 0, 0]])
      >>> print(kljax.opo_advantages(rewards, groups, mask, num_groups=1))
      [ 0.25 -0.75]
    """
    check_choice("singleton", singleton, SINGLETONS)
    # At padding between segments may lie any id.
    members = as_groups(group_ids, num_groups, unknown=isinstance(mask, Segments))
    shape = check_same_shape(mask=mask)
    if isinstance(mask, Segments):
        rewards, members = _of_segments(mask, as_float(rewards)[0], members)
    elif len(shape) != 2 or shape[:1] != jnp.shape(rewards):
        expected = ", ".join([*map(str, jnp.shape(rewards)), "T"])
        raise ValueError(f"mask: got shape {list(shape)}, expected [{expected}], the tokens of each row")
    groups = make_groups(rewards, members)
    lengths = row_count(mask)
    weights = jnp.where(groups.real, lengths.ravel().astype(groups.rewards.dtype), 0)
    advantages = finish(groups, centered(groups, weights), groups.rewards, singleton)
    if not isinstance(mask, Segments):
        return advantages
    return masked(to_tokens(advantages.reshape(lengths.shape), mask), mask)


def broadcast_to_tokens(
    advantages: Real[ArrayLike, "..."],
    mask: MaskLike[Mask, "*b T"],
) -> Float[Array, "*b T"]:
    """Gives every unmasked token of a row the row's advantage: `A_t = m_t A`.

    Args:
      advantages: `[...]`, one per row. With `Segments` `[..., S]`: entry `s` is that of the segment with id `s`, and
        `S` is more than every id.
      mask: `[..., T]`, boolean or `Segments`.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0.

    Gradient:
      To `advantages`, summed over the unmasked tokens of the row.

    Raises:
      ValueError: if `advantages` does not have the shape of the mask without its last axis.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.broadcast_to_tokens(jnp.array([2.0]), jnp.array([[1, 1, 0]])))
      [[2. 2. 0.]]
    """
    (advantages,) = as_float(advantages)
    shape = check_same_shape(mask=mask)
    if isinstance(mask, Segments):
        if advantages.ndim != len(shape) or advantages.shape[:-1] != shape[:-1]:
            expected = ", ".join([*map(str, shape[:-1]), "S"])
            raise ValueError(f"advantages: got shape {list(advantages.shape)}, expected [{expected}], one per segment")
        return masked(to_tokens(advantages, mask), mask)
    if advantages.shape != shape[:-1]:
        raise ValueError(f"advantages: got shape {list(advantages.shape)}, expected {list(shape[:-1])}, one per row")
    return masked(jnp.broadcast_to(advantages[..., None], shape), mask)


def per_token(advantages: Array, mask: Mask) -> Array:
    """Gives every unmasked token its advantage, or that of its row.

    Args:
      advantages: `[..., T]`, or `[...]`, one per row.
      mask: `[..., T]`, boolean.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0.
    """
    if advantages.ndim < len(check_same_shape(mask=mask)):
        return broadcast_to_tokens(advantages, mask)
    check_same_shape(advantages=advantages, mask=mask)
    return masked(advantages, mask)


def _of_segments(mask: Segments, rewards: Array, groups: Groups) -> tuple[Array, Groups]:
    """Rewards and groups of each token's sequence as rewards and groups of rows `[N]`, one for each segment."""
    check_same_shape(**{"rewards": rewards, "group_ids": groups.ids, "mask": mask})
    ids = as_array(mask.ids)
    of_tokens = as_array(groups.ids)
    present = row_any(narrowed(mask, of_tokens >= 0))
    of_rows = jnp.where(present, to_sequences(of_tokens, ids), -1).ravel()
    return to_sequences(rewards, ids).ravel(), as_groups(dataclasses.replace(groups, ids=of_rows), None)
