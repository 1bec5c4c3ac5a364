"""Policy losses whose trust region is a mask: tokens outside it have no gradient, tokens inside are not clipped.

`d = log_probs - old_log_probs`, `r = exp(d)`. All losses are `[..., T]`, masked positions exactly 0.
"""

from typing import get_args

import jax
import jax.numpy as jnp

from kljax._checks import check_at_least, check_choice, check_mask
from kljax._devices import auto_sharded
from kljax._numerics import clip_symmetric, times
from kljax._typing import Array, ArrayLike, AxisName, Bool, Divergence, Float, Mask, MaskLike, Real, Scalar, Through
from kljax.losses._surrogate import importance_weighted, loss_inputs
from kljax.ratios import second_moment_mask
from kljax.ratios._bernoulli import DIVERGENCES

__all__ = ["dppo_loss", "dppo_mask", "m2po_loss", "sppo_loss"]

THROUGH = get_args(Through)


def dppo_mask(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    divergence: Divergence = "tv",
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    symmetric: bool = False,
) -> Bool[Array, "*b T"]:
    """The tokens that `dppo_loss` trains: they have not gone too far already in the direction of their advantage.

    With `p = pi_old` and `q = pi` at the sampled token, the distance is `|q - p|` ("tv") or that of the coins "this
    token or not", `p log(p / q) + (1 - p) log((1 - p) / (1 - q))` ("kl"). Not kept is a token of `A > 0` with `q > p`
    and a distance above `clip_high`, and one of `A <= 0` with `q < p` and a distance above `clip_low`.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs of the policy that the region is about: the rollout policy in the paper.
      advantages: a constant.
      divergence: "tv" or "kl".
      clip_low: largest distance below, inclusive, at least 0: a probability for "tv", nats for "kl".
      clip_high: largest distance above, inclusive, at least 0.
      symmetric: the two bounds hold whatever the sign of the advantage, as in prime-rl's "ipo".

    Returns:
      `[..., T]` booleans, a subset of `mask`.

    Raises:
      ValueError: for an unknown divergence, differing shapes, advantages that are not per token, or a negative bound.

    References:
      Qi et al., "Rethinking the trust region in LLM reinforcement learning" (DPPO, 2026), eq. 13 and 14; verl, SkyRL.
      prime-rl's default is "tv"; the mask of its reference KL is `symmetric` with `clip_high=1`, which is no bound.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, old, adv = jnp.log(jnp.array([0.9, 0.1, 0.9])), jnp.log(jnp.full(3, 0.5)), jnp.array([1.0, 1.0, -1.0])
      >>> print(kljax.dppo_mask(lp, old, adv, jnp.array([1, 1, 1])))
      [False  True  True]
    """
    check_choice("divergence", divergence, DIVERGENCES)
    check_at_least("clip_low", clip_low, 0)
    check_at_least("clip_high", clip_high, 0)
    inputs = loss_inputs(log_probs, old_log_probs, advantages, mask)
    log_probs, old_log_probs, advantages = jax.lax.stop_gradient(inputs)
    apart = DIVERGENCES[divergence](old_log_probs, log_probs)
    risen = log_probs > old_log_probs
    low, high = (jnp.asarray(bound, apart.dtype) for bound in (clip_low, clip_high))
    outside = apart > jnp.where(risen, high, low)
    if not symmetric:
        outside &= risen == (advantages > 0)
    return check_mask(mask) & ~outside


def dppo_loss(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    divergence: Divergence = "tv",
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    through: Through = "ratio",
    symmetric: bool = False,
    max_ratio: Scalar | None = None,
    log_ratio_clip: Scalar | None = None,
) -> Float[Array, "*b T"]:
    """DPPO: importance sampling on the tokens inside a trust region of probabilities, `L = -k A min(r, max_ratio)`.

    `k` is `dppo_mask`. PPO bounds the ratio, which stops rare tokens at once and common ones never; here the bound is
    on how far the probability itself has moved.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs of the policy that drew the tokens; a constant. verl gives the old policy's.
      advantages: a constant. Advantages per row go through `broadcast_to_tokens` first.
      divergence: "tv" or "kl", as in `dppo_mask`.
      clip_low: as in `dppo_mask`.
      clip_high: as in `dppo_mask`.
      through: what is differentiated: "ratio", or "log_prob" of `L = -k A sg(min(r, max_ratio)) log pi`, as in verl.
        They differ in their gradient only above `max_ratio`, where "log_prob" keeps the capped one.
      symmetric: as in `dppo_mask`.
      max_ratio: the cap of `r`, above 0; None does not cap. verl uses 3 unless told otherwise.
      log_ratio_clip: bound of `d`, in nats; None does not clip. verl and SkyRL use 20.

    Returns:
      `[..., T]`, float32 or float64; positions that are masked or outside the region hold 0.

    Gradient:
      To `log_probs`: `-k A r` for `r <= max_ratio`; above, 0 with "ratio" and `-k A max_ratio` with "log_prob".

    Raises:
      ValueError: for an unknown name, differing shapes, advantages that are not per token, or a negative bound.

    References:
      Qi et al., "Rethinking the trust region in LLM reinforcement learning" (DPPO, 2026); verl `dppo_tv`, `dppo_kl`;
      SkyRL `dppo`; prime-rl's default loss, and its "ipo" (`symmetric`), each plus `2 * coef * rollout_kl_loss`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, old, ones = jnp.log(jnp.array([0.9, 0.2])), jnp.log(jnp.array([0.5, 0.1])), jnp.ones(2)
      >>> print(kljax.dppo_loss(lp, old, ones, jnp.array([1, 1])))
      [-0. -2.]
    """
    check_choice("through", through, THROUGH)
    check_at_least("max_ratio", max_ratio, 0, strict=True)
    check_at_least("log_ratio_clip", log_ratio_clip, 0, strict=True)
    accepted = dppo_mask(
        log_probs,
        old_log_probs,
        advantages,
        mask,
        divergence=divergence,
        clip_low=clip_low,
        clip_high=clip_high,
        symmetric=symmetric,
    )
    log_probs, old_log_probs, advantages = loss_inputs(log_probs, old_log_probs, advantages, mask)
    log_ratio = clip_symmetric(log_probs - old_log_probs, log_ratio_clip)
    if through == "ratio":
        return -importance_weighted(advantages, log_ratio, kept=accepted, max_ratio=max_ratio)
    fixed = jax.lax.stop_gradient(log_ratio)
    return times(-importance_weighted(advantages, fixed, kept=accepted, max_ratio=max_ratio), log_probs)


