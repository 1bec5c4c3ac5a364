"""Estimators of KL(pi || ref) from tokens that were sampled from pi; per token, unreduced.

With `x = log_probs - ref_log_probs` at a sampled token, each estimator is a function of `x` whose expectation over
tokens drawn from pi is the KL divergence (`k1`, `k3`), half its second-order expansion (`k2`), or a size of the
mismatch (`abs`). The value that an estimator has in expectation and the gradient that its derivative has in
expectation are two different things; each docstring states both. All arrays are `[..., T]` unless said otherwise.

A log-prob of minus infinity means an impossible token: an estimate is finite wherever its limit is, and infinite,
never NaN, elsewhere. Only a token without probability under both policies has no log-ratio; every estimate of it is
NaN.
"""

from collections.abc import Callable
from typing import get_args

import jax
import jax.numpy as jnp

from kljax._checks import as_float, check_at_least, check_choice, check_log_probs, check_mask, check_same_shape
from kljax._numerics import clip_symmetric, exp_capped, expm1_minus, times, with_gradient_of
from kljax._typing import Array, ArrayLike, Estimator, Float, KLGradient, Mask, MaskLike, Scalar

__all__ = ["abs_diff", "estimate_kl", "k1", "k2", "k3", "low_var_kl"]

LOW_VAR_LOG_RATIO_CLIP = 20.0
LOW_VAR_VALUE_CLIP = 10.0

Ratios = tuple[Array, Array, Array]


def k1(log_probs: Float[ArrayLike, "*b T"], ref_log_probs: Float[ArrayLike, "*b T"]) -> Float[Array, "*b T"]:
    """The log-ratio itself: `k1 = x = log pi - log ref`. Unbiased for KL(pi || ref), high variance, can be negative.

    Args:
      log_probs: `[..., T]` log pi of the sampled tokens, in nats.
      ref_log_probs: log-probs of the reference.

    Returns:
      `[..., T]`, float32 or float64, in nats.

    Gradient:
      1 to `log_probs`, -1 to `ref_log_probs`. Over tokens sampled from pi its expectation is
      `E[grad log pi] = 0`: as a loss term k1 does nothing but add noise.

    Raises:
      ValueError: if the shapes differ.

    References:
      Schulman, "Approximating KL divergence" (2020), estimator k1.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.k1(jnp.array([-1.0]), jnp.array([-1.5])))
      [0.5]
    """
    return _log_ratio(log_probs, ref_log_probs)


def abs_diff(log_probs: Float[ArrayLike, "*b T"], ref_log_probs: Float[ArrayLike, "*b T"]) -> Float[Array, "*b T"]:
    """The absolute log-ratio: `abs = |x|`. A size of the mismatch; larger than KL(pi || ref) in expectation.

    Args:
      log_probs: `[..., T]` log pi of the sampled tokens, in nats.
      ref_log_probs: log-probs of the reference.

    Returns:
      `[..., T]`, float32 or float64, in nats, never negative.

    Gradient:
      `sign(x)` to `log_probs`, and 0 at `x = 0` as in PyTorch (`jnp.abs` has 1 there). Not the gradient of a KL.

    Raises:
      ValueError: if the shapes differ.

    References:
      Ziegler et al., "Fine-tuning language models from human preferences" (2019); named `abs` in verl and SkyRL.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.abs_diff(jnp.array([-1.5]), jnp.array([-1.0])))
      [0.5]
    """
    return _abs(_log_ratio(log_probs, ref_log_probs))


def k2(log_probs: Float[ArrayLike, "*b T"], ref_log_probs: Float[ArrayLike, "*b T"]) -> Float[Array, "*b T"]:
    """Half the squared log-ratio: `k2 = x^2 / 2`. Biased in value, right in gradient.

    Args:
      log_probs: `[..., T]` log pi of the sampled tokens, in nats.
      ref_log_probs: log-probs of the reference.

    Returns:
      `[..., T]`, float32 or float64, in squared nats, never negative.

    Gradient:
      `x` to `log_probs`, `-x` to `ref_log_probs`. Over tokens sampled from pi the former is exactly the gradient
      of KL(pi || ref) in expectation.

    Raises:
      ValueError: if the shapes differ.

    References:
      Schulman, "Approximating KL divergence" (2020), estimator k2.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.k2(jnp.array([-1.0]), jnp.array([-2.0])))
      [0.5]
    """
    return _k2(_log_ratio(log_probs, ref_log_probs))


