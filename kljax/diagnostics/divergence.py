"""How far two policies are apart at the sampled tokens."""

import jax.numpy as jnp

from kljax._typing import ArrayLike, Estimator, Float, Level, Mask, MaskLike, MetricMode, Scalar
from kljax.aggregation import WeightedSum
from kljax.diagnostics.token_means import mean_by_position, mean_metric
from kljax.kl import estimate_kl
from kljax.ratios import level_log_ratios, level_mask, log_ratios

__all__ = [
    "chi_squared",
    "kl_by_position",
    "log_prob_abs_diff",
    "log_prob_squared_diff",
    "ppo_kl",
    "reference_kl",
    "rollout_kl",
]


def ppo_kl(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    estimator: Estimator = "k1",
    log_ratio_clip: Scalar | None = None,
    mode: MetricMode = "token_mean",
) -> WeightedSum:
    """How far an update has moved the policy: `E[log pi_old - log pi]`, k1 of KL(old || pi) over tokens of old.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs at the start of the update.
      mask: boolean or `Segments`.
      estimator: as in `estimate_kl`; "k1" unless one wants less variance ("k3") or what a system has ("abs", "k2").
      log_ratio_clip: bound of each token's log-ratio, in nats; None does not clip. verl uses 20.
      mode: as in `mean_metric`.

    Returns:
      `WeightedSum`, in nats; k1 can be negative on a sample.

    Raises:
      ValueError: for an unknown name, differing shapes, or a clip that is not positive.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.ppo_kl(jnp.array([-2.0, -1.0]), jnp.array([-1.0, -1.0]), jnp.array([1, 1])).value())
      0.5
    """
    kl = estimate_kl(old_log_probs, log_probs, mask, estimator=estimator, log_ratio_clip=log_ratio_clip)
    return mean_metric(kl, mask, mode=mode)


def reference_kl(
    log_probs: Float[ArrayLike, "*b T"],
    ref_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    estimator: Estimator = "k3",
    mode: MetricMode = "token_mean",
) -> WeightedSum:
    """KL(pi || ref) per token, over tokens drawn from pi.

    Args:
      log_probs: `[..., T]` log-probs of the policy that drew the tokens, in nats.
      ref_log_probs: log-probs of the reference.
      mask: boolean or `Segments`.
      estimator: as in `estimate_kl`; "k1" and "k3" have the KL as their expectation, and "k3" varies less.
      mode: as in `mean_metric`; "seq_mean_token_sum" with "k1" estimates the KL of whole sequences.

    Returns:
      `WeightedSum`, in nats.

    Raises:
      ValueError: for an unknown name or differing shapes.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(f"{kljax.reference_kl(jnp.array([-1.0]), jnp.array([-2.0]), jnp.array([1])).value():.4f}")
      0.3679
    """
    return mean_metric(estimate_kl(log_probs, ref_log_probs, mask, estimator=estimator), mask, mode=mode)


def rollout_kl(
    log_probs: Float[ArrayLike, "*b T"],
    rollout_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    estimator: Estimator = "k3",
    mode: MetricMode = "token_mean",
) -> WeightedSum:
    """KL(rollout || pi) per token: the mismatch between the sampler that drew the tokens and the trainer.

    The tokens come from the rollout, so this is the direction that they estimate without bias: "k1" is
    `log pi_rollout - log pi`, "k3" is `r - 1 - log r` with `r = pi / pi_rollout`.

    Args:
      log_probs: `[..., T]` log-probs of the trainer's policy, in nats.
      rollout_log_probs: log-probs recorded by the sampler.
      mask: boolean or `Segments`.
      estimator: as in `estimate_kl`.
      mode: as in `mean_metric`.

    Returns:
      `WeightedSum`, in nats.

    Raises:
      ValueError: for an unknown name or differing shapes.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.rollout_kl(jnp.array([-2.0]), jnp.array([-1.0]), jnp.array([1]), estimator="k1").value())
      1.0
    """
    return mean_metric(estimate_kl(rollout_log_probs, log_probs, mask, estimator=estimator), mask, mode=mode)


def log_prob_abs_diff(
    log_probs: Float[ArrayLike, "*b T"],
    rollout_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    mode: MetricMode = "token_mean",
) -> WeightedSum:
    """Mean absolute difference of two log-probs: `E[|log pi - log pi_rollout|]`.

    Args:
      log_probs: `[..., T]` log-probs, in nats.
      rollout_log_probs: log-probs recorded by the sampler, or of any other policy.
      mask: boolean or `Segments`.
      mode: as in `mean_metric`.

    Returns:
      `WeightedSum`, in nats.

    Raises:
      ValueError: for an unknown mode or differing shapes.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.log_prob_abs_diff(jnp.array([-2.0, -1.0]), jnp.array([-1.0, -2.0]), jnp.array([1, 1])).value())
      1.0
    """
    return mean_metric(estimate_kl(log_probs, rollout_log_probs, mask, estimator="abs"), mask, mode=mode)


