"""Prints the CPU seconds of every test file: `make test ARGS="-p tests.cpu_times"`.

Wall time depends on what else a machine does. These are the seconds that a test process and the processes it waited for
have spent, in threads too. What the tests of a file share is counted where it is made first.
"""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

NAME = "cpu_seconds"
STARTS = "(starts and collection)"
DEAREST = 40
"""Tests that are listed for themselves."""
# By file, and what the processes did before their first test.
_spent: Counter[str] = Counter()
_tests: Counter[str] = Counter()
_of_test: Counter[str] = Counter()
_last = {NAME: 0.0}


def cpu_seconds() -> float:
    """Returns what this process has spent, and the ended processes that it started."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _since_last() -> float:
    """Returns what was spent since the last call."""
    now = cpu_seconds()
    before, _last[NAME] = _last[NAME], now
    return now - before


def pytest_collection_finish() -> None:
    """Begins to count for the first test."""
    _spent[STARTS] += _since_last()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Adds to a report what was spent since the last one."""
    report = yield
    report.user_properties.append((NAME, _since_last()))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Sums over the tests of a file."""
    file = report.nodeid.partition("::")[0]
    spent = sum(value for name, value in report.user_properties if name == NAME)
    _spent[file] += spent
    _of_test[report.nodeid] += spent
    _tests[file] += report.when == "call"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Sends what a worker did before its first test to the process that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[NAME] = _spent[STARTS]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes what a worker sent."""
    _spent[STARTS] += getattr(node, "workeroutput", {}).get(NAME, 0.0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the dearest tests, then all files."""
    terminalreporter.section("CPU seconds")
    for test, spent in _of_test.most_common(DEAREST):
        terminalreporter.write_line(f"{spent:8.1f}         {test}")
    for file, spent in _spent.most_common():
        terminalreporter.write_line(f"{spent:8.1f} {_tests[file]:6d}  {file}")
    terminalreporter.write_line(f"{sum(_spent.values()):8.1f} {sum(_tests.values()):6d}  all")