@auto_sharded
def m2po_loss(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    threshold: Scalar = 0.04,
    log_ratio_clip: Scalar | None = None,
    axis_name: AxisName = None,
) -> Float[Array, "*b T"]:
    """M2PO: importance sampling without the outliers of the batch, `L = -k A r` with `k` from `second_moment_mask`.

    The mask is that of the log-ratios of this call, so give it the whole optimizer batch. In parts, take
    `second_moment_mask` of the whole batch once, and `importance_sampling_loss` of each part with that mask: the same
    loss and gradient, whatever the split.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs of the policy that drew the tokens; a constant.
      advantages: a constant. Advantages per row go through `broadcast_to_tokens` first.
      threshold: as in `second_moment_mask`.
      log_ratio_clip: bound of `d` in the ratio, in nats; None does not clip.
      axis_name: mapped axes, as of `shard_map`, over whose parts the first axis is spread.

    Returns:
      `[..., T]`, float32 or float64, in the unit of the advantages; masked and dropped positions hold 0. The paper
      divides by all tokens, dropped ones included: `token_weights(mask, mode="token_mean")`.

    Gradient:
      To `log_probs`: `-A r` on tokens that are kept; the choice is a constant.

    Raises:
      ValueError: for differing shapes, advantages that are not per token, a negative threshold, or a clip that is not
        positive.

    References:
      Zheng et al., "Prosperity before collapse: how far can off-policy RL reach with stale data on LLMs?" (M2PO, 2025),
      algorithm 1 and the objective that follows it.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, old, adv = jnp.array([0.1, 0.2, 0.3, -0.9]), jnp.zeros(4), jnp.ones(4)
      >>> print(kljax.m2po_loss(lp, old, adv, jnp.array([1, 1, 1, 1])).round(2))
      [-1.11 -1.22 -0.   -0.41]
    """
    check_at_least("log_ratio_clip", log_ratio_clip, 0, strict=True)
    inputs = loss_inputs(log_probs, old_log_probs, advantages, mask)
    accepted = second_moment_mask(*inputs, mask, threshold=threshold, axis_name=axis_name)
    log_probs, old_log_probs, advantages = inputs
    log_ratio = clip_symmetric(log_probs - old_log_probs, log_ratio_clip)
    return -importance_weighted(advantages, log_ratio, kept=accepted)


def sppo_loss(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    clip: Scalar = 0.3,
) -> Float[Array, "*b T"]:
    """Softmax PPO: `L = -A d` where `1 / (1 + clip) <= r <= 1 + clip`, else 0.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs of the policy at the start of the update; a constant.
      advantages: a constant. Advantages per row go through `broadcast_to_tokens` first.
      clip: how far the ratio may be from 1, as a factor less 1, above 0; both sides whatever the sign of `A`.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0.

    Gradient:
      To `log_probs`: `-A` where the ratio is within the bounds, else 0.

    Raises:
      ValueError: for differing shapes, advantages that are not per token, or a `clip` that is not positive.

    References:
      Vaswani et al., "A general class of surrogate functions for stable and efficient reinforcement learning" (2021);
      Trinity-RFT `sppo`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, old, adv = jnp.array([-0.75, -0.5]), jnp.array([-1.0, -1.0]), jnp.ones(2)
      >>> print(kljax.sppo_loss(lp, old, adv, jnp.array([1, 1])))
      [-0.25 -0.  ]
    """
    check_at_least("clip", clip, 0, strict=True)
    log_probs, old_log_probs, advantages = loss_inputs(log_probs, old_log_probs, advantages, mask)
    log_ratio = log_probs - old_log_probs
    inside = jnp.abs(jax.lax.stop_gradient(log_ratio)) <= jnp.log1p(jnp.asarray(clip, log_ratio.dtype))
    return -advantages * jnp.where(inside, log_ratio, 0)
