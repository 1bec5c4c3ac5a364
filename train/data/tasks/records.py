"""Records of a task, read from JSON lines, a JSON array, Parquet or, by name, through the `datasets` library."""

import codecs
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from train.config.data import HUB
from train.config.errors import UserError
from train.config.json_text import check_encoding, parse_json
from train.data.parquet import MAGIC, drop_empty, read_table


class Record(NamedTuple):
    """One JSON object; `where` is its file and line, for error messages."""

    where: str
    fields: Mapping[str, Any]


def text_of(record: Record, name: str) -> str:
    """Returns the text of a field.

    Raises:
      UserError: the field is missing, empty or no string; names file and line.
    """
    if name not in record.fields:
        got = ", ".join(sorted(record.fields)) or "no fields"
        raise UserError(f"{record.where}: field {name!r} is missing, got {got}")
    value = record.fields[name]
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{record.where}: field {name!r}: got {value!r}, expected a non-empty string")
    return value


def _parse_line(line: str, where: str, expected: str) -> Record:
    try:
        fields = parse_json(line, unique_keys=True)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg}, column {error.colno}); expected one object a line") from error
    except ValueError as error:
        raise UserError(f"{where}: JSON that cannot be used ({error})") from error
    return _record(fields, where, expected)


def _record(fields: Any, where: str, expected: str) -> Record:
    if not isinstance(fields, dict):
        raise UserError(f"{where}: got {type(fields).__name__}, expected an object with {expected}")
    return Record(where, fields)


def _from_file(path: Path, field: str, expected: str) -> list[Record]:
    """Reads JSON lines, a JSON array or Parquet, told apart by their content."""
    if path.exists() and not path.is_file():
        kind = "a directory" if path.is_dir() else "no regular file"
        raise UserError(f"{field}: cannot read {path}: it is {kind}, expected a file of JSON lines")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{field}: cannot read {path}: {error.strerror}") from error
    if content.startswith(MAGIC):
        rows = read_table(path, field).to_pylist()
        return [Record(f"{path}, row {number}", drop_empty(row)) for number, row in enumerate(rows, start=1)]
    try:
        check_encoding(content)
    except ValueError as error:
        raise UserError(f"{field}: {path}: {error}") from None
    if content.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        try:
            entries = parse_json(content, unique_keys=True)
        except (json.JSONDecodeError, UnicodeDecodeError):  # lines, of which the first is wrong
            return _from_lines(content, path, expected)
        except ValueError as error:
            raise UserError(f"{path}: JSON that cannot be used ({error})") from error
        return [_record(entry, f"{path}, entry {number}", expected) for number, entry in enumerate(entries, start=1)]
    return _from_lines(content, path, expected)


def _from_lines(content: bytes, path: Path, expected: str) -> list[Record]:
    records = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        where = f"{path}, line {number}"
        try:
            text = line.decode("utf-8-sig")  # a mark begins each of several files that were joined
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from error
        if text.strip():
            records.append(_parse_line(text, where, expected))
    return records


def _from_hub(name: str, field: str) -> list[Record]:
    """Loads `NAME`, `NAME:SPLIT` or `NAME:CONFIG:SPLIT`; the default split is train."""
    parts = name.split(":")
    if not parts[0] or len(parts) > 3:
        raise UserError(f"{field}: got 'datasets:{name}', expected datasets:NAME, :SPLIT or :CONFIG:SPLIT after it")
    split = parts[-1] if len(parts) > 1 else "train"
    config = parts[1] if len(parts) == 3 else None
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError(
            f"{field}: 'datasets:{name}' is read by the library datasets, which is not installed; "
            "run `pip install datasets` (`uv sync --group datasets`), or give a file of JSON lines"
        ) from error
    try:
        rows = load_dataset(parts[0], config, split=split)
    except Exception as error:  # any error of the network or the Hub
        raise UserError(f"{field}: cannot load 'datasets:{name}': {error}") from error
    return [Record(f"datasets:{name}, row {number}", dict(row)) for number, row in enumerate(rows)]


def read_records(path: str | Path | None, field: str, *, expected: str) -> list[Record]:
    """Reads all records of a file, skipping blank lines, or of a dataset; none if a run does not need them.

    Args:
      path: the file, of JSON lines, a JSON array or Parquet; or `datasets:NAME`, `datasets:NAME:SPLIT` or
        `datasets:NAME:CONFIG:SPLIT`. None: no records.
      field: config field of the path, for error messages.
      expected: fields of a record, for error messages.

    Raises:
      UserError: the file is unreadable or empty, or a line is no JSON object (names file and line).
    """
    if path is None:
        return []
    on_hub = isinstance(path, str) and path.startswith(HUB)
    records = _from_hub(str(path).removeprefix(HUB), field) if on_hub else _from_file(Path(path), field, expected)
    if not records:
        raise UserError(f"{field}: {path} holds no examples")
    return records
