"""Audits a recorded batch: the log-probs of the sampled tokens, without the rest of the vocabulary."""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kljax._checks import check_mask, check_same_shape
from kljax._typing import Array, ArrayLike
from kljax.tools.audit._metrics import (
    Sums,
    check_cap,
    check_intervals,
    gradient_labels,
    label_results,
    ratio,
    summarize,
    value_labels,
)
from kljax.tools.audit._moments import estimates
from kljax.tools.audit.report import Audit
from kljax.tools.audit.results import Interval, Result

__all__ = ["audit_batch"]

RECORDED = "the exact KL(policy || reference) per token that the batch records"
ON_POLICY = "the mean of k1 over the sampled tokens, which is unbiased on-policy; no exact KL is recorded"
OFF_POLICY = "the mean of k1 times the importance ratio, which is unbiased off-policy; no exact KL is recorded"
OF_ERROR = "variances are those of the estimate less the recorded KL of its position"
OF_ESTIMATE = "variances are those of the estimate over tokens: how the KL itself varies between positions is in them"
# A log-prob near 0 may be rounded to a positive number.
ROUNDING = 1e-3
MAX_LOG_RATIO = 700.0
"""In nats: the exponential of a larger number overflows in float64."""
COEFFICIENTS = (
    "a batch has no expected gradient: each token's derivative by its log-prob is compared with that of the unbiased "
    "k2 loss, x times the importance ratio; a constant added to all derivatives can be noise without being bias"
)


def audit_batch(
    log_probs: ArrayLike,
    ref_log_probs: ArrayLike,
    mask: ArrayLike,
    kl: ArrayLike | None = None,
    sampling_log_probs: ArrayLike | None = None,
    *,
    bootstrap: int = 1000,
    confidence: float = 0.95,
    max_ratio: float | None = 2.0,
    key: Array | None = None,
) -> Audit:
    """Compares the estimators on a recorded batch: their values with a yardstick, and their derivatives.

    The yardstick is the exact KL per token if the batch records it. Otherwise it is the mean of k1, times the
    importance ratio with behaviour log-probs: unbiased, but of high variance, and the intervals show its noise. The
    bootstrap resamples rows; estimate and yardstick come from the same tokens.

    Metrics of a value, per token and per sequence (sum over the row): mean, bias, relative_bias, variance, snr, rmse as
    in `audit_logits`. Metrics of a coefficient, the derivative of a token's estimate by its log-prob, against the
    unbiased `w x`: relative_difference (norm of the difference over that of `w x`), cosine and root_mean_square.

    Args:
      log_probs: `[B, T]` log-probs of the policy at the sampled tokens, in nats.
      ref_log_probs: same shape, log-probs of the reference.
      mask: same shape, boolean.
      kl: same shape, exact KL(policy || reference) over the vocabulary at each position, in nats; None if not recorded.
      sampling_log_probs: same shape, log-probs of the policy that drew the tokens (the rollout engine, or the policy
        before the update); None if the policy itself drew them.
      bootstrap: replicates of the bootstrap; 0 has no intervals.
      confidence: coverage of the percentile intervals.
      max_ratio: cap of the capped correction, a finite number above 0; None leaves that correction out.
      key: PRNG key of the bootstrap; None is `jax.random.key(0)`.

    Returns:
      An `Audit`, on the host. `Audit.yardstick` names the yardstick.

    Raises:
      ValueError: if shapes differ, nothing is unmasked, an unmasked number is not finite, a log-prob is above 0 or a KL
        below 0 by more than rounding (1e-3), two log-probs of a token differ by more than 700 nats, or an option is
        out of range.
      TypeError: if the mask has a floating type, or an array has other than real numbers.

    References:
      As `audit_logits`.

    Example:
      >>> import jax, jax.numpy as jnp, kljax
      >>> lp, ref = -1.0 + 0.1 * jax.random.normal(jax.random.key(0), (2, 16, 8))
      >>> audit = kljax.audit.audit_batch(lp, ref, jnp.ones(lp.shape, bool), bootstrap=50)
      >>> print(audit.yardstick)
      the mean of k1 over the sampled tokens, which is unbiased on-policy; no exact KL is recorded
    """
    check_intervals(bootstrap, confidence)
    check_cap(max_ratio)
    inputs = {"log_probs": log_probs, "ref_log_probs": ref_log_probs, "kl": kl, "behaviour": sampling_log_probs}
    shape = check_same_shape(mask=mask, **inputs)
    if len(shape) != 2:
        raise ValueError(f"log_probs: got shape {list(shape)}, expected [B, T]")
    mask = np.asarray(check_mask(mask))
    if not mask.any():
        raise ValueError("mask: no position is unmasked, so there is nothing to audit")
    arrays = {name: _filled(name, array, mask) for name, array in inputs.items() if array is not None}
    _check_ratios(arrays)
    corrections: tuple[str, ...] = ("none",)
    if sampling_log_probs is not None:
        corrections = ("none", "ratio") if max_ratio is None else ("none", "ratio", "capped")
    by_correction = {correction: _estimates(arrays, correction, max_ratio) for correction in corrections}
    unbiased = by_correction["none" if len(corrections) == 1 else "ratio"]
    exact = arrays["kl"] if kl is not None else unbiased.values[0]
    levels = _levels(by_correction, exact, mask)
    coefficients = _coefficients(by_correction, unbiased, mask)
    keys = jax.random.split(jax.random.key(0) if key is None else key)
    results: list[Result] = []
    means: dict[str, Interval] = {}
    metrics = functools.partial(_value_metrics, of_error=kl is not None)
    for (level, sums), level_key in zip(levels.items(), keys, strict=True):
        values = summarize(level_key, bootstrap, confidence, sums, metrics)
        results += label_results(values, value_labels(corrections), "value", level, "recorded")
        first = {name: field[:, :1] for name, field in sums.items()}
        exact = summarize(level_key, bootstrap, confidence, first, lambda sums: {"kl": sums["exact"] / sums["count"]})
        means[level] = exact["kl"][0]
    compared = summarize(keys[0], bootstrap, confidence, coefficients, _coefficient_metrics)
    labels = [label for label in gradient_labels(corrections) if label.place != "reward_baseline"]
    results += label_results(compared, labels, "coefficient", "token", "recorded")
    settings = {
        "source": "batch",
        "rows": int(mask.any(-1).sum()),
        "positions": int(mask.sum()),
        "policy": "on-policy" if len(corrections) == 1 else "off-policy",
        "bootstrap": bootstrap,
        "confidence": confidence,
        "resampled": "rows",
    }
    yardstick = RECORDED if kl is not None else ON_POLICY if len(corrections) == 1 else OFF_POLICY
    notes = (OF_ERROR if kl is not None else OF_ESTIMATE, COEFFICIENTS)
    return Audit(yardstick, notes, settings, means, tuple(results))


