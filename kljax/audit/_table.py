"""An audit as plain text."""

import math
import textwrap
from collections.abc import Iterable, Sequence

from kljax.audit.report import Audit, Interval, Result

HEADS = {
    "value": "Values: bias and signal-to-noise of one estimate",
    "gradient": "Gradients with respect to the logits: expected gradient against that of the exact KL",
    "coefficient": "Gradients with respect to the recorded log-probs, against those of the unbiased k2 loss",
}
HEAD = {"relative_bias": "bias/exact", "relative_difference": "difference", "root_mean_square": "rms", "snr": "SNR"}
# The metrics shown per kind and level; the others are in the JSON file.
COLUMNS = {
    ("value", "token"): ("relative_bias", "variance", "snr"),
    ("value", "sequence"): ("variance", "snr"),
    # Against a recorded yardstick, whose own noise is in the quotient: the bias itself.
    ("recorded value", "token"): ("bias", "variance", "snr"),
    ("recorded value", "sequence"): ("bias", "variance", "snr"),
    ("gradient", "token"): ("relative_bias", "cosine", "gain", "snr"),
    ("gradient", "sequence"): ("relative_bias", "snr"),
    ("coefficient", "token"): ("relative_difference", "cosine", "root_mean_square"),
}
# What has its interval beside it, per token.
WITH_INTERVAL = ("bias", "relative_bias", "relative_difference")


def table(audit: Audit) -> str:
    """The whole report."""
    settings = ", ".join(f"{name} {value}" for name, value in audit.settings.items())
    texts = [f"KL audit: {settings}", f"Yardstick: {audit.yardstick}", *(f"Note: {note}" for note in audit.notes)]
    lines = [line for text in texts for line in textwrap.wrap(text, 120, subsequent_indent="  ")]
    lines += [f"KL(policy || reference) per {level}: {_interval(found)} nats" for level, found in audit.kl.items()]
    for how in ("exact", "recorded", "sampled"):
        for kind, head in HEADS.items():
            chosen = audit.select(kind=kind, how=how)
            if chosen:
                name = "recorded value" if (how, kind) == ("recorded", "value") else kind
                lines += ["", f"{head} ({how})", *_block(name, chosen)]
    return "\n".join([*lines, *_answers(audit)])


def number(value: float) -> str:
    """At most four significant digits; a dash where the number has no meaning."""
    if not math.isfinite(value):
        return "-" if math.isnan(value) else str(value)
    if abs(value) < 1e-9:
        return "0"
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"


def _interval(found: Interval) -> str:
    return f"{number(found.value)} [{number(found.low)}, {number(found.high)}]"


def _block(kind: str, results: Sequence[Result]) -> list[str]:
    """A table with one line per estimator, place and correction, tokens on the left, sequences on the right."""
    pairs: dict[tuple[str, str, str], dict[str, Result]] = {}
    for result in results:
        pairs.setdefault((result.correction, result.place, result.estimator), {})[result.level] = result
    levels = [level for level in ("token", "sequence") if any(level in found for found in pairs.values())]
    first = ["correction", "place", "estimator"] if results[0].place else ["correction", "estimator"]
    heads = [*first, *(_head(name, level) for level in levels for name in COLUMNS[kind, level])]
    rows = []
    for labels, found in pairs.items():
        row = [label for label in labels if label]
        for level in levels:
            row += _cells(kind, level, found.get(level))
        rows.append(row)
    return _aligned([heads, *rows], left=len(first))


def _head(metric: str, level: str) -> str:
    name = HEAD.get(metric, metric)
    return name if level == "token" else f"{name}/seq"


def _cells(kind: str, level: str, result: Result | None) -> list[str]:
    if result is None:
        return [""] * len(COLUMNS[kind, level])
    found = [(result.metrics[name], name in WITH_INTERVAL and level == "token") for name in COLUMNS[kind, level]]
    return [_interval(metric) if whole else number(metric.value) for metric, whole in found]


def _aligned(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _answers(audit: Audit) -> Iterable[str]:
    answers = audit.answers()
    if not answers:
        return
    yield ""
    yield "Which estimator in which place: of those within 1 % of the exact answer, the one of least variance per token"
    rows = [["place", "correction", "estimator", "", "bias/exact", "SNR"]]
    for a in answers:
        verdict = "right" if a.right else "none is right; least wrong"
        rows.append([a.place, a.correction, a.estimator, verdict, number(a.relative_bias), number(a.snr)])
    yield from _aligned(rows, left=4)
