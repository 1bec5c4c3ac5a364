"""Recorded rollouts: the numbers of the update itself, within a size limit, and no bit of the run is another."""

import dataclasses
import errno
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pyarrow import parquet

import kljax
from tests import tiny
from tests.run_programs import shared_by_runs
from train.config.errors import UserError
from train.data.tokenizers import ByteTokenizer
from train.rl.policy import ScoredPolicy
from train.rl.reference import FrozenWeights
from train.rollouts.recorded.table import TokenRows, make_table
from train.run.loop import rl_step
from train.run.programs import Programs
from train.run.recorder import (
    RolloutFiles,
    RolloutRecorder,
    chosen_rows,
    recorded_steps,
    token_texts,
    whole_completions,
)

CONFIG = tiny.config_of(
    *("kl.loss.coef=0.1", "kl.rollout.coef=0.1", "rollout.policy_lag=1"),
    "optim={updates_per_batch: 2, micro_batches: 2, learning_rate: 1e-2}",
)


def two_steps(directory: Path | None) -> tuple[list[dict[str, float]], list[np.ndarray]]:
    """The metrics of two steps and the weights behind them, recorded in a directory or not."""
    context = tiny.context_of(CONFIG)
    with jax.set_mesh(context.mesh), shared_by_runs():
        state = tiny.state_of(CONFIG, context.optimizer)
        reference = ScoredPolicy(context.model, kljax.Policy(jax.tree.map(jnp.asarray, tiny.host_params())))
        recorder = None if directory is None else RolloutRecorder(context, directory, done=0)
        programs = Programs.of(context, state, per_token=recorder is not None)
        stream, frozen, metrics = tiny.stream_of(context), FrozenWeights(None, reference), []
        for step in range(2):
            state, values, _ = rl_step(context, programs, stream, frozen, state, step=step, recorder=recorder)
            metrics.append(values)
        if recorder is not None:
            recorder.close()
        return metrics, [np.array(leaf) for leaf in jax.tree.leaves(state.trainable)]


def test_recorded_tokens_have_the_means_of_the_metrics(tmp_path):
    metrics, weights = two_steps(tmp_path)
    assert recorded_steps(tmp_path) == [1, 2]
    for step, values in enumerate(metrics, start=1):
        rows = parquet.read_table(tmp_path / f"{step:08d}.parquet").to_pylist()
        assert [row["row"] for row in rows] == list(range(tiny.ROWS))
        assert {row["policy_version"] for row in rows} == {0}, "of the policy before the first step"
        tokens = {name: np.concatenate([row[name] for row in rows]) for name in rows[0] if is_per_token(rows[0][name])}
        for column, metric in {"entropy": "entropy", "kl": "kl_reference"}.items():
            np.testing.assert_allclose(tokens[column].mean(), values[metric], rtol=1e-5)
        np.testing.assert_allclose(np.mean([row["reward"] for row in rows]), values["reward"], rtol=1e-6)
        # The updates of a step have two halves of its rows, and the weights of each add up to 1.
        np.testing.assert_allclose(tokens["loss_weights"].sum(), 2, rtol=1e-6)
        error = np.abs(tokens["old_log_probs"] - tokens["log_probs"]).max()
        np.testing.assert_allclose(error, values["rollout_log_prob_error"], rtol=1e-6, atol=1e-9)
        assert len(tokens["policy_log_probs"]) == values["completion_length"] * tiny.ROWS
    plain_metrics, plain_weights = two_steps(None)
    assert metrics == plain_metrics
    for recorded, plain in zip(weights, plain_weights, strict=True):
        np.testing.assert_array_equal(recorded, plain)


def is_per_token(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], float)


