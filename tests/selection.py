"""The tests that `make test` leaves to others, by two lists beside this file.

Those of `more.txt` run by `make test-all`, as in CI; those of `nightly.txt` by `make test-thorough`, as in CI at night.
Of most, another test states as much for less; some that run at night have none. `make test-all ARGS="-p
tests.cpu_times"` measures what each test costs, and `python -m tests.mutants` whether `make test` still notices what
`make test-all` does.
"""

import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

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


@functools.cache
def listed_files(mark: str) -> Mapping[str, bool]:
    """Returns the files of the list of a mark: whether the list has the whole file."""
    names = set(read_names(mark))
    return {file: file in names for file in (name.partition("::")[0] for name in names)}


@functools.cache
def may_select(expression: str, file: str) -> bool:
    """Says whether an expression of marks may select a test of a file, without a look into the file.

    Which tests have the mark `more`, the lists alone say. A test may have any other mark by itself.
    """
    if not expression:
        return True
    try:
        compiled = Expression.compile(expression)
    except Exception:  # pytest says what is wrong with it
        return True
    words = set(re.findall(r"[^\W\d]\w*", expression)) - {"and", "or", "not"}
    values = dict.fromkeys(words, (True, False))
    for mark in MARKS:
        files = listed_files(mark)
        if files.get(file):
            values[mark] = (True,)
        elif mark == "more" and file not in files:
            values[mark] = (False,)
    choices = (dict(zip(values, choice, strict=True)) for choice in itertools.product(*values.values()))
    return any(compiled.evaluate(lambda name, /, chosen=chosen, **_: chosen[name]) for chosen in choices)
