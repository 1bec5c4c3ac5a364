"""Every fault of a server ends in a clear message, or is put right."""

import pytest

from tests.faults.case import BAD, Fault
from tests.faults.server import CASES, FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_a_server_is_clear(fault: Fault, tmp_path):
    assert fault.run(tmp_path) not in BAD


def test_every_listed_fault_is_covered():
    assert len(CASES) == 52
