"""Policy losses that act on the few tokens whose covariance drives the entropy down.

The covariance of a token is `c_t = (A_t - mean A) (log pi_t - mean log pi)`, with means over all unmasked tokens.
Tokens are chosen by their rank in the whole batch: give these losses the whole optimizer batch, or accept that the
choice is made within each micro-batch. Every choice is data, and arrays keep their shapes under jit.
"""

import jax
import jax.numpy as jnp

from kljax._checks import check_at_least, check_mask
from kljax._typing import Array, ArrayLike, Scalar
from kljax.kl import abs_diff
from kljax.losses._surrogate import check_clip, clipped_surrogate, importance_weighted, loss_inputs
from kljax.masking import masked, masked_mean

__all__ = ["clip_cov_loss", "kl_cov_loss"]


def clip_cov_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    key: ArrayLike,
    *,
    fraction: Scalar = 2e-4,
    lower: Scalar = 1.0,
    upper: Scalar = 5.0,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    dual_clip: Scalar | None = None,
) -> Array:
    """Clip-Cov: PPO's clipped surrogate without a random few of the tokens of high covariance, `L = k_t L_ppo`.

    The candidates are the tokens with `lower < c_t < upper` that PPO does not clip already. Of these
    `max(floor(fraction * n), 1)`, drawn at random, get `k_t = 0`; every other token has `k_t = 1`.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: same shape, log-probs of the policy at the start of the update; data.
      advantages: same shape; data. Advantages per row go through `broadcast_to_tokens` first.
      mask: same shape, boolean; `n` is the number of unmasked tokens.
      key: a PRNG key that decides among the candidates.
      fraction: how many tokens are dropped, as a fraction of `n`, at least 0; one token at the least.
      lower: covariance above which a token is a candidate, exclusive.
      upper: covariance below which it is one, exclusive; infinity has no bound.
      clip_low: as in `ppo_clip_loss`.
      clip_high: as in `ppo_clip_loss`.
      dual_clip: as in `ppo_clip_loss`; None, as in the paper, verl and SkyRL, has no bound.

    Returns:
      `[..., T]`, float32 or float64; masked and dropped positions hold 0.

    Gradient:
      To `log_probs`, that of `ppo_clip_loss` at the tokens that are kept.

    Raises:
      ValueError: for differing shapes, advantages that are not per token, or a negative clip or fraction.

    References:
      Cui et al., "The entropy mechanism of reinforcement learning for reasoning language models" (2025), eq. 12.

    Example:
      >>> import jax, jax.numpy as jnp, kljax
      >>> lp, adv = jnp.array([[-4.0, -1.0, -0.1]]), jnp.array([[-1.0, 0.0, 1.0]])
      >>> mask = jnp.ones((1, 3), bool)
      >>> print(kljax.clip_cov_loss(lp, lp, adv, mask, jax.random.key(0), lower=2.0))
      [[ 0. -0. -1.]]
    """
    check_clip(clip_low, clip_high, dual_clip)
    check_at_least("fraction", fraction, 0)
    log_probs, old_log_probs, advantages = loss_inputs(log_probs, old_log_probs, advantages, mask)
    keep, log_ratio = check_mask(mask), log_probs - old_log_probs
    ratio = jnp.exp(log_ratio)
    clipped = jnp.where(advantages > 0, ratio > 1 + clip_high, (advantages < 0) & (ratio < 1 - clip_low))
    covariance = _covariance(log_probs, advantages, mask)
    candidates = keep & ~clipped & (covariance > lower) & (covariance < upper)
    chosen = _highest(jax.random.uniform(key, covariance.shape), candidates, _number(fraction, keep))
    loss = clipped_surrogate(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return masked(loss, keep & ~chosen)


def kl_cov_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    fraction: Scalar = 2e-4,
    coef: Scalar = 1.0,
) -> Array:
    """KL-Cov: unclipped importance sampling with a KL penalty on the tokens of highest covariance.

    `L = -A r + coef |d|` on the `max(floor(fraction * n), 1)` tokens with the highest `c_t`, `L = -A r` on the others.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: same shape, log-probs of the policy at the start of the update; data.
      advantages: same shape; data. Advantages per row go through `broadcast_to_tokens` first.
      mask: same shape, boolean; `n` is the number of unmasked tokens.
      fraction: how many tokens pay, as a fraction of `n`, at least 0; one token at the least. verl 2e-4, SkyRL 0.2.
      coef: weight of the penalty. verl 0.1, SkyRL 1.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0. Of equal covariances the earlier token is chosen.

    Gradient:
      To `log_probs`: `-A r`, and `coef * sign(d)` more where the penalty is paid, with `sign(0) = 0` as in PyTorch.

    Raises:
      ValueError: for differing shapes, advantages that are not per token, or a negative fraction.

    References:
      Cui et al., "The entropy mechanism of reinforcement learning for reasoning language models" (2025), eq. 14.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, old = jnp.array([[-4.0, -1.0, -0.5]]), jnp.array([[-4.5, -1.0, -1.0]])
      >>> print(kljax.kl_cov_loss(lp, old, jnp.array([[-1.0, 0.0, 0.0]]), jnp.ones((1, 3), bool), coef=2.0).round(4))
      [[2.6487 0.     0.    ]]
    """
    check_at_least("fraction", fraction, 0)
    log_probs, old_log_probs, advantages = loss_inputs(log_probs, old_log_probs, advantages, mask)
    keep = check_mask(mask)
    chosen = _highest(_covariance(log_probs, advantages, mask), keep, _number(fraction, keep))
    penalty = jnp.asarray(coef, log_probs.dtype) * masked(abs_diff(log_probs, old_log_probs), chosen)
    return masked(penalty - importance_weighted(advantages, log_probs - old_log_probs), mask)


def _covariance(log_probs: Array, advantages: Array, mask: ArrayLike) -> Array:
    """`(A - mean A) (log pi - mean log pi)` over the unmasked tokens, detached."""
    log_probs, advantages = jax.lax.stop_gradient((log_probs, advantages))
    return (advantages - masked_mean(advantages, mask)) * (log_probs - masked_mean(log_probs, mask))


def _number(fraction: Scalar, keep: Array) -> Array:
    """`max(floor(fraction * n), 1)` for the `n` unmasked tokens, at most the size of the array."""
    number = jnp.floor(fraction * keep.sum().astype(jnp.result_type(float)))
    return jnp.clip(number, 1, keep.size).astype(jnp.int32)


def _highest(scores: Array, candidates: Array, number: Array) -> Array:
    """Which candidates have the `number` highest scores of all; of equal ones the earlier. `number` may be traced."""
    flat = jnp.where(candidates, -scores, jnp.inf).ravel()
    order = jnp.argsort(flat, stable=True)
    rank = jnp.zeros(flat.shape, jnp.int32).at[order].set(jnp.arange(flat.size, dtype=jnp.int32))
    return candidates & (rank < number).reshape(candidates.shape)
