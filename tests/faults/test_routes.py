"""Every fault of recorded routes is named with its field; routes without a fault are read."""

import pytest

from tests.faults.case import BAD, Fault
from tests.faults.routes import FAULTS, WRITERS, damaged


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_routes_is_named(fault: Fault, tmp_path):
    assert fault.run(tmp_path) not in BAD


@pytest.mark.parametrize("kind", WRITERS)
def test_undamaged_routes_are_read(kind, tmp_path):
    assert damaged(WRITERS[kind], lambda routes: routes, ())(tmp_path) == "silent"
