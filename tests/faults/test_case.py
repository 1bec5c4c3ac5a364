"""The table has a row for each fault, whatever its check does."""

import subprocess
from pathlib import Path

import pytest

from tests.faults.case import Fault, count


def _times_out(place: Path) -> str:
    raise subprocess.TimeoutExpired(str(place), 300)


def test_count_after_a_timeout_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    faults = [Fault("area", "hangs", _times_out, "a reason"), Fault("area", "ends", lambda _: "silent", "a reason")]
    counted = list(count(faults, tmp_path))
    assert [outcome for _, outcome in counted] == ["unfinished", "silent"]
    assert [fault.fails(outcome) for fault, outcome in counted] == [True, False]
    assert "timed out after 300 seconds" in capsys.readouterr().err
