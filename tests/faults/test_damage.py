"""Damage to the files of a run is noticed by the real `--resume`; the command has all of it."""

from pathlib import Path

import pytest

from tests.faults.case import BAD
from tests.faults.damage import FAULTS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_run")]
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


@pytest.mark.parametrize("name", CHEAP)
def test_damage_is_noticed(name: str, tmp_path: Path):
    assert CASES[name].run(tmp_path) in ("refused", "repaired")


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in CASES if name not in CHEAP])
def test_other_damage_is_noticed_or_harmless(name: str, tmp_path: Path):
    assert CASES[name].run(tmp_path) not in BAD


def test_at_least_80_faults_are_listed():
    assert len(FAULTS) >= 80
