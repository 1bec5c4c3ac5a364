"""The benchmark of limits: the same tokens and the same KV cache under every limit. No time is looked at."""

import json

import numpy as np
import pytest

from benchmarks import rollout
from benchmarks.suites.model.problem import ModelWork
from train.rollouts.sampler import windows

WORK = ModelWork(vocab=32, layers=1, samples=2, prompt_length=4, completion_length=8)


def test_a_larger_limit_needs_no_more_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout, "LIMITED", WORK)
    monkeypatch.setattr(windows, "FIRST_WINDOW", 4)
    files = tmp_path / "found.json", tmp_path / "found.md"
    command = [
        "--limits",
        "8,32",
        "--rounds",
        "1",
        "--threads",
        "0",
        "--json",
        str(files[0]),
        "--markdown",
        str(files[1]),
    ]
    assert rollout.main(command) == 0
    recorded = json.loads(files[0].read_text())
    longest = max(recorded["lengths"])
    assert recorded["lengths"] == rollout.lengths_of(WORK).tolist()
    # Keys and values of 2 heads of 64, in float32: 2 prompts of 4 columns, 4 rows with the columns of a window.
    column = 2 * 2 * 64 * 4
    reached = 4 if longest <= 4 else 8
    for row in recorded["rows"]:
        window = row["limit"] if row["way"] == "whole" else reached
        assert row["window"] == window
        assert row["cache_bytes"] == column * (2 * 4 + 4 * window)
    assert [row["memory"] for row in recorded["rows"] if row["way"] == "windows"] == [1, 1]
    assert files[1].read_text() == rollout.report(recorded).text


def test_limits_with_different_tokens_are_an_error(monkeypatch):
    class OtherTokens:
        def __init__(self, *_: object, max_new_tokens: int, **__: object) -> None:
            self.limit = max_new_tokens

        def __call__(self, *arguments: object) -> "OtherTokens":
            return self

        @property
        def tokens(self) -> np.ndarray:
            return np.full((WORK.rows, WORK.prompt_length + self.limit), self.limit)

    monkeypatch.setattr(rollout, "WindowedSampler", OtherTokens)
    with pytest.raises(RuntimeError, match="differ"):
        rollout.measure_limits(WORK, (8, 16), 0)


@pytest.mark.parametrize("text", ["512,256", "0,8", "8,8", "a"])
def test_limits_are_increasing_numbers(text, capsys):
    with pytest.raises(SystemExit):
        rollout.main(["--limits", text])
    assert "--limits" in capsys.readouterr().err
