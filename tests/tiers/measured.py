"""Reads what `tests.tiers.measure` wrote."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FREE = 0.005
"""CPU seconds that the smallest test counts."""
Lines = frozenset[tuple[str, int]]
"""Files and the numbers of lines."""


def read_costs(folder: Path) -> dict[str, float]:
    """Reads the CPU seconds of each test."""
    rows = (json.loads(line) for file in folder.glob("*.costs") for line in file.read_text("utf-8").splitlines())
    return {test: max(seconds, FREE) for test, seconds in rows}


def read_lines(folder: Path) -> dict[str, Lines]:
    """Reads the lines that each test reaches."""
    lines: dict[str, set[tuple[str, int]]] = {}
    for data in _databases(folder):
        for file in data.measured_files():
            for line, tests in data.contexts_by_lineno(file).items():
                for test in filter(None, tests):
                    lines.setdefault(test, set()).add((file, line))
    return {test: frozenset(of_test) for test, of_test in lines.items()}


def tests_reaching(folder: Path, file: str, lines: range) -> list[str]:
    """Lists the tests that reach a line of a file of the repository, the cheapest first."""
    costs = read_costs(folder)
    tests: set[str] = set()
    for data in _databases(folder):
        for path in data.measured_files():
            if path.endswith(f"/{file}"):
                reached = data.contexts_by_lineno(path)
                tests.update(test for line in lines for test in reached.get(line, ()))
    return sorted(tests & costs.keys(), key=costs.__getitem__)


def _databases(folder: Path) -> Iterator[Any]:
    # In the group `measure` of the dependencies.
    import coverage

    for path in folder.glob("*.coverage"):
        data = coverage.CoverageData(str(path))
        data.read()
        yield data
