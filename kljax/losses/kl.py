"""KL terms of a loss, per token; `[..., T]`, masked positions exactly 0. The coefficient is the caller's."""

from kljax._typing import Array, ArrayLike, Estimator, Float, KLGradient, Mask, MaskLike, Scalar
from kljax.kl import estimate_kl

__all__ = ["reference_kl_loss", "rollout_kl_loss"]


def reference_kl_loss(
    log_probs: Float[ArrayLike, "*b T"],
    ref_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    estimator: Estimator = "k3",
    gradient: KLGradient = "k2",
    sampling_log_probs: Float[ArrayLike, "*b T"] | None = None,
    max_ratio: Scalar | None = None,
    log_ratio_clip: Scalar | None = None,
    value_clip: Scalar | None = None,
) -> Float[Array, "*b T"]:
    """The KL to the reference as a loss term: `estimate_kl(log_probs, ref_log_probs)` whose gradient means something.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      ref_log_probs: log-probs of the reference; a constant.
      estimator: the value, as in `estimate_kl`.
      gradient: "k2" (default): the gradient of KL(pi || ref) whatever the value; "weighted_k2": the same, with the
        importance ratio in the gradient but not in the value; "value": that of the estimator; "none": a constant.
      sampling_log_probs: importance-corrects for tokens that another policy drew.
      max_ratio: cap of that importance ratio.
      log_ratio_clip: bound of the log-ratio, in nats.
      value_clip: bound of the estimate, in nats.

    Returns:
      `[..., T]`, float32 or float64, in nats; masked positions hold 0.

    Gradient:
      As `estimate_kl`; by default `x = log pi - log ref` to `log_probs`, which is in expectation over tokens drawn from
      pi the gradient of KL(pi || ref).

    Raises:
      ValueError: as `estimate_kl`; and for "k1" with gradient "value" and no `sampling_log_probs`, whose expected
        gradient is zero.

    References:
      Shao et al., "DeepSeekMath" (2024), eq. 3 and 4; Tang and Munos (2025).

    Example:
      >>> import jax, jax.numpy as jnp, kljax
      >>> lp, ref, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[-2.0, -1.0]]), jnp.array([[1, 1]])
      >>> print(f"{kljax.reference_kl_loss(lp, ref, mask).sum():.4f}")
      0.3679
      >>> print(jax.grad(lambda lp: kljax.reference_kl_loss(lp, ref, mask).sum())(lp))
      [[1. 0.]]
    """
    if estimator == "k1" and gradient == "value" and sampling_log_probs is None:
        raise ValueError(
            "gradient: got 'value' with estimator 'k1', whose gradient is that of log pi; its expectation over sampled "
            "tokens is zero, so the term would only add noise. Use gradient='k2', or give sampling_log_probs"
        )
    return estimate_kl(
        log_probs,
        ref_log_probs,
        mask,
        estimator=estimator,
        gradient=gradient,
        sampling_log_probs=sampling_log_probs,
        max_ratio=max_ratio,
        log_ratio_clip=log_ratio_clip,
        value_clip=value_clip,
    )


def rollout_kl_loss(
    log_probs: Float[ArrayLike, "*b T"],
    rollout_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    estimator: Estimator = "k2",
    gradient: KLGradient = "value",
    log_ratio_clip: Scalar | None = None,
    value_clip: Scalar | None = None,
) -> Float[Array, "*b T"]:
    """Keeps the policy near the one that drew the tokens: an estimator of `x = log pi - log pi_rollout`.

    It composes with any policy loss and needs no reference: `rollout_log_probs` are what the sampler recorded.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      rollout_log_probs: recorded log-probs of the sampler; a constant.
      estimator: the value, as in `estimate_kl`; prime-rl's squared log-ratio is twice "k2".
      gradient: "value" (default): that of the estimator; "k2": `x` whatever the value; "none": a constant.
      log_ratio_clip: bound of the log-ratio, in nats.
      value_clip: bound of the estimate, in nats.

    Returns:
      `[..., T]`, float32 or float64, in nats; masked positions hold 0.

    Gradient:
      To `log_probs`: 1 (k1), `sign(x)` (abs), `x` (k2), `1 - exp(-x)` (k3); 0 beyond a clip. The tokens come from the
      rollout policy: in expectation over it, k2 and k3 pull the policy back to the rollout with the same first-order
      strength, while k1 has the gradient of minus KL(rollout || pi), which pushes away once the two differ. "k2" is the
      safe choice.

    Raises:
      ValueError: for an unknown name, differing shapes, or a bound that is not positive.

    References:
      NovaSky-AI SkyRL pull request 1811 (mean over rows of k2); prime-rl `default_loss_fn` (`kl_tau`, no half).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.rollout_kl_loss(jnp.array([[-1.0, -1.0]]), jnp.array([[-3.0, jnp.nan]]), jnp.array([[1, 0]])))
      [[2. 0.]]
    """
    return estimate_kl(
        log_probs,
        rollout_log_probs,
        mask,
        estimator=estimator,
        gradient=gradient,
        log_ratio_clip=log_ratio_clip,
        value_clip=value_clip,
    )
