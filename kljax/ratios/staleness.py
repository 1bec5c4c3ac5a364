"""Rejection by age: tokens that a policy of too many steps ago drew. Arrays are `[..., T]`."""

from typing import get_args

from kljax._checks import as_array, check_at_least, check_choice, check_mask, check_same_shape
from kljax._typing import Array, ArrayLike, Bool, DivergenceLevel, Integer, Mask, MaskLike
from kljax.rows import narrowed, row_any, to_tokens

__all__ = ["max_lag_mask"]

LEVELS = get_args(DivergenceLevel)


def max_lag_mask(
    lags: Integer[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    max_lag: int,
    level: DivergenceLevel = "sequence",
) -> Bool[Array, "*b T"]:
    """The tokens of a policy of at most so many steps ago: `m_t and lag_t <= max_lag`, or whole sequences of them.

    Args:
      lags: `[..., T]` steps from the policy that drew each token to the one that is trained; negative where nobody
        knows, which is kept.
      mask: boolean or `Segments`.
      max_lag: largest lag kept, inclusive.
      level: "sequence" drops a sequence with an older token, "token" drops the older tokens alone.

    Returns:
      `[..., T]` booleans, a subset of `mask`.

    Raises:
      ValueError: for an unknown level, differing shapes, or a negative bound.

    References:
      `max_off_policy_steps` of prime-rl, which drops the rollout; the staleness bound of AReaL (arXiv:2505.24298).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lags = jnp.array([[3, 1, 0], [1, 1, 0]])
      >>> print(kljax.max_lag_mask(lags, jnp.ones((2, 3), bool), max_lag=2))
      [[False False False]
       [ True  True  True]]
      >>> print(kljax.max_lag_mask(lags, jnp.ones((2, 3), bool), max_lag=2, level="token"))
      [[False  True  True]
       [ True  True  True]]
    """
    check_at_least("max_lag", max_lag, 0)
    check_choice("level", level, LEVELS)
    check_same_shape(lags=lags, mask=mask)
    keep = check_mask(mask)
    fresh = as_array(lags) <= max_lag
    if level == "token":
        return keep & fresh
    return keep & ~to_tokens(row_any(narrowed(mask, keep & ~fresh)), mask)
