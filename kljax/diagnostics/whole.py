"""Statistics that are no means: taken of a whole batch, before it is split."""

import jax
import jax.numpy as jnp

from kljax._checks import as_float, check_same_shape
from kljax._typing import Array, ArrayLike, AxisName
from kljax.masking import masked, masked_mean, masked_var

__all__ = ["effective_sample_size", "explained_variance"]


def effective_sample_size(weights: ArrayLike, mask: ArrayLike, *, axis_name: AxisName = None) -> Array:
    """The share of a sample that its importance weights leave in effect: `(sum w)^2 / (n sum w^2)`.

    Args:
      weights: `[..., T]` importance weights, at least 0, of the whole batch (`truncated_importance_weights`).
      mask: same shape, boolean; `n` is the number of unmasked positions.
      axis_name: mapped axes, as of `shard_map`, over whose parts the batch is spread.

    Returns:
      A scalar between 0 and 1, float32 or float64: 1 for equal weights, `1 / n` if one weight dominates, 0 if there
      is no weight.

    Gradient:
      None; metrics are data.

    Raises:
      ValueError: if the shapes differ.

    References:
      Kong, "A note on importance sampling using standardized weights" (1992).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.effective_sample_size(jnp.array([1.0, 0.0]), jnp.array([1, 1])))
      0.5
    """
    weights = jax.lax.stop_gradient(masked(weights, mask))
    # Divided by the largest weight first, so that no square overflows.
    largest = weights.max(initial=0)
    if axis_name is not None:
        largest = jax.lax.pmax(largest, axis_name)
    weights = weights / jnp.where(largest == 0, 1, largest)
    squares = masked_mean(jnp.square(weights), mask, axis_name=axis_name)
    none = squares == 0
    return jnp.where(none, 0, jnp.square(masked_mean(weights, mask, axis_name=axis_name)) / jnp.where(none, 1, squares))


def explained_variance(values: ArrayLike, returns: ArrayLike, mask: ArrayLike, *, axis_name: AxisName = None) -> Array:
    """How much of the returns a value function predicts: `1 - var(R - V) / var(R)`.

    Args:
      values: `[..., T]` values of the whole batch, in the unit of the rewards.
      returns: same shape, the returns.
      mask: same shape, boolean.
      axis_name: mapped axes, as of `shard_map`, over whose parts the batch is spread.

    Returns:
      A scalar of at most 1, float32 or float64: 1 is perfect, 0 no better than a constant, and 0 if the
      returns do not vary.

    Gradient:
      None; metrics are data.

    Raises:
      ValueError: if the shapes differ.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.explained_variance(jnp.array([1.0, 2.0]), jnp.array([1.0, 3.0]), jnp.array([1, 1])))
      0.75
    """
    check_same_shape(values=values, returns=returns, mask=mask)
    values, returns = as_float(values, returns)
    values, returns = masked(values, mask), masked(returns, mask)
    total = masked_var(returns, mask, axis_name=axis_name)
    unexplained = masked_var(returns - values, mask, axis_name=axis_name)
    constant = total == 0
    return jax.lax.stop_gradient(jnp.where(constant, 0, 1 - unexplained / jnp.where(constant, 1, total)))
