"""The benchmark of logging, checkpoints and a server: its ratios, its targets, and a smoke test."""

import json

import pytest

from benchmarks import overhead
from benchmarks.overhead import CYCLE, RECORDED, StepSizes, kind_of


def parts(pace: float, step: float) -> dict[str, float]:
    """A step whose update takes a little longer than the answer."""
    return {"step": step, "answer": 0.9 * pace, "update": pace}


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
        "server": [{"ahead: 0": parts(pace, 2 * pace), "ahead: 1": parts(pace, 1.1 * pace)} for pace in slow],
    }


def test_steps_are_compared_with_plain_steps_per_round():
    measured = report(logged=1.01, saved=1.2, after=1.1)
    made = overhead.report(measured)
    verdicts = {check.title: (round(check.value, 4), check.verdict) for check in made.checks}
    assert verdicts == {
        "metrics in every step": (1.01, "met"),
        "the step that saves the state": (1.2, "missed"),
        "a verifier of a tenth of the step": (1.0, "met"),
        "a server one step ahead": (1.1, "met"),
    }
    text = made.text
    assert "| and the state is saved | 2.400 | 1.200 | 2.000 | 1.000 | 0.4000 |" in text
    assert "| a step with `ahead: 0` | 4.000 | 2.00 |" in text
    assert f"{StepSizes(**measured['work']).rows} completions of 3 tokens" in text


def test_steps_scored_once_are_compared_per_round():
    names = {name: updates * (0.5 if mib else 1) for name, (updates, mib) in RECORDED.items()}
    rounds = [{name: [pace * n, 2 * pace * n] for name, n in names.items()} for pace in (1, 2)]
    measured = report() | {"recorded": rounds}
    text = overhead.report(measured).text
    assert "| 2 updates on a batch, scored once | 1.500 | 0.50 | 3.000 | 0.50 |" in text
    assert "| 1 update on a batch, scored in every epoch | 1.500 | 1.00 | 3.000 | 1.00 |" in text


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
    assert overhead.main(["--quick", "--rounds", "1", "--recorded", "--json", str(path)]) == 0
    assert overhead.report(json.loads(path.read_text())).text == capsys.readouterr().out
