"""A flipped bit in any file of an export is named when it is loaded."""

from pathlib import Path

import pytest

from tests.faults.case import Fault
from tests.faults.exports import FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_flip_of_an_export_is_refused(fault: Fault, tmp_path: Path):
    assert fault.run(tmp_path) == "refused"
