"""A run of episodes that a signal leaves in the middle of one goes on as if nothing had happened."""

import json
import os
import signal

import pytest

from tests.integration.command import records, run_here
from tests.integration.test_shipped_configs import CALCULATOR
from train.rollouts.engine import TurnEngine


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 2, "tensor": 2}], ids=["one device", "mesh"])
def test_step_that_is_left_between_turns_is_run_again(mesh, monkeypatch, tmp_path):
    """To the bit; a mesh has the episodes of one device."""
    options = (
        *CALCULATOR,
        "model.kv_heads=2",
        "steps=3",
        "warm_start.steps=0",
        "eval.prompts=0",
        "report.rollouts=0",
        f"output={tmp_path}",
        f"mesh={json.dumps(mesh)}",
    )
    step, calls = TurnEngine.step, []

    def signalling(self):
        ended = step(self)
        calls.append(self.count["chunks"])
        if self._version == 1 and len(calls) > 2 and not any(call is None for call in calls):
            calls.append(None)
            os.kill(os.getpid(), signal.SIGTERM)
        return ended

    monkeypatch.setattr(TurnEngine, "step", signalling)
    stopped = run_here(*options)
    assert stopped.returncode == 130, stopped.stderr
    assert "interrupted after step 1 of 3; saved, continue with --resume" in stopped.stderr
    root = tmp_path / "calculator"
    assert [record["step"] for record in records(root, "train")] == [1]
    monkeypatch.undo()
    run_here(*options, "--resume").succeeded()
    run_here(*options, "name=whole").succeeded()
    assert (root / "metrics.jsonl").read_text() == (tmp_path / "whole" / "metrics.jsonl").read_text()
    assert all(record["episode_turns"] >= 1 for record in records(root, "train"))
    if mesh:
        run_here(*options, "name=one", "mesh={}").succeeded()
        for name in ("reward", "completion_length", "episode_turns", "episode_tool_calls"):
            first, second = ([record[name] for record in records(tmp_path / x, "train")] for x in ("whole", "one"))
            assert first == second, name