def test_rows_are_complete_groups_up_to_the_number():
    config = tiny.config_of("report.rollouts=5", "rollout={prompts_per_step: 6, samples_per_prompt: 4}")
    rows = chosen_rows(config, 3)
    assert rows == chosen_rows(config, 3)
    assert [row // 4 for row in rows] == [rows[0] // 4] * 4 + [rows[-1] // 4]
    assert rows[4] == rows[-1] // 4 * 4
    assert len({tuple(chosen_rows(config, step)) for step in range(20)}) > 5
    assert len(chosen_rows(tiny.config_of("report.rollouts=99"), 1)) == tiny.ROWS


def fill(path: Path, size: int) -> int:
    path.write_bytes(bytes(size))
    return size


def written(directory: Path, steps: range, *, limit: int, done: int = 0) -> list[int]:
    """Records some steps with 10 bytes each, and lists those that are left."""
    files = RolloutFiles(directory, max_bytes=limit, done=done)
    for step in steps:
        files.wait()
        if files.wants(step):
            files.write(step, lambda path: fill(path, 10))
    files.close()
    return recorded_steps(directory)


def test_size_limit_leaves_every_nth_step(tmp_path):
    assert written(tmp_path, range(1, 41), limit=95) == [8, 16, 24, 32, 40]


def test_resumed_recording_ends_as_one_without_a_pause(tmp_path):
    straight = written(tmp_path / "straight", range(1, 41), limit=95)
    written(tmp_path / "paused", range(1, 24), limit=95)
    (tmp_path / "paused" / "00000031.parquet.partial").touch()
    assert written(tmp_path / "paused", range(21, 41), limit=95, done=20) == straight
    assert not list((tmp_path / "paused").glob("*.partial"))


def test_step_after_a_slow_write_keeps_the_files_even(tmp_path):
    files = RolloutFiles(tmp_path, max_bytes=35, done=0)
    asked = threading.Event()

    def fill_slowly(path: Path) -> int:
        assert asked.wait(10)
        return fill(path, 10)

    for step in range(1, 5):
        files.wait()
        files.write(step, fill_slowly if step == 4 else lambda path: fill(path, 10))
    assert files.wants(5)
    asked.set()
    files.write(5, lambda path: fill(path, 10))
    files.close()
    assert recorded_steps(tmp_path) == [2, 4]


def test_full_disk_ends_the_recording_with_a_warning(tmp_path, capsys):
    files = RolloutFiles(tmp_path, max_bytes=100, done=0)

    def fail(path: Path) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    files.write(1, fail)
    files.close()
    assert not files.wants(2)
    assert "rollouts are not recorded any more, because No space left on device" in capsys.readouterr().err


def test_unwritable_directory_is_a_user_error(tmp_path):
    (tmp_path / "rollouts").touch()
    with pytest.raises(UserError, match=r"report\.rollouts: cannot write to"):
        RolloutFiles(tmp_path / "rollouts", max_bytes=100, done=0)


def test_unsupported_decoder_gives_texts_of_ids():
    class Pieces(ByteTokenizer):
        def token_bytes(self) -> list[bytes]:
            raise UserError("model.path: decoder of tokenizer.json: got WordPiece")

    ids = np.array([72, 105, ByteTokenizer().eos_id])
    assert token_texts(Pieces()).of(ids) == token_texts(ByteTokenizer()).of(ids) == ["H", "i", "<eos>"]


def test_first_update_alone_measures_the_sampling_bias():
    """Later ones have another policy than the one that sampled; what all updates have is a mean."""
    context = tiny.context_of(CONFIG)
    with jax.set_mesh(context.mesh), shared_by_runs():
        state = tiny.state_of(CONFIG, context.optimizer)
        reference = ScoredPolicy(context.model, kljax.Policy(jax.tree.map(jnp.asarray, tiny.host_params())))
        programs, updates = Programs.of(context, state), []

        def update(*arguments, **options):
            state, metrics = programs.update(*arguments, **options)
            updates.append({name: float(metric.value()) for name, metric in jax.device_get(metrics).items()})
            return state, metrics

        counted = dataclasses.replace(programs, update=update)
        stream, frozen = tiny.stream_of(context), FrozenWeights(None, reference)
        _, values, _ = rl_step(context, counted, stream, frozen, state, step=0)
    first, second = updates
    for name in ("sampling_bias", "sampling_bias_z"):
        assert first[name] != second[name]
        assert values[name] == first[name]
    assert values["entropy"] == pytest.approx((first["entropy"] + second["entropy"]) / 2)
    assert values["learning_rate"] == np.float32(1e-2)
    assert values["reward_std"] >= 0
    assert 0 <= values["groups_with_spread"] <= 1


def test_left_out_tokens_are_recorded_without_numbers(tmp_path):
    mask = np.array([[True, True, True, False, False]])
    arrays = {
        "tokens": np.array([[65, 66, 67, 0, 0]], np.int32),
        "token_mask": mask,
        "completion_mask": np.array([[False, False, True, False, False]]),
        "log_probs": np.array([[0, 0, -2.0, 0, 0]], np.float32),
    }
    rows = TokenRows([{"row": 0}], whole_completions(arrays, np.array([1])))
    (record,) = make_table(rows, token_texts(ByteTokenizer())).to_pylist()
    assert (record["prompt_ids"], record["completion_ids"]) == ([65], [66, 67])
    assert record["log_probs"] == [None, -2.0]
    assert record["token_texts"] == ["A", "B", "C"]
