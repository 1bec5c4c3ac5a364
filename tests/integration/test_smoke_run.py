"""The smallest shipped config through the real command: output, files, and the same again from the same seed."""

import json
import math
import re

import matplotlib.image
import numpy as np
import pytest

from tests.integration.command import (
    assert_same_arrays,
    files,
    records,
    run_here,
    saved_arrays,
    state_arrays,
)
from train.config.load import load
from train.distributed.compile_cache import compiled_anew
from train.run.directory import resume_run
from train.run.glossary import tag_of
from train.weights.remat import with_remat

CONFIG = "configs/smoke.yaml"
STEPS = 2
TRAIN_METRICS = {
    *("reward", "correct", "kl_reference", "rollout_kl", "entropy", "loss", "policy_loss", "kl_loss"),
    *("rollout_kl_loss", "clip_fraction", "ppo_kl", "grad_norm", "completion_length", "finished"),
    *("rollout_log_prob_error", "rollout_occupancy", "skipped_updates", "kl_reference_max", "rollout_kl_max"),
    *("reward_std", "groups_with_spread", "repeated_completions", "copied_groups", "learning_rate"),
    *("sampling_bias", "sampling_bias_z"),
}
TIMES = ("rollout", "rewards", "update", "record", "rollout_tokens_per_second")
EVAL_METRICS = {"accuracy", "correct", "reward", "accuracy_greedy"}


@pytest.fixture(scope="module")
def again(smoke):
    """Runs a command twice into one directory, the second time compiled anew: (files after the first, second run)."""
    before = files(smoke.root)
    with compiled_anew():
        return before, run_here(CONFIG, f"output={smoke.root.parent}").succeeded()


def scalars(directory):
    """Reads `{(tag, step): value}` from the event files of a directory."""
    from tensorboardX import proto

    collected = {}
    for path in directory.glob("events.out.tfevents.*"):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = proto.event_pb2.Event.FromString(data[12 : 12 + length])
            collected |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            data = data[16 + length :]
    return collected


def test_output_is_progress_and_the_table_alone(smoke):
    # On a busy machine a phase or a step that takes seconds has a line as well.
    slow = re.compile(rf"(evaluation|step) .* \.\.\.|(warm start|RL) (?!{STEPS}/)\d+/.*")
    lines = [line for line in smoke.stdout.splitlines() if not slow.fullmatch(line)]
    assert re.fullmatch(r"devices: 8 x cpu; JAX [\d.]+", lines[0])
    assert re.fullmatch(r"compile cache: \S+, as JAX_COMPILATION_CACHE_DIR says", lines.pop(1))
    assert lines[1] == f"run directory: {smoke.root}"
    assert lines[2].startswith("sampling: weights in place, float32 (the memory of this device is not known); ")
    assert lines[3].startswith(f"warm start {STEPS}/{STEPS}  loss ")
    assert lines[4].startswith(f"RL {STEPS}/{STEPS}  reward ")
    assert re.search(r"  \d+\.\d s \(rollout \d+\.\d, rewards \d+\.\d, update \d+\.\d\)$", lines[4])
    table = "\n".join(lines[5:])
    assert "before" in table
    assert "after" in table
    for row in ("held-out accuracy, sampled (%)", "KL(policy || reference) (nats/token)", "rollout KL (nats/token)"):
        assert row in table
    # Whether completions of an untrained model are right is chance.
    assert re.fullmatch(r"(warning: step 1: the rewards of no group differ, [^\n]*\n)?", smoke.stderr)


def test_the_resolved_config_loads_back_as_the_config(smoke):
    expected = load(CONFIG, [f"output={smoke.root.parent}"])
    loaded = load(smoke.root / "config.yaml")
    # What the run chose on a CPU.
    assert loaded.config == with_remat(expected.config, "full")
    assert loaded.warnings == ()


def test_metrics_have_every_step_and_every_name(smoke):
    warm, train, evaluation = (records(smoke.root, phase) for phase in ("warm_start", "train", "eval"))
    assert [record["step"] for record in warm] == [1, 2]
    assert [record["step"] for record in train] == [1, 2]
    assert [record["step"] for record in evaluation] == [0, 1, 2]
    assert [set(record) for record in warm] == [{"loss", "phase", "step"}] * 2
    assert [set(record) for record in train] == [TRAIN_METRICS | {"phase", "step"}] * 2
    assert [set(record) for record in evaluation] == [EVAL_METRICS | {"phase", "step"}] * 3
    values = [value for record in warm + train + evaluation for value in record.values() if value != record["phase"]]
    assert all(math.isfinite(value) for value in values)
    # The policy has moved away from where it started, and an untrained model of 264 tokens is uncertain.
    assert train[-1]["kl_reference"] > train[0]["kl_reference"] >= 0
    assert train[-1]["grad_norm"] > 0
    assert 5 < train[-1]["entropy"] < math.log(264)


