"""The check of a recorded row: its number, the number of rows of its file, and a digest of its other fields."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kljax.checkpoint import text_hash

FIELD = "kljax_check"


def with_checks(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file, each with its check."""
    for number, row in enumerate(rows, start=1):
        yield {**row, FIELD: f"{number}/{len(rows)} {_digest(row)}"}


def take_check(record: dict[str, Any]) -> str | None:
    """Removes the check of a row that was recorded, and compares it; a row of others has none.

    Returns:
      The number of the row and of all rows, as "3/8", or None.

    Raises:
      ValueError: the row was changed.
    """
    check = record.pop(FIELD, None)
    if check is None:
        return None
    numbers, _, digest = str(check).partition(" ")
    if digest != _digest(record):
        raise ValueError(
            f"the row is damaged: it differs from what was recorded; restore it, or delete its field {FIELD!r} if the "
            "change is wanted"
        )
    return numbers


class RowCounter:
    """Compares the numbers in the checks of a file with the rows that are read."""

    def __init__(self) -> None:
        self._rows, self._expected = 0, 0

    def add(self, numbers: str | None) -> None:
        """Counts a row; raises ValueError if a row before it is missing."""
        self._rows += 1
        if numbers is not None:
            first, _, last = numbers.partition("/")
            self._expected = int(last)
            if int(first) != self._rows:
                raise ValueError(f"got row {first} of {last}, expected row {self._rows}: rows are missing or doubled")

    def finish(self) -> None:
        """Raises ValueError if rows are missing at the end."""
        if self._rows < self._expected:
            raise ValueError(f"got {self._rows} rows, expected {self._expected}: the file was cut")


def _digest(row: Mapping[str, Any]) -> str:
    return text_hash(json.dumps(row, ensure_ascii=True)).hexdigest()
