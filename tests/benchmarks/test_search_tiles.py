"""The search for tile sizes, on a problem of a second."""

import re

import pytest

from benchmarks import search_tiles


def test_grid_is_timed_and_reported_as_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["--tokens", "32,64", "--vocab", "128"]
    assert search_tiles.main(["--size", "96x16x300", *grid, "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^\| (\d+) \| (\d+) \| \d+\.\d\d \| [\d.]+ \|", printed, re.MULTILINE)
    assert {("32", "128"), ("64", "128")} < set(rows)
    assert printed.count("<- present") == 1
    assert re.search(r'^    "cpu": Tile\(\d+, \d+\),$', printed, re.MULTILINE)


def test_smallest_of_equally_fast_tiles_is_chosen() -> None:
    assert search_tiles.best({(512, 4096): 1.0, (256, 4096): 1.01, (128, 4096): 1.1}) == (256, 4096)


@pytest.mark.parametrize("wrong", ["12x3", "axb", "0x1x2"])
def test_malformed_size_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        search_tiles.main(["--size", wrong])
    assert f"got {wrong!r}, expected 3 positive numbers" in capsys.readouterr().err
