"""What to log about divergence, clipping and mismatch.

Means travel as `WeightedSum`: those of micro-batches, devices and processes are added, and divided once. Nothing here
carries a gradient. The mean of an array that is there already, such as `TokenStats.entropy`, is
`WeightedSum.of(values, mask)`. Statistics that are no means (`effective_sample_size`, `explained_variance`) are taken
of a whole batch, before it is split. Arrays are `[..., T]`.
"""

import jax
import jax.numpy as jnp

from kljax._checks import as_float, check_same_shape
from kljax._typing import Array, ArrayLike, Scalar
from kljax.aggregation import WeightedSum
from kljax.kl import estimate_kl
from kljax.losses._surrogate import check_clip, loss_inputs
from kljax.masking import masked, masked_mean, masked_var
from kljax.ratios import level_log_ratios

__all__ = [
    "clip_fraction",
    "dual_clip_fraction",
    "effective_sample_size",
    "explained_variance",
    "log_prob_abs_diff",
    "ppo_kl",
    "reference_kl",
    "rollout_kl",
]


def ppo_kl(
    log_probs: ArrayLike, old_log_probs: ArrayLike, mask: ArrayLike, *, log_ratio_clip: Scalar | None = None
) -> WeightedSum:
    """How far an update has moved the policy: `E[log pi_old - log pi]`, k1 of KL(old || pi) over tokens of old.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: same shape, log-probs at the start of the update.
      mask: same shape, boolean.
      log_ratio_clip: bound of each token's log-ratio, in nats; None does not clip. verl uses 20.

    Returns:
      `WeightedSum` per token, in nats; can be negative on a sample.

    Gradient:
      None; metrics are data.

    Raises:
      ValueError: if the shapes differ.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.ppo_kl(jnp.array([-2.0, -1.0]), jnp.array([-1.0, -1.0]), jnp.array([1, 1])).value())
      0.5
    """
    kl = estimate_kl(old_log_probs, log_probs, mask, estimator="k1", log_ratio_clip=log_ratio_clip)
    return WeightedSum.of(kl, mask)


def reference_kl(
    log_probs: ArrayLike, ref_log_probs: ArrayLike, mask: ArrayLike, *, estimator: str = "k3"
) -> WeightedSum:
    """KL(pi || ref) per token, over tokens drawn from pi.

    Args:
      log_probs: `[..., T]` log-probs of the policy that drew the tokens, in nats.
      ref_log_probs: same shape, log-probs of the reference.
      mask: same shape, boolean.
      estimator: as in `estimate_kl`; "k1" and "k3" have the KL as their expectation, and "k3" varies less.

    Returns:
      `WeightedSum` per token, in nats.

    Gradient:
      None; metrics are data.

    Raises:
      ValueError: for an unknown estimator or differing shapes.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> kl = kljax.reference_kl(jnp.array([-1.0]), jnp.array([-2.0]), jnp.array([1]))
      >>> print(f"{kl.value():.4f}")
      0.3679
    """
    return WeightedSum.of(estimate_kl(log_probs, ref_log_probs, mask, estimator=estimator), mask)


def rollout_kl(
    log_probs: ArrayLike, rollout_log_probs: ArrayLike, mask: ArrayLike, *, estimator: str = "k3"
) -> WeightedSum:
    """KL(rollout || pi) per token: the mismatch between the sampler that drew the tokens and the trainer.

    The tokens come from the rollout, so this is the direction that they estimate without bias: "k1" is
    `log pi_rollout - log pi`, "k3" is `r - 1 - log r` with `r = pi / pi_rollout`.

    Args:
      log_probs: `[..., T]` log-probs of the trainer's policy, in nats.
      rollout_log_probs: same shape, log-probs recorded by the sampler.
      mask: same shape, boolean.
      estimator: as in `estimate_kl`.

    Returns:
      `WeightedSum` per token, in nats.

    Gradient:
      None; metrics are data.

    Raises:
      ValueError: for an unknown estimator or differing shapes.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.rollout_kl(jnp.array([-2.0]), jnp.array([-1.0]), jnp.array([1]), estimator="k1").value())
      1.0
    """
    return WeightedSum.of(estimate_kl(rollout_log_probs, log_probs, mask, estimator=estimator), mask)


def log_prob_abs_diff(log_probs: ArrayLike, other_log_probs: ArrayLike, mask: ArrayLike) -> WeightedSum:
    """Mean absolute difference of two log-probs: `E[|log pi - log pi_other|]`.

    Args:
      log_probs: `[..., T]` log-probs, in nats.
      other_log_probs: same shape, e.g. the ones the sampler recorded.
      mask: same shape, boolean.

    Returns:
      `WeightedSum` per token, in nats.

    Gradient:
      None; metrics are data.

    Raises:
      ValueError: if the shapes differ.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.log_prob_abs_diff(jnp.array([-2.0, -1.0]), jnp.array([-1.0, -2.0]), jnp.array([1, 1])).value())
      1.0
    """
    return WeightedSum.of(estimate_kl(log_probs, other_log_probs, mask, estimator="abs"), mask)


