"""Faults of reward functions end in a clear message."""

from pathlib import Path

import pytest

from tests.faults.case import BAD, Fault
from tests.faults.rewards import FAULTS


# tests/train/data/test_tasks_judged.py asks the same of math-verify.
@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if "math-verify" not in fault.name], ids=lambda fault: fault.name
)
def test_a_fault_is_noticed(fault: Fault, tmp_path: Path):
    assert fault.run(tmp_path) not in BAD