def test_summary_agrees_with_the_metrics(smoke):
    summary = json.loads((smoke.root / "summary.json").read_text())
    last, evaluation = records(smoke.root, "train")[-1], records(smoke.root, "eval")
    assert summary.pop("seconds") > 0
    assert summary == {
        "accuracy_before": evaluation[0]["accuracy"],
        "accuracy_after": evaluation[-1]["accuracy"],
        "accuracy_greedy_before": evaluation[0]["accuracy_greedy"],
        "accuracy_greedy_after": evaluation[-1]["accuracy_greedy"],
        "kl_reference": last["kl_reference"],
        "kl_reference_exact": None,
        "rollout_kl": last["rollout_kl"],
        "steps": STEPS,
        "skipped_updates": 0,
    }
    assert evaluation[-1]["accuracy"] == 100 * evaluation[-1]["correct"]


def test_completions_of_each_evaluation_are_kept(smoke):
    files = sorted((smoke.root / "samples").iterdir())
    assert [path.name for path in files] == ["0.jsonl", "1.jsonl", "2.jsonl"]
    for path, evaluation in zip(files, records(smoke.root, "eval"), strict=True):
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(samples) == 8
        texts = {"prompt", "completion", "answer", "conversation"}
        assert samples[0].keys() == texts | {"finished", "reward", "correct", "decoding"}
        assert {sample["decoding"] for sample in samples} == {"sampled"}
        assert np.mean([sample["correct"] for sample in samples]) == evaluation["correct"]


def test_tensorboard_has_the_same_values_and_the_times(smoke):
    for phase in ("warm_start", "train", "eval"):
        points = scalars(smoke.root / "tensorboard" / phase)
        timed = {position: points.pop(position) for position in list(points) if position[0].startswith("time/")}
        expected = {
            (tag_of(name), record["step"]): np.float32(value)
            for record in records(smoke.root, phase)
            for name, value in record.items()
            if name not in ("phase", "step")
        }
        assert points == expected
        names = {f"time/{name}" for name in TIMES} if phase == "train" else set()
        assert set(timed) == {(name, step) for name in names for step in (1, 2)}
        assert all(seconds > 0 for seconds in timed.values())


def test_curves_are_a_nonblank_picture(smoke):
    image = matplotlib.image.imread(smoke.root / "curves.png")
    assert image.shape == (770, 1815, 4)
    colours = {tuple(colour) for colour in image[::3, ::3].reshape(-1, 4)}
    assert len(colours) > 10


def test_checkpoints_hold_the_state_of_their_step(smoke):
    assert sorted(path.name for path in (smoke.root / "checkpoints").iterdir()) == ["0", "1", "2"]
    base = saved_arrays(smoke.root / "base")
    states = [state_arrays(smoke.root, step) for step in range(STEPS + 1)]
    prefix = "trainable.params."
    assert_same_arrays({n.removeprefix(prefix): x for n, x in states[0].items() if n.startswith(prefix)}, base)
    assert [int(state["step"]) for state in states] == [0, 1, 2]
    # Two updates a step.
    assert [int(state["opt_state.1.0.count"]) for state in states] == [0, 2, 4]
    moved = [name for name in base if not np.array_equal(states[2][prefix + name], base[name])]
    assert sorted(moved) == sorted(base)


def test_same_seed_gives_the_same_run(smoke, again):
    before, second = again
    # Each worker of the tests may run it again.
    assert re.fullmatch(r"smoke-[2-9]", second.root.name)
    assert (second.root / "metrics.jsonl").read_bytes() == before["metrics.jsonl"]
    assert_same_arrays(state_arrays(second.root, STEPS), state_arrays(smoke.root, STEPS))
    assert files(smoke.root) == before


def test_numbered_run_is_continued_by_its_name(again):
    _, second = again
    config = load(CONFIG, [f"output={second.root.parent}", f"name={second.root.name}"]).config
    assert resume_run(config).root == second.root


def test_another_seed_gives_another_run(smoke, again, tmp_path):
    other = run_here(CONFIG, "seed=1", f"output={tmp_path}").succeeded()
    for phase in ("warm_start", "train"):
        pairs = zip(records(smoke.root, phase), records(other.root, phase), strict=True)
        assert all(first["loss"] != second["loss"] for first, second in pairs)
