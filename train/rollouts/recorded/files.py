"""Random access to the rows of recorded files: JSON lines and Parquet."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from train.config.errors import UserError
from train.config.json_text import parse_json
from train.rollouts.recorded.row_checks import FIELD, RowCounter, take_check

SUFFIXES = {".jsonl": "JSON lines", ".json": "JSON lines", ".parquet": "Parquet"}


class RowPosition(NamedTuple):
    """Position of a row: index of its file, `offset` for random access, and line number from 1."""

    file: int
    offset: int
    line: int


class RowFile(Protocol):
    """A file of rows."""

    path: Path

    def __iter__(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yields `(offset, line, record)` of every row in order."""

    def read(self, offset: int) -> dict[str, Any]:
        """Reads the record at an offset; raises OSError or ValueError if the file has changed."""


class JsonLinesFile:
    """A file of one JSON object per line; empty lines are skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        offset, line, counter = 0, 0, RowCounter()
        with self.path.open("rb") as file:
            for line, text in enumerate(file, start=1):
                if text.strip():
                    record = self._parse(text, line)
                    with self._errors(line):
                        counter.add(take_check(record))
                    yield offset, line, record
                offset += len(text)
        with self._errors(line):
            counter.finish()

    @contextmanager
    def _errors(self, line: int) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise UserError(f"rollout.source.path: {self.path}, line {line}: {error}") from error

    def read(self, offset: int) -> dict[str, Any]:
        """Reads the line that begins at byte `offset`; raises `ValueError` if it is no object, or is damaged."""
        with self.path.open("rb") as file:
            file.seek(offset)
            record = parse_json(file.readline(), unique_keys=True)
        if not isinstance(record, dict):
            raise ValueError("not an object")
        take_check(record)
        return record

    def _parse(self, text: bytes, line: int) -> dict[str, Any]:
        try:
            record = parse_json(text, unique_keys=True)
        except ValueError as error:
            raise UserError(f"rollout.source.path: {self.path}, line {line}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise UserError(f"rollout.source.path: {self.path}, line {line}: got {text[:40]!r}, expected an object")
        return record


class ParquetFile:
    """A Parquet file with a completion per row; an empty cell means a missing field."""

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
        offset = 0
        for part in self._table.to_batches(max_chunksize=1024):
            for record in part.to_pylist():
                yield offset, offset + 1, _drop_empty(record)
                offset += 1

    def read(self, offset: int) -> dict[str, Any]:
        """Reads row `offset`."""
        return _drop_empty(self._table.slice(offset, 1).to_pylist()[0])


def _drop_empty(record: dict[str, Any]) -> dict[str, Any]:
    """Drops empty fields, also in nested structs: a Parquet column has the fields of all rows."""
    return {
        name: _drop_empty(value) if isinstance(value, dict) else value
        for name, value in record.items()
        if value is not None and name != FIELD
    }


def open_files(path: Path) -> list[RowFile]:
    """Opens a file, or the files of a directory in the order of their names.

    Raises:
      UserError: the file does not exist, or its format is not supported.
    """
    if not path.exists():
        raise UserError(f"rollout.source.path: got {str(path)!r}, but there is no such file or directory")
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files or files[0].suffix not in SUFFIXES:
        known = ", ".join(f"{suffix} ({kind})" for suffix, kind in SUFFIXES.items())
        raise UserError(f"rollout.source.path: got {str(path)!r}, expected a file, or a directory of files, of {known}")
    return [ParquetFile(file) if file.suffix == ".parquet" else JsonLinesFile(file) for file in files]
