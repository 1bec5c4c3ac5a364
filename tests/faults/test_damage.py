"""Damage to the files of a run is noticed by the real `--resume`; the command has all of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import programs
from tests.faults import runs
from tests.faults.case import BAD
from tests.faults.damage import FAULTS
from tests.run_programs import shared_by_runs

pytestmark = pytest.mark.slow
CHEAP = (
    "config.yaml, a digit changed",
    "config.yaml, cut",
    "reference.json, emptied",
    "reference.json, deleted",
    "metrics.jsonl, a digit changed",
    "metrics.jsonl, cut",
    "metrics.jsonl, deleted",
    "base, a data file, cut",
    "base, deleted",
    "base, of another run",
    "checkpoints/4, of another run",
    "checkpoints/4, the step before in its place",
)
CASES = {fault.name: fault for fault in FAULTS}


@pytest.fixture(scope="module", autouse=True)
def _shared_run(tmp_path_factory) -> Iterator[None]:
    """The run and its compiled programs are those of other tests, and the resumed runs share what they trace."""
    runs.share(programs.session_directory(tmp_path_factory.getbasetemp()))
    with shared_by_runs():
        yield


@pytest.mark.parametrize("name", CHEAP)
def test_damage_is_noticed(name: str, tmp_path: Path):
    assert CASES[name].run(tmp_path) in ("refused", "repaired")


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in CASES if name not in CHEAP])
def test_other_damage_is_noticed_or_harmless(name: str, tmp_path: Path):
    assert CASES[name].run(tmp_path) not in BAD


def test_at_least_80_faults_are_listed():
    assert len(FAULTS) >= 80
