"""The race of forests against rows."""

import json
import pathlib

import numpy as np
import pytest

from benchmarks import forests


def test_forests_race_and_are_reported(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "forests.json"
    assert forests.main(["--quick", "--rounds", "1", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "2 x (6 + 2 x 4 + 4 x 3) tokens, 2 in a row of 52, over rows | at most 0.57" in printed
    assert "| forest |" in printed
    fields = json.loads(file.read_text())
    assert fields["sizes"][0]["results"]["forest"]["differences"]["sum"] < forests.DIFFERENCE
    assert forests.report(fields).text == printed
    fields["sizes"][0]["results"]["forest"] |= {"seconds": {}, "problem": "no memory"}
    assert "| forest |  |  |  |" in forests.report(fields).text


def test_sizes_count_the_slots_and_pairs_of_the_forest() -> None:
    size = forests.QUICK[0]
    forest = size.forest()
    end = np.asarray(forest.end)
    start = np.asarray(forest.start)
    slots = np.arange(end.shape[1])
    seen = (start[:, :, None] <= slots) & (slots <= slots[:, None]) & (slots[:, None] < end[:, None, :])
    assert end.shape == (1, size.trees * size.slots)
    assert seen.sum() == size.trees * size.pairs
    # Sequences that share a slot have the same token there.
    tokens = size.tokens()
    places = np.asarray(forest.places)
    assert all(len(set(tokens[places == slot].tolist())) == 1 for slot in slots)
