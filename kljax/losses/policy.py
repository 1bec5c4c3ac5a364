"""Policy losses per token, to be minimised; `[..., T]`, masked positions exactly 0.

`d = log_probs - old_log_probs` and `r = exp(d)` at a sampled token; `A` is its advantage, which is a constant and whose
producer stopped its gradient, as with the old log-probs.
"""

from typing import get_args

import jax
import jax.numpy as jnp

from kljax._checks import check_at_least, check_choice, check_numbers
from kljax._numerics import clip, times, with_gradient_of
from kljax._typing import Array, ArrayLike, Float, GSPOGradient, Mask, MaskLike, Real, Scalar, SurrogateLevel
from kljax.losses._surrogate import check_clip, clipped_surrogate, log_ratios_of, loss_inputs
from kljax.masking import masked

__all__ = ["cispo_loss", "gspo_loss", "ppo_clip_loss"]

GRADIENTS = get_args(GSPOGradient)


def ppo_clip_loss(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    dual_clip: Scalar | None = None,
    max_ratio: Scalar | None = None,
    level: SurrogateLevel = "token",
    log_ratio_clip: Scalar | None = None,
) -> Float[Array, "*b T"]:
    """PPO's clipped surrogate: `L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`.

    With `dual_clip = c`, a token of negative advantage pays at most `-c A`. With `max_ratio`, `min(r, max_ratio)` takes
    the place of the `r` that is not clipped, which bounds negative advantages as well. Given
    `old_log_probs = stop_gradient(log_probs)` it is the on-policy gradient, at `r = 1`.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs of the policy at the start of the update; a constant.
      advantages: a constant. Advantages per row go through `broadcast_to_tokens` first.
      mask: boolean or `Segments`.
      clip_low: how far below 1 the ratio may fall and still be rewarded, at least 0.
      clip_high: how far above 1 it may rise; larger than `clip_low` in DAPO ("clip-higher").
      dual_clip: the bound `c` on the ratio of a negative advantage, above 1; None has no bound. verl uses 3.
      max_ratio: the cap of the ratio, above 0; None does not cap. TRL's `delta`. ART's
        `max_negative_advantage_importance_sampling_weight` is the same, with a `clip_high` of at most it less 1.
      level: whose ratio `r` is: "token"; "sequence", the product over the row (TRL's RLOO trainer); "geometric", the
        geometric mean over the row, as in `gspo_loss(gradient="sequence")`; "average" and "geometric_average", the mean
        and the geometric mean of the token's and the row's "geometric" one (ART). It is differentiated as it stands.
      log_ratio_clip: bound of `d`, or of the logarithm of the level's ratio, in nats; None does not clip. verl and
        OpenRLHF use 20.

    Returns:
      `[..., T]`, float32 or float64, in the unit of the advantages; masked positions hold 0.

    Gradient:
      To `log_probs`: `-A r` where the ratio is within the bound that applies (`r <= 1 + clip_high` for `A > 0`,
      `1 - clip_low <= r` for `A < 0`), both inclusive as in PyTorch, else 0. At `r = 1` that is the policy gradient.
      Exactly on `dual_clip` it is half, because two terms tie. Ratios of a row pass it on to all tokens of the row.

    Raises:
      ValueError: for differing shapes, advantages that are not per token, an unknown level, a negative clip, a
        `max_ratio` that is not positive, or `dual_clip <= 1`.

    References:
      Schulman et al., "Proximal policy optimization" (2017), eq. 7; Ye et al., "Mastering complex control in MOBA
      games" (2020), eq. 5 (dual clip); Yu et al., "DAPO" (2025), eq. 10 (two bounds).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, old, ones = jnp.log(jnp.array([[0.9, 0.5]])), jnp.log(jnp.array([[0.5, 0.5]])), jnp.ones((1, 2))
      >>> print(kljax.ppo_clip_loss(lp, old, ones, jnp.array([[1, 1]])))
      [[-1.2 -1. ]]
    """
    check_clip(clip_low, clip_high, dual_clip, max_ratio)
    log_probs, old_log_probs, advantages = loss_inputs(log_probs, old_log_probs, advantages, mask)
    log_ratio = log_ratios_of(log_probs, old_log_probs, mask, level=level, log_ratio_clip=log_ratio_clip)
    loss = clipped_surrogate(
        log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, max_ratio=max_ratio
    )
    return masked(loss, mask)