def k3(log_probs: Float[ArrayLike, "*b T"], ref_log_probs: Float[ArrayLike, "*b T"]) -> Float[Array, "*b T"]:
    """The low-variance estimator: `k3 = exp(-x) - 1 + x`. Unbiased for KL(pi || ref) and never negative.

    Near 0 it is computed by a series: written naively it is mere rounding in float32 for `|x| < 3e-4`, often negative.

    Args:
      log_probs: `[..., T]` log pi of the sampled tokens, in nats.
      ref_log_probs: log-probs of the reference.

    Returns:
      `[..., T]`, float32 or float64, in nats, never negative; infinite where `exp(-x)` overflows.

    Gradient:
      `1 - exp(-x)` to `log_probs`. Over tokens sampled from pi that is in expectation the gradient of the other
      direction, KL(ref || pi). For the gradient of KL(pi || ref) use `estimate_kl(..., gradient="k2")`.

    Raises:
      ValueError: if the shapes differ.

    References:
      Schulman, "Approximating KL divergence" (2020), estimator k3; Shao et al., "DeepSeekMath" (2024), eq. 4.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> at_zero, at_one = kljax.k3(jnp.array([-1.0, -1.0]), jnp.array([-1.0, -2.0]))
      >>> print(f"{at_zero:.4f} {at_one:.4f}")
      0.0000 0.3679
    """
    return _k3(_log_ratio(log_probs, ref_log_probs))


def low_var_kl(log_probs: Float[ArrayLike, "*b T"], ref_log_probs: Float[ArrayLike, "*b T"]) -> Float[Array, "*b T"]:
    """`k3` with its log-ratio clipped to [-20, 20] and its value to [-10, 10]: the meaning of the name in verl.

    Args:
      log_probs: `[..., T]` log pi of the sampled tokens, in nats.
      ref_log_probs: log-probs of the reference.

    Returns:
      `[..., T]`, float32 or float64, in nats, between 0 and 10.

    Gradient:
      That of `k3`, and exactly 0 where a clip is active: for `x < -2.61` or `x > 11` nothing pulls the policy back.

    Raises:
      ValueError: if the shapes differ.

    References:
      verl `kl_penalty(..., "low_var_kl")`; Schulman (2020), estimator k3.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.low_var_kl(jnp.array([-9.0]), jnp.array([-1.0])))
      [10.]
    """
    return estimate_kl(log_probs, ref_log_probs, estimator="low_var_kl")


