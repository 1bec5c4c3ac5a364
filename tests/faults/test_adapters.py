"""Faults of PEFT folders end in a clear message."""

from pathlib import Path

import pytest

from tests.faults.adapters import FAULTS
from tests.faults.case import BAD, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_noticed(fault: Fault, tmp_path: Path):
    assert fault.run(tmp_path) not in BAD