class Estimates(NamedTuple):
    """Values `[E, B, T]`, derivatives by the log-prob `[E + 1, B, T]`, the last straight-through, weights `[B, T]`."""

    values: np.ndarray
    derivatives: np.ndarray
    weights: np.ndarray


def _filled(name: str, array: ArrayLike, mask: np.ndarray) -> np.ndarray:
    """Returns the array on the host in float64, 0 under the mask."""
    dtype = np.asarray(array).dtype
    if dtype.kind not in "fiub" and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name}: got dtype {dtype}, expected real numbers")
    values = np.where(mask, np.asarray(array, np.float64), 0)
    if not np.isfinite(values).all():
        raise ValueError(f"{name}: {int((~np.isfinite(values)).sum())} unmasked numbers are not finite")
    if name != "kl" and values.max() > ROUNDING:
        where = tuple(int(index) for index in np.unravel_index(np.argmax(values), values.shape))
        raise ValueError(f"{name}: got {values.max():.6g} at (row, token) {where}, expected log-probs of at most 0")
    if name == "kl" and values.min() < -ROUNDING:
        where = tuple(int(index) for index in np.unravel_index(np.argmin(values), values.shape))
        raise ValueError(f"kl: got {values.min():.6g} at (row, token) {where}, expected an exact KL of at least 0")
    return values


