"""A signal while completions are sampled leaves the step, and the run that is continued has not noticed."""

import os
import signal
import threading
import time

import pytest

from tests.integration.command import records, run_here
from tests.train.rollouts.fake_server import PROBES, Digits, serving
from train.data.tokenizers import ByteTokenizer
from train.rollouts.sampler import windows

SMOKE = ("configs/smoke.yaml", "steps=3", "eval.prompts=0", "report.rollouts=0", "correction=[]")
STOPPED = "interrupted after step 1 of 3; saved, continue with --resume"


class SlowServer(Digits):
    """Sends SIGTERM to this process when it is asked for the second step, and keeps that request waiting."""

    signalled = 0.0
    ended = threading.Event()

    def __call__(self, path: str, body: dict):
        if "completions" in path and len(self.bodies) == PROBES + 16 + 8 and not self.signalled:
            self.signalled = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
        if self.signalled and not self.ended.is_set() and "completions" in path:
            self.ended.wait(60)
            return None
        return super().__call__(path, body)


def test_step_is_left_while_a_server_samples(tmp_path):
    server = SlowServer(ByteTokenizer().eos_id)
    with serving(server) as url:
        source = f"rollout.source={{type: openai, url: '{url}', model: m, sync: none, retries: 0}}"
        options = (*SMOKE, source, f"output={tmp_path}", "warm_start.steps=0")
        stopped = run_here(*options)
        seconds = time.monotonic() - server.signalled
        server.ended.set()
        assert (stopped.returncode, seconds < 10) == (130, True), stopped.stderr
        assert STOPPED in stopped.stderr
        root = tmp_path / "smoke"
        assert [record["step"] for record in records(root, "train")] == [1]
        run_here(*options, "--resume").succeeded()
        run_here(*options, "name=whole").succeeded()
    assert (root / "metrics.jsonl").read_text() == (tmp_path / "whole" / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_step_is_left_between_windows_of_sampling(monkeypatch, tmp_path):
    monkeypatch.setattr(windows, "FIRST_WINDOW", 4)
    options = (*SMOKE, "data.max_completion_length=16", f"output={tmp_path}", "warm_start.steps=0")
    made = windows.WindowedSampler.window
    calls: list[int] = []

    def window(self, number: int):
        # In the second step the signal comes while its first window is decoded on the devices.
        calls.append(number)
        return made(self, number)

    whole = run_here(*options, "name=whole").succeeded()
    first = windows.WindowedSampler.__call__

    def call(self, *arguments, **others):
        calls.append(0)
        if calls.count(0) == 2:
            monkeypatch.setattr(windows.WindowedSampler, "window", window)
            os.kill(os.getpid(), signal.SIGTERM)
        return first(self, *arguments, **others)

    monkeypatch.setattr(windows.WindowedSampler, "__call__", call)
    stopped = run_here(*options)
    assert (stopped.returncode, calls) == (130, [0, 0]), stopped.stderr
    assert STOPPED in stopped.stderr
    monkeypatch.setattr(windows.WindowedSampler, "__call__", first)
    continued = run_here(*options, "--resume").succeeded()
    assert (continued.root / "metrics.jsonl").read_text() == (whole.root / "metrics.jsonl").read_text()
