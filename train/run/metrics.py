"""The metrics of a run: `metrics.jsonl`, with equal bytes for equal values, and TensorBoard events."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

from kljax._files import write_text_atomic
from kljax.checkpoint import text_hash
from train.config.errors import UserError, warn
from train.config.schema import Config
from train.config.storage import is_address
from train.distributed.exchange import run_together
from train.distributed.peers import is_leader
from train.run.events import EventFile
from train.run.trackers import Tracker, open_trackers
from train.storage.paths import as_path
from train.storage.uploads import Mirror

FILE_NAME = "metrics.jsonl"
PHASES = ("warm_start", "train", "eval")


def finite_or_none(value: SupportsFloat) -> float | None:
    """Converts a value to a Python float; NaN and infinity, which JSON lacks, become None."""
    number = float(value)
    return number if math.isfinite(number) else None


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Reads the records of a metrics file in order; drops a last line without newline (a write cut short).

    Raises:
      UserError: the file cannot be read, or another line is not a record.
    """
    try:
        lines = as_path(path).read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg})") from error
    if not isinstance(record, dict) or record.get("phase") not in PHASES or not isinstance(record.get("step"), int):
        raise UserError(f"{where}: expected an object with 'phase' (one of {', '.join(PHASES)}) and an integer 'step'")
    return record


def _dump(records: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(record, sort_keys=True, allow_nan=False) + "\n" for record in records)


def _lines_up_to(path: Path, step: int) -> str:
    """Reads the lines of the warm start, and of RL up to a step."""
    return _dump(r for r in read_metrics(path) if r["phase"] == "warm_start" or r["step"] <= step)


def _lines_of_mark(path: Path, mark: Mapping[str, Any]) -> str:
    """Reads the lines that a mark stands for; warns if the file is gone.

    Raises:
      UserError: the file is not what was written up to the mark.
    """
    try:
        text = path.read_bytes()[: mark["bytes"]]
    except FileNotFoundError:
        if mark["bytes"]:
            warn(f"{path} is gone: the run goes on, but the metrics of its steps so far are lost")
        return ""
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if text_hash(text).hexdigest() != mark["digest"]:
        what = f"got {len(text)} bytes, expected {mark['bytes']}" if len(text) < mark["bytes"] else "a line differs"
        raise UserError(
            f"{path} is damaged: it is not what the run had written when it saved its last checkpoint ({what}); "
            "restore it from a copy, or move it away to go on without the metrics of the steps so far"
        )
    return text.decode()


