"""Perplexities of whole sequences and how two policies differ in them; means over the rows that have a token."""

import jax.numpy as jnp

from kljax._checks import check_same_shape
from kljax._typing import Array, ArrayLike, Float, Mask, MaskLike
from kljax.aggregation import WeightedSum
from kljax.ratios import level_log_ratios, level_mask
from kljax.rows import row_mean

__all__ = ["log_perplexity", "log_perplexity_diff", "perplexity", "perplexity_ratio"]


def perplexity(
    log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
) -> WeightedSum:
    """Mean perplexity of the sequences: `E_i[exp(-sum_t m_it log pi(y_it) / n_i)]`.

    Args:
      log_probs: `[..., T]` log-probs of the tokens, in nats.
      mask: boolean or `Segments`; `n_i` is the number of unmasked tokens of row `i`.

    Returns:
      `WeightedSum` per row that has a token.

    Raises:
      ValueError: if the shapes differ.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(f"{kljax.perplexity(jnp.log(jnp.array([[0.5, 0.125]])), jnp.array([[1, 1]])).value():.4f}")
      4.0000
    """
    return _over_sequences(jnp.exp(-_mean_log_probs(log_probs, mask)), mask)


def log_perplexity(
    log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
) -> WeightedSum:
    """Mean log-perplexity of the sequences: `E_i[-sum_t m_it log pi(y_it) / n_i]`.

    Args:
      log_probs: `[..., T]` log-probs of the tokens, in nats.
      mask: boolean or `Segments`; `n_i` is the number of unmasked tokens of row `i`.

    Returns:
      `WeightedSum` per row that has a token, in nats.

    Raises:
      ValueError: if the shapes differ.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.log_perplexity(jnp.array([[-1.0, -3.0]]), jnp.array([[1, 1]])).value())
      2.0
    """
    return _over_sequences(-_mean_log_probs(log_probs, mask), mask)


def log_perplexity_diff(
    log_probs: Float[ArrayLike, "*b T"],
    rollout_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    absolute: bool = False,
) -> WeightedSum:
    """How much higher the trainer's log-perplexity is than the sampler's, on sequences of the sampler.

    Per row the mean of `log pi_rollout - log pi`, the negative log of the length-normalised ratio.

    Args:
      log_probs: `[..., T]` log-probs of the trainer's policy, in nats.
      rollout_log_probs: log-probs recorded by the sampler.
      mask: boolean or `Segments`.
      absolute: takes the absolute difference of each row, so that opposite signs do not cancel.

    Returns:
      `WeightedSum` per row that has a token, in nats. Its extremes over rows are the negative ones of
      `log_prob_diff_extremes(..., level="geometric")`.

    Raises:
      ValueError: if the shapes differ.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, rollout, mask = jnp.array([[-2.0], [-1.0]]), jnp.array([[-1.0], [-2.0]]), jnp.array([[1], [1]])
      >>> for absolute in (False, True):
      ...     print(kljax.log_perplexity_diff(lp, rollout, mask, absolute=absolute).value())
      0.0
      1.0
    """
    difference = -level_log_ratios(log_probs, rollout_log_probs, mask, "geometric")
    return _over_sequences(jnp.abs(difference) if absolute else difference, mask)


def perplexity_ratio(
    log_probs: Float[ArrayLike, "*b T"],
    rollout_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
) -> WeightedSum:
    """Mean over sequences of the trainer's perplexity divided by the sampler's.

    Args:
      log_probs: `[..., T]` log-probs of the trainer's policy, in nats.
      rollout_log_probs: log-probs recorded by the sampler.
      mask: boolean or `Segments`.

    Returns:
      `WeightedSum` per row that has a token; 1 where the two agree.

    Raises:
      ValueError: if the shapes differ.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, rollout = jnp.log(jnp.array([[0.25, 0.5]])), jnp.log(jnp.array([[0.5, 1.0]]))
      >>> print(f"{kljax.perplexity_ratio(lp, rollout, jnp.array([[1, 1]])).value():.4f}")
      2.0000
    """
    log_ratio = level_log_ratios(log_probs, rollout_log_probs, mask, "geometric")
    return _over_sequences(jnp.exp(-log_ratio), mask)


def _mean_log_probs(log_probs: ArrayLike, mask: Mask) -> Array:
    check_same_shape(log_probs=log_probs, mask=mask)
    return row_mean(log_probs, mask)


def _over_sequences(values: Array, mask: Mask) -> WeightedSum:
    return WeightedSum.of(values, level_mask(mask, "geometric"))
