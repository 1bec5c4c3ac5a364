"""Every mistake of a config that the study tried is refused with the name of what is wrong."""

import pathlib

import pytest

from tests.faults.case import Fault
from tests.faults.configs import FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_mistake_is_named(fault: Fault, tmp_path: pathlib.Path) -> None:
    assert fault.run(tmp_path) == "refused"
