"""Faults of a run in two processes; `tests/integration/test_lost_process.py` has some of them in `make test`."""

from pathlib import Path

import pytest

from tests.faults.case import BAD, Fault
from tests.faults.processes import FAULTS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_run")]


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_of_two_processes_is_noticed(fault: Fault, tmp_path: Path):
    assert fault.run(tmp_path) not in BAD
