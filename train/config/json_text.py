"""Reading of JSON that others wrote."""

import codecs
import json
from typing import Any

COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ": ("xz", "unxz"),
    b"(\xb5/\xfd": ("zstd", "unzstd"),
    b"PK\x03\x04": ("zip", "unzip"),
}
"""The first bytes of compressed files, with the name of the format, and the program that decompresses them."""


def parse_json(text: str | bytes, *, unique_keys: bool = False) -> Any:
    """Parses JSON.

    Args:
      text: the JSON.
      unique_keys: whether an object that has a key twice is an error; otherwise its last value counts.

    Raises:
      ValueError: the text cannot be read, also if it is nested too deeply or has a number with too many digits;
        `json.JSONDecodeError` if it is not JSON.

    Example:
        >>> parse_json("[" * 100_000)
        Traceback (most recent call last):
        ...
        ValueError: nested too deeply
    """
    try:
        return json.loads(text, object_pairs_hook=_unique if unique_keys else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        if str(error).startswith("Exceeds the limit"):  # of the interpreter, which names a setting of its own
            raise ValueError("a number with too many digits") from None
        raise


def check_encoding(head: bytes) -> None:
    """Checks that the first bytes of a file may begin JSON in UTF-8.

    Raises:
      ValueError: they are of UTF-16, or of a compressed file; says how to convert it.

    Example:
        >>> check_encoding("{}".encode("utf-16"))
        Traceback (most recent call last):
        ...
        ValueError: UTF-16, expected UTF-8; convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW
    """
    for magic, (kind, program) in COMPRESSED.items():
        if head.startswith(magic):
            raise ValueError(f"compressed by {kind}, expected text; decompress it: {program} FILE")
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in head[:4]:
        raise ValueError("UTF-16, expected UTF-8; convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in fields if names.count(name) > 1)
        raise ValueError(f"duplicate key {repeated!r}")
    return fields


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested mappings by dotted name.

    Example:
      >>> flat({"a": {"b": 1}, "c": [2]})
      {'a.b': 1, 'c': [2]}
    """
    if not isinstance(value, dict):
        return {prefix: value}
    parts = (flat(inner, f"{prefix}.{key}" if prefix else str(key)) for key, inner in value.items())
    return {name: inner for part in parts for name, inner in part.items()}
