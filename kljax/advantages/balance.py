"""The weight of what went well beside what went badly."""

import jax.numpy as jnp

from kljax._checks import as_float, check_at_least, check_at_most, check_mask, check_same_shape
from kljax._typing import Array, ArrayLike, AxisName, Float, Mask, MaskLike, Real, Scalar
from kljax.masking import masked, masked_sum

__all__ = ["balanced_advantages"]


def balanced_advantages(
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    balance: Scalar,
    weights: Real[ArrayLike, "*b T"] | None = None,
    axis_name: AxisName = None,
) -> Float[Array, "*b T"]:
    """Makes one sign of the advantages smaller, then their weighted mean size 1: `A_t f / (sum_u w_u |A_u f| / sum w)`.

    `f` is `1 - balance` for `A <= 0` if `balance` is positive, `1 + balance` for `A >= 0` if it is negative, and else
    1: at 1 only good completions count, at -1 only bad ones.

    Args:
      advantages: `[..., T]`, or of rows, given to their tokens by `broadcast_to_tokens`.
      balance: -1 to 1.
      weights: at least 0, the weights of the tokens in the mean; None weighs all the same.
      axis_name: mapped axes, as of `shard_map`, over whose parts the mean is taken as well.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0, and so does everything if all advantages are 0.

    Gradient:
      Plain mathematics; advantages are constants.

    Raises:
      ValueError: for differing shapes, or a `balance` out of range.

    References:
      ART 0.5.18, `advantage_balance`, in the packing of a batch.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.balanced_advantages(jnp.array([[1.0, -1.0]]), jnp.array([[1, 1]]), balance=0.5).round(4))
      [[ 1.3333 -0.6667]]
    """
    check_at_least("balance", balance, -1)
    check_at_most("balance", balance, 1)
    check_same_shape(advantages=advantages, mask=mask, weights=weights)
    arrays = as_float(advantages, advantages if weights is None else weights)
    advantages = masked(arrays[0], mask)
    weights = arrays[1] if weights is not None else jnp.ones_like(arrays[0])
    share = jnp.asarray(balance, advantages.dtype)
    factor = jnp.where(advantages > 0, 1 - jnp.maximum(-share, 0), 1 - jnp.maximum(share, 0))
    scaled = advantages * factor
    weights = jnp.where(check_mask(mask), weights, 0)
    size = masked_sum(weights * jnp.abs(scaled), mask, axis_name=axis_name)
    total = masked_sum(weights, mask, axis_name=axis_name)
    return masked(scaled * jnp.where(size > 0, total / jnp.where(size > 0, size, 1), 0), mask)
