"""Runs of random numbers, and their pages."""

from pathlib import Path

import pytest

from benchmarks.report_page import make_run
from train.report.page import render
from train.report.runs import read_run

TOKENS, ROLLOUTS = 12, 96


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> list[Path]:
    """The directories of two runs that differ by their seed."""
    root = tmp_path_factory.mktemp("runs")
    return [make_run(root / name, rollouts=ROLLOUTS, tokens=TOKENS, seed=seed) for seed, name in enumerate("ab")]


@pytest.fixture(scope="session")
def pages(runs) -> dict[str, Path]:
    """Files with the page of the first run, and of both."""
    files = {}
    for name, paths in {"one": runs[:1], "both": runs}.items():
        files[name] = runs[0].parent / f"{name}.html"
        files[name].write_text(render(name, [read_run(path, rollouts=1000) for path in paths]), encoding="utf-8")
    return files
