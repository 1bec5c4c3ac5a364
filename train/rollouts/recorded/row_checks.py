"""Two fields of a recorded row: the format, and a check with its number, that of all rows of its step, and a digest."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kljax.checkpoint import text_hash
from train.data.parquet import drop_empty
from train.rollouts.recording_format import FORMAT, FORMAT_FIELD, SEQUENCES, check_format, format_of

FIELD = "kljax_check"


def with_checks(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file, each with its format and its check."""
    for number, row in enumerate(rows, start=1):
        written = {**row, FORMAT_FIELD: format_of(row)}
        yield {**written, FIELD: f"{number}/{len(rows)} {_digest(written)}"}


def take_check(record: dict[str, Any]) -> str | None:
    """Removes format and check of a row that was recorded, and compares them; a row of others has none.

    Returns:
      The number of the row and of all rows, as "3/8", or None.

    Raises:
      ValueError: the row was changed, or a later release recorded it.
    """
    # Before the check, which another format may make in another way.
    check_format(FORMAT_FIELD, record.get(FORMAT_FIELD, FORMAT))
    check = record.pop(FIELD, None)
    numbers, _, digest = str(check).partition(" ")
    if check is not None and digest != _digest(record):
        raise ValueError(
            f"the row is damaged: it differs from what was recorded; restore it, or delete its field {FIELD!r} if the "
            "change is wanted"
        )
    record.pop(FORMAT_FIELD, None)
    return None if check is None else numbers


class RowCounter:
    """Compares the numbers in the checks of a file, which has one step or several, with the rows that are read."""

    def __init__(self) -> None:
        # The row of its step, and the rows of that step, 0 until a check tells.
        self._all = 0
        self._row = 0
        self._expected = 0

    def add(self, numbers: str | None) -> None:
        """Counts a row; raises ValueError if a row before it is missing."""
        self._all += 1
        if self._row == self._expected:
            self._row = 0
            self._expected = 0
        self._row += 1
        if numbers is None:
            return
        first, last = map(int, numbers.split("/"))
        if first != self._row or self._expected not in (0, last):
            raise ValueError(f"got row {first} of {last}, expected row {self._row}: rows are missing or doubled")
        self._expected = last

    def finish(self) -> None:
        """Raises ValueError if there is no row, or rows are missing at the end."""
        if not self._all:
            raise ValueError("got no row; restore the file, or delete it if it was empty from the start")
        if self._row < self._expected:
            raise ValueError(f"got {self._row} rows, expected {self._expected}: the file was cut")


def _digest(row: Mapping[str, Any]) -> str:
    if row.get(FORMAT_FIELD) == SEQUENCES:
        # A copy in a Parquet file has its fields in another order, and no null ones.
        row = dict(sorted(drop_empty(row).items()))
    # Damage to the schema of a Parquet file gives values that JSON lacks; what is recorded never has one.
    return text_hash(json.dumps(row, ensure_ascii=True, default=repr)).hexdigest()
