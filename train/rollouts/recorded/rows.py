"""Rows of files, by place: a file is read once to check it, and then only where a step needs it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from train.config.errors import UserError

SUFFIXES = {".jsonl": "JSON lines", ".json": "JSON lines", ".parquet": "Parquet"}


class Place(NamedTuple):
    """Where a row is: `at` is what the file needs to find it again, `line` its number for people, from 1."""

    file: int
    at: int
    line: int


class Rows(Protocol):
    """The rows of one file."""

    path: Path

    def __iter__(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """`(at, line, record)` of every row in order."""

    def read(self, at: int) -> dict[str, Any]:
        """The record at a place."""


class JsonLines:
    """One JSON object a line; empty lines are passed over."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        at = 0
        with self.path.open("rb") as file:
            for line, text in enumerate(file, start=1):
                if text.strip():
                    yield at, line, self._parse(text, line)
                at += len(text)

    def read(self, at: int) -> dict[str, Any]:
        """The line that begins at byte `at`."""
        with self.path.open("rb") as file:
            file.seek(at)
            return json.loads(file.readline())

    def _parse(self, text: bytes, line: int) -> dict[str, Any]:
        try:
            record = json.loads(text)
        except ValueError as error:
            raise UserError(f"rollout.source.path: {self.path}, line {line}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise UserError(f"rollout.source.path: {self.path}, line {line}: got {text[:40]!r}, expected an object")
        return record


class Parquet:
    """A row a completion; an empty cell is a field that is not there."""

    def __init__(self, path: Path) -> None:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise UserError(
                f"rollout.source.path: {path} is Parquet, which needs pyarrow; install it, or convert the file to JSON "
                "lines"
            ) from error
        self.path = path
        try:
            self._table = parquet.read_table(path, memory_map=True)
        except (ArrowException, OSError) as error:
            raise UserError(f"rollout.source.path: {path} cannot be read as Parquet: {error}") from error

    def __iter__(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        at = 0
        for part in self._table.to_batches(max_chunksize=1024):
            for record in part.to_pylist():
                yield at, at + 1, _filled(record)
                at += 1

    def read(self, at: int) -> dict[str, Any]:
        """Row `at`."""
        return _filled(self._table.slice(at, 1).to_pylist()[0])


def _filled(record: dict[str, Any]) -> dict[str, Any]:
    """Without what is empty, in the structs inside too: a column holds the names of all rows."""
    return {
        name: _filled(value) if isinstance(value, dict) else value
        for name, value in record.items()
        if value is not None
    }


def open_rows(path: Path) -> list[Rows]:
    """The file, or the files of a directory in the order of their names.

    Raises:
      UserError: there is no such file, or nothing in it that can be read.
    """
    if not path.exists():
        raise UserError(f"rollout.source.path: got {str(path)!r}, but there is no such file or directory")
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files or files[0].suffix not in SUFFIXES:
        known = ", ".join(f"{suffix} ({kind})" for suffix, kind in SUFFIXES.items())
        raise UserError(f"rollout.source.path: got {str(path)!r}, expected a file, or a directory of files, of {known}")
    return [Parquet(file) if file.suffix == ".parquet" else JsonLines(file) for file in files]
