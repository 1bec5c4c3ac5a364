"""Flipped bits are noticed: some that need no run; `python -m tests.faults --areas flips` has 200."""

import pytest

from tests.faults.case import BAD
from tests.faults.flips import FAULTS

CHEAP = ("a reference that follows the policy", "an export")
CASES = [fault for fault in FAULTS if fault.name.startswith(CHEAP) and int(fault.name.split()[-1]) < 6]


@pytest.mark.parametrize("fault", CASES, ids=lambda fault: fault.name)
def test_a_flipped_bit_is_noticed(fault, tmp_path):
    assert fault.run(tmp_path) not in BAD


def test_two_hundred_flips_are_listed():
    assert len(FAULTS) == 200
    assert len(CASES) == 12
