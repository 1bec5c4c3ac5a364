"""The HTML file: data, script and style in one file that makes no request."""

import base64
import dataclasses
import html
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

import kljax
from kljax.tools.parity.report import ParityReport, as_json, as_text
from train.report.quantities import QUANTITIES, Quantity, color_limit, histogram, histogram_limit, quantity_of
from train.report.rollouts import RecordedRollout, columns_of
from train.report.runs import Points, ShownRun, config_difference
from train.run.glossary import group_of, metric_of
from train.sequences.sample import FAILURES, Failure

PARTS = Path(__file__).with_name("page")
SCRIPTS = ("elements", "data", "chart", "curves", "table", "tokens", "rollouts", "histograms", "compare", "main")
"""The files of `page/` that are joined into one script: they see each other's functions, and are run in this order."""
EXCERPT = 200
"""Characters of a text in the table."""
FAILURE_LINES = 8
"""Lines of the text of a failure: the error, and where it was raised."""


@dataclasses.dataclass(frozen=True)
class ShownDump:
    """A recorded batch of another system, replayed."""

    name: str
    parity: ParityReport


@dataclasses.dataclass(frozen=True)
class TokenNumbers:
    """The numbers of the tokens of all rollouts of a page.

    Attributes:
      rollouts: each with the index of its run.
      quantities: the quantities that a rollout has.
      values: by the key of a quantity, the values of each rollout, or None.
    """

    rollouts: Sequence[tuple[int, RecordedRollout]]
    quantities: Sequence[Quantity]
    values: Mapping[str, Sequence[np.ndarray | None]]

    @classmethod
    def of(cls, runs: Sequence[ShownRun]) -> "TokenNumbers":
        """Computes the quantities of all rollouts: known ones in the order of the table, then other columns."""
        rollouts = [(index, rollout) for index, run in enumerate(runs) for rollout in run.recording.rollouts]
        known = {quantity.key for quantity in QUANTITIES}
        others = [quantity_of(name) for name in columns_of(rollout for _, rollout in rollouts) if name not in known]
        values = {q.key: [_values(q, rollout) for _, rollout in rollouts] for q in (*QUANTITIES, *others)}
        present = [q for q in (*QUANTITIES, *others) if any(x is not None for x in values[q.key])]
        return cls(rollouts, present, values)

    def of_run(self, quantity: Quantity, run: int | None = None) -> np.ndarray:
        """Returns the values of all rollouts of a run, or of all runs, one after another."""
        pairs = zip(self.rollouts, self.values[quantity.key], strict=True)
        chosen = [x for (index, _), x in pairs if x is not None and run in (None, index)]
        return np.concatenate(chosen) if chosen else np.zeros(0, np.float32)

    def describe(self) -> Iterator[dict[str, Any]]:
        """Yields each quantity with the scale of its colours."""
        for quantity in self.quantities:
            together = self.of_run(quantity)
            both = quantity.scale == "both" or bool((together < 0).any())
            described = dataclasses.asdict(quantity)
            yield described | {"scale": "both" if both else "up", "limit": color_limit(together)}

    def summaries(self) -> Iterator[dict[str, Any]]:
        """Yields each rollout for the table: scalars, texts, mean and largest value of each quantity."""
        for index, (run, rollout) in enumerate(self.rollouts):
            arrays = {q.key: self.values[q.key][index] for q in self.quantities}
            yield {
                "run": run,
                "step": rollout.step,
                "group": rollout.group,
                "row": rollout.row,
                "version": rollout.policy_version,
                "reward": _number(rollout.reward),
                "rewards": {name: _number(value) for name, value in rollout.rewards.items()},
                "finished": rollout.finished,
                "length": rollout.length if rollout.sampled is None else sum(rollout.sampled),
                "episode": rollout.episode,
                "failure": None if rollout.failure is None else _describe_failure(rollout.failure),
                "prompt": rollout.prompt[:EXCERPT],
                "answer": rollout.answer[:EXCERPT],
                "completion": rollout.completion[:EXCERPT],
                "numbers": {key: _summary(x) for key, x in arrays.items() if x is not None and x.size},
            }

    def histograms(self, runs: int) -> Iterator[dict[str, Any]]:
        """Yields the distributions of the log-ratios, with equal bins for all runs."""
        for quantity in (quantity for quantity in self.quantities if quantity.histogram):
            limit = histogram_limit(self.of_run(quantity))
            counted = [histogram(self.of_run(quantity, run), limit) for run in range(runs)]
            yield {"key": quantity.key, "label": quantity.label, "limit": limit, "runs": counted}


