"""Policy losses without a clip or a trust region: score functions and importance sampling.

`L = -A w log pi` with a constant weight `w` has the gradient of a policy gradient and a value without a meaning of its
own; `L = -A r` has the same gradient where `w = r`. All are `[..., T]`, masked positions exactly 0.
"""

from typing import get_args

import jax
import jax.numpy as jnp

from kljax._checks import as_float, check_at_least, check_choice, check_numbers, check_same_shape
from kljax._numerics import clip, clip_symmetric, exp_capped, times
from kljax._typing import Array, ArrayLike, Float, Mask, MaskLike, Real, Scalar, SupervisedWeight
from kljax.losses._surrogate import check_per_token, importance_weighted, loss_inputs
from kljax.masking import masked

__all__ = [
    "cross_entropy_loss",
    "gpg_loss",
    "importance_sampling_loss",
    "opmd_loss",
    "reinforce_loss",
    "topr_loss",
]

WEIGHTS = get_args(SupervisedWeight)


def reinforce_loss(
    log_probs: Float[ArrayLike, "*b T"], advantages: Real[ArrayLike, "*b T"], mask: MaskLike[Mask, "*b T"]
) -> Float[Array, "*b T"]:
    """REINFORCE, the plain policy gradient: `L = -A log pi`.

    For tokens of another policy the loss is multiplied by `stop_gradient(importance_weights(log_probs, ...))`: with
    `mode="mask"` that is SkyRL's `rollout_is`, with `mode="truncate"` the "reinforce" of verl's `bypass_mode`.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      advantages: a constant. Advantages per row go through `broadcast_to_tokens` first.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0. The value has no meaning beyond its gradient.

    Gradient:
      To `log_probs`: `-A`.

    Raises:
      ValueError: for differing shapes or advantages that are not per token.

    References:
      Williams, "Simple statistical gradient-following algorithms" (1992); verl `compute_policy_loss_reinforce`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.reinforce_loss(jnp.array([-1.0, -2.0]), jnp.array([3.0, jnp.nan]), jnp.array([1, 0])))
      [ 3. -0.]
    """
    check_per_token(advantages, check_same_shape(log_probs=log_probs, mask=mask))
    log_probs, advantages = as_float(log_probs, advantages)
    return times(-masked(advantages, mask), masked(log_probs, mask))


def gpg_loss(
    log_probs: Float[ArrayLike, "*b T"], advantages: Real[ArrayLike, "*b T"], mask: MaskLike[Mask, "*b T"]
) -> Float[Array, "*b T"]:
    """GPG, group policy gradient: `L = -A log pi`, which is `reinforce_loss`.

    What makes it GPG is the advantage, a reward centred in its group and rescaled for the rows that are not centred to
    nothing.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      advantages: a constant. Advantages per row go through `broadcast_to_tokens` first.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0. The value has no meaning beyond its gradient.

    Gradient:
      To `log_probs`: `-A`.

    Raises:
      ValueError: for differing shapes or advantages that are not per token.

    References:
      Chu et al., "GPG: a simple and strong reinforcement learning baseline for model reasoning" (2025); verl `gpg`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.gpg_loss(jnp.array([-1.0, -2.0]), jnp.array([3.0, -1.0]), jnp.array([1, 1])))
      [ 3. -2.]
    """
    return reinforce_loss(log_probs, advantages, mask)


def importance_sampling_loss(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    log_ratio_clip: Scalar | None = None,
    max_ratio: Scalar | None = None,
) -> Float[Array, "*b T"]:
    """Importance sampling without a clip: `L = -A r`.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs of the policy that drew the tokens; a constant.
      advantages: a constant. Advantages per row go through `broadcast_to_tokens` first.
      log_ratio_clip: bound of `d`, in nats; None does not clip. Trinity-RFT uses 20.
      max_ratio: the cap of `r`, above 0; None does not cap.

    Returns:
      `[..., T]`, float32 or float64, in the unit of the advantages; masked positions hold 0.

    Gradient:
      To `log_probs`: `-A r`; 0 outside the clip and above the cap (whole on either).

    Raises:
      ValueError: for differing shapes, advantages that are not per token, or a bound that is not positive.

    References:
      The loss "importance_sampling" of Tinker, SkyRL and Trinity-RFT.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, old = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 0.1]))
      >>> print(kljax.importance_sampling_loss(lp, old, jnp.ones(2), jnp.array([1, 1]), max_ratio=3.0))
      [-2. -3.]
    """
    check_at_least("log_ratio_clip", log_ratio_clip, 0, strict=True)
    check_at_least("max_ratio", max_ratio, 0, strict=True)
    log_probs, old_log_probs, advantages = loss_inputs(log_probs, old_log_probs, advantages, mask)
    log_ratio = clip_symmetric(log_probs - old_log_probs, log_ratio_clip)
    return -importance_weighted(advantages, log_ratio, max_ratio=max_ratio)


