"""From moments per position to what is reported: per token and per sequence, with bootstrap intervals.

A level has units that are resampled (rows, or single positions) and, per unit and result, a few sums: the exact KL, the
mean, the squared bias, the variance, and for gradients squared norms and inner products over all positions taken as one
long vector. Every metric is a ratio of such sums, so a bootstrap replicate is a weighted sum over units.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kljax._typing import Array
from kljax.audit._moments import MEASURED, Moments

PLACES = ("loss", "straight_through", "reward", "reward_baseline", "advantage")

Sums = dict[str, Any]
Offsets = Mapping[str, tuple[Any, Any, Any]]
# Numbers of replicates whose resampling counts are held at a time.
_REPLICATES = 64


class Labels(NamedTuple):
    """What one column of the sums is about; `place` is empty for a value."""

    estimator: str
    place: str
    correction: str


class Level(NamedTuple):
    """Sums `[units, results]` of the values and of the gradients, and `[units, 1]` what a mean divides by."""

    value: Sums
    gradient: Sums


def value_labels(corrections: tuple[str, ...]) -> list[Labels]:
    """The columns of the value sums."""
    return [Labels(name, "", correction) for correction in corrections for name in MEASURED]


def gradient_labels(corrections: tuple[str, ...]) -> list[Labels]:
    """The columns of the gradient sums; the straight-through gradient is the same whatever the estimator."""
    labels = []
    for correction in corrections:
        for place in PLACES:
            names = ("any",) if place == "straight_through" else MEASURED
            labels += [Labels(name, place, correction) for name in names]
    return labels


def token_level(moments: Moments, mask: np.ndarray, *, by_row: bool) -> Level:
    """Sums per row or per position of the moments `[..., N, T]`, each token on its own."""
    value = _value_fields(moments)
    mean = _tokens_mean(moments.mean, mask)
    zero = np.zeros_like(moments.mean)
    offsets = {
        "reward": (zero, zero, zero),
        # The baseline comes from the same draws, as that of a group does; from few draws it is a little noisy.
        "reward_baseline": (-moments.mean, moments.mean_squared, moments.mean_squared),
        "advantage": (zero - mean, zero + mean**2, zero + mean**2),
    }
    gradient = _gradient_fields(moments, offsets)
    collect = functools.partial(_units, mask=mask, by_row=by_row)
    return Level(collect(value), collect(gradient))


def sequence_level(moments: Moments, mask: np.ndarray, *, draws: int) -> Level:
    """Sums per row of the moments `[..., N, T]`: an estimate is the sum over the row, a reward is paid to all before.

    The tokens of a row are independent given the prefixes that the logits were computed at, so variances add up.
    """
    moments = _zero_under(moments, mask)
    variance = moments.square - moments.mean_squared
    mean = _tokens_mean(moments.mean, mask)
    later, later_variance = _after(moments.mean), _after(variance)
    # From drawn tokens the square of an estimated mean is too large by the variance of that mean.
    later_squared = later**2 - (later_variance / draws if draws else 0)
    less = -moments.mean
    offsets = {
        "reward": (later, later_squared, later_squared + later_variance),
        # A perfect baseline takes away the mean of the token's own KL and of everything after it.
        "reward_baseline": (less, moments.mean_squared, moments.mean_squared + later_variance),
        "advantage": (np.zeros_like(less) - mean, np.zeros_like(less) + mean**2, np.zeros_like(less) + mean**2),
    }
    fields = _value_fields(moments)
    kl, row_mean = fields["exact"].sum(-1), fields["mean"].sum(-1)
    row_variance = fields["variance"].sum(-1)
    bias = (row_mean - kl) ** 2 - (row_variance / draws if draws else 0)
    value = {"exact": kl, "mean": row_mean, "squared_bias": bias, "variance": row_variance}
    kept = mask.any(-1)
    gradient = {name: field.sum(-1) for name, field in _gradient_fields(moments, offsets).items()}
    return Level(_flat(value, kept), _flat(gradient, kept))


def value_metrics(sums: Mapping[str, Any]) -> Sums:
    """Metrics of values from sums over units."""
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
    """Metrics of expected gradients, all positions taken as one vector, from sums over units; `eps` of their type."""
    exact, inner, second = (sums[name] for name in ("exact", "inner", "second"))
    # What rounding leaves of a gradient that is zero has a direction, but no meaning.
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


def bootstrap(key: Array, sums: Sums, metrics: Callable[[Sums], Sums], *, replicates: int, confidence: float) -> Sums:
    """Percentile intervals `[2, results]` of each metric over resampled units."""
    units = len(sums["count"])
    found: dict[str, list[Any]] = {}
    for start in range(0, replicates, _REPLICATES):
        counts = np.asarray(_resampled(key, start, units), np.float64)[: replicates - start]
        for name, value in metrics(weighted(sums, counts)).items():
            found.setdefault(name, []).append(value)
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    return {name: np.quantile(np.concatenate(values), tails, axis=0) for name, values in found.items()}


@functools.partial(jax.jit, static_argnames="units")
def _resampled(key: Array, first: int, units: int) -> Array:
    """`[replicates, units]` how often each unit is drawn in as many draws with replacement as there are units."""

    def once(key: Array) -> Array:
        return jnp.bincount(jax.random.randint(key, (units,), 0, units), length=units)

    return jax.vmap(once)(jax.random.split(jax.random.fold_in(key, first), _REPLICATES))


def weighted(sums: Sums, counts: np.ndarray) -> Sums:
    """Sums over units that occur `counts` times each: `[..., units]` with `[units, results]`."""
    return {name: counts @ field for name, field in sums.items()}


def ratio(numerator: Any, denominator: Any) -> Any:
    """The quotient, NaN where the denominator is 0: what has no exact answer has no relative error."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator > 0, numerator / np.where(denominator > 0, denominator, 1), np.nan)


