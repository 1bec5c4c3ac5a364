"""The benchmark of packed rows: which seconds are compared, and that it runs. No time is looked at."""

import json

import pytest

from benchmarks.harness.report import ContenderResult
from benchmarks.suites.model import packed
from benchmarks.suites.model.long_tail import Tail

TAIL = Tail(rows=8, group=2, prompt_length=4, max_new_tokens=12, median=3.0, vocab=32, layers=1)


def of_norms(**norms: float):
    return lambda tail: (
        {name: lambda norm=norm: (None, norm) for name, norm in norms.items()},
        dict.fromkeys(norms, 1.0),
    )


def test_packed_rows_are_compared_with_padding_and_tokens(monkeypatch):
    seconds = {"padded": 8.0, "packed": 2.0, "full": 10.0}
    results = {name: ContenderResult(name, seconds={"run": [(1.0, cpu)]}) for name, cpu in seconds.items()}
    monkeypatch.setattr(packed, "programs_of", of_norms(padded=1.0, packed=1.0, full=2.0))
    monkeypatch.setattr(packed, "race_programs", lambda programs, rounds: results)
    report = packed.measure(TAIL, 1)
    share = (16 + TAIL.lengths().sum()) / (16 + 8 * 12)
    assert report["real_share"] == pytest.approx(share)
    assert report["ratios"]["cpu"] == {"padded": 0.25, "share": pytest.approx(0.2 / share)}
    text = packed.report(report).text
    assert "| CPU seconds of packed rows over padded rows | at most 0.45 | 0.25 | 1.00 | met |" in text


def test_differing_gradients_are_an_error(monkeypatch):
    monkeypatch.setattr(packed, "programs_of", of_norms(padded=1.0, packed=1.1, full=1.0))
    with pytest.raises(RuntimeError, match="the gradient has norm"):
        packed.measure(TAIL, 1)


def test_mean_length_is_a_quarter_of_the_longest():
    lengths = packed.TAIL.lengths()
    assert lengths.max() == packed.TAIL.max_new_tokens
    assert lengths.mean() / lengths.max() == pytest.approx(0.25, abs=0.01)


@pytest.mark.thorough
def test_the_updates_run_and_agree(tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "TAIL", TAIL)
    assert packed.main(["--rounds", "1", "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["packed"]["share"] > report["padded"]["share"]
