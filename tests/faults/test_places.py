"""Paths that cannot hold a run, and processes that start or continue one together."""

import pytest

from tests.faults.case import BAD
from tests.faults.places import FAULTS, PATHS, can_mount, read_only_disk, start_without_files
from tests.faults.starts import many_starts, two_writers

CASES = [fault for fault in FAULTS if fault.name in PATHS]


@pytest.mark.parametrize("fault", CASES, ids=lambda fault: fault.name)
def test_path_unable_to_hold_a_run_is_refused(fault, tmp_path):
    assert fault.run(tmp_path) == "refused"


def test_twenty_starts_have_names_of_their_own(tmp_path):
    assert many_starts(tmp_path) == "identical"


def test_a_second_writer_is_refused(tmp_path):
    assert two_writers(tmp_path) == "refused"


@pytest.mark.skipif(not can_mount(), reason="this process may not mount a small file system")
@pytest.mark.parametrize("start", [read_only_disk, start_without_files])
def test_start_on_a_disk_without_room_is_refused(start, tmp_path):
    assert start(tmp_path) == "refused"


@pytest.mark.thorough
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in CASES], ids=lambda fault: fault.name)
def test_full_disk_is_reported_in_one_line(fault, tmp_path):
    assert fault.run(tmp_path) not in BAD
