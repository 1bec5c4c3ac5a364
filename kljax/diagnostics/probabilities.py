"""Differences of probabilities, where differences of their logarithms are dominated by improbable tokens."""

import jax.numpy as jnp

from kljax._checks import as_float, check_same_shape
from kljax._typing import Array, ArrayLike, Float, Mask, MaskLike
from kljax.masking import masked
from kljax.ratios._bernoulli import bernoulli_tv

__all__ = ["probability_diff"]


def probability_diff(
    log_probs: Float[ArrayLike, "*b T"],
    rollout_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    absolute: bool = False,
) -> Float[Array, "*b T"]:
    """Subtracts the probabilities that two policies give the sampled tokens: `p_t - q_t`.

    With `absolute`, `mean_metric(diff, mask)` is the mean over tokens of the total variation of "this token or another
    one", and `Extremes.of(diff, mask).max` its largest value.

    Args:
      log_probs: `[..., T]` log-probs of the trainer's policy, in nats; `p = exp(log_probs)`.
      rollout_log_probs: log-probs recorded by the sampler, or of any other policy; `q` is their `exp`.
      absolute: takes the absolute difference.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0. The relative accuracy is that of the log-probs where `p`
      and `q` are close to each other.

    Raises:
      ValueError: if the shapes differ.

    References:
      verl 0.9.1, `training/rollout_probs_diff_mean`, `_max` and `_std`, with `absolute`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, rollout = jnp.log(jnp.array([0.5, 0.25])), jnp.log(jnp.array([0.25, 0.5]))
      >>> print(kljax.probability_diff(lp, rollout, jnp.array([1, 1])))
      [ 0.25 -0.25]
    """
    check_same_shape(log_probs=log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
    log_probs, rollout_log_probs = as_float(log_probs, rollout_log_probs)
    log_probs = masked(log_probs, mask)
    rollout_log_probs = masked(rollout_log_probs, mask)
    size = bernoulli_tv(log_probs, rollout_log_probs)
    return size if absolute else jnp.where(log_probs < rollout_log_probs, -size, size)
