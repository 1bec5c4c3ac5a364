"""The results of an audit: measured numbers with intervals, and the estimator to take in each place."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

__all__ = ["Answer", "Interval", "Result"]

# An answer calls an estimator right if its bias is at most this share of the exact value or gradient.
TOLERANCE = 0.01


def select(results: Iterable["Result"], **labels: str) -> list["Result"]:
    """Selects the results whose attributes equal the labels, in the order measured.

    Args:
      labels: attributes of `Result` with their values; none selects every result.

    Returns:
      The results that match; an empty list if none does.
    """
    return [result for result in results if all(getattr(result, name) == label for name, label in labels.items())]


def best_estimators(results: Iterable["Result"]) -> list["Answer"]:
    """Chooses an estimator for every place and correction, from the exact results per token.

    Of the estimators with a relative bias of at most 0.01, it takes the first within 1 % of the least variance;
    without any, the one with the least bias.

    Args:
      results: of an audit; sampled results, recorded results and results of whole sequences are ignored.

    Returns:
      One `Answer` per place and correction, in the order measured; none where no relative bias is finite.
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in select(results, level="token", how="exact"):
        groups.setdefault((result.place or "value", result.correction), []).append(result)
    return [best for labels, group in groups.items() for best in _best(labels, group)]


def _best(labels: tuple[str, str], results: Iterable["Result"]) -> list["Answer"]:
    def bias(result: "Result") -> float:
        return abs(result.metrics["relative_bias"].value)

    known = [result for result in results if math.isfinite(bias(result))]
    if not known:
        return []
    right = [result for result in known if bias(result) <= TOLERANCE]
    chosen = _least_variance(right) if right else min(known, key=bias)
    relative_bias, snr = (chosen.metrics[name].value for name in ("relative_bias", "snr"))
    return [Answer(*labels, chosen.estimator, bool(right), relative_bias, snr)]


def _least_variance(results: Iterable["Result"]) -> "Result":
    """Returns the first result, ordered from plain to clipped, within the tolerance of the least variance."""
    variances = [(result.metrics["variance"].value, result) for result in results]
    least = min(variance for variance, _ in variances)
    return next(result for variance, result in variances if variance <= (1 + TOLERANCE) * least)


class Interval(NamedTuple):
    """A number with its bootstrap interval; NaN where it has no meaning, or no interval was asked for.

    Attributes:
      value: the number measured.
      low: lower end of the percentile interval.
      high: upper end.

    Example:
      >>> import kljax
      >>> kljax.audit.Interval(0.1, 0.05, 0.2).value
      0.1
    """

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Result:
    """One estimator at one place, on one level.

    Attributes:
      kind: "value", "gradient" (with respect to the logits) or "coefficient" (with respect to recorded log-probs).
      level: "token" or "sequence".
      how: "exact" (summed over the vocabulary), "sampled" (from drawn tokens) or "recorded" (from a batch).
      estimator: a name of `kljax.estimate_kl`, or "any" where all have the same gradient.
      place: "" for a value, else "loss", "straight_through", "reward", "reward_baseline" or "advantage".
      correction: "none", "ratio" (multiplied by the importance ratio) or "capped" (by at most `max_ratio`).
      metrics: name to `Interval`.

    Example:
      >>> import kljax
      >>> mean = kljax.audit.Interval(0.1, 0.1, 0.1)
      >>> kljax.audit.Result("value", "token", "exact", "k3", "", "none", {"mean": mean}).metrics["mean"].value
      0.1
    """

    kind: str
    level: str
    how: str
    estimator: str
    place: str
    correction: str
    metrics: Mapping[str, Interval]


@dataclasses.dataclass(frozen=True)
class Answer:
    """The estimator to take: the least variance among biases of at most 1 %, or else the least bias.

    Attributes:
      place: "value" for a logged number, or the place of a gradient.
      correction: as in `Result`.
      estimator: the name.
      right: whether its bias is at most 1 % of the exact value or gradient.
      relative_bias: its bias over the exact value or gradient.
      snr: signal-to-noise of one token.

    Example:
      >>> import kljax
      >>> kljax.audit.Answer("loss", "none", "k2", True, 0.0, 0.3).estimator
      'k2'
    """

    place: str
    correction: str
    estimator: str
    right: bool
    relative_bias: float
    snr: float
