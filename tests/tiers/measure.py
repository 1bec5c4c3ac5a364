"""Writes what each test costs and which lines of `kljax` and `train` it reaches: `pytest -p tests.tiers.measure`.

Every process writes into the folder that `KLJAX_MEASURED` names. Lines that a test reaches in a process of its own are
not seen. Fixtures that tests share count for their file, whichever test needs them first.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cpu_times import cpu_seconds

ROOT = Path(__file__).parents[2]


class Measure:
    """Measures the tests of one process."""

    def __init__(self, folder: Path) -> None:
        import coverage

        folder.mkdir(parents=True, exist_ok=True)
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self.costs = (folder / f"{worker}.costs").open("w", encoding="utf-8", buffering=1)
        self.shared = 0.0
        self.lines = coverage.Coverage(
            data_file=str(folder / f"{worker}.coverage"),
            source=[str(ROOT / "kljax"), str(ROOT / "train")],
            config_file=False,
            concurrency=["thread"],
        )
        self.lines.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measures one test, apart from the fixtures that others share."""
        self.lines.switch_context(item.nodeid)
        self.shared = 0.0
        before = cpu_seconds()
        result = yield
        own = cpu_seconds() - before - self.shared
        self.costs.write(json.dumps([item.nodeid, round(own, 3), round(self.shared, 3)]) + "\n")
        self.lines.switch_context("")
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """Measures a fixture that others share; one fixture that needs another does not run inside it."""
        before = cpu_seconds()
        result = yield
        if fixturedef.scope != "function":
            self.shared += cpu_seconds() - before
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
