"""Runs of random numbers, and their pages."""

from pathlib import Path

import numpy as np
import pytest

from tests.parity import write_dump
from tests.train.report.random_run import make_run
from train.report.__main__ import main
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


@pytest.fixture(scope="session")
def dumps(tmp_path_factory) -> Path:
    """The page of two dumps that name the estimator k3; the KL of the second is that of k2."""
    root, rng = tmp_path_factory.mktemp("dumps"), np.random.default_rng(0)
    log_probs = -rng.exponential(size=(4, 6))
    ref_log_probs = log_probs + rng.normal(size=log_probs.shape) / 2
    gap = ref_log_probs - log_probs
    values = {"right": np.expm1(gap) - gap, "wrong": gap**2 / 2}
    mask = np.arange(6) < np.array([[6], [4], [2], [5]])
    for name, kl in values.items():
        arrays = {"log_probs": log_probs, "ref_log_probs": ref_log_probs, "mask": mask, "kl": kl}
        write_dump(root / f"{name}.npz", {"kljax_parity": 1, "kl": {"estimator": "k3", "coef": 0.1}}, arrays)
    page = root / "page.html"
    assert main([str(root / "right.npz"), str(root / "wrong.npz"), "--output", str(page)]) == 0
    return page
