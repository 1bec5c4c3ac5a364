"""The measurement of router replay, on a problem of seconds."""

import json
import pathlib

import pytest

from benchmarks import routing


def test_each_way_is_measured_and_reported(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "routing.json"
    assert routing.main(["--quick", "--seeds", "1", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert all(f"| {title} |" in printed for title in routing.ROWS.values())
    (seed,) = json.loads(file.read_text())["seeds"]
    assert seed["replayed"]["flips"] == seed["chosen"]["flips"]
    assert seed["shifted"]["largest"] > seed["replayed"]["largest"]