def estimate_kl(
    log_probs: Float[ArrayLike, "*b T"],
    ref_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"] | None = None,
    *,
    estimator: Estimator = "k3",
    gradient: KLGradient = "value",
    sampling_log_probs: Float[ArrayLike, "*b T"] | None = None,
    max_ratio: Scalar | None = None,
    log_ratio_clip: Scalar | None = None,
    value_clip: Scalar | None = None,
) -> Float[Array, "*b T"]:
    """Per-token estimate of KL(pi || ref), with its value and its gradient chosen separately.

    With `x = log pi - log ref`, `c = log_ratio_clip`, `v = value_clip`, and
    `w = min(exp(log_probs - sampling_log_probs), max_ratio)` (1 without `sampling_log_probs`):

        value = clip(w * estimator(clip(x, -c, c)), -v, v)

    Args:
      log_probs: `[..., T]` log pi of the sampled tokens under the policy being trained, in nats.
      ref_log_probs: log-probs of the reference; a constant, whose producer stops its gradient.
      mask: None keeps every position.
      estimator: "none", "k1", "abs", "k2", "k3" or "low_var_kl" (k3 with the clips 20 and 10 unless given).
      gradient: "value" differentiates the estimate; "k2" keeps the value and takes the gradient of `w_const * x^2 / 2`,
        which no clip touches; "weighted_k2" takes the same gradient and leaves `w` out of the value; "none" makes the
        estimate a constant.
      sampling_log_probs: log-probs of the policy that drew the tokens. They multiply the estimate
        by the importance ratio `w`, which makes it right off-policy.
      max_ratio: cap of `w`; None does not cap.
      log_ratio_clip: bound `c` of the log-ratio, in nats; None does not clip.
      value_clip: bound `v` of the estimate, applied last, in nats; None does not clip.

    Returns:
      `[..., T]`, float32 or float64, in nats; masked positions hold exactly 0.

    Gradient:
      To `log_probs` (and, with "value", to `ref_log_probs` if the caller did not stop it). In expectation over tokens
      drawn from pi: k1 nothing; k2, and every estimator with a gradient of k2, that of KL(pi || ref); k3 that of
      KL(ref || pi). With `sampling_log_probs` the ratio is differentiated too, and `w * k1` and `w * k3` have the
      gradient of KL(pi || ref) in expectation over the sampling policy, while `max_ratio` is not reached. Clips have
      PyTorch's gradient: 1 inside and on the bound, 0 outside, also where the estimate would overflow.

    Raises:
      ValueError: for an unknown `estimator` or `gradient`, differing shapes, a bound that is not positive, or a
        `max_ratio` without `sampling_log_probs`.

    References:
      Schulman (2020); Tang and Munos, "On a few pitfalls in KL divergence gradient estimation for RL" (2025);
      DeepSeek-AI, "DeepSeek-V3.2" (2025), unbiased KL estimate.

    Example:
      >>> import jax, jax.numpy as jnp, kljax
      >>> kl = lambda p: kljax.estimate_kl(p, jnp.array([-2.0]), estimator="k3", gradient="k2").sum()
      >>> value, grad = jax.value_and_grad(kl)(jnp.array([-1.0]))
      >>> print(f"{value:.4f}", grad)
      0.3679 [1.]
    """
    check_choice("estimator", estimator, ESTIMATORS)
    check_choice("gradient", gradient, GRADIENTS)
    if max_ratio is not None and sampling_log_probs is None:
        raise ValueError("max_ratio: caps the importance ratio, so it needs sampling_log_probs")
    for name, bound in (("max_ratio", max_ratio), ("log_ratio_clip", log_ratio_clip), ("value_clip", value_clip)):
        check_at_least(name, bound, 0, strict=True)
    if estimator == "low_var_kl":
        log_ratio_clip = LOW_VAR_LOG_RATIO_CLIP if log_ratio_clip is None else log_ratio_clip
        value_clip = LOW_VAR_VALUE_CLIP if value_clip is None else value_clip
    ratios, keep = _masked_log_ratios(log_probs, ref_log_probs, sampling_log_probs, mask)

    def corrected(log_ratio: Array, log_weight: Array, log_ref_weight: Array) -> Array:
        clipped = clip_symmetric(log_ratio, log_ratio_clip)
        if sampling_log_probs is None or gradient == "weighted_k2":
            return _ESTIMATORS[estimator](clipped)
        far = jnp.zeros(log_ratio.shape, bool)
        if estimator in ("k3", "low_var_kl"):
            far = (log_ratio < -1) & (clipped == log_ratio) & (log_weight <= _log_cap(max_ratio, log_weight))
        # Without probability under pi the token has no weight, however large its log-ratio.
        gone = far | (log_weight == -jnp.inf)
        plain = _weight(log_weight, clipped, max_ratio) * _ESTIMATORS[estimator](jnp.where(gone, 0, clipped))
        return jnp.where(far, _far_weighted_k3(far, log_ratio, log_weight, log_ref_weight), plain)

    value = _clip_value(corrected, ratios, value_clip)
    if gradient != "value":
        value = jax.lax.stop_gradient(value)
    if gradient in ("k2", "weighted_k2") and estimator != "none":
        log_ratio, log_weight, _ = ratios
        surrogate = _k2(log_ratio)
        if sampling_log_probs is not None:
            weight = jax.lax.stop_gradient(_weight(log_weight, log_ratio, max_ratio))
            surrogate = weight * _k2(jnp.where(log_weight == -jnp.inf, 0, log_ratio))
        value = with_gradient_of(value, surrogate)
    return value if keep is None else jnp.where(keep, value, 0)