class MetricsWriter:
    """Appends the metrics of a run to `metrics.jsonl`, flushing every line, and to TensorBoard.

    `metrics.jsonl` holds `{"phase", "step", name: value, ...}` a line, keys sorted, floats with every digit, so two
    runs with equal values have equal bytes. Lists of integers are in this file alone. Times and other values that
    differ between runs go through `timing`.
    In an object store, which has no append, the files are local ones that are uploaded whole: before each checkpoint,
    at the end, and every few seconds for whoever watches the run.
    Write the lines of a step before its checkpoint: then the file of a resumed run equals that of an uninterrupted one.
    """

    def __init__(
        self,
        directory: str | Path,
        resume_step: int | None = None,
        mark: Mapping[str, Any] | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        """Starts the files of `directory`, or continues them after `resume_step`.

        Args:
          directory: where to write; created if missing.
          resume_step: None removes the metrics of an earlier run. A step keeps the lines of the warm start, and of
              RL up to and including that step.
          mark: the lines up to that step as `mark` returned them then, or None if nobody knows.
          trackers: get every value too, and are closed with the files.

        Raises:
          UserError: the file is not what was written up to `mark`, or a line is not a record.
        """
        target = as_path(directory)
        self._target = target
        self._mirror = Mirror(target) if is_address(target) else None
        self._directory = target if self._mirror is None else self._mirror.local
        self._directory.mkdir(parents=True, exist_ok=True)
        path = target / FILE_NAME
        if resume_step is None:
            text = ""
        elif mark is None:
            text = _lines_up_to(path, resume_step) if path.exists() else ""
        else:
            text = _lines_of_mark(path, mark)
        if resume_step is None:
            for events in target.glob("tensorboard/*/events.out.tfevents.*"):
                events.unlink()
        path = self._directory / FILE_NAME
        write_text_atomic(path, text)
        if self._mirror is not None:
            self._mirror.upload()
        self._evaluated = {record["step"] for record in map(json.loads, text.splitlines()) if record["phase"] == "eval"}
        self._hash = text_hash(text)
        self._size = len(text.encode())
        self._file = path.open("a", encoding="utf-8", newline="\n")
        self._resume_step = resume_step
        self._boards: dict[str, EventFile] = {}
        self._trackers = trackers

    def _board(self, phase: str) -> EventFile:
        # One TensorBoard run for each phase: warm start and RL count their steps separately.
        if phase not in self._boards:
            resumed_after = None if phase == "warm_start" else self._resume_step
            self._boards[phase] = EventFile(
                self._directory / "tensorboard" / phase,
                purge_step=None if resumed_after is None else resumed_after + 1,
                # Event files are named by the second: a resume within it must not overwrite the first file.
                suffix="" if self._resume_step is None else f".resumed{self._resume_step}",
            )
        return self._boards[phase]

    def _plot(self, phase: str, step: int, values: Mapping[str, float | None]) -> None:
        finite = {name: value for name, value in values.items() if value is not None}
        self._board(phase).write(step, finite)
        for tracker in self._trackers:
            tracker.log(phase, step, finite)

    def write(self, phase: str, step: int, values: Mapping[str, SupportsFloat | list[int]]) -> None:
        """Writes the values of a step; NaN and infinity become null, and have no point in TensorBoard.

        Raises:
          ValueError: an unknown phase, or a metric that is named "phase" or "step".
        """
        if phase not in PHASES:
            raise ValueError(f"phase: got {phase!r}, expected one of {', '.join(PHASES)}")
        if reserved := {"phase", "step"} & set(values):
            raise ValueError(f"values: {', '.join(sorted(reserved))} cannot name a metric")
        lists = {name: value for name, value in values.items() if isinstance(value, list)}
        plain = {name: finite_or_none(value) for name, value in values.items() if not isinstance(value, list)}
        line = _dump([{"phase": phase, "step": step, **plain, **lists}])
        if phase == "eval":
            self._evaluated.add(step)
        self._hash.update(line.encode())
        self._size += len(line.encode())
        self._file.write(line)
        self._file.flush()
        self._plot(phase, step, plain)
        if self._mirror is not None:
            self._mirror.changed()

    def is_evaluated(self, step: int) -> bool:
        """Whether the file has an evaluation of a step."""
        return step in self._evaluated

    def mark(self) -> dict[str, Any]:
        """Puts all lines on disk, and returns their size and digest, with which a resumed run finds them unchanged."""
        os.fsync(self._file.fileno())
        if self._mirror is not None:
            self._mirror.upload()
        return {"bytes": self._size, "digest": self._hash.hexdigest()}

    def samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Writes the completions of an evaluation to `samples/<step>.jsonl`, one object a line."""
        directory = self._target / "samples"
        directory.mkdir(exist_ok=True)
        write_text_atomic(directory / f"{step}.jsonl", _dump(samples))

    def timing(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Writes values that differ between runs, such as seconds, to TensorBoard and trackers, under `time/`."""
        self._plot("train", step, {f"time/{name}": finite_or_none(value) for name, value in values.items()})

    def close(self) -> None:
        """Closes the files."""
        for board in self._boards.values():
            board.close()
        self._file.close()
        for tracker in self._trackers:
            tracker.close()
        if self._mirror is not None:
            self._mirror.close()


class NoMetrics:
    """Takes the metrics of a process that is not the leader, and drops them."""

    def write(self, phase: str, step: int, values: Mapping[str, SupportsFloat | list[int]]) -> None:
        """No-op."""

    def is_evaluated(self, step: int) -> bool:
        """Returns False: the leader knows."""
        del step
        return False

    def mark(self) -> dict[str, Any]:
        """Returns nothing: the mark of the leader is saved."""
        return {}

    def samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """No-op."""

    def timing(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """No-op."""

    def close(self) -> None:
        """No-op."""


Metrics = MetricsWriter | NoMetrics


def open_metrics(
    config: Config, directory: Path, resume_step: int | None = None, mark: Mapping[str, Any] | None = None
) -> Metrics:
    """Opens the metrics of a run, and the trackers of its config, in the leader; the other processes write none."""

    def open_files() -> Metrics:
        if not is_leader():
            return NoMetrics()
        return MetricsWriter(directory, resume_step, mark, open_trackers(config, directory))

    return run_together("metrics", open_files)