def log_prob_squared_diff(
    log_probs: Float[ArrayLike, "*b T"],
    rollout_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    mode: MetricMode = "token_mean",
) -> WeightedSum:
    """Mean squared difference of two log-probs: `E[(log pi - log pi_rollout)^2]`, twice the mean of k2.

    With a mean of the difference, signed or absolute, it has the standard deviation of it: `mean.std(squares)`.

    Args:
      log_probs: `[..., T]` log-probs, in nats.
      rollout_log_probs: log-probs recorded by the sampler, or of any other policy.
      mask: boolean or `Segments`.
      mode: as in `mean_metric`.

    Returns:
      `WeightedSum`, in squared nats.

    Raises:
      ValueError: for an unknown mode or differing shapes.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> given = jnp.array([-4.0, -1.0]), jnp.array([-1.0, -2.0]), jnp.array([1, 1])
      >>> squares = kljax.log_prob_squared_diff(*given)
      >>> print(squares.value(), kljax.log_prob_abs_diff(*given).std(squares))
      5.0 1.0
    """
    return mean_metric(jnp.square(log_ratios(log_probs, rollout_log_probs, mask)), mask, mode=mode)


def chi_squared(
    log_probs: Float[ArrayLike, "*b T"],
    sampling_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    level: Level = "token",
    log_ratio_clip: Scalar | None = None,
) -> WeightedSum:
    """The chi-squared divergence of pi from the policy that drew the tokens, `E[r^2] - 1`: the variance of the ratios.

    Args:
      log_probs: `[..., T]` log-probs of the numerator policy, in nats.
      sampling_log_probs: log-probs of the policy that drew the tokens.
      mask: boolean or `Segments`.
      level: whose ratio: "token", "sequence" (product over the row) or "geometric" (its length-normalised form).
      log_ratio_clip: bound of the level's log-ratio, in nats; None does not clip. `r^2` of a sequence overflows
        float32 from a log-ratio of 44; verl uses 20.

    Returns:
      `WeightedSum` of `r^2 - 1` per token, or per row that has one. Its value estimates `E[r^2] - 1` and is at least
      -1; below 0 only because the mean of the ratios in the sample is not 1.

    Raises:
      ValueError: for an unknown level, differing shapes, or a clip that is not positive.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, rollout = jnp.log(jnp.array([[0.6, 0.2]])), jnp.log(jnp.array([[0.4, 0.4]]))
      >>> print(f"{kljax.chi_squared(lp, rollout, jnp.array([[1, 1]])).value():.4f}")
      0.2500
    """
    log_ratio = level_log_ratios(log_probs, sampling_log_probs, mask, level, log_ratio_clip)
    return WeightedSum.of(jnp.expm1(2 * log_ratio), level_mask(mask, level))


def kl_by_position(
    log_probs: Float[ArrayLike, "*b T"],
    ref_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    num_buckets: int,
    max_length: Scalar | None = None,
    estimator: Estimator = "k3",
) -> WeightedSum:
    """KL(pi || ref) per token in each of a number of equal ranges of positions, over tokens drawn from pi.

    Drift often starts late in a completion, or in its first tokens; one mean over all of them hides it.

    Args:
      log_probs: `[..., T]` log-probs of the policy that drew the tokens, in nats. For the mismatch of a sampler that
        is the rollout policy.
      ref_log_probs: log-probs of the other policy.
      mask: boolean or `Segments`.
      num_buckets: static number `K` of ranges, see `mean_by_position`.
      max_length: the length that the ranges divide, in tokens; None is T.
      estimator: as in `estimate_kl`.

    Returns:
      `WeightedSum` with `[K]` arrays, in nats.

    Raises:
      ValueError: for an unknown estimator, differing shapes, or a number that is not positive.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, ref, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.0, -3.0]]), jnp.array([[1, 1]])
      >>> print(kljax.kl_by_position(lp, ref, mask, num_buckets=2, estimator="k1").value())
      [0. 2.]
    """
    kl = estimate_kl(log_probs, ref_log_probs, mask, estimator=estimator)
    return mean_by_position(kl, mask, num_buckets=num_buckets, max_length=max_length)