def render(title: str, runs: Sequence[ShownRun], dumps: Sequence[ShownDump] = ()) -> str:
    """Makes the page of one or two runs, or of one or two dumps."""
    numbers = TokenNumbers.of(runs)
    data = {
        "title": title,
        "made": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}, kljax {kljax.__version__}",
        "runs": [_describe_run(run) for run in runs],
        "glossary": _glossary(runs),
        "quantities": list(numbers.describe()),
        "rollouts": list(numbers.summaries()),
        "histograms": list(numbers.histograms(len(runs))),
        "differences": config_difference(*(run.config for run in runs)) if len(runs) == 2 else [],
        "dumps": [{"name": dump.name, "text": as_text(dump.parity), **as_json(dump.parity)} for dump in dumps],
    }
    parts = {
        "TITLE": html.escape(title),
        "STYLE": (PARTS / "page.css").read_text(encoding="utf-8"),
        "DATA": _script_json(data),
        "SCRIPT": "\n".join((PARTS / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS),
        "BLOCKS": "\n".join(_block(index, rollout) for index, (_, rollout) in enumerate(numbers.rollouts)),
    }
    template = (PARTS / "page.html").read_text(encoding="utf-8")
    return re.sub("<!--([A-Z]+)-->", lambda match: parts[match[1]], template)


def _values(quantity: Quantity, rollout: RecordedRollout) -> np.ndarray | None:
    """Returns the values of a quantity; a policy version of the row is that of each token."""
    values = quantity.of(rollout.columns)
    if values is None and quantity.key == "policy_version" and rollout.policy_version is not None:
        return np.full(rollout.length, rollout.policy_version, np.float32)
    return values


def _describe_run(run: ShownRun) -> dict[str, Any]:
    metrics = {
        phase: {
            name: {"group": group_of(name), "steps": [s for s, _ in points], "values": [_number(v) for _, v in points]}
            for name, points in series.items()
        }
        for phase, series in run.metrics.items()
    }
    skipped = [step for step, value in run.metrics.get("train", {}).get("skipped_updates", ()) if value]
    return {
        "name": run.name,
        "metrics": metrics,
        "config": dict(run.config),
        "checkpoints": list(run.checkpoints),
        "skipped": skipped,
        "failed": _count_failed(run.metrics.get("train", {})),
        "notes": list(run.notes),
    }


def _count_failed(metrics: Mapping[str, Points]) -> dict[str, int]:
    """Counts the episodes of all steps that the world failed, by the name of the failure."""
    counts = {
        name: round(sum(value or 0.0 for _, value in metrics.get(metric, ()))) for name, metric in FAILURES.items()
    }
    return {name: count for name, count in counts.items() if count}


def _describe_failure(failure: Failure) -> dict[str, str]:
    """Returns a failure with the first lines of its text."""
    lines = failure.text.splitlines()
    more = ["..."] if len(lines) > FAILURE_LINES else []
    return {"of": failure.of, "name": failure.name, "text": "\n".join(lines[:FAILURE_LINES] + more)}


def _glossary(runs: Sequence[ShownRun]) -> dict[str, dict[str, str]]:
    """Returns what the curves mean, by the name of the metric; rewards of a task have no entry."""
    names = {name for run in runs for series in run.metrics.values() for name in series}
    entries = {name: metric_of(name) for name in sorted(names)}
    return {
        name: {"meaning": entry.meaning, "healthy": entry.healthy, "sick": entry.sick}
        for name, entry in entries.items()
        if entry is not None
    }


def _block(index: int, rollout: RecordedRollout) -> str:
    """Packs the tokens of a rollout, which the page unpacks when it is opened.

    A block is a header in JSON and the columns as float32, whose bytes of equal weight lie together.
    """
    names = list(rollout.columns)
    header = {
        "ids": list(rollout.ids),
        "texts": list(rollout.token_texts),
        "prompt": rollout.prompt_length,
        "sampled": None if rollout.sampled is None else [int(value) for value in rollout.sampled],
        "columns": names,
        "others": {name: list(values) for name, values in rollout.others.items()},
    }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8", errors="replace")
    matrix = np.stack([rollout.columns[name] for name in names]) if names else np.zeros((0, 0), np.float32)
    planes = matrix.astype("<f4").reshape(-1, 1).view(np.uint8).T.tobytes()
    packed = zlib.compress(len(text).to_bytes(4, "little") + text + planes, 6)
    return f'<script type="text/plain" id="rollout-{index}">{base64.b64encode(packed).decode()}</script>'


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _summary(values: np.ndarray) -> list[float | None]:
    """Returns the mean, and the value that is farthest from 0, with the digits that the table shows."""
    # Observations of an episode have no number.
    known = values[~np.isnan(values)]
    if not len(known):
        return [None, None]
    largest = known[np.argmax(np.abs(known))]
    numbers = (_number(float(value)) for value in (known.mean(dtype=np.float64), largest))
    return [None if number is None else float(f"{number:.6g}") for number in numbers]


def _script_json(data: Any) -> str:
    """Writes JSON that no parser of HTML takes for markup."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False, default=str)
    return text.replace("<", "\\u003c")
