"""Faults of model folders end in a clear message."""

from pathlib import Path

import pytest

from tests.faults.case import BAD, Fault
from tests.faults.folders import FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_a_folder_is_noticed(fault: Fault, tmp_path: Path):
    assert fault.run(tmp_path) not in BAD
