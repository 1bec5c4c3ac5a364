"""Rejection by an estimate of the divergence of two policies, per token or per sequence; arrays are `[..., T]`."""

from typing import get_args

import jax.numpy as jnp

from kljax._checks import as_float, check_at_least, check_choice, check_mask, check_numbers, check_same_shape
from kljax._typing import (
    Array,
    ArrayLike,
    Bool,
    Divergence,
    DivergenceLevel,
    Float,
    Mask,
    MaskLike,
    Real,
    RejectionEstimator,
    RowStatistic,
    Scalar,
)
from kljax.kl import estimate_kl
from kljax.masking import masked
from kljax.ratios._bernoulli import DIVERGENCES
from kljax.ratios.levels import check_bounds, within
from kljax.rows import row_max, row_mean, row_sum, to_tokens

__all__ = ["divergence_mask", "kl_rejection_mask", "off_policy_sequence_mask"]

ESTIMATORS = get_args(RejectionEstimator)
REDUCTIONS = get_args(RowStatistic)
LEVELS = get_args(DivergenceLevel)


def kl_rejection_mask(
    log_probs: Float[ArrayLike, "*b T"],
    sampling_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    estimator: RejectionEstimator = "k1",
    reduction: RowStatistic = "token",
    lower: Scalar | None = None,
    upper: Scalar | None = None,
    log_ratio_clip: Scalar | None = None,
) -> Bool[Array, "*b T"]:
    """The tokens whose estimate of KL(behaviour || pi) lies within bounds, each by itself or its whole row at once.

    With `d = log pi - log behaviour` at a token that the behaviour drew: `k1 = -d`, `k2 = d^2 / 2`,
    `k3 = exp(d) - 1 - d`. The reduction over the unmasked tokens of the row gives what is compared.

    Args:
      log_probs: `[..., T]` log-probs of the policy the loss is about (usually the old policy), in nats.
      sampling_log_probs: log-probs of the policy that drew the tokens.
      mask: boolean or `Segments`.
      estimator: "k1", "k2" or "k3".
      reduction: "token" keeps or rejects each token; "sum", "mean" and "max" over the row do so with whole rows.
      lower: lowest value kept, inclusive, in nats; None has no lower bound. Negative values have a use with "k1" only.
      upper: highest value kept, inclusive, in nats; None has no upper bound.
      log_ratio_clip: bound of each `d` before it is estimated, in nats; None does not clip. verl uses 20.

    Returns:
      `[..., T]` booleans, a subset of `mask`. A value that is NaN is rejected.

    Raises:
      ValueError: for an unknown name, differing shapes, no bound at all, `lower > upper`, or a clip not above 0.

    References:
      verl's `rollout_rs`: "token_k3" is "k3" with "token", "seq_mean_k1" is "k1" with "mean". The thresholds that verl
      takes for k1 are ratios `behaviour / pi`: "0.5_2.0" there is `lower=log(0.5), upper=log(2.0)` here.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, rollout, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.0, -3.0]]), jnp.array([[1, 1]])
      >>> for reduction in ("token", "max"):
      ...     print(kljax.kl_rejection_mask(lp, rollout, mask, estimator="k2", reduction=reduction, upper=1.0))
      [[ True False]]
      [[False False]]
    """
    check_numbers(lower=lower, upper=upper)
    check_choice("estimator", estimator, ESTIMATORS)
    check_choice("reduction", reduction, REDUCTIONS)
    check_bounds(lower, upper)
    unmasked = check_mask(mask)
    # The tokens are the behaviour's, so it is the first of the two policies.
    kl = estimate_kl(sampling_log_probs, log_probs, unmasked, estimator=estimator, log_ratio_clip=log_ratio_clip)
    if reduction == "token":
        return unmasked & within(kl, lower, upper)
    if reduction == "sum":
        kl = row_sum(kl, mask)
    elif reduction == "mean":
        kl = row_mean(kl, mask)
    else:
        kl = row_max(kl, mask, initial=-jnp.inf)
    return unmasked & to_tokens(within(kl, lower, upper), mask)


