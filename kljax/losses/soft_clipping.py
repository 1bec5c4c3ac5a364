"""Policy losses that bound the ratio softly, or that of a row by its geometric mean; `[..., T]`, masked exactly 0.

`d = log_probs - old_log_probs` and `r = exp(d)` at a sampled token; `A` is its advantage.
"""

from typing import get_args

import jax
import jax.numpy as jnp

from kljax._checks import check_at_least, check_choice, check_same_shape
from kljax._numerics import (
    Parts,
    clip,
    clip_symmetric,
    exp_of_sum,
    expm1_parts,
    product_parts,
    scalar_parts,
    sigmoid_expm1,
    split,
    times,
)
from kljax._typing import Array, ArrayLike, Float, Mask, MaskLike, Real, Scalar, SurrogateLevel, Through
from kljax.losses._surrogate import importance_weighted, log_ratios_of, loss_inputs
from kljax.masking import masked
from kljax.rows import row_mean, row_sum, to_tokens

__all__ = ["gmpo_loss", "sapo_loss", "vespo_loss"]

THROUGH = get_args(Through)
# sigmoid(x) is 1 in float64, and its slope 0, long before x gets here.
_SATURATED = 800.0


def sapo_loss(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    tau_positive: Scalar = 1.0,
    tau_negative: Scalar = 1.05,
    through: Through = "ratio",
    level: SurrogateLevel = "token",
    log_ratio_clip: Scalar | None = None,
) -> Float[Array, "*b T"]:
    """SAPO, a soft gate in place of the clip: `L = -A f(r)` with `f(r) = 4 / tau * sigmoid(tau (r - 1))`.

    The slope of the gate is 1 at `r = 1` and falls off on both sides, the faster the larger `tau`, which is
    `tau_positive` for `A > 0` and `tau_negative` for the rest.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs of the policy at the start of the update; a constant.
      advantages: a constant. Advantages per row go through `broadcast_to_tokens` first.
      mask: boolean or `Segments`.
      tau_positive: steepness of the gate for positive advantages, above 0.
      tau_negative: the same for the others; a little larger in the paper.
      through: what is differentiated: the gate ("ratio", as in the paper, verl, SkyRL and TRL), or "log_prob" of
        `L = -A sg(f(r)) log pi`, which is Trinity-RFT's, with a gate of 2 / tau instead of a slope of 1 at `r = 1`.
      level: whose ratio `r` is, as in `ppo_clip_loss`.
      log_ratio_clip: bound of `d`, in nats; None does not clip. verl and SkyRL use 20.

    Returns:
      `[..., T]`, float32 or float64, in the unit of the advantages; masked positions hold 0.

    Gradient:
      To `log_probs`: `-A r 4 f' (1 - f')` with `f' = sigmoid(tau (r - 1))`, which is 0 where `r` overflows; with
      "log_prob" `-A f(r)`.

    Raises:
      ValueError: for an unknown name, differing shapes, advantages that are not per token, or a `tau` not above 0.

    References:
      Gao et al., "Soft adaptive policy optimization" (2025).

    Example:
      >>> import jax, jax.numpy as jnp, kljax
      >>> lp, old, adv = jnp.array([0.0, 2.0]), jnp.array([0.0, 0.0]), jnp.array([1.0, 1.0])
      >>> print(jax.grad(lambda lp: kljax.sapo_loss(lp, old, adv, jnp.array([1, 1])).sum())(lp).round(4))
      [-1.     -0.0495]
    """
    check_choice("through", through, THROUGH)
    check_at_least("tau_positive", tau_positive, 0, strict=True)
    check_at_least("tau_negative", tau_negative, 0, strict=True)
    log_probs, old_log_probs, advantages = loss_inputs(log_probs, old_log_probs, advantages, mask)
    log_ratio = log_ratios_of(log_probs, old_log_probs, mask, level=level, log_ratio_clip=log_ratio_clip)
    tau_parts = _chosen(advantages > 0, tau_positive, tau_negative, log_ratio.dtype)
    tau = sum(tau_parts)
    # A ratio that has saturated the gate is not let to overflow: the gradient would be 0 * inf.
    bounded = clip(log_ratio, None, jnp.log1p(_SATURATED / tau))
    gate = sigmoid_expm1(tau_parts, bounded) * (4 / tau)
    if through == "log_prob":
        return times(-advantages * jax.lax.stop_gradient(gate), log_probs)
    return -advantages * gate


