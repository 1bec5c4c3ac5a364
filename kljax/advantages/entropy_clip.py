"""Which tokens of negative advantage to train on, so that the entropy does not collapse under them.

A little more of the logit of a token of probability `p` is `S = p (H + log p)` times as much less entropy `H`, and less
of it that much more: at a token of negative advantage the entropy falls where `S < 0`.
"""

import jax
import jax.numpy as jnp

from kljax._checks import as_float, as_real, check_at_least, check_mask, check_same_shape
from kljax._devices import all_rows, auto_sharded, local_rows
from kljax._numerics import floor_share
from kljax._typing import Array, ArrayLike, AxisName, Bool, Float, Mask, MaskLike, Real, Scalar
from kljax.masking import highest, masked, masked_mean, masked_var

__all__ = ["clip_b_mask", "clip_v_mask"]


def clip_b_mask(
    advantages: Real[ArrayLike, "*b T"],
    log_probs: Float[ArrayLike, "*b T"],
    entropies: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    mu: Scalar = 2.5,
    axis_name: AxisName = None,
) -> Bool[Array, "*b T"]:
    """Drops tokens of negative advantage and small `S`; the others have `A >= 0` or `S - mean(S) >= -mu * std(S)`.

    Mean and population standard deviation are taken over all unmasked tokens: give it the whole batch.

    Args:
      advantages: `[..., T]`, per token.
      log_probs: log-probs of the sampled tokens, in nats.
      entropies: entropy of the distribution at each position, in nats.
      mu: how many standard deviations below the mean are kept, at least 0.
      axis_name: mapped axes, as of `shard_map`, over whose parts the batch is spread.

    Returns:
      `[..., T]` booleans, True on tokens to train on; False where the mask is.

    Raises:
      ValueError: for differing shapes, or a negative `mu`.

    References:
      Wang et al., "On the entropy dynamics in reinforcement fine-tuning of large language models" (2026), Clip_B.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> log_probs, ones = jnp.log(jnp.array([[0.5, 0.5, 0.01]])), jnp.ones((1, 3))
      >>> print(kljax.clip_b_mask(-ones, log_probs, ones, ones.astype(bool), mu=1.0))
      [[ True  True False]]
    """
    check_same_shape(advantages=advantages, log_probs=log_probs, entropies=entropies, mask=mask)
    check_at_least("mu", mu, 0)
    score = _score(log_probs, entropies, mask)
    std = jnp.sqrt(masked_var(score, mask, ddof=0, axis_name=axis_name))
    centered = score - masked_mean(score, mask, axis_name=axis_name)
    low = centered < -jnp.asarray(mu, score.dtype) * std
    return check_mask(mask) & ~(low & (as_real(advantages) < 0))


@auto_sharded
def clip_v_mask(
    advantages: Real[ArrayLike, "*b T"],
    log_probs: Float[ArrayLike, "*b T"],
    entropies: Real[ArrayLike, "*b T"],
    expected_scores: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    mu: Scalar = 2.0,
    max_fraction: Scalar = 1e-4,
    axis_name: AxisName = None,
) -> Bool[Array, "*b T"]:
    """Drops tokens of negative advantage and an `S` far below its expectation, the farthest first.

    A token goes where `A < 0` and `E[S] - S > mu * std`, with the population standard deviation of `E[S] - S` over all
    unmasked tokens: give it the whole batch. At most `max_fraction` of these tokens go, rounded down, but one may.

    Args:
      advantages: `[..., T]`, per token.
      log_probs: log-probs of the sampled tokens, in nats.
      entropies: entropy of the distribution at each position, in nats.
      expected_scores: the mean of `S` over the vocabulary at each position,
        `sum_v p_v^2 (H + log p_v)`.
      mu: how many standard deviations below its expectation `S` may be, at least 0.
      max_fraction: bound of the share of tokens that are dropped, at least 0.
      axis_name: mapped axes, as of `shard_map`, over whose parts the first axis is spread, in their order; the
        ranks are ranks in the whole batch.

    Returns:
      `[..., T]` booleans, True on tokens to train on; False where the mask is.

    Raises:
      ValueError: for differing shapes, or a negative `mu` or `max_fraction`.

    References:
      Wang et al., "On the entropy dynamics in reinforcement fine-tuning of large language models" (2026), Clip_V;
      Trinity-RFT 0.6.0, `clipv`, which also drops tokens of advantage 0.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> log_probs, ones = jnp.log(jnp.array([[0.5, 0.5, 0.01]])), jnp.ones((1, 3))
      >>> print(kljax.clip_v_mask(-ones, log_probs, ones, 0.2 * ones, ones.astype(bool), mu=1.0))
      [[ True  True False]]
    """
    check_same_shape(
        advantages=advantages, log_probs=log_probs, entropies=entropies, expected_scores=expected_scores, mask=mask
    )
    check_at_least("mu", mu, 0)
    check_at_least("max_fraction", max_fraction, 0)
    keep = check_mask(mask)
    score = _score(log_probs, entropies, mask)
    below = masked(expected_scores, mask).astype(score.dtype) - score
    std = jnp.sqrt(masked_var(below, mask, ddof=0, axis_name=axis_name))
    candidates = keep & (as_real(advantages) < 0) & (below > jnp.asarray(mu, score.dtype) * std)
    all_keep, below, candidates = all_rows((keep, below, candidates), axis_name)
    most = jnp.maximum(floor_share(max_fraction, all_keep.sum(), all_keep.size), 1)
    return keep & ~local_rows(highest(below, candidates, most), axis_name)


def _score(log_probs: ArrayLike, entropies: ArrayLike, mask: Mask) -> Array:
    """`p (H + log p)`, 0 under the mask; a token without probability has 0."""
    log_probs, entropies = as_float(log_probs, entropies)
    log_probs = masked(log_probs, mask)
    entropies = masked(entropies, mask)
    gone = log_probs == -jnp.inf
    score = jnp.exp(log_probs) * (entropies + jnp.where(gone, 0, log_probs))
    return jax.lax.stop_gradient(masked(score, mask))