def _log_ratio(log_probs: ArrayLike, ref_log_probs: ArrayLike) -> Array:
    check_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs)
    log_probs, ref_log_probs = as_float(log_probs, ref_log_probs)
    return log_probs - ref_log_probs


def _masked_log_ratios(
    log_probs: ArrayLike, ref_log_probs: ArrayLike, sampling_log_probs: ArrayLike | None, mask: Mask | None
) -> tuple[Ratios, Array | None]:
    """The log-ratios pi / ref, pi / sampling and ref / sampling, 0 under the mask, and the mask as booleans."""
    check_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs, sampling_log_probs=sampling_log_probs, mask=mask)
    sampling = log_probs if sampling_log_probs is None else sampling_log_probs
    log_probs, ref_log_probs, sampling = as_float(log_probs, ref_log_probs, sampling)
    keep = None if mask is None else check_mask(mask)
    if keep is not None:
        log_probs, ref_log_probs, sampling = (jnp.where(keep, x, 0) for x in (log_probs, ref_log_probs, sampling))
    check_log_probs(log_probs=log_probs, ref_log_probs=ref_log_probs)
    if sampling_log_probs is not None:
        check_log_probs(sampling_log_probs=sampling)
    return (log_probs - ref_log_probs, log_probs - sampling, ref_log_probs - sampling), keep


def _clip_value(function: Callable[..., Array], ratios: Ratios, bound: Scalar | None) -> Array:
    """Clips `function`'s value; where it is clipped the inputs are replaced first, so an overflow has gradient 0."""
    if bound is None:
        return function(*ratios)
    bound = jnp.asarray(bound, ratios[0].dtype)
    raw = jax.lax.stop_gradient(function(*ratios))
    outside = jnp.abs(raw) > bound
    inside = function(*(jnp.where(outside, 0, ratio) for ratio in ratios))
    return jnp.where(outside, jnp.sign(raw) * bound, inside)


def _abs(x: Array) -> Array:
    return x * jax.lax.stop_gradient(jnp.sign(x))


def _k2(x: Array) -> Array:
    return 0.5 * jnp.square(x)


def _k3(x: Array) -> Array:
    return expm1_minus(-x)


def _weight(log_weight: Array, log_ratio: Array, max_ratio: Scalar | None) -> Array:
    """The importance ratio, capped; finite where the log-ratio is 0, since every estimate is 0 there."""
    if max_ratio is None:
        max_ratio = jnp.where(log_ratio == 0, jnp.finfo(log_weight.dtype).max, jnp.inf).astype(log_weight.dtype)
    return exp_capped(log_weight, max_ratio)


def _log_cap(max_ratio: Scalar | None, like: Array) -> Array:
    return jnp.asarray(jnp.inf, like.dtype) if max_ratio is None else jnp.log(jnp.asarray(max_ratio, like.dtype))


def _far_weighted_k3(far: Array, x: Array, log_weight: Array, log_ref_weight: Array) -> Array:
    """`w k3(x)` as `ref / sampling + w (x - 1)`; anything where not `far`.

    Far below 0 the ratio `w` underflows while `exp(-x)` overflows, and the large terms of the gradient cancel only
    approximately. Their product is the moderate `ref / sampling`, which does not depend on pi at all.
    """
    x, log_weight, log_ref_weight = (jnp.where(far, value, 0) for value in (x, log_weight, log_ref_weight))
    return jnp.exp(log_ref_weight) + times(jnp.exp(log_weight), x - 1)


_ESTIMATORS: dict[str, Callable[[Array], Array]] = {
    "none": jnp.zeros_like,
    "k1": lambda x: x,
    "abs": _abs,
    "k2": _k2,
    "k3": _k3,
    "low_var_kl": _k3,
}
ESTIMATORS = get_args(Estimator)
GRADIENTS = get_args(KLGradient)
