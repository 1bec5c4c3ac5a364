"""Random access to the rows of recorded files: JSON lines and Parquet."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from train.config.errors import UserError
from train.config.json_text import check_encoding, parse_json
from train.data.parquet import drop_empty, read_table
from train.rollouts.recorded.row_checks import RowCounter, take_check
from train.rollouts.recording_format import check_table
from train.weights.files import read_record, write_record

COUNT = "count.sealed"
"""Beside the files of a run: how many there are, so that a lost one is noticed."""
SUFFIXES = {".jsonl": "JSON lines", ".json": "JSON lines", ".parquet": "Parquet"}


class RowPosition(NamedTuple):
    """Position of a row: index of its file, `offset` for random access, line from 1, and the row that it continues."""

    file: int
    offset: int
    line: int
    parent: "RowPosition | None" = None


@contextmanager
def _errors(path: Path, line: int) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise UserError(f"rollout.source.path: {path}, line {line}: {error}") from error


def _record(text: bytes) -> dict[str, Any]:
    """Parses a line; raises `ValueError` if it is no JSON, or no object."""
    try:
        record = parse_json(text, unique_keys=True)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"got {text[:40]!r}, expected an object a line")
    return record


class JsonLinesFile:
    """A file of one JSON object per line; empty lines are skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yields `(offset, line, record)` of every row in order."""
        offset = 0
        line = 0
        counter = RowCounter()
        with self.path.open("rb") as file:
            with _errors(self.path, 1):
                check_encoding(file.read(8))
            file.seek(0)
            for line, text in enumerate(file, start=1):
                if text.strip():
                    with _errors(self.path, line):
                        record = _record(text)
                        counter.add(take_check(record))
                    yield offset, line, record
                offset += len(text)
        with _errors(self.path, line):
            counter.finish()

    def read(self, offset: int) -> dict[str, Any]:
        """Reads the line that begins at byte `offset`; raises `ValueError` if it is no object, or is damaged."""
        with self.path.open("rb") as file:
            file.seek(offset)
            record = _record(file.readline())
        take_check(record)
        return record


class ParquetFile:
    """A Parquet file with a sequence or completion per row; an empty cell means a missing field."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._table = read_table(path, "rollout.source.path")
        try:
            check_table(self._table.schema.metadata)
        except ValueError as error:
            raise UserError(f"rollout.source.path: {path}: {error}") from error

    def __iter__(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yields `(offset, line, record)` of every row in order."""
        offset = 0
        counter = RowCounter()
        for part in self._table.to_batches(max_chunksize=1024):
            for record in map(drop_empty, part.to_pylist()):
                with _errors(self.path, offset + 1):
                    counter.add(take_check(record))
                yield offset, offset + 1, record
                offset += 1
        with _errors(self.path, offset):
            counter.finish()

    def read(self, offset: int) -> dict[str, Any]:
        """Reads row `offset`; raises `ValueError` if it is damaged."""
        record = drop_empty(self._table.slice(offset, 1).to_pylist()[0])
        take_check(record)
        return record


RowFile = JsonLinesFile | ParquetFile


def count_file(directory: Path, step: int) -> None:
    """Writes down that a run has recorded the files of all steps up to this one.

    Raises:
      OSError: it cannot be written.
    """
    path = directory / COUNT
    files = step + 1
    if path.is_file():
        with suppress(UserError):  # a damaged count is written again
            files = max(files, read_record(path, "")["files"])
    write_record(path, {"files": files})


def _check_count(directory: Path) -> None:
    """Raises UserError if a file is gone that a run recorded in this directory."""
    if not (directory / COUNT).is_file():
        return
    hint = f"restore it, or delete {COUNT} if the directory is to have other files"
    try:
        files = read_record(directory / COUNT, hint)["files"]
    except UserError as error:
        raise UserError(f"rollout.source.path: {error}") from error
    missing = [name for name in map(file_name, range(files)) if not (directory / name).is_file()]
    if missing:
        raise UserError(
            f"rollout.source.path: {directory} lacks {missing[0]}, {len(missing)} of the {files} files that a run "
            f"recorded there; {hint}"
        )


def file_name(step: int) -> str:
    """Returns the name of the file with the rows of a step."""
    return f"{step:08d}.jsonl"


def list_files(path: Path) -> list[Path]:
    """Returns a file, or the files of a directory in the order of their names.

    Raises:
      UserError: the file does not exist, its format is not supported, or files of a recording are missing.
    """
    if not path.exists():
        raise UserError(f"rollout.source.path: got {str(path)!r}, but there is no such file or directory")
    if path.is_dir():
        _check_count(path)
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files or files[0].suffix not in SUFFIXES:
        known = ", ".join(f"{suffix} ({kind})" for suffix, kind in SUFFIXES.items())
        raise UserError(f"rollout.source.path: got {str(path)!r}, expected a file, or a directory of files, of {known}")
    return files


def open_files(path: Path) -> list[RowFile]:
    """Opens the files of `list_files`.

    Raises:
      UserError: as `list_files`, or a Parquet file cannot be read.
    """
    return [ParquetFile(file) if file.suffix == ".parquet" else JsonLinesFile(file) for file in list_files(path)]