def topr_loss(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    threshold: Scalar = 0.0,
) -> Float[Array, "*b T"]:
    """Tapered off-policy REINFORCE: `L = -A w log pi`, truncated importance weights for what went badly only.

    `w = min(r, 1)` where `A <= threshold`, else 1: what went well is imitated wherever it came from, what went badly
    is unlearned only as far as the policy would still do it.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs of the policy that drew the tokens; a constant.
      advantages: a constant. The paper's are rewards, with or without a baseline.
      threshold: the largest advantage whose token is weighted.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0. The value has no meaning beyond its gradient.

    Gradient:
      To `log_probs`: `-A w`; the weight is a constant.

    Raises:
      ValueError: for differing shapes or advantages that are not per token.

    References:
      Le Roux et al., "Tapered off-policy REINFORCE" (2025), there with the ratio of the sequence; Trinity-RFT `topr`,
      with that of the token as here.

    Example:
      >>> import jax, jax.numpy as jnp, kljax
      >>> lp, old, adv = jnp.log(jnp.array([0.1, 0.1, 0.4])), jnp.log(jnp.full(3, 0.2)), jnp.array([1.0, -1.0, -1.0])
      >>> print(jax.grad(lambda lp: kljax.topr_loss(lp, old, adv, jnp.ones(3, bool)).sum())(lp))
      [-1.   0.5  1. ]
    """
    check_numbers(threshold=threshold)
    log_probs, old_log_probs, advantages = loss_inputs(log_probs, old_log_probs, advantages, mask)
    tapered = exp_capped(jax.lax.stop_gradient(log_probs - old_log_probs), 1.0)
    weight = jnp.where(advantages <= jnp.asarray(threshold, advantages.dtype), tapered, 1)
    return times(-advantages * weight, log_probs)


def opmd_loss(
    log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    tau: Scalar = 1.0,
) -> Float[Array, "*b T"]:
    """Online policy mirror descent in its simplest form: `L = -A log pi / (1 + tau)`.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      advantages: a constant. Advantages per row go through `broadcast_to_tokens` first.
      tau: strength of the regularisation towards the current policy, at least 0: it makes the step shorter.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0. The value has no meaning beyond its gradient.

    Gradient:
      To `log_probs`: `-A / (1 + tau)`.

    Raises:
      ValueError: for differing shapes, advantages that are not per token, or a negative `tau`.

    References:
      Trinity-RFT `opmd`, whose advantages are rewards centred in their group.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.opmd_loss(jnp.array([-1.0, -2.0]), jnp.array([3.0, -1.0]), jnp.array([1, 1])))
      [ 1.5 -1. ]
    """
    check_at_least("tau", tau, 0)
    loss = reinforce_loss(log_probs, advantages, mask)
    return loss / (1 + jnp.asarray(tau, loss.dtype))


def cross_entropy_loss(
    log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    weight: SupervisedWeight = "none",
    max_probability: Scalar | None = None,
) -> Float[Array, "*b T"]:
    """Supervised fine-tuning on the tokens given: `L = -w log pi`, with the weight `w` constant.

    A policy loss on some rows and this one on the rows of an expert, each with its own mask and weight, are the mixed
    losses of Trinity-RFT (`mix`, `mix_chord`).

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      weight: "none" is 1; "probability" is `pi`, which discounts tokens that the policy is unlikely to draw;
        "uncertainty" is `pi (1 - pi)`, which discounts certain tokens as well.
      max_probability: the probability, at most 1, above which a token is not trained further; None trains all.

    Returns:
      `[..., T]`, float32 or float64, in nats; masked positions hold 0.

    Gradient:
      To `log_probs`: `-w`; 0 where `pi > max_probability`.

    Raises:
      ValueError: for differing shapes, an unknown weight, or a `max_probability` that is not positive.

    References:
      "cross_entropy" of SkyRL and Tinker; `sft`, `sft_is` ("probability") and `sft_phi` ("uncertainty") of Trinity-RFT,
      after Zhang et al., "On-policy RL meets off-policy experts" (CHORD, 2025).

    Example:
      >>> import jax, jax.numpy as jnp, kljax
      >>> lp, mask = jnp.log(jnp.array([0.5, 0.25])), jnp.array([1, 1])
      >>> for weight in ("none", "probability", "uncertainty"):
      ...     print(jax.grad(lambda lp: kljax.cross_entropy_loss(lp, mask, weight=weight).sum())(lp))
      [-1. -1.]
      [-0.5  -0.25]
      [-0.25   -0.1875]
    """
    check_choice("weight", weight, WEIGHTS)
    check_at_least("max_probability", max_probability, 0, strict=True)
    check_same_shape(log_probs=log_probs, mask=mask)
    log_probs = masked(log_probs, mask)
    fixed = jax.lax.stop_gradient(log_probs)
    weights = {
        "none": jnp.ones_like(fixed),
        "probability": jnp.exp(fixed),
        "uncertainty": -jnp.exp(fixed) * jnp.expm1(fixed),
    }[weight]
    if max_probability is not None:
        log_probs = clip(log_probs, None, jnp.log(jnp.asarray(max_probability, log_probs.dtype)))
    return -masked(times(weights, log_probs), mask)
