"""Metrics per token and per sequence, with bootstrap intervals, from moments per position.

A level has units to resample (rows, or single positions). Per unit and result it has a few sums: the exact KL, the
mean, the squared bias and the variance; for gradients, squared norms and inner products over all positions as one long
vector. Every metric is a ratio of such sums, so a bootstrap replicate is a weighted sum over units.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kljax._checks import check_at_least
from kljax._typing import Array
from kljax.tools.audit._moments import MEASURED, Moments
from kljax.tools.audit.results import Interval, Result

PLACES = ("loss", "straight_through", "reward", "reward_baseline", "advantage")

Sums = dict[str, Any]
Offsets = Mapping[str, tuple[Any, Any, Any]]
Summary = Callable[[Sums, Callable[[Sums], Sums]], dict[str, list[Interval]]]
# Bootstrap replicates in memory at a time.
_REPLICATES = 64


class Labels(NamedTuple):
    """The estimator, place and correction of one column of the sums; `place` is empty for a value."""

    estimator: str
    place: str
    correction: str


class Level(NamedTuple):
    """Sums `[units, results]` of the values and of the gradients; `count` `[units, 1]` is the divisor of a mean."""

    value: Sums
    gradient: Sums


def value_labels(corrections: tuple[str, ...]) -> list[Labels]:
    """Lists the columns of the value sums: the estimators of the first correction, then of the next."""
    return [Labels(name, "", correction) for correction in corrections for name in MEASURED]


def gradient_labels(corrections: tuple[str, ...]) -> list[Labels]:
    """Lists the columns of the gradient sums; all estimators share the straight-through gradient."""
    labels = []
    for correction in corrections:
        for placement in PLACES:
            names = ("any",) if placement == "straight_through" else MEASURED
            labels += [Labels(name, placement, correction) for name in names]
    return labels


def token_level(moments: Moments, mask: np.ndarray, *, by_row: bool) -> Level:
    """Sums the moments `[..., N, T]` per row or per position, with every token on its own.

    Args:
      moments: their positions are the last two axes.
      mask: `[N, T]` bool.
      by_row: whether a unit is a row with tokens; otherwise it is an unmasked token.
    """
    value = _value_fields(moments)
    mean = _tokens_mean(moments.mean, mask)
    zero = np.zeros_like(moments.mean)
    offsets = {
        "reward": (zero, zero, zero),
        # The baseline comes from the same draws, as a group baseline does; few draws make it noisy.
        "reward_baseline": (-moments.mean, moments.mean_squared, moments.mean_squared),
        "advantage": (zero - mean, zero + mean**2, zero + mean**2),
    }
    gradient = _gradient_fields(moments, offsets)
    collect = functools.partial(_units, mask=mask, by_row=by_row)
    return Level(collect(value), collect(gradient))


def sequence_level(moments: Moments, mask: np.ndarray, *, draws: int) -> Level:
    """Sums the moments `[..., N, T]` per row: estimates add up, and a reward goes to all tokens before it.

    The tokens of a row are independent given the prefixes of the logits, so variances add up.

    Args:
      moments: their positions are the last two axes.
      mask: `[N, T]` bool.
      draws: tokens drawn at each position; 0 for exact moments.

    Returns:
      Sums whose units are the rows with tokens.
    """
    moments = _zero_under(moments, mask)
    variance = moments.square - moments.mean_squared
    mean = _tokens_mean(moments.mean, mask)
    zero = np.zeros_like(moments.mean)
    later = _after(moments.mean)
    later_variance = _after(variance)
    # From drawn tokens the square of an estimated mean is too large by the variance of that mean.
    later_squared = later**2 - (later_variance / draws if draws else 0)
    minus_mean = -moments.mean
    offsets = {
        "reward": (later, later_squared, later_squared + later_variance),
        # A perfect baseline subtracts the mean of the token's own KL and of everything after it.
        "reward_baseline": (minus_mean, moments.mean_squared, moments.mean_squared + later_variance),
        "advantage": (zero - mean, zero + mean**2, zero + mean**2),
    }
    fields = _value_fields(moments)
    kl = fields["exact"].sum(-1)
    row_mean = fields["mean"].sum(-1)
    row_variance = fields["variance"].sum(-1)
    bias = (row_mean - kl) ** 2 - (row_variance / draws if draws else 0)
    value = {"exact": kl, "mean": row_mean, "squared_bias": bias, "variance": row_variance}
    not_empty = mask.any(-1)
    gradient = {name: field.sum(-1) for name, field in _gradient_fields(moments, offsets).items()}
    return Level(_flat(value, not_empty), _flat(gradient, not_empty))


def value_metrics(sums: Mapping[str, Any]) -> Sums:
    """Computes the metrics of values from sums over units.

    Args:
      sums: `[..., results]` sums of `Level.value`; `count` is `[..., 1]`.

    Returns:
      `[..., results]` numbers by metric, in nats; `variance` in nats squared; `relative_bias` and `snr` without unit.
    """
    count = sums["count"]
    exact, mean, variance = (sums[name] / count for name in ("exact", "mean", "variance"))
    return {
        "mean": mean,
        "bias": mean - exact,
        "relative_bias": ratio(mean - exact, exact),
        "variance": variance,
        "snr": ratio(np.abs(mean), np.sqrt(np.maximum(variance, 0))),
        "rmse": np.sqrt(np.maximum(sums["squared_bias"] / count + variance, 0)),
    }


def gradient_metrics(sums: Mapping[str, Any], *, eps: float) -> Sums:
    """Computes the metrics of expected gradients from sums over units.

    Args:
      sums: `[..., results]` sums of `Level.gradient`; `count` is `[..., 1]`.
      eps: distance of 1 to the next number in the dtype of the gradients.

    Returns:
      `[..., results]` numbers by metric.
    """
    exact, inner, second = (sums[name] for name in ("exact", "inner", "second"))
    # Rounding leaves a zero gradient with a direction that has no meaning.
    norm = np.where(sums["norm"] <= (64 * eps) ** 2 * second, 0, sums["norm"])
    bias = np.maximum(sums["bias"], 0)
    variance = np.maximum(second - sums["norm"], 0)
    cosine = np.where(norm > 0, ratio(inner, np.sqrt(norm * exact)), 0)
    return {
        "bias_norm": np.sqrt(bias / sums["count"]),
        "relative_bias": np.sqrt(ratio(bias, exact)),
        "cosine": np.clip(cosine, -1, 1),
        "gain": ratio(inner, exact),
        "variance": variance / sums["count"],
        "snr": np.sqrt(ratio(norm, variance)),
    }


def summarize(
    key: Array, replicates: int, confidence: float, sums: Sums, metrics: Callable[[Sums], Sums]
) -> dict[str, list[Interval]]:
    """Computes each metric of each column with its bootstrap interval.

    Args:
      replicates: bootstrap replicates; 0 leaves the intervals NaN.
      metrics: `value_metrics` or `gradient_metrics`.

    Returns:
      By metric, an interval of each column.
    """
    values = metrics(weighted(sums, np.ones(len(sums["count"]))))
    if replicates:
        ends = bootstrap(key, sums, metrics, replicates=replicates, confidence=confidence)
    else:
        ends = {name: np.full((2, *np.shape(value)), np.nan) for name, value in values.items()}
    return {
        name: [Interval(*map(float, trio)) for trio in zip(value, *ends[name], strict=True)]
        for name, value in values.items()
    }


def label_results(
    columns: dict[str, list[Interval]], labels: Iterable[Labels], kind: str, level: str, how: str
) -> list[Result]:
    """Makes one result of each column and its label.

    Args:
      columns: of `summarize`.
      labels: one of each column, in their order.
      kind, level, how: as in `Result`.
    """
    return [
        Result(kind, level, how, *label, {name: column[i] for name, column in columns.items()})
        for i, label in enumerate(labels)
    ]


def check_intervals(replicates: int, confidence: float) -> None:
    """Checks the arguments of the bootstrap.

    Raises:
      ValueError: if there are fewer than 0 replicates, or the confidence is not between 0 and 1.
    """
    check_at_least("bootstrap", replicates, 0)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: got {confidence!r}, expected a number between 0 and 1")


def check_cap(max_ratio: float | None) -> None:
    """Checks the cap of the capped correction.

    Raises:
      ValueError: if the cap is not a finite number above 0.
    """
    check_at_least("max_ratio", max_ratio, 0, strict=True)
    if max_ratio is not None and not math.isfinite(max_ratio):
        raise ValueError(
            f"max_ratio: got {max_ratio!r}, expected a finite number > 0; the ratio without a cap is measured as well"
        )


def bootstrap(key: Array, sums: Sums, metrics: Callable[[Sums], Sums], *, replicates: int, confidence: float) -> Sums:
    """Computes percentile intervals `[2, results]` of each metric over resampled units.

    Args:
      metrics: `value_metrics` or `gradient_metrics`.
    """
    units = len(sums["count"])
    replicated: dict[str, list[Any]] = {}
    for start in range(0, replicates, _REPLICATES):
        counts = np.asarray(_resampled(key, start, units), np.float64)[: replicates - start]
        for name, value in metrics(weighted(sums, counts)).items():
            replicated.setdefault(name, []).append(value)
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    return {name: np.quantile(np.concatenate(values), tails, axis=0) for name, values in replicated.items()}


@functools.partial(jax.jit, static_argnames="units")
def _resampled(key: Array, first: int, units: int) -> Array:
    """Counts `[replicates, units]` how often each of the units occurs in as many draws with replacement."""

    def once(key: Array) -> Array:
        return jnp.bincount(jax.random.randint(key, (units,), 0, units), length=units)

    return jax.vmap(once)(jax.random.split(jax.random.fold_in(key, first), _REPLICATES))


def weighted(sums: Sums, counts: np.ndarray) -> Sums:
    """Sums over units that occur several times: `counts @ field`.

    Args:
      sums: fields `[units, results]`.
      counts: `[..., units]`, how often each unit occurs.

    Returns:
      Fields `[..., results]`.
    """
    return {name: counts @ field for name, field in sums.items()}


def ratio(numerator: Any, denominator: Any) -> Any:
    """Divides; NaN where the denominator is 0, since a relative error of 0 has no meaning."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator > 0, numerator / np.where(denominator > 0, denominator, 1), np.nan)


