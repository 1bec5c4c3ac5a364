"""A run, or a recording of another system, as the page shows it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from train.config.errors import UserError
from train.config.json_text import flat, parse_json
from train.config.regular_file import read_regular
from train.config.yaml_text import parse_yaml
from train.report.quantities import QUANTITIES
from train.report.rollouts import RecordedRollout, RolloutSample, read_parquet, read_prime_rl
from train.run.paths import RunPaths
from train.weights.files import FIRST_LINE, check_sealed_text

MOST_CONFIG_BYTES = 2**20
"""Largest config of a page, also with its aliases written out."""
Points = Sequence[tuple[int, float | None]]


@dataclasses.dataclass(frozen=True)
class ShownRun:
    """A run of the page.

    Attributes:
      name: shown everywhere; the directory or file that it was read from.
      metrics: points by phase and metric.
      config: values by dotted name; empty if there is none.
      checkpoints: steps that have a checkpoint.
      recording: the rollouts.
      notes: what the reader has to know.
    """

    name: str
    metrics: Mapping[str, Mapping[str, Points]]
    config: Mapping[str, Any]
    checkpoints: Sequence[int]
    recording: RolloutSample
    notes: Sequence[str]


def read_run(path: Path, *, rollouts: int) -> ShownRun:
    """Reads a run, which may be going, or a token export of prime-rl.

    Args:
      path: directory of a run, or file or directory of an export.
      rollouts: about the largest number of rollouts.

    Raises:
      UserError: there is nothing that can be read.
    """
    paths = RunPaths(path)
    if not path.exists():
        raise UserError(f"there is no run at {path}{_others(path)}")
    if not paths.config.is_file() and not paths.metrics.is_file():
        recording = read_prime_rl(path, rollouts)
        if not recording.rollouts:
            raise UserError(f"{path} is neither a run nor a token export: {' '.join(recording.notes) or 'it is empty'}")
        return ShownRun(path.name, {"train": mean_metrics(recording.rollouts)}, {}, [], recording, [])
    metrics, notes = _read_metrics(paths.metrics)
    config, problems = _read_config(paths.config)
    recording = read_parquet(paths.rollouts, rollouts)
    notes += problems
    if not recording.rollouts and not recording.notes:
        notes.append("No rollouts are recorded: report.rollouts is 0, or no step is done.")
    return ShownRun(path.resolve().name, metrics, config, paths.steps(), recording, [*notes, *recording.notes])


def _others(path: Path) -> str:
    """Lists the runs beside a path that is no run."""
    runs = sorted(other.parent.name for other in path.parent.glob("*/config.yaml")) if path.parent.is_dir() else []
    return f"; {path.parent} has {', '.join(runs[:8])}" if runs else ""


def _read_metrics(path: Path) -> tuple[dict[str, dict[str, list[tuple[int, float | None]]]], list[str]]:
    """Reads the points of every metric; the last line of a run that is going may be incomplete."""
    metrics: dict[str, dict[str, list[tuple[int, float | None]]]] = {}
    try:
        lines = read_regular(path).decode("utf-8", errors="replace").split("\n")
    except OSError as error:
        return {}, [f"The metrics cannot be read: {error.strerror}."]
    if len(lines) == 1 and lines[0].strip():
        return {}, ["The metrics are damaged: they have no whole line."]
    damaged = 0
    for line in lines[:-1]:
        try:
            record = parse_json(line)
            phase = str(record.pop("phase"))
            step = int(record.pop("step"))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            damaged += 1
            continue
        for name, value in record.items():
            if value is None or isinstance(value, int | float):
                metrics.setdefault(phase, {}).setdefault(name, []).append((step, value))
    return metrics, [f"{damaged} lines of the metrics are damaged and left out."] if damaged else []


def _read_config(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Reads the values of the config as the trainer reads them, with notes about what is wrong with it."""
    try:
        data = read_regular(path)
        if len(data) > MOST_CONFIG_BYTES:
            return {}, [f"The config cannot be read: it has {len(data)} bytes, expected at most {MOST_CONFIG_BYTES}."]
        content, repeated = parse_yaml(data.decode("utf-8"))
        if _is_larger(content, MOST_CONFIG_BYTES):
            return {}, ["The config cannot be read: its aliases stand for too many values."]
        values = flat(content) if isinstance(content, dict) else {}
        if data.startswith(FIRST_LINE.encode()):
            check_sealed_text(path, "it was changed")
    except UserError:
        return values, ["The config is damaged or was changed: it differs from what the run wrote."]
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        return {}, [f"The config cannot be read: {_reason(error)}."]
    notes = [f"The config has a key twice: {line}." for line in repeated[:1]]
    return values, notes if values else [*notes, "The config is empty."]


def _is_larger(value: Any, most: int) -> bool:
    """Whether a value has more parts, or characters, than a number; one that contains itself has."""
    left = [value]
    count = 0
    while left and count <= most:
        part = left.pop()
        count += 1 + (len(part) if isinstance(part, str) else 0)
        if isinstance(part, dict):
            left += [*part.keys(), *part.values()]
        elif isinstance(part, list):
            left += part
    return count > most


def _reason(error: Exception) -> str:
    """Returns the first line of an error, for a note."""
    text = str(getattr(error, "strerror", None) or error).partition("\n")[0]
    return "it is nested too deeply" if isinstance(error, RecursionError) else text.rstrip(".") or type(error).__name__


def mean_metrics(rollouts: Sequence[RecordedRollout]) -> Mapping[str, Points]:
    """Returns means over the recorded rollouts of each step, for a recording without metrics."""
    steps: dict[int, list[RecordedRollout]] = {}
    for rollout in rollouts:
        steps.setdefault(rollout.step, []).append(rollout)
    points: dict[str, list[tuple[int, float | None]]] = {}
    for step, members in sorted(steps.items()):
        rewards = [rollout.reward for rollout in members if rollout.reward is not None]
        lengths = [float(rollout.length) for rollout in members]
        values: dict[str, list[float]] = {"reward": rewards, "completion_length": lengths}
        for quantity in QUANTITIES:
            arrays = [x for x in (quantity.of(rollout.columns) for rollout in members) if x is not None]
            if quantity.key in ("entropy", "mismatch_kl", "kl") and arrays:
                values[quantity.key] = np.concatenate(arrays).tolist()
        for name, numbers in values.items():
            finite = [number for number in numbers if math.isfinite(number)]
            if finite:
                points.setdefault(name, []).append((step, sum(finite) / len(finite)))
    return points


def config_difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Lists the fields whose values differ, with both values; a field that is missing has None."""
    names = dict.fromkeys((*first, *second))
    return [(name, first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)]
