"""What an audit found, as data: results with intervals, the answers that follow, text, JSON and a plot."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = ["Answer", "Audit", "Interval", "Result"]

# An answer calls an estimator right if its bias is at most this share of the exact value or gradient.
TOLERANCE = 0.01


class Interval(NamedTuple):
    """A number with its bootstrap interval; NaN where it has no meaning or no interval was asked for.

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
    """The estimator to take: of those whose bias is at most 1 % the one of least variance, else the least biased.

    Attributes:
      place: where it is used: "value" for a logged number, or the place of a gradient.
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


@dataclasses.dataclass(frozen=True)
class Audit:
    """The whole report of an audit.

    Attributes:
      yardstick: what the estimates are compared with, in words.
      notes: what is exact and what is not, in words.
      settings: sizes and options of the audit.
      kl: mean KL(pi || ref) per "token" and per "sequence", in nats.
      results: every measurement.

    Example:
      >>> import jax, kljax
      >>> policy, ref = jax.random.normal(jax.random.key(0), (2, 4, 3, 5))
      >>> audit = kljax.audit.audit_logits(policy, ref, bootstrap=20)
      >>> found = audit.find(kind="gradient", level="token", place="loss", estimator="k2")
      >>> print(f"{found.metrics['cosine'].value:.3f}")
      1.000
    """

    yardstick: str
    notes: tuple[str, ...]
    settings: Mapping[str, Any]
    kl: Mapping[str, Interval]
    results: tuple[Result, ...]

    def select(self, **labels: str) -> list[Result]:
        """The results whose attributes have the values given, in the order measured."""
        return [r for r in self.results if all(getattr(r, name) == value for name, value in labels.items())]

    def find(self, **labels: str) -> Result:
        """The first result whose attributes have the values given: exact before sampled, uncorrected before corrected.

        Raises:
          KeyError: if there is none.
        """
        found = self.select(**labels)
        if not found:
            raise KeyError(f"no result with {labels}")
        return found[0]

    def answers(self) -> list[Answer]:
        """Which estimator in which place, per correction, from the results per token that are exact."""
        groups: dict[tuple[str, str], list[Result]] = {}
        for result in self.select(level="token", how="exact"):
            groups.setdefault((result.place or "value", result.correction), []).append(result)
        return [answer for key, results in groups.items() for answer in _best(*key, results)]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: numbers that have no meaning become None."""
        return {
            "yardstick": self.yardstick,
            "notes": list(self.notes),
            "settings": dict(self.settings),
            "kl": {level: _plain(interval._asdict()) for level, interval in self.kl.items()},
            "answers": [_plain(dataclasses.asdict(answer)) for answer in self.answers()],
            "results": [
                {
                    **{f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name != "metrics"},
                    "metrics": {name: _plain(value._asdict()) for name, value in result.metrics.items()},
                }
                for result in self.results
            ],
        }

    def table(self) -> str:
        """The report as plain text of at most 120 columns."""
        from kljax.audit._table import table

        return table(self)

    def write(self, directory: str | pathlib.Path) -> list[pathlib.Path]:
        """Writes `audit.txt`, `audit.json` and, if matplotlib is installed, `audit.png`; returns what was written."""
        from kljax.audit._plot import draw, have_matplotlib

        text, data = self.table(), json.dumps(self.to_dict(), indent=1, allow_nan=False)
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        written = [directory / "audit.txt", directory / "audit.json"]
        written[0].write_text(text + "\n")
        written[1].write_text(data + "\n")
        if have_matplotlib():
            written.append(draw(self, directory / "audit.png"))
        return written


def _best(place: str, correction: str, results: Iterable[Result]) -> list[Answer]:
    def bias(result: Result) -> float:
        return abs(result.metrics["relative_bias"].value)

    known = [result for result in results if math.isfinite(bias(result))]
    if not known:
        return []
    right = [result for result in known if bias(result) <= TOLERANCE]
    chosen = _least_variance(right) if right else min(known, key=bias)
    relative_bias, snr = (chosen.metrics[name].value for name in ("relative_bias", "snr"))
    return [Answer(place, correction, chosen.estimator, bool(right), relative_bias, snr)]


def _least_variance(results: Iterable[Result]) -> Result:
    """The first, in the order from plain to clipped, that is within the tolerance of the least variance."""
    variances = [(result.metrics["variance"].value, result) for result in results]
    least = min(variance for variance, _ in variances)
    return next(result for variance, result in variances if variance <= (1 + TOLERANCE) * least)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    finite = {name: not isinstance(value, float) or math.isfinite(value) for name, value in values.items()}
    return {name: value if finite[name] else None for name, value in values.items()}
