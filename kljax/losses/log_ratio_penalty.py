"""Policy gradients held near the old policy by a penalty on the log-ratio; `[..., T]`, masked positions exactly 0."""

from typing import get_args

import jax
import jax.numpy as jnp

from kljax._checks import as_float, check_at_least, check_choice
from kljax._numerics import times
from kljax._typing import Array, ArrayLike, Float, Mask, MaskLike, Real, RECClip, RECRegularizer, RECWeight, Scalar
from kljax.losses._surrogate import check_clip, log_ratios_of, loss_inputs
from kljax.losses.kl import rollout_kl_loss
from kljax.losses.policy_gradient import reinforce_loss
from kljax.masking import masked

__all__ = ["dro_loss", "rec_loss"]

CLIP_MODES = get_args(RECClip)
WEIGHTS = get_args(RECWeight)
REGULARIZERS = get_args(RECRegularizer)


def dro_loss(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    coef: Scalar,
) -> Float[Array, "*b T"]:
    """Direct reward optimisation: `L = -A log pi + coef d^2 / 2`.

    It is `reinforce_loss + coef * rollout_kl_loss`: a square pulls back what the policy gradient moves, and neither a
    ratio nor a clip is needed for tokens of another policy.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs of the policy that it is held near; a constant.
      advantages: a constant. Advantages per row go through `broadcast_to_tokens` first.
      coef: weight of the square, above 0, in the unit of the advantages.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0.

    Gradient:
      To `log_probs`: `-A + coef d`; it vanishes at `d = A / coef`.

    Raises:
      ValueError: for differing shapes, advantages that are not per token, or a `coef` that is not positive.

    References:
      Richemond et al., "Offline regularised reinforcement learning for large language models alignment" (2024); verl
      `dro`, whose `dro_beta` is `coef`.

    Example:
      >>> import jax, jax.numpy as jnp, kljax
      >>> lp, old, adv = jnp.array([-1.0, -0.5]), jnp.array([-1.0, -1.0]), jnp.array([1.0, 1.0])
      >>> print(jax.grad(lambda lp: kljax.dro_loss(lp, old, adv, jnp.array([1, 1]), coef=2.0).sum())(lp))
      [-1.  0.]
    """
    check_at_least("coef", coef, 0, strict=True)
    log_probs, old_log_probs, advantages = as_float(log_probs, old_log_probs, advantages)
    gradient = reinforce_loss(log_probs, advantages, mask)
    square = rollout_kl_loss(log_probs, old_log_probs, mask, estimator="k2")
    return _with_penalty(gradient, jnp.asarray(coef, square.dtype) * square)


