"""Reads what `tests.tiers.measure` wrote."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FREE = 0.005
"""CPU seconds that the smallest test counts."""
Lines = frozenset[tuple[str, int]]
"""Files and the numbers of lines."""


def read_costs(folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Reads the CPU seconds of each test alone, and of what the tests of each file share."""
    own: dict[str, float] = {}
    shared: dict[str, dict[str, float]] = {}
    for path in folder.glob("*.costs"):
        for row in path.read_text("utf-8").splitlines():
            test, seconds, of_file = json.loads(row)
            own[test] = max(seconds, FREE)
            # Each process that runs tests of a file sets up its own.
            of_processes = shared.setdefault(file_of(test), {})
            of_processes[path.name] = of_processes.get(path.name, 0.0) + of_file
    return own, {file: max(of_processes.values()) for file, of_processes in shared.items()}


def file_of(test: str) -> str:
    """Returns the file of a test."""
    return test.partition("::")[0]


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
    costs, _ = read_costs(folder)
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
