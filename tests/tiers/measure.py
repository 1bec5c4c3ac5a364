"""Writes what each test costs and which lines of `kljax` and `train` it reaches: `pytest -p tests.tiers.measure`.

Every process writes into the folder that `KLJAX_MEASURED` names. Lines that a test reaches in a process of its own are
not seen. What the tests of a file share is counted where it is made first.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def cpu_seconds() -> float:
    """Returns what this process has spent, and the ended processes that it started."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Measure:
    """Measures the tests of one process."""

    def __init__(self, folder: Path) -> None:
        import coverage

        folder.mkdir(parents=True, exist_ok=True)
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self.costs = (folder / f"{worker}.costs").open("w", encoding="utf-8", buffering=1)
        self.lines = coverage.Coverage(
            data_file=str(folder / f"{worker}.coverage"),
            source=[str(ROOT / "kljax"), str(ROOT / "train")],
            config_file=False,
            concurrency=["thread"],
        )
        self.lines.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measures one test, with the fixtures that it is the first to need."""
        self.lines.switch_context(item.nodeid)
        before = cpu_seconds()
        result = yield
        self.costs.write(json.dumps([item.nodeid, round(cpu_seconds() - before, 3)]) + "\n")
        self.lines.switch_context("")
        return result

    def pytest_sessionfinish(self) -> None:
        """Writes the lines."""
        self.lines.stop()
        self.lines.save()
        self.costs.close()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Begins before the sources are imported."""
    early_config.pluginmanager.register(Measure(Path(os.environ["KLJAX_MEASURED"])))