def gmpo_loss(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    clip_low: Scalar = 0.4,
    clip_high: Scalar = 0.4,
) -> Float[Array, "*b T"]:
    """GMPO: a row's loss is `L = -A exp(mean_t d'_t)`, the geometric mean of ratios that are clipped token by token.

    `d' = min(d, clip_high)` where `A > 0`, `max(d, -clip_low)` where `A < 0`, and 0 where `A = 0`: PPO's clip, in nats
    and inside the mean. `A` in the row's loss is the mean over its tokens, which are meant to have one advantage.

    Every token holds the loss of its row. `token_weights(mode="seq_mean_token_mean", empty_rows="count")` is the mean
    over rows that verl and TRL take.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs of the policy at the start of the update; a constant.
      advantages: a constant, equal over a row (`broadcast_to_tokens`).
      mask: boolean or `Segments`.
      clip_low: how far `d` may fall below 0, in nats, at least 0.
      clip_high: how far it may rise above 0, in nats, at least 0.

    Returns:
      `[..., T]`, float32 or float64, in the unit of the advantages; masked positions hold 0.

    Gradient:
      To `log_probs` at `t`: the row's loss over its number of tokens, times the sum of the weights with which the
      row's tokens enter the total; 0 where `d_t` is clipped (whole on the bound).

    Raises:
      ValueError: for differing shapes, advantages that are not per token, or a negative bound.

    References:
      Zhao et al., "Geometric-mean policy optimization" (2025); verl `geo_mean`, TRL's GMPO trainer.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, old, ones = jnp.array([[0.2, 0.8]]), jnp.zeros((1, 2)), jnp.ones((1, 2))
      >>> print(kljax.gmpo_loss(lp, old, ones, jnp.array([[1, 1]])).round(4))
      [[-1.3499 -1.3499]]
    """
    check_at_least("clip_low", clip_low, 0)
    check_at_least("clip_high", clip_high, 0)
    log_probs, old_log_probs, advantages = loss_inputs(log_probs, old_log_probs, advantages, mask)
    low, high = (jnp.asarray(bound, log_probs.dtype) for bound in (-clip_low, clip_high))
    lowest = jnp.where(advantages < 0, low, -jnp.inf)
    highest = jnp.where(advantages > 0, high, jnp.inf)
    clipped = jnp.where(advantages == 0, 0, clip(log_probs - old_log_probs, lowest, highest))
    log_mean, advantage = (row_mean(values, mask) for values in (clipped, advantages))
    loss = importance_weighted(advantage, log_mean)
    return -masked(to_tokens(loss, mask), mask)


def vespo_loss(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    k_positive: Scalar = 2.0,
    lambda_positive: Scalar = 3.0,
    k_negative: Scalar = 3.0,
    lambda_negative: Scalar = 2.0,
    weights: Real[ArrayLike, "*b T"] | None = None,
    log_ratio_clip: Scalar | None = None,
) -> Float[Array, "*b T"]:
    """VESPO: `L = -A phi(w) log pi`, where the ratio `w` of the whole row enters by `phi(w) = w^k exp(lambda (1 - w))`.

    `phi` is 1 at `w = 1`, largest at `w = k / lambda` and falls to 0 on both sides, so no ratio is clipped. It is
    computed from `log w = sum_t m_t d_t`, in log space.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs of the policy at the start of the update; a constant.
      advantages: a constant. Advantages per row go through `broadcast_to_tokens` first.
      mask: boolean or `Segments`.
      k_positive: the power `k` where `A >= 0`, above 0.
      lambda_positive: the rate `lambda` where `A >= 0`, above 0.
      k_negative: the power where `A < 0`.
      lambda_negative: the rate where `A < 0`.
      weights: importance weights of the old policy against the sampler, of which the product over the row
        multiplies `w`; a constant. A weight of the row as a whole goes to one of its tokens, 1 to the others.
      log_ratio_clip: bound of each `d`, in nats; None does not clip. TRL uses 20.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0. The value has no meaning beyond its gradient.

    Gradient:
      To `log_probs`: `-A phi(w)`; `phi` is a constant.

    Raises:
      ValueError: for differing shapes, advantages that are not per token, or a `k` or `lambda` not above 0.

    References:
      Shen et al., "VESPO: variational sequence-level soft policy optimization" (2026); TRL `loss_type="vespo"`, which
      also keeps `log w` within [log 1e-8, 20].

    Example:
      >>> import jax, jax.numpy as jnp, kljax
      >>> old, adv, mask = jnp.full((2, 2), -1.0), jnp.ones((2, 2)), jnp.ones((2, 2), bool)
      >>> lp = jnp.array([[-1.0, -1.0], [-0.5, -0.5]])
      >>> print(jax.grad(lambda lp: kljax.vespo_loss(lp, old, adv, mask).sum())(lp).round(4))
      [[-1.     -1.    ]
       [-0.0426 -0.0426]]
    """
    for name, value in {
        "k_positive": k_positive,
        "lambda_positive": lambda_positive,
        "k_negative": k_negative,
        "lambda_negative": lambda_negative,
    }.items():
        check_at_least(name, value, 0, strict=True)
    check_at_least("log_ratio_clip", log_ratio_clip, 0, strict=True)
    log_probs, old_log_probs, advantages = loss_inputs(log_probs, old_log_probs, advantages, mask)
    log_weights = clip_symmetric(log_probs - old_log_probs, log_ratio_clip)
    if weights is not None:
        check_same_shape(weights=weights, mask=mask)
        log_weights += masked(jnp.log(jnp.asarray(weights, log_probs.dtype)), mask)
    log_weight = row_sum(jax.lax.stop_gradient(log_weights), mask)
    log_weight = to_tokens(log_weight, mask)
    k = _chosen(advantages >= 0, k_positive, k_negative, log_weight.dtype)
    leading, trailing = _chosen(advantages >= 0, lambda_positive, lambda_negative, log_weight.dtype)
    # Without the infinities, where phi is 0.
    far = jnp.isinf(log_weight)
    log_weight = jnp.where(far, 0, log_weight)
    parts = (*product_parts(k, split(log_weight)), *product_parts((-leading, -trailing), expm1_parts(log_weight)))
    phi = jax.lax.stop_gradient(jnp.where(far, 0, exp_of_sum(parts)))
    return times(-advantages * phi, log_probs)


def _chosen(condition: Array, positive: Scalar, negative: Scalar, dtype: jnp.dtype) -> Parts:
    """One of two numbers for each token, in parts."""
    high, low = scalar_parts(positive, dtype)
    other_high, other_low = scalar_parts(negative, dtype)
    return jnp.where(condition, high, other_high), jnp.where(condition, low, other_low)
