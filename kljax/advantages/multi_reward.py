"""Several rewards per row, each compared within the group before they are added."""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp

from kljax._checks import as_float, as_groups, check_choice, check_mask, check_numbers
from kljax._devices import auto_sharded
from kljax._typing import Array, ArrayLike, Float, Integer, Real, RewardNormalization, Scalar, Scale, Singleton
from kljax.advantages._groups import safe_ids
from kljax.advantages.group import grpo_advantages
from kljax.batches import Groups

__all__ = ["gdpo_advantages"]

NORMALIZATIONS = get_args(RewardNormalization)


@auto_sharded
def gdpo_advantages(
    rewards: Real[ArrayLike, "B K"],
    group_ids: Integer[ArrayLike, " B"] | Groups,
    *,
    num_groups: int | None = None,
    weights: Real[ArrayLike, "..."] | None = None,
    scale: Scale = "std",
    ddof: int = 1,
    eps: Scalar = 1e-6,
    normalize: RewardNormalization = "none",
    singleton: Singleton = "zero",
) -> Float[Array, " B"]:
    """The sum of the group advantages of each reward: `A_i = sum_k w_k grpo(r_k)_i`.

    A reward that varies little weighs as much as one that varies much, which it would not in the advantage of the sum.

    What follows differs. verl whitens over tokens, `masked_whiten(broadcast_to_tokens(A, mask), mask)`. TRL's
    "normalize_then_sum" takes `(A - mean) / (std + eps)` over the rows of the batch, which is `normalize="rows"` (with
    `eps=1e-4`).

    Args:
      rewards: `[B, K]`, the rewards of each row.
      group_ids: `[B]` integers below `num_groups`, the prompt of each row, negative on padding rows; or `Groups`,
        whose `valid` may be `[B, K]`: a single reward that is False does not count and adds nothing to its row, as TRL
        treats a reward that is NaN.
      num_groups: static number of groups, unless they are `Groups`.
      weights: `[K]`, the weight of each reward; None weighs each 1.
      scale: "std", "batch_std", "mean" or "none", as `grpo_advantages`.
      ddof: of the standard deviations, 0 or 1.
      eps: added to the standard deviations; in the unit of the rewards.
      normalize: "rows" standardises the sum over the rows of the batch; "none" leaves it.
      singleton: as `grpo_advantages`, "zero" or "reward".

    Returns:
      `[B]`, float32 or float64; padding rows hold 0.

    Raises:
      ValueError: as `grpo_advantages`; for rewards that are not `[B, K]`, or `weights` that are not `[K]`.

    References:
      "GDPO: group reward-decoupled normalization policy optimization" (arXiv 2601.05242, 2026).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> rewards = jnp.array([[1.0, 0.0], [0.0, 0.0], [1.0, 100.0], [0.0, 0.0]])
      >>> print(kljax.gdpo_advantages(rewards, jnp.array([0, 0, 1, 1]), num_groups=2, ddof=0, eps=0.0))
      [ 1. -1.  2. -2.]
    """
    check_numbers(ddof=ddof, eps=eps)
    check_choice("normalize", normalize, NORMALIZATIONS)
    (rewards,) = as_float(rewards)
    if rewards.ndim != 2:
        raise ValueError(f"rewards: got shape {list(rewards.shape)}, expected [B, K], the rewards of each row")
    valid = group_ids.valid if isinstance(group_ids, Groups) else None
    bare = dataclasses.replace(group_ids, valid=None) if isinstance(group_ids, Groups) else group_ids
    groups = as_groups(bare, num_groups)
    ids, real, unknown = safe_ids(groups)
    there = jnp.ones(rewards.shape, bool) if valid is None else check_mask(valid, "group_ids.valid")
    there = there[:, None] if there.ndim == 1 else there
    if there.shape not in (rewards.shape, (rewards.shape[0], 1)):
        raise ValueError(
            f"group_ids.valid: got shape {list(there.shape)}, expected {list(rewards.shape)} or one per row"
        )
    (weights,) = as_float(jnp.ones(rewards.shape[1:], rewards.dtype) if weights is None else weights)
    if weights.shape != rewards.shape[1:]:
        raise ValueError(
            f"weights: got shape {list(weights.shape)}, expected {list(rewards.shape[1:])}, one per reward"
        )

    def standardized(reward: Array, present: Array) -> Array:
        of_reward = dataclasses.replace(groups, valid=present)
        return grpo_advantages(reward, of_reward, scale=scale, ddof=ddof, eps=eps, singleton=singleton)

    each = jax.vmap(standardized, in_axes=(1, 1), out_axes=1)(rewards, jnp.broadcast_to(there, rewards.shape))
    result = (each * weights.astype(each.dtype)[None]).sum(1)
    if normalize == "none":
        return result
    batch = Groups(jnp.where(there.any(1) & real, ids * 0, -1), 1, axis_name=groups.axis_name)
    standardised = grpo_advantages(result, batch, ddof=ddof, eps=eps)
    return jnp.where(unknown, jnp.nan, standardised)
