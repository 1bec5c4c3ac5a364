"""The tests that `make test` leaves to `make test-all`: those of `more.txt`, whose statement has a cheaper test too.

`make test-all ARGS="-p tests.cpu_times"` measures what each test costs, and `python -m tests.mutants` whether
`make test` still notices what `make test-all` does.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("more.txt")


def read_names() -> list[str]:
    """Reads the lines of the list: a test with its parameters, a test with all of them, or a file."""
    lines = (line.strip() for line in FILE.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def mark_more(items: Iterable[pytest.Item]) -> None:
    """Marks the tests of the list `more`."""
    names = set(read_names())
    for item in items:
        file = item.nodeid.partition("::")[0]
        if names & {item.nodeid, item.nodeid.partition("[")[0], file}:
            item.add_marker(pytest.mark.more)