def _check_ratios(arrays: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError where the exponential of a log-ratio overflows."""
    for name in ("ref_log_probs", "behaviour"):
        ratios = np.abs(arrays["log_probs"] - arrays.get(name, arrays["log_probs"]))
        if ratios.max() > MAX_LOG_RATIO:
            where = tuple(int(index) for index in np.unravel_index(ratios.argmax(), ratios.shape))
            raise ValueError(
                f"{name}: differs from log_probs by {ratios.max():.6g} nats at (row, token) {where}, expected at most "
                f"{MAX_LOG_RATIO:g}; mask such tokens"
            )


def _estimates(arrays: dict[str, np.ndarray], correction: str, max_ratio: float | None) -> Estimates:
    cap = {"none": None, "ratio": math.inf, "capped": max_ratio}[correction]
    behaviour = arrays.get("behaviour", arrays["log_probs"])
    tokens = (jnp.asarray(array, float) for array in (arrays["log_probs"], arrays["ref_log_probs"], behaviour))
    values, derivatives = _compiled(*tokens, None if cap is None else jnp.asarray(cap, float))
    weights = np.exp(np.minimum(arrays["log_probs"] - behaviour, math.inf if cap is None else math.log(cap)))
    if cap is None:
        weights = np.ones_like(weights)
    return Estimates(np.asarray(values, np.float64), np.asarray(derivatives, np.float64), weights)


@jax.jit
def _compiled(log_probs: Array, ref_log_probs: Array, sampling_log_probs: Array, cap: Array | None) -> Any:
    return estimates(log_probs, ref_log_probs, sampling_log_probs, jnp.ones(log_probs.shape, bool), cap)


def _levels(by_correction: Mapping[str, Estimates], exact: np.ndarray, mask: np.ndarray) -> dict[str, Sums]:
    """Sums the fields of values per row, for tokens, and makes each row one number, for sequences."""
    means = np.concatenate([corrected.values for corrected in by_correction.values()])
    rows = mask.any(-1)
    columns = len(means)
    exacts = np.broadcast_to(exact, means.shape)
    ones = np.ones((int(rows.sum()), columns))
    levels = {}
    per_row = (_row_sums(means, mask), _row_sums(exacts, mask))
    for level, (mean, truth) in {"token": (means, exacts), "sequence": per_row}.items():
        fields = {"exact": truth, "mean": mean, "square": mean**2, "squared_error": (mean - truth) ** 2}
        if level == "token":
            fields = {name: _row_sums(field, mask) for name, field in fields.items()}
        count = mask.sum(-1)[rows, None] * ones if level == "token" else ones
        levels[level] = {**{name: field.T[rows] for name, field in fields.items()}, "count": count}
    return levels


def _row_sums(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return np.where(mask, values, 0).sum(-1)


def _value_metrics(sums: Sums, *, of_error: bool) -> Sums:
    exact, mean, square, squared_error = (
        sums[name] / sums["count"] for name in ("exact", "mean", "square", "squared_error")
    )
    bias = mean - exact
    variance = np.maximum(squared_error - bias**2 if of_error else square - mean**2, 0)
    return {
        "mean": mean,
        "bias": bias,
        "relative_bias": ratio(bias, exact),
        "variance": variance,
        "snr": ratio(np.abs(mean), np.sqrt(variance)),
        "rmse": np.sqrt(bias**2 + variance),
    }


def _coefficients(by_correction: Mapping[str, Estimates], unbiased: Estimates, mask: np.ndarray) -> Sums:
    """Sums the coefficients of every place per row; in the place "reward", a token gets its own estimate alone."""
    columns = []
    for values, derivatives, weights in by_correction.values():
        mean = np.where(mask, values, 0).sum((-2, -1), keepdims=True) / mask.sum()
        columns += [derivatives, values, values - weights * mean]
    coefficients = np.concatenate(columns)
    exact = np.broadcast_to(unbiased.derivatives[-1], coefficients.shape)
    fields = {"square": coefficients**2, "inner": coefficients * exact, "exact": exact**2}
    fields["difference"] = (coefficients - exact) ** 2
    rows = mask.any(-1)
    sums = {name: _row_sums(field, mask).T[rows] for name, field in fields.items()}
    return {**sums, "count": mask.sum(-1)[rows, None] * np.ones_like(sums["square"])}


def _coefficient_metrics(sums: Sums) -> Sums:
    return {
        "relative_difference": np.sqrt(ratio(sums["difference"], sums["exact"])),
        "cosine": ratio(sums["inner"], np.sqrt(sums["square"] * sums["exact"])),
        "root_mean_square": np.sqrt(sums["square"] / sums["count"]),
    }
