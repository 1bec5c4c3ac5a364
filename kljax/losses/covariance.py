"""Policy losses that act on the few tokens whose covariance drives the entropy down.

The covariance of a token is `c_t = (A_t - mean A) (log pi_t - mean log pi)`, with means over all unmasked tokens.
Tokens are chosen by their rank in the whole batch: give these losses the whole optimizer batch, or accept that the
choice is made within each micro-batch. Every choice is treated as a constant, and arrays keep their shapes under jit.
"""

import jax
import jax.numpy as jnp

from kljax._checks import check_at_least, check_mask, check_numbers
from kljax._devices import all_rows, auto_sharded, local_rows
from kljax._numerics import floor_share
from kljax._typing import Array, ArrayLike, AxisName, Float, Mask, MaskLike, Real, Scalar
from kljax.kl import abs_diff
from kljax.losses._surrogate import beyond_clip, check_clip, clipped_surrogate, importance_weighted, loss_inputs
from kljax.masking import highest, masked, masked_mean

__all__ = ["clip_cov_loss", "kl_cov_loss"]


@auto_sharded
def clip_cov_loss(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    key: ArrayLike,
    *,
    fraction: Scalar = 2e-4,
    lower: Scalar = 1.0,
    upper: Scalar = 5.0,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    dual_clip: Scalar | None = None,
    axis_name: AxisName = None,
) -> Float[Array, "*b T"]:
    """Clip-Cov: PPO's clipped surrogate without a random few of the tokens of high covariance, `L = k_t L_ppo`.

    The candidates are the tokens with `lower < c_t < upper` that PPO does not clip already. Of these
    `max(floor(fraction * n), 1)`, drawn at random, get `k_t = 0`; every other token has `k_t = 1`.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs of the policy at the start of the update; a constant.
      advantages: a constant. Advantages per row go through `broadcast_to_tokens` first.
      mask: `n` is the number of unmasked tokens.
      key: a PRNG key that decides among the candidates.
      fraction: how many tokens are dropped, as a fraction of `n`, at least 0; one token at the least. A Python number
        is multiplied as Python does it, a traced one in its own type, where 0.29 of 100 may be 29 and not 28.
      lower: covariance above which a token is a candidate, exclusive.
      upper: covariance below which it is one, exclusive; infinity has no bound.
      clip_low: as in `ppo_clip_loss`.
      clip_high: as in `ppo_clip_loss`.
      dual_clip: as in `ppo_clip_loss`; None, as in the paper, verl and SkyRL, has no bound.
      axis_name: mapped axes, as of `shard_map`, over whose parts the first axis is spread, in their order; the
        ranks are ranks in the whole batch, of which the same tokens are drawn by the same key.

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
    check_numbers(lower=lower, upper=upper)
    check_clip(clip_low, clip_high, dual_clip)
    check_at_least("fraction", fraction, 0)
    log_probs, old_log_probs, advantages = loss_inputs(log_probs, old_log_probs, advantages, mask)
    keep = check_mask(mask)
    log_ratio = log_probs - old_log_probs
    below, above = beyond_clip(jnp.exp(log_ratio), advantages, clip_low, clip_high)
    covariance = _covariance(log_probs, advantages, mask, axis_name)
    candidates = keep & ~(below | above) & (covariance > lower) & (covariance < upper)
    all_keep, candidates = all_rows((keep, candidates), axis_name)
    chosen = local_rows(
        highest(jax.random.uniform(key, all_keep.shape), candidates, _number(fraction, all_keep)), axis_name
    )
    loss = clipped_surrogate(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return masked(loss, keep & ~chosen)


@auto_sharded
def kl_cov_loss(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    fraction: Scalar = 2e-4,
    coef: Scalar = 1.0,
    axis_name: AxisName = None,
) -> Float[Array, "*b T"]:
    """KL-Cov: unclipped importance sampling with a KL penalty on the tokens of highest covariance.

    `L = -A r + coef |d|` on the `max(floor(fraction * n), 1)` tokens with the highest `c_t`, `L = -A r` on the others.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs of the policy at the start of the update; a constant.
      advantages: a constant. Advantages per row go through `broadcast_to_tokens` first.
      mask: `n` is the number of unmasked tokens.
      fraction: how many tokens pay, as a fraction of `n`, at least 0; one token at the least. verl 2e-4, SkyRL 0.2. A
        Python number is multiplied as Python does it, a traced one in its own type, as in `clip_cov_loss`.
      coef: weight of the penalty. verl 0.1, SkyRL 1.
      axis_name: mapped axes, as of `shard_map`, over whose parts the first axis is spread, in their order; the
        ranks are ranks in the whole batch.

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
    check_numbers(coef=coef)
    check_at_least("fraction", fraction, 0)
    log_probs, old_log_probs, advantages = loss_inputs(log_probs, old_log_probs, advantages, mask)
    covariance, unmasked = all_rows((_covariance(log_probs, advantages, mask, axis_name), check_mask(mask)), axis_name)
    chosen = local_rows(highest(covariance, unmasked, _number(fraction, unmasked)), axis_name)
    penalty = jnp.asarray(coef, log_probs.dtype) * masked(abs_diff(log_probs, old_log_probs), chosen)
    return masked(penalty - importance_weighted(advantages, log_probs - old_log_probs), mask)


def _covariance(log_probs: Array, advantages: Array, mask: Mask, axis_name: AxisName) -> Array:
    """`(A - mean A) (log pi - mean log pi)` over the unmasked tokens, detached."""
    log_probs, advantages = jax.lax.stop_gradient((log_probs, advantages))
    advantage, log_prob = (masked_mean(x, mask, axis_name=axis_name) for x in (advantages, log_probs))
    return (advantages - advantage) * (log_probs - log_prob)


def _number(fraction: Scalar, keep: Array) -> Array:
    """`max(floor(fraction * n), 1)` for the `n` unmasked tokens, at most the size of the array."""
    return jnp.maximum(floor_share(fraction, keep.sum(), keep.size), 1)