def gspo_loss(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    clip_low: Scalar = 3e-4,
    clip_high: Scalar = 4e-4,
    gradient: GSPOGradient = "token",
    dual_clip: Scalar | None = None,
    max_ratio: Scalar | None = None,
    max_log_ratio: Scalar | None = None,
) -> Float[Array, "*b T"]:
    """PPO's surrogate with the length-normalised sequence ratio `s = exp(sum_t m_t d_t / n)` in place of the token's.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs of the policy at the start of the update; a constant.
      advantages: a constant, usually equal over a row (`broadcast_to_tokens`).
      mask: boolean or `Segments`; `n` is the number of unmasked tokens of the row.
      clip_low: how far below 1 the ratio may fall; of the order of 1e-4, since `s` is a mean over the row.
      clip_high: how far above 1 it may rise.
      gradient: "token" (GSPO-token, as verl, SkyRL and Trinity) has the value `s` and the gradient of the token's own
        log-prob; "sequence" (as slime, OpenRLHF and TRL) differentiates `s`.
      dual_clip: as in `ppo_clip_loss`; None has no bound. slime and OpenRLHF take one.
      max_ratio: as in `ppo_clip_loss`; None does not cap. TRL's `delta`.
      max_log_ratio: upper bound of `log s`, in nats; None does not clip. verl and SkyRL use 10.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0.

    Gradient:
      To `log_probs` at `t`, where the clip is not active: `-A_t s` with "token"; with "sequence" an equal share of the
      row's sum, `-s / n * sum_u g_u A_u`, if token `u` enters the loss with weight `g_u`. The two agree where `A` and
      the weights are constant over the row.

    Raises:
      ValueError: for differing shapes, advantages that are not per token, an unknown `gradient`, a negative clip, a
        `max_ratio` that is not positive, or `dual_clip <= 1`.

    References:
      Zheng et al., "Group Sequence Policy Optimization" (2025), eq. 5 ("sequence") and eq. 13 ("token").

    Example:
      >>> import jax, jax.numpy as jnp, kljax
      >>> old, adv, mask = jnp.zeros((1, 2)), jnp.array([[1.0, 3.0]]), jnp.array([[1, 1]])
      >>> for gradient in ("token", "sequence"):
      ...     print(jax.grad(lambda lp: kljax.gspo_loss(lp, old, adv, mask, gradient=gradient).sum())(old))
      [[-1. -3.]]
      [[-2. -2.]]
    """
    check_numbers(max_log_ratio=max_log_ratio)
    check_clip(clip_low, clip_high, dual_clip, max_ratio)
    check_choice("gradient", gradient, GRADIENTS)
    log_probs, old_log_probs, advantages = loss_inputs(log_probs, old_log_probs, advantages, mask)
    log_ratio = log_ratios_of(log_probs, old_log_probs, mask, level="geometric")
    if gradient == "token":
        log_ratio = with_gradient_of(jax.lax.stop_gradient(log_ratio), log_probs)
    if max_log_ratio is not None:
        log_ratio = clip(log_ratio, None, jnp.asarray(max_log_ratio, log_ratio.dtype))
    loss = clipped_surrogate(
        log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, max_ratio=max_ratio
    )
    return masked(loss, mask)


def cispo_loss(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    clip_low: Scalar = 1.0,
    clip_high: Scalar = 4.0,
    mask_low: Scalar | None = None,
    mask_high: Scalar | None = None,
    level: SurrogateLevel = "token",
    log_ratio_clip: Scalar | None = None,
) -> Float[Array, "*b T"]:
    """Policy gradient with a clipped, constant importance weight: `L = -A * w * log pi`.

    The weight `w = clip(r, 1 - clip_low, 1 + clip_high)` is not differentiated. Unlike in PPO no token loses its
    gradient; only its weight is bounded. The systems differ widely in the bounds: ART [0, 5] (the defaults here),
    SkyRL 0.3.0 [1, 6], Trinity [0, 1.28], verl and slime [0.8, 1.2]; TRL's `epsilon_high` is the upper bound itself,
    which is `clip_low=1, clip_high=epsilon_high - 1` here.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs of the policy that drew the tokens or started the update; a constant.
      advantages: a constant. Advantages per row go through `broadcast_to_tokens` first.
      mask: boolean or `Segments`.
      clip_low: the lower bound of the weight is `1 - clip_low`; 1 is none.
      clip_high: the upper bound of the weight is `1 + clip_high`, at least 0.
      mask_low: tokens of `A < 0` with `r < 1 - mask_low` are left out; None leaves none out. With `mask_high` the clip
        of PPO, as Trinity-RFT's `enable_mask_clip`.
      mask_high: tokens of `A > 0` with `r > 1 + mask_high` are left out; None leaves none out.
      level: whose ratio `r` is, as in `ppo_clip_loss`.
      log_ratio_clip: as in `ppo_clip_loss`. verl and SkyRL use 20.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0. The value has no meaning beyond its gradient.

    Gradient:
      To `log_probs`: `-A clip(r)`, the importance-weighted policy gradient with a truncated weight; 0 where left out.

    Raises:
      ValueError: for differing shapes, advantages that are not per token, an unknown level, or a bound too low.

    References:
      MiniMax, "MiniMax-M1" (2025), eq. 4.

    Example:
      >>> import jax, jax.numpy as jnp, kljax
      >>> lp, old, ones = jnp.array([[0.0, -3.0]]), jnp.array([[-3.0, -3.0]]), jnp.ones((1, 2))
      >>> print(jax.grad(lambda lp: kljax.cispo_loss(lp, old, ones, jnp.array([[1, 1]])).sum())(lp))
      [[-5. -1.]]
    """
    check_numbers(mask_low=mask_low, mask_high=mask_high)
    check_at_least("clip_low", clip_low, 0)
    check_at_least("clip_high", clip_high, -1)
    log_probs, old_log_probs, advantages = loss_inputs(log_probs, old_log_probs, advantages, mask)
    log_ratio = log_ratios_of(log_probs, old_log_probs, mask, level=level, log_ratio_clip=log_ratio_clip)
    ratio = jnp.exp(jax.lax.stop_gradient(log_ratio))
    low, high = (jnp.asarray(bound, ratio.dtype) for bound in (1 - clip_low, 1 + clip_high))
    weight = clip(ratio, low, high)
    if mask_low is not None:
        weight = jnp.where((advantages < 0) & (ratio < jnp.asarray(1 - mask_low, ratio.dtype)), 0, weight)
    if mask_high is not None:
        weight = jnp.where((advantages > 0) & (ratio > jnp.asarray(1 + mask_high, ratio.dtype)), 0, weight)
    return masked(times(-advantages * weight, log_probs), mask)