def rec_loss(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    clip_mode: RECClip = "none",
    weight: RECWeight = "none",
    regularizer: RECRegularizer = "none",
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    ring_low: Scalar = 0.6,
    ring_high: Scalar = 2.0,
    coef: Scalar = 0.0,
    temperature: Scalar = 1.0,
) -> Float[Array, "*b T"]:
    """REC, REINFORCE with a clip taken apart: `L = -k w A log pi + coef * regularizer`, with `k` and `w` constant.

    `k` is 1 where, with `low = 1 - clip_low` and `high = 1 + clip_high`, and 0 elsewhere:

        none           everywhere
        one_side       r <= high if A > 0, r >= low if A < 0: the tokens that PPO does not clip
        gspo_one_side  the same of the row's ratio s, as in `gspo_loss`
        two_side       low <= r <= high
        ring           as two_side; or r <= 1 - ring_low if A > 0; or r >= 1 + ring_high if A < 0

    `w` is 1 ("none"), `r` ("importance_sampling"), `s` ("gspo_importance_sampling") or `exp(A / temperature)`
    ("advantage"). The regularizer is paid by all tokens, also by tokens with `k = 0`: `d^2 / 2` ("k2") or `-log pi`
    ("forward_kl", imitation of the policy that drew the tokens).

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs of the policy that drew the tokens; a constant.
      advantages: a constant. Advantages per row go through `broadcast_to_tokens` first.
      mask: boolean or `Segments`.
      clip_mode: one of the five names above.
      weight: one of the four names above.
      regularizer: "none", "k2" or "forward_kl".
      clip_low: how far below 1 the ratio may fall, at least 0.
      clip_high: how far above 1 it may rise, at least 0.
      ring_low: for "ring", how far below 1 a ratio is again trained up, at least 0.
      ring_high: for "ring", how far above 1 a ratio is again trained down, at least 0.
      coef: weight of the regularizer, at least 0. Trinity-RFT's counts `d^2`: the `coef` of "k2" is twice that.
      temperature: of the weight "advantage", above 0, in the unit of the advantages.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0. The value has no meaning beyond its gradient.

    Gradient:
      To `log_probs`: `-k w A`, and `coef d` ("k2") or `-coef` ("forward_kl") more.

    Raises:
      ValueError: for an unknown name, differing shapes, advantages that are not per token, or a negative number.

    References:
      Yao et al., "Group-relative REINFORCE is secretly an off-policy algorithm" (2025); Trinity-RFT `rec`, which
      reduces "gspo_one_side" by rows and the others by tokens.

    Example:
      >>> import jax, jax.numpy as jnp, kljax
      >>> lp, old, adv = jnp.log(jnp.array([0.8, 0.4, 0.1])), jnp.log(jnp.full(3, 0.4)), jnp.array([1.0, 2.0, 1.0])
      >>> for mode in ("one_side", "two_side", "ring"):
      ...     print(jax.grad(lambda lp: kljax.rec_loss(lp, old, adv, jnp.ones(3, bool), clip_mode=mode).sum())(lp))
      [-0. -2. -1.]
      [-0. -2. -0.]
      [-0. -2. -1.]
    """
    check_choice("clip_mode", clip_mode, CLIP_MODES)
    check_choice("weight", weight, WEIGHTS)
    check_choice("regularizer", regularizer, REGULARIZERS)
    check_clip(clip_low, clip_high)
    for name, value in {"ring_low": ring_low, "ring_high": ring_high, "coef": coef}.items():
        check_at_least(name, value, 0)
    check_at_least("temperature", temperature, 0, strict=True)
    log_probs, old_log_probs, advantages = loss_inputs(log_probs, old_log_probs, advantages, mask)
    fixed = jax.lax.stop_gradient((log_probs, old_log_probs))
    token, row = (jnp.exp(log_ratios_of(*fixed, mask, level=level)) for level in ("token", "geometric"))
    low, high, inner, outer = (
        jnp.asarray(bound, token.dtype) for bound in (1 - clip_low, 1 + clip_high, 1 - ring_low, 1 + ring_high)
    )
    accepted = {
        "none": jnp.ones_like(token, bool),
        "one_side": jnp.where(advantages > 0, token <= high, token >= low),
        "gspo_one_side": jnp.where(advantages > 0, row <= high, row >= low),
        "two_side": (token >= low) & (token <= high),
        "ring": (token >= low) & (token <= high) | jnp.where(advantages > 0, token <= inner, token >= outer),
    }[clip_mode]
    # What is not kept, or has no advantage, may have any weight, infinity as well.
    used = accepted & (advantages != 0)
    weights = {
        "none": jnp.ones_like(token),
        "importance_sampling": token,
        "gspo_importance_sampling": row,
        "advantage": jnp.exp(advantages / jnp.asarray(temperature, token.dtype)),
    }[weight]
    loss = times(-jnp.where(used, advantages, 0) * jnp.where(used, weights, 0), log_probs)
    coef = jnp.asarray(coef, loss.dtype)
    penalty = {
        "none": jnp.zeros_like(loss),
        "k2": 0.5 * jnp.square(jnp.where(coef == 0, 0, log_probs - old_log_probs)),
        "forward_kl": -log_probs,
    }[regularizer]
    return masked(_with_penalty(loss, times(coef, penalty)), mask)


def _with_penalty(loss: Array, penalty: Array) -> Array:
    """Their sum; an infinite penalty alone, for a loss that is infinite as well grows slower than it."""
    return jnp.where(jnp.isinf(penalty), penalty, loss + penalty)
