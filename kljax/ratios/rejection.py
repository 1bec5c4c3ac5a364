"""Rejection by the ratio of two policies: which tokens, or whole sequences, another policy drew too differently.

A mask here is a subset of the mask given. Reduced with the weights of the original mask, rejected tokens count as zero
loss and the denominators stay; with the weights of the returned mask they are dropped. Arrays are `[..., T]`.
"""

import jax.numpy as jnp

from kljax._checks import check_mask
from kljax._typing import Array, ArrayLike, Bool, Float, Level, Mask, MaskLike, Scalar
from kljax.ratios.levels import check_bounds, level_log_ratios, token_ratios, within
from kljax.rows import narrowed, row_any, to_tokens

__all__ = ["rejection_mask", "veto_mask"]


def rejection_mask(
    log_probs: Float[ArrayLike, "*b T"],
    sampling_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    level: Level = "token",
    lower: Scalar | None = None,
    upper: Scalar | None = None,
) -> Bool[Array, "*b T"]:
    """The tokens whose ratio lies within bounds: `m_t and lower <= r <= upper`, with the ratio `r` of a level.

    Reduce with the weights of the original mask to keep the denominators (rejected tokens then count as zero loss), or
    with the weights of the returned mask to drop the rejected tokens altogether.

    Args:
      log_probs: `[..., T]` log-probs of the policy the loss is about (usually the old policy), in nats.
      sampling_log_probs: log-probs of the policy that drew the tokens.
      mask: boolean or `Segments`.
      level: "token", "sequence" (rejects whole rows by their product) or "geometric" (by their geometric mean).
      lower: lowest ratio kept, inclusive; None has no lower bound.
      upper: highest ratio kept, inclusive; None has no upper bound.

    Returns:
      `[..., T]` booleans, a subset of `mask`. A ratio that is NaN is rejected.

    Raises:
      ValueError: for an unknown level, differing shapes, no bound at all, a negative bound, or `lower > upper`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, rollout = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.0, -3.0]])
      >>> print(kljax.rejection_mask(lp, rollout, jnp.array([[1, 1]]), lower=0.5, upper=2.0))
      [[ True False]]
    """
    check_bounds(lower, upper, low=0)
    ratio = jnp.exp(level_log_ratios(log_probs, sampling_log_probs, mask, level))
    inside = within(ratio, lower, upper)
    return check_mask(mask) & (inside if level == "token" else to_tokens(inside, mask))


def veto_mask(
    log_probs: Float[ArrayLike, "*b T"],
    sampling_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    min_ratio: Scalar | None = 1e-4,
    max_ratio: Scalar | None = None,
) -> Bool[Array, "*b T"]:
    """Drops each sequence that holds a catastrophic token: one with `r_t < min_ratio` or `r_t > max_ratio`.

    Args:
      log_probs: `[..., T]` log-probs of the policy the loss is about (usually the old policy), in nats.
      sampling_log_probs: log-probs of the policy that drew the tokens.
      mask: boolean or `Segments`.
      min_ratio: lowest token ratio tolerated, inclusive; None tolerates any.
      max_ratio: highest token ratio tolerated, inclusive; None tolerates any.

    Returns:
      `[..., T]` booleans: the mask, with every position of a vetoed row False. A token whose ratio is NaN vetoes.

    Raises:
      ValueError: if the shapes differ, a bound is negative, there is none, or they are in the wrong order.

    References:
      slime's veto (a lower bound) and SkyRL's outlier tokens (either one).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, rollout = jnp.array([[-1.0, -20.0], [-1.0, -2.0]]), jnp.array([[-1.0, -1.0], [-1.0, -2.0]])
      >>> print(kljax.veto_mask(lp, rollout, jnp.ones((2, 2), bool)))
      [[False False]
       [ True  True]]
    """
    check_bounds(min_ratio, max_ratio, low=0, names=("min_ratio", "max_ratio"))
    keep = check_mask(mask)
    tolerated = within(token_ratios(log_probs, sampling_log_probs, mask), min_ratio, max_ratio)
    return keep & ~to_tokens(row_any(narrowed(mask, keep & ~tolerated)), mask)
