"""The race of grouped products."""

import json
import pathlib
import re

import pytest

from benchmarks import grouped


def test_products_race_and_are_reported(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "grouped.json"
    assert grouped.main(["--quick", "--rounds", "1", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert all(f"| {title}, with gradients |" in printed for title in grouped.TITLES.values())
    assert "7 rows an expert: forward, over equal groups" in printed
    assert "512 rows an expert: with gradients, over dense" in printed
    assert "7 rows an expert: forward, over dense" not in printed
    assert "2 of 4 experts: sampling, over dense" in printed
    fields = json.loads(file.read_text())
    assert grouped.report(fields).text == printed
    fields["decoders"][0]["results"]["dense"] |= {"seconds": {}, "problem": "no memory"}
    for entry in fields["sizes"]:
        entry["results"]["dense_forward"] |= {"seconds": {}, "problem": "no memory"}
    failed = grouped.report(fields).text
    assert f"| {grouped.DECODERS['dense']} |  |  |  |" in failed
    assert not re.search(r"\| inf|\| 0(\.0+)? \|", failed)