def _value_fields(moments: Moments) -> Sums:
    kl = np.broadcast_to(moments.kl, moments.mean.shape)
    squared_bias = moments.mean_squared - 2 * moments.mean * kl + kl**2
    variance = moments.square - moments.mean_squared
    return {"exact": kl, "mean": moments.mean, "squared_bias": squared_bias, "variance": variance}


def _gradient_fields(moments: Moments, offsets: Offsets) -> Sums:
    """Computes the fields `[K, results, N, T]` of every place: a loss uncorrected, a reward with its offset.

    With a reward `e + r`, `r` independent of the token and of the same weight, the expected gradient is that of `e`
    plus `E[r] E[w u]`. An offset is `(E[r], E[r]^2, E[r^2])`.
    """
    parts = {name: [np.asarray(getattr(moments, f"loss_{name}"))] for name in ("bias", "norm", "inner", "second")}
    score_norm, score_inner, score_second = (
        np.asarray(field)[:, None] for field in (moments.score_norm, moments.score_inner, moments.score_second)
    )
    for mean, mean_squared, square in (offsets[placement] for placement in PLACES[2:]):
        shift = mean_squared * score_norm
        along = 2 * mean * moments.reward_drift
        parts["bias"].append(moments.reward_bias + along - 2 * mean * score_inner + shift)
        parts["norm"].append(moments.reward_norm + along + shift)
        parts["inner"].append(moments.reward_inner + mean * score_inner)
        parts["second"].append(moments.reward_second + 2 * mean * moments.reward_cross + square * score_second)
    fields: Sums = {name: np.concatenate(arrays, axis=1) for name, arrays in parts.items()}
    return {"exact": np.broadcast_to(moments.exact_norm, fields["norm"].shape), **fields}


