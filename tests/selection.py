"""The tests that `make test` leaves to others, by two lists beside this file.

Those of `more.txt` run by `make test-all`, as in CI; those of `nightly.txt` by `make test-thorough`, as in CI at night.
What they state has a cheaper test too. `make test-all ARGS="-p tests.cpu_times"` measures what each test costs, and
`python -m tests.mutants` whether `make test` still notices what `make test-all` does.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest

MARKS = {"more": "more.txt", "thorough": "nightly.txt"}


def read_names(mark: str) -> list[str]:
    """Reads the list of a mark: tests with their parameters, tests with all of them, and files."""
    text = Path(__file__).with_name(MARKS[mark]).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def add_marks(items: Iterable[pytest.Item]) -> None:
    """Marks the tests of the lists."""
    names = {mark: set(read_names(mark)) for mark in MARKS}
    for item in items:
        of_item = {item.nodeid, item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]}
        for mark, listed in names.items():
            if listed & of_item:
                item.add_marker(mark)
