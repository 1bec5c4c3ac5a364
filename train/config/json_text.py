"""Reading of JSON that others wrote."""

import json
from typing import Any


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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in fields if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} is there twice")
    return fields