def divergence_mask(
    log_probs: Float[ArrayLike, "*b T"],
    sampling_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    divergence: Divergence = "tv",
    level: DivergenceLevel = "token",
    max_divergence: Scalar,
) -> Bool[Array, "*b T"]:
    """The tokens, or rows, at which the two policies are close, judged by the probability of the sampled token alone.

    Seen as a coin with the outcomes "this token" and "any other token", with `p = exp(sampling_log_probs)` and
    `q = exp(log_probs)`, the policies are apart by `|p - q|` ("tv") or by
    `p log(p / q) + (1 - p) log((1 - p) / (1 - q))` ("kl", KL(behaviour || pi)). Both are lower bounds of what they are
    over the vocabulary. Unlike a ratio they leave rare tokens alone.

    Args:
      log_probs: `[..., T]` log-probs of the policy the loss is about (usually the old policy), in nats.
      sampling_log_probs: log-probs of the policy that drew the tokens.
      mask: boolean or `Segments`.
      divergence: "tv" or "kl".
      level: "token", or "sequence" for the mean over the unmasked tokens of the row.
      max_divergence: highest divergence kept, inclusive: a probability for "tv", nats for "kl".

    Returns:
      `[..., T]` booleans, a subset of `mask`. A divergence that is NaN is rejected.

    Raises:
      ValueError: for an unknown name, differing shapes, or a negative bound.

    References:
      OpenRLHF 0.11.2's `is_correction_gating`, which clamps both probabilities to [1e-6, 1 - 1e-6] first.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, rollout, mask = jnp.log(jnp.array([0.9, 1e-4])), jnp.log(jnp.array([0.5, 1e-6])), jnp.array([1, 1])
      >>> print(kljax.divergence_mask(lp, rollout, mask, max_divergence=0.2))
      [False  True]
    """
    check_choice("divergence", divergence, DIVERGENCES)
    check_choice("level", level, LEVELS)
    check_at_least("max_divergence", max_divergence, 0)
    check_same_shape(log_probs=log_probs, sampling_log_probs=sampling_log_probs, mask=mask)
    log_probs, sampling_log_probs = as_float(log_probs, sampling_log_probs)
    apart = DIVERGENCES[divergence](masked(sampling_log_probs, mask), masked(log_probs, mask))
    if level == "sequence":
        apart = to_tokens(row_mean(apart, mask), mask)
    return check_mask(mask) & within(apart, None, max_divergence)


def off_policy_sequence_mask(
    log_probs: Float[ArrayLike, "*b T"],
    sampling_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    max_kl: Scalar,
    log_ratio_clip: Scalar | None = None,
) -> Bool[Array, "*b T"]:
    """Drops the tokens of negative advantage in rows that the policy has moved away from (OPSM).

    A row is off-policy if the mean of `log behaviour - log pi` over its unmasked tokens, k1 of KL(behaviour || pi),
    is above `max_kl`. To learn from mistakes that the policy does not make any more destabilises training; what went
    well is kept.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      sampling_log_probs: log-probs of the policy that drew the tokens, or of the start of the update.
      advantages: per token; only their sign is read.
      mask: boolean or `Segments`.
      max_kl: highest mean tolerated, inclusive, in nats. slime uses 1e-4, Trinity-RFT 0.1.
      log_ratio_clip: bound of each token's log-ratio, in nats; None does not clip. Trinity-RFT uses 20.

    Returns:
      `[..., T]` booleans, a subset of `mask`. A row whose mean is NaN is off-policy.

    Raises:
      ValueError: for differing shapes or a clip that is not positive.

    References:
      DeepSeek-AI, "DeepSeek-V3.2" (2025), off-policy sequence masking.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, rollout = jnp.array([[-2.0, -2.0]]), jnp.array([[-1.0, -1.0]])
      >>> print(kljax.off_policy_sequence_mask(lp, rollout, jnp.array([[1.0, -1.0]]), jnp.array([[1, 1]]), max_kl=0.1))
      [[ True False]]
    """
    check_numbers(max_kl=max_kl)
    check_same_shape(log_probs=log_probs, advantages=advantages)
    kl = estimate_kl(sampling_log_probs, log_probs, mask, estimator="k1", log_ratio_clip=log_ratio_clip)
    near = to_tokens(within(row_mean(kl, mask), None, max_kl), mask)
    return check_mask(mask) & (near | ~(masked(advantages, mask) < 0))
