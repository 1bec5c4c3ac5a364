"""The race of turns."""

import json
import pathlib

import pytest

from benchmarks import turns
from tests.benchmarks.test_results import RESULTS


def test_turns_race_and_are_reported(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "turns.json"
    assert turns.main(["--quick", "--sessions", "2", "16", "--rounds", "1", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert all(f"| {title} |" in printed for title in turns.CONTENDERS.values())
    assert "16 sessions: tokens per CPU second, over the call" in printed
    assert "2 sessions: programs" in printed
    assert "2 sessions: tokens per CPU second" not in printed
    fields = json.loads(file.read_text())
    assert turns.report(fields).text == printed


def test_other_log_probs_fail() -> None:
    fields = json.loads((RESULTS / "turns-cpu.json").read_text())
    assert not turns.report(fields).failures
    fields["sizes"][0]["counts"]["difference"] = float("nan")
    (failure,) = turns.report(fields).failures
    assert failure.endswith("got a difference of nan from the log-probs of the trainer, expected at most 5e-06")


def test_instruction_set_that_is_missing_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(turns.instructions, "lacking", list)
    with pytest.raises(SystemExit):
        turns.main(["--isa", "avx512"])
    assert "argument --isa: got avx512, which this processor lacks" in capsys.readouterr().err
