"""The benchmark of digests: a tiny run that ends in a table, and the size of its weights."""

import json
import re

import pytest

from benchmarks import checkpoint


def test_saves_and_restores_are_timed_with_the_digests_of_each(tmp_path, capsys):
    path = tmp_path / "found.json"
    assert checkpoint.main(["--megabytes", "1", "--rounds", "2", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "the fastest of 2 interleaved rounds" in printed
    seconds = json.loads(path.read_text())["seconds"]
    for part in ("save", "restore"):
        digests = seconds[f"digests of a {part}"]
        assert digests > 0
        added = re.search(rf"^\| {part} \| [\d.]+ \| [\d.]+ \| ([\d.]+)% \|$", printed, re.MULTILINE)
        assert float(added[1]) == pytest.approx(100 * digests / seconds[part], abs=0.06)


def test_weights_have_the_size_that_was_asked_for():
    size = sum(leaf.nbytes for leaf in checkpoint.weights(4).values())
    assert size == pytest.approx(4e6, rel=0.1)


def test_a_save_that_fails_is_said(monkeypatch, capsys):
    def failing(tree, scratch):
        return dict.fromkeys(("save", "digests of a save", "restore", "digests of a restore"), lambda: 1 / 0)

    monkeypatch.setattr(checkpoint, "programs_of", failing)
    assert checkpoint.main(["--megabytes", "1", "--rounds", "1"]) == 1
    assert "ERROR save: ZeroDivisionError" in capsys.readouterr().err
