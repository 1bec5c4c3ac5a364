"""The benchmark of logging, checkpoints and a verifier: its ratios, its targets, and a smoke test."""

import json

import pytest

from benchmarks import overhead
from benchmarks.overhead import CYCLE, StepSizes, kind_of


def report(**seconds: float) -> dict:
    """Three rounds on a machine that gets slower; each kind of step takes so many plain steps."""
    kinds = {kind: seconds.get(kind, 1.0) for kind in overhead.TITLES}
    slow = (1.0, 2.0, 4.0)
    return {
        "machine": {"date": "today", "processor": "a processor"},
        "versions": {"kljax": "1"},
        "load": [0.5, 0.6],
        "work": {"width": 8, "prompts": 2, "samples": 2, "completion_length": 3},
        "rounds": len(slow),
        "bytes": 2e6,
        "steps": [{kind: [[pace * value, pace, pace * (value - 1)]] for kind, value in kinds.items()} for pace in slow],
    }


def test_steps_are_compared_with_plain_steps_per_round():
    measured = report(logged=1.01, saved=1.2, after=1.1)
    made = overhead.report(measured)
    verdicts = {check.title: (round(check.value, 4), check.verdict) for check in made.checks}
    assert verdicts == {
        "metrics in every step": (1.01, "met"),
        "the step that saves the state": (1.2, "missed"),
        "a verifier of a tenth of the step": (1.0, "met"),
    }
    text = made.text
    assert "| and the state is saved | 2.400 | 1.200 | 2.000 | 1.000 | 0.4000 |" in text
    assert f"{StepSizes(**measured['work']).rows} completions of 3 tokens" in text


def test_trainer_saves_at_the_last_step_per_round():
    assert [kind_of(step) for step in range(1, 15)] == [*CYCLE, *CYCLE]
    assert [step for step in range(1, 15) if kind_of(step) == "saved"] == [7, 14]


@pytest.mark.thorough
def test_a_smoke_run_ends_in_tables(tmp_path, capsys):
    path = tmp_path / "found.json"
    assert overhead.main(["--quick", "--rounds", "1", "--json", str(path)]) == 0
    recorded = json.loads(path.read_text())
    assert overhead.report(recorded).text == capsys.readouterr().out
    assert [len(pairs) for pairs in recorded["steps"][0].values()] == [1, 2, 2, 1, 1]
    assert recorded["bytes"] > 0
