"""Failures of episodes: which are shown, how often, and when a run ends."""

import dataclasses

import jax
import pytest

from train.distributed.global_arrays import RowSplit
from train.rollouts.episodes import failures
from train.rollouts.episodes.failures import FailureWatch
from train.rollouts.episodes.turns import Episode
from train.rollouts.source import Request, SourceError


def request(step: int, first_row: int | None = None) -> Request:
    rows = RowSplit(0, *[jax.numpy.zeros(0)] * 2)
    return Request([], 4, step, jax.random.key(0), rows, first_row=first_row)


def episodes(*failures: tuple[str, str] | None) -> list[Episode]:
    return [dataclasses.replace(Episode(), failure=failure) for failure in failures]


def test_text_that_a_program_posts_is_shown_without_control_characters(capsys):
    watch = FailureWatch(0.5, "rollout.source.max_failures")
    watch.check(episodes(None, ("exception", "the shop\x1b[2J is closed"), ("ended", "killed"), None), request(6))
    assert capsys.readouterr().err == (
        "warning: step 7: 2 of 4 episodes failed (1 exception, 1 ended); the first: the shop?[2J is closed\n"
    )


def test_failures_of_a_name_are_shown_once_in_50_steps(capsys):
    watch = FailureWatch(0.5, "environment.max_failures")
    for step in range(60):
        watch.check(episodes(("exception", f"fault {step}"), None), request(step))
    first, *later, count = capsys.readouterr().err.splitlines()
    assert first.endswith("fault 0")
    assert [line.rpartition(" ")[2] for line in later] == ["50"]
    assert count == "So did episodes of 49 batches since the last such warning"
    watch.check(episodes(("step_seconds", "late"), None), request(60))
    watch.check(episodes(None, ("exception", "held out"), None), request(60, first_row=0))
    assert [line.partition(";")[0] for line in capsys.readouterr().err.splitlines()] == [
        "warning: step 61: 1 of 2 episodes failed (1 step_seconds)",
        "warning: step 60: 1 of 3 held-out episodes failed (1 exception)",
    ]


def test_failures_of_all_processes_count_together(monkeypatch):
    """A process all of whose episodes failed goes on with those of another."""
    monkeypatch.setattr(failures, "exchange_json", lambda _, own: [[3, []], own])
    FailureWatch(0.25, "environment.max_failures").check(episodes(("exception", "a fault")), request(0))
    with pytest.raises(SourceError, match=r"max_failures: got 0.2, but 1 of 4 episodes failed \(1 exception\); the"):
        FailureWatch(0.2, "environment.max_failures").check(episodes(("exception", "a fault")), request(0))


def test_step_without_an_episode_ends_the_run_and_an_evaluation_does_not(capsys):
    watch = FailureWatch(1.0, "environment.max_failures")
    lost = episodes(("exception", "no answer"), ("exception", "no network"))
    with pytest.raises(SourceError, match=r"max_failures: got 1, but nothing is left to train on: 2 of 2 .*no answer$"):
        watch.check(lost, request(0))
    watch.check(lost, request(0, first_row=0))
    assert "2 of 2 held-out episodes failed" in capsys.readouterr().err
    watch.check(episodes(None, None), request(0))
    assert not capsys.readouterr().err
