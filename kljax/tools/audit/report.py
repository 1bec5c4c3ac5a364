"""The report of an audit: data, text of at most 120 columns, JSON and a plot."""

import dataclasses
import json
import math
import pathlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kljax._files import check_output, write_output
from kljax.tools.audit._plot import draw, have_matplotlib
from kljax.tools.audit.results import Answer, Interval, Result, best_estimators, select

__all__ = ["Audit"]

TITLES = {
    "value": "Values: bias and signal-to-noise of one estimate",
    "gradient": "Gradients with respect to the logits: expected gradient against that of the exact KL",
    "coefficient": "Gradients with respect to the recorded log-probs, against those of the unbiased k2 loss",
}
HEADINGS = {
    "relative_bias": "bias/exact",
    "relative_difference": "difference",
    "root_mean_square": "rms",
    "snr": "SNR",
}
# The metrics shown per kind and level; the others are in the JSON file.
COLUMNS = {
    ("value", "token"): ("relative_bias", "variance", "snr"),
    ("value", "sequence"): ("variance", "snr"),
    # A recorded yardstick has noise of its own, which would enter a quotient: the table shows the bias itself.
    ("recorded value", "token"): ("bias", "variance", "snr"),
    ("recorded value", "sequence"): ("bias", "variance", "snr"),
    ("gradient", "token"): ("relative_bias", "cosine", "gain", "snr"),
    ("gradient", "sequence"): ("relative_bias", "snr"),
    ("coefficient", "token"): ("relative_difference", "cosine", "root_mean_square"),
}
# Metrics that the table shows with their interval, per token.
WITH_INTERVAL = ("bias", "relative_bias", "relative_difference")


