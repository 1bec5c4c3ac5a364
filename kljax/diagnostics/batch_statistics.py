"""Statistics that are no means: taken of a whole batch, before it is split."""

import jax
import jax.numpy as jnp

from kljax._checks import as_float, check_mask, check_same_shape
from kljax._devices import greatest
from kljax._typing import Array, ArrayLike, AxisName, Float, Mask, MaskLike, Real
from kljax.masking import masked, masked_mean, masked_var
from kljax.ratios.levels import largest

__all__ = ["effective_sample_size", "explained_variance", "probability_correlation"]


def effective_sample_size(
    weights: Real[ArrayLike, "*b T"], mask: MaskLike[Mask, "*b T"], *, axis_name: AxisName = None
) -> Float[Array, ""]:
    """The share of a sample that its importance weights leave in effect: `(sum w)^2 / (n sum w^2)`.

    Args:
      weights: `[..., T]` importance weights, at least 0, of the whole batch (`truncated_importance_weights`).
      mask: `n` is the number of unmasked positions.
      axis_name: mapped axes, as of `shard_map`, over whose parts the batch is spread.

    Returns:
      A scalar between 0 and 1, float32 or float64: 1 for equal weights, `1 / n` if one weight dominates, 0 if there
      is no weight. It is also `mean(w)^2 / mean(w^2)`, with both means as `mean_metric` for parts of a batch.

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
    largest = greatest(weights.max(initial=0), axis_name)
    weights = weights / jnp.where(largest == 0, 1, largest)
    squares = masked_mean(jnp.square(weights), mask, axis_name=axis_name)
    none = squares == 0
    return jnp.where(none, 0, jnp.square(masked_mean(weights, mask, axis_name=axis_name)) / jnp.where(none, 1, squares))


def explained_variance(
    values: Real[ArrayLike, "*b T"],
    returns: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    axis_name: AxisName = None,
) -> Float[Array, ""]:
    """How much of the returns a value function predicts: `1 - var(R - V) / var(R)`.

    Args:
      values: `[..., T]` values of the whole batch, in the unit of the rewards.
      returns: the returns.
      axis_name: mapped axes, as of `shard_map`, over whose parts the batch is spread.

    Returns:
      A scalar of at most 1, float32 or float64: 1 is perfect, 0 no better than a constant, and 0 if the
      returns do not vary.

    Raises:
      ValueError: if the shapes differ.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.explained_variance(jnp.array([1.0, 2.0]), jnp.array([1.0, 3.0]), jnp.array([1, 1])))
      0.75
    """
    check_same_shape(values=values, returns=returns, mask=mask)
    values, returns = as_float(values, returns)
    values = masked(values, mask)
    returns = masked(returns, mask)
    total = masked_var(returns, mask, axis_name=axis_name)
    unexplained = masked_var(returns - values, mask, axis_name=axis_name)
    constant = total == 0
    return jax.lax.stop_gradient(jnp.where(constant, 0, 1 - unexplained / jnp.where(constant, 1, total)))


def probability_correlation(
    log_probs: Float[ArrayLike, "*b T"],
    rollout_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    axis_name: AxisName = None,
) -> Float[Array, ""]:
    """Pearson's correlation of the probabilities that two policies give the sampled tokens.

    Args:
      log_probs: `[..., T]` log-probs of the whole batch, in nats.
      rollout_log_probs: log-probs recorded by the sampler, or of any other policy.
      axis_name: mapped axes, as of `shard_map`, over whose parts the batch is spread.

    Returns:
      A scalar between -1 and 1, float32 or float64; 0 if either policy gives every token the same probability.

    Raises:
      ValueError: if the shapes differ.

    References:
      ART's `probs_corr`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, rollout = jnp.log(jnp.array([0.1, 0.5, 0.9])), jnp.log(jnp.array([0.2, 0.4, 0.6]))
      >>> print(f"{kljax.probability_correlation(lp, rollout, jnp.array([1, 1, 1])):.4f}")
      1.0000
    """
    check_same_shape(log_probs=log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
    unmasked = check_mask(mask)
    logs = [masked(jax.lax.stop_gradient(x), mask) for x in as_float(log_probs, rollout_log_probs)]
    # In units of the largest probability, so that squares of small ones do not vanish.
    first, second = (jnp.exp(x - largest(x, unmasked, axis_name)) for x in logs)
    first, second = (x - masked_mean(x, mask, axis_name=axis_name) for x in (first, second))

    def mean(values: Array) -> Array:
        return masked_mean(values, mask, axis_name=axis_name)

    norm = jnp.sqrt(mean(jnp.square(first))) * jnp.sqrt(mean(jnp.square(second)))
    return jnp.where(norm == 0, 0, mean(first * second) / jnp.where(norm == 0, 1, norm)).clip(-1, 1)