def _value_fields(moments: Moments) -> Sums:
    kl = np.broadcast_to(moments.kl, moments.mean.shape)
    squared_bias = moments.mean_squared - 2 * moments.mean * kl + kl**2
    variance = moments.square - moments.mean_squared
    return {"exact": kl, "mean": moments.mean, "squared_bias": squared_bias, "variance": variance}


def _gradient_fields(moments: Moments, offsets: Offsets) -> Sums:
    """Fields `[K, results, N, T]` of every place: the loss as it is, a reward with what is added to it.

    With a reward `e + r`, `r` independent of the token and weighted as it, the expected gradient is that of `e` plus
    `E[r] E[w u]`. An offset is `(E[r], E[r]^2, E[r^2])`.
    """
    found = {name: [np.asarray(getattr(moments, f"loss_{name}"))] for name in ("bias", "norm", "inner", "second")}
    score_norm, score_inner, score_second = (
        np.asarray(field)[:, None] for field in (moments.score_norm, moments.score_inner, moments.score_second)
    )
    for mean, mean_squared, square in (offsets[place] for place in PLACES[2:]):
        shift, along = mean_squared * score_norm, 2 * mean * moments.reward_drift
        found["bias"].append(moments.reward_bias + along - 2 * mean * score_inner + shift)
        found["norm"].append(moments.reward_norm + along + shift)
        found["inner"].append(moments.reward_inner + mean * score_inner)
        found["second"].append(moments.reward_second + 2 * mean * moments.reward_cross + square * score_second)
    fields: Sums = {name: np.concatenate(parts, axis=1) for name, parts in found.items()}
    return {"exact": np.broadcast_to(moments.exact_norm, fields["norm"].shape), **fields}


def _units(fields: Sums, *, mask: np.ndarray, by_row: bool) -> Sums:
    """`[..., N, T]` fields as `[units, results]`: sums over the unmasked tokens of a row, or a unit per token."""
    if not by_row:
        chosen = {name: np.asarray(field)[..., mask] for name, field in fields.items()}
        return _flat(chosen, np.ones(int(mask.sum()), bool))
    sums = {name: np.where(mask, field, 0).sum(-1) for name, field in fields.items()}
    kept = mask.any(-1)
    return {**_flat(sums, kept), "count": mask.sum(-1)[kept, None].astype(np.float64)}


def _flat(fields: Sums, kept: Any) -> Sums:
    """`[..., units]` as `[units, results]`, each unit counted once."""
    flat = {name: field.reshape(-1, field.shape[-1]).T[kept] for name, field in fields.items()}
    return {**flat, "count": np.ones((int(kept.sum()), 1))}


def _zero_under(moments: Moments, mask: np.ndarray) -> Moments:
    fields = {field.name: np.where(mask, getattr(moments, field.name), 0) for field in dataclasses.fields(moments)}
    return Moments(**fields)  # type: ignore[arg-type]


def _tokens_mean(values: Any, mask: np.ndarray) -> Any:
    """`[..., 1, 1]` mean over the unmasked tokens."""
    return np.where(mask, values, 0).sum((-2, -1), keepdims=True) / mask.sum()


def _after(values: Any) -> Any:
    """Sum over the later positions of the row, the own one left out."""
    return np.flip(np.cumsum(np.flip(values, -1), -1), -1) - values