@dataclasses.dataclass(frozen=True)
class Audit:
    """The report of an audit.

    Attributes:
      yardstick: the exact or unbiased quantity that estimates are compared with, in words.
      notes: assumptions behind the numbers, in words.
      settings: sizes and options of the audit.
      kl: mean KL(pi || ref) per "token" and per "sequence", in nats.
      results: every measurement.

    Example:
      >>> import jax, kljax
      >>> policy, ref = jax.random.normal(jax.random.key(0), (2, 4, 3, 5))
      >>> audit = kljax.audit.audit_logits(policy, ref, bootstrap=20)
      >>> result = audit.find(kind="gradient", level="token", place="loss", estimator="k2")
      >>> print(f"{result.metrics['cosine'].value:.3f}")
      1.000
    """

    yardstick: str
    notes: tuple[str, ...]
    settings: Mapping[str, Any]
    kl: Mapping[str, Interval]
    results: tuple[Result, ...]

    def select(self, **labels: str) -> list[Result]:
        """Selects the results whose attributes equal the labels, in the order measured.

        Args:
          labels: attributes of `Result` with their values, such as `kind="gradient"`; none selects every result.

        Returns:
          The results that match; an empty list if none does.
        """
        return select(self.results, **labels)

    def find(self, **labels: str) -> Result:
        """Returns the first result that matches: exact before sampled, uncorrected before corrected.

        Args:
          labels: see `select`.

        Returns:
          The `Result`.

        Raises:
          KeyError: if there is none.
        """
        matches = self.select(**labels)
        if not matches:
            raise KeyError(f"no result with {labels}")
        return matches[0]

    def answers(self) -> list[Answer]:
        """Chooses an estimator for every place and correction, from the exact results per token.

        Returns:
          One `Answer` per place and correction, in the order measured; none for a recorded batch, or where no relative
          bias is finite.
        """
        return best_estimators(self.results)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON; numbers without a meaning become None.

        Returns:
          The attributes of the audit and its `answers`, by name. An interval has the keys `value`, `low` and `high`.
        """
        return {
            "yardstick": self.yardstick,
            "notes": list(self.notes),
            "settings": {name: _as_python(value) for name, value in self.settings.items()},
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
        """Writes the report as plain text of at most 120 columns.

        Returns:
          Lines joined by newlines, without one at the end. Columns with an interval show it in brackets.
        """
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        texts = [f"KL audit: {settings}", f"Yardstick: {self.yardstick}", *(f"Note: {note}" for note in self.notes)]
        lines = [line for text in texts for line in textwrap.wrap(text, 120, subsequent_indent="  ")]
        lines += [f"KL(policy || reference) per {level}: {_interval(kl)} nats" for level, kl in self.kl.items()]
        for how in ("exact", "recorded", "sampled"):
            for kind, title in TITLES.items():
                results = self.select(kind=kind, how=how)
                if results:
                    name = "recorded value" if (how, kind) == ("recorded", "value") else kind
                    lines += ["", f"{title} ({how})", *_results_table(name, results)]
        return "\n".join([*lines, *_answers_table(self.answers())])

    def write(self, directory: str | pathlib.Path) -> list[pathlib.Path]:
        """Writes `audit.txt`, `audit.json` and, if matplotlib is installed, `audit.png`.

        Args:
          directory: made if it does not exist; files of these names in it are overwritten.

        Returns:
          The paths of the files.
        """
        written = write_report(directory, "audit", self.table(), self.to_dict())
        if have_matplotlib():
            picture = pathlib.Path(directory, "audit.png")
            check_output(picture)
            written.append(draw(self.results, f"KL audit against {self.yardstick}", picture))
        return written


def write_report(directory: str | pathlib.Path, name: str, table: str, content: Any) -> list[pathlib.Path]:
    """Writes `NAME.txt` and `NAME.json` into a directory, which is made if it does not exist."""
    data = json.dumps(content, indent=1, allow_nan=False)
    pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
    written = [pathlib.Path(directory, f"{name}.txt"), pathlib.Path(directory, f"{name}.json")]
    for path, text in zip(written, (table, data), strict=True):
        check_output(path)
        write_output(path, f"{text}\n")
    return written


def number(value: float) -> str:
    """Writes a number in at most three significant digits; a dash where it has no meaning.

    Args:
      value: any number; NaN has no meaning.

    Returns:
      Text such as `0.123`; `0` below 1e-9, and two digits with an exponent below 1e-3 or from 1e4 on.
    """
    if not math.isfinite(value):
        return "-" if math.isnan(value) else str(value)
    if abs(value) < 1e-9:
        return "0"
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"


def _interval(interval: Interval) -> str:
    return f"{number(interval.value)} [{number(interval.low)}, {number(interval.high)}]"


def _results_table(kind: str, results: Sequence[Result]) -> list[str]:
    """Writes one line per estimator, place and correction, tokens on the left, sequences on the right."""
    by_labels: dict[tuple[str, str, str], dict[str, Result]] = {}
    for result in results:
        by_labels.setdefault((result.correction, result.place, result.estimator), {})[result.level] = result
    levels = [level for level in ("token", "sequence") if any(level in by_level for by_level in by_labels.values())]
    label_headings = ["correction", "place", "estimator"] if results[0].place else ["correction", "estimator"]
    headings = [*label_headings, *(_heading(name, level) for level in levels for name in COLUMNS[kind, level])]
    lines = []
    for labels, by_level in by_labels.items():
        line = [label for label in labels if label]
        for level in levels:
            line += _cells(kind, level, by_level.get(level))
        lines.append(line)
    return _aligned([headings, *lines], left=len(label_headings))


def _heading(metric: str, level: str) -> str:
    name = HEADINGS.get(metric, metric)
    return name if level == "token" else f"{name}/seq"


def _cells(kind: str, level: str, result: Result | None) -> list[str]:
    if result is None:
        return [""] * len(COLUMNS[kind, level])
    metrics = [(result.metrics[name], name in WITH_INTERVAL and level == "token") for name in COLUMNS[kind, level]]
    return [_interval(metric) if with_interval else number(metric.value) for metric, with_interval in metrics]


def _aligned(lines: Sequence[Sequence[str]], *, left: int) -> list[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _answers_table(answers: Sequence[Answer]) -> Iterable[str]:
    if not answers:
        return
    yield ""
    yield "Which estimator in which place: of those within 1 % of the exact answer, the one of least variance per token"
    lines = [["place", "correction", "estimator", "", "bias/exact", "SNR"]]
    for a in answers:
        verdict = "right" if a.right else "none is right; least wrong"
        lines.append([a.place, a.correction, a.estimator, verdict, number(a.relative_bias), number(a.snr)])
    yield from _aligned(lines, left=4)


def _as_python(value: Any) -> Any:
    """Returns a Python number for a scalar array, any other value as it is."""
    return value.item() if hasattr(value, "item") else value


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    finite = {name: not isinstance(value, float) or math.isfinite(value) for name, value in values.items()}
    return {name: value if finite[name] else None for name, value in values.items()}