def clip_fraction(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    level: str = "token",
) -> WeightedSum:
    """Fraction of tokens whose clip is active: `r > 1 + clip_high` where `A > 0`, `r < 1 - clip_low` where `A < 0`.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: same shape, log-probs at the start of the update.
      advantages: same shape; a token of advantage 0 is never counted.
      mask: same shape, boolean.
      clip_low: as in the loss.
      clip_high: as in the loss.
      level: whose ratio: "token" for PPO, "geometric" for GSPO, or "sequence".

    Returns:
      `WeightedSum` of zeros and ones per token.

    Gradient:
      None; metrics are data.

    Raises:
      ValueError: for differing shapes, a negative clip, or an unknown level.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, old, ones = jnp.array([0.0, -1.0]), jnp.array([-1.0, -1.0]), jnp.ones(2)
      >>> print(kljax.clip_fraction(lp, old, ones, jnp.array([1, 1])).value())
      0.5
    """
    check_clip(clip_low, clip_high)
    ratio, advantages = _ratios(log_probs, old_log_probs, advantages, mask, level)
    low, high = (jnp.asarray(bound, ratio.dtype) for bound in (1 - clip_low, 1 + clip_high))
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    return WeightedSum.of(clipped.astype(ratio.dtype), mask)


def dual_clip_fraction(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    dual_clip: Scalar,
    level: str = "token",
) -> WeightedSum:
    """Fraction of tokens that the dual clip bounds: `A < 0` and `r > dual_clip`.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: same shape, log-probs at the start of the update.
      advantages: same shape.
      mask: same shape, boolean.
      dual_clip: as in the loss, above 1.
      level: whose ratio: "token", "geometric" or "sequence".

    Returns:
      `WeightedSum` of zeros and ones per token.

    Gradient:
      None; metrics are data.

    Raises:
      ValueError: for differing shapes, `dual_clip <= 1`, or an unknown level.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, old = jnp.array([0.0, 0.0]), jnp.array([-2.0, -2.0])
      >>> print(kljax.dual_clip_fraction(lp, old, jnp.array([1.0, -1.0]), jnp.array([1, 1]), dual_clip=3.0).value())
      0.5
    """
    check_clip(0, 0, dual_clip)
    ratio, advantages = _ratios(log_probs, old_log_probs, advantages, mask, level)
    bounded = (advantages < 0) & (ratio > jnp.asarray(dual_clip, ratio.dtype))
    return WeightedSum.of(bounded.astype(ratio.dtype), mask)


def effective_sample_size(weights: ArrayLike, mask: ArrayLike) -> Array:
    """The share of a sample that its importance weights leave in effect: `(sum w)^2 / (n sum w^2)`.

    Args:
      weights: `[..., T]` importance weights, at least 0, of the whole batch (`truncated_importance_weights`).
      mask: same shape, boolean; `n` is the number of unmasked positions.

    Returns:
      A scalar between 0 and 1, float32 or float64: 1 for equal weights, `1 / n` if one weight dominates, 0 if there
      is no weight.

    Gradient:
      None; metrics are data.

    Raises:
      ValueError: if the shapes differ.

    References:
      Kong, "A note on importance sampling using standardized weights" (1992).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.effective_sample_size(jnp.array([1.0, 0.0]), jnp.array([1, 1])))
      0.5
    """
    weights = jax.lax.stop_gradient(masked(weights, mask))
    # Divided by the largest weight first, so that no square overflows.
    largest = weights.max(initial=0)
    weights = weights / jnp.where(largest == 0, 1, largest)
    squares = masked_mean(jnp.square(weights), mask)
    none = squares == 0
    return jnp.where(none, 0, jnp.square(masked_mean(weights, mask)) / jnp.where(none, 1, squares))


def explained_variance(values: ArrayLike, returns: ArrayLike, mask: ArrayLike) -> Array:
    """How much of the returns a value function predicts: `1 - var(R - V) / var(R)`.

    Args:
      values: `[..., T]` values of the whole batch, in the unit of the rewards.
      returns: same shape, the returns.
      mask: same shape, boolean.

    Returns:
      A scalar of at most 1, float32 or float64: 1 is perfect, 0 no better than a constant, and 0 if the
      returns do not vary.

    Gradient:
      None; metrics are data.

    Raises:
      ValueError: if the shapes differ.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.explained_variance(jnp.array([1.0, 2.0]), jnp.array([1.0, 3.0]), jnp.array([1, 1])))
      0.75
    """
    check_same_shape(values=values, returns=returns, mask=mask)
    values, returns = as_float(values, returns)
    values, returns = masked(values, mask), masked(returns, mask)
    total = masked_var(returns, mask)
    unexplained = masked_var(returns - values, mask)
    constant = total == 0
    return jax.lax.stop_gradient(jnp.where(constant, 0, 1 - unexplained / jnp.where(constant, 1, total)))


def _ratios(
    log_probs: ArrayLike, old_log_probs: ArrayLike, advantages: ArrayLike, mask: ArrayLike, level: str
) -> tuple[Array, Array]:
    """The ratios of a level and the advantages, both `[..., T]` and detached."""
    log_probs, old_log_probs, advantages = loss_inputs(log_probs, old_log_probs, advantages, mask)
    ratio = jnp.exp(level_log_ratios(log_probs, old_log_probs, mask, level))
    if level != "token":
        ratio = jnp.broadcast_to(ratio[..., None], advantages.shape)
    return jax.lax.stop_gradient((ratio, advantages))
