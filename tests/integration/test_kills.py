"""A run with any feature, killed at any moment and continued, ends bit by bit where the uninterrupted one ends."""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.integration.command import TINY, assert_same_arrays, finish, run_here, start, state_arrays, wait_for

STEPS = 4
QUICK = ("configs/quickstart.yaml", *TINY, f"steps={STEPS}", "optim.warmup_steps=0", "warm_start.steps=30")
FEATURES = {
    "lora": ("lora={rank: 2, alpha: 4.0}", "reference={source: base}"),
    "average": ("reference={source: ema, decay: 0.9}",),
    "corrected average": ("reference={source: bema, every: 2}",),
    "refreshed": ("reference={source: step, step: 0, refresh_every: 2}",),
    "lag": ("rollout.policy_lag=2", "correction=[{type: truncated_importance_weights}]"),
    "controllers": (
        "kl.loss.controller={type: pi, target: 0.1, kp: 0.1, ki: 0.1}",
        "kl.reward={coef: 0.1, controller: {type: adaptive, target: 0.1, horizon: 100}}",
    ),
    "epochs": ("optim={epochs: 2, updates_per_batch: 2, micro_batches: 2}", "loss={type: gspo}"),
    # Beyond the limit after nearly every step.
    "roll_back": ("guard={max_kl: 1e-6, action: roll_back, max_actions: 9}", "checkpoint.every=2"),
    "slower": ("guard={max_kl: 1e-6, action: lower_learning_rate, max_actions: 9}",),
    "skipped": ("kl.loss.coef=3e38", "guard.max_skipped=99"),
    "muon": ("optim.optimizer=muon", "optim.schedule={type: cosine, decay_steps: 4}"),
}
KILLS = 20


def log_of(root: Path) -> int:
    """Counts the bytes that a run has written to its metrics."""
    path = root / "metrics.jsonl"
    return path.stat().st_size if path.exists() else 0


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(KILLS))
def test_run_killed_at_any_moment_resumes(shared, env, tmp_path, seed):
    drawn = random.Random(seed)
    name = list(FEATURES)[seed % len(FEATURES)]
    recipe = (*QUICK, *FEATURES[name])
    uninterrupted = shared(*recipe).succeeded()
    size = log_of(uninterrupted.root)
    # Moments are counted by what is in the metrics, so that a fast and a slow machine draw alike, and then by time.
    kills = sorted((drawn.random() * size, drawn.random() * 0.3) for _ in range(drawn.randint(1, 2)))
    root = tmp_path / "quickstart"

    def arguments() -> tuple[str, ...]:
        started = (root / "config.yaml").exists()
        return (*recipe, f"output={tmp_path}", *(["--resume"] if started else []))

    for written, seconds in kills:
        process = start(env, *arguments())
        wait_for(process, lambda: log_of(root) >= written)  # noqa: B023 (called at once)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        finish(process)
    assert run_here(*arguments()).succeeded().root == root
    assert (root / "metrics.jsonl").read_text() == (uninterrupted.root / "metrics.jsonl").read_text(), name
    for step in (0, STEPS):
        assert_same_arrays(state_arrays(root, step), state_arrays(uninterrupted.root, step))
    shutil.rmtree(tmp_path)