def _units(fields: Sums, *, mask: np.ndarray, by_row: bool) -> Sums:
    """Reshapes `[..., N, T]` fields to `[units, results]`: sums over the tokens of a row, or one unit per token."""
    if not by_row:
        unmasked = {name: np.asarray(field)[..., mask] for name, field in fields.items()}
        return _flat(unmasked, np.ones(int(mask.sum()), bool))
    sums = {name: np.where(mask, field, 0).sum(-1) for name, field in fields.items()}
    not_empty = mask.any(-1)
    return {**_flat(sums, not_empty), "count": mask.sum(-1)[not_empty, None].astype(np.float64)}


def _flat(fields: Sums, units: Any) -> Sums:
    """Reshapes `[..., units]` to `[units, results]`, each unit counted once."""
    flat = {name: field.reshape(-1, field.shape[-1]).T[units] for name, field in fields.items()}
    return {**flat, "count": np.ones((int(units.sum()), 1))}


def _zero_under(moments: Moments, mask: np.ndarray) -> Moments:
    fields = {field.name: np.where(mask, getattr(moments, field.name), 0) for field in dataclasses.fields(moments)}
    return Moments(**fields)  # type: ignore[arg-type]


def _tokens_mean(values: Any, mask: np.ndarray) -> Any:
    """Returns the mean over the unmasked tokens, `[..., 1, 1]`."""
    return np.where(mask, values, 0).sum((-2, -1), keepdims=True) / mask.sum()


def _after(values: Any) -> Any:
    """Sums over the later positions of the row, without the position itself."""
    return np.flip(np.cumsum(np.flip(values, -1), -1), -1) - values
