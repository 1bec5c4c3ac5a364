"""Every fault of a file of prompts or completions is named with file and line."""

import pytest

from tests.faults.case import BAD, Fault
from tests.faults.data import FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_data_is_named(fault: Fault, tmp_path):
    assert fault.run(tmp_path) not in BAD
