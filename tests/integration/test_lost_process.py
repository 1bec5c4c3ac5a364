"""A run in two processes that loses one ends with its name, and continues as the uninterrupted run."""

import fcntl
import os
import re
import shutil
import signal

import numpy as np
import pytest

from tests import lost
from tests.integration.command import assert_same_arrays, records, run_here, saved_arrays, state_arrays

CLOSE = 1e-6
# A reference that moves, so that a state has more than the weights; the other run of two processes has a warm start.
AVERAGE = ("reference={source: ema, decay: 0.9}", "model.layers=1", "warm_start.steps=0")


@pytest.fixture(scope="session")
def whole(session_directory, env):
    """The uninterrupted run in two processes, once for all test processes."""
    output = session_directory / "two-processes"
    with (session_directory / "two-processes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (output / lost.NAME / "summary.json").exists():
            shutil.rmtree(output, ignore_errors=True)
            lost.uninterrupted(output, env)
    return output / lost.NAME


def assert_same_run(got, expected) -> None:
    """Compares base, states and metrics, bit by bit."""
    assert_same_arrays(saved_arrays(got / "base"), saved_arrays(expected / "base"))
    for step in range(lost.STEPS + 1):
        assert_same_arrays(state_arrays(got, step), state_arrays(expected, step))
    assert (got / "metrics.jsonl").read_text() == (expected / "metrics.jsonl").read_text()


def assert_close_run(got, expected) -> None:
    """Compares completions and rewards bit by bit; losses, and the first and the last state, within rounding.

    The rounding of an array is that of its largest number.
    """
    for step in (0, lost.STEPS):
        left, right = (state_arrays(root, step) for root in (got, expected))
        assert left.keys() == right.keys()
        for name, value in right.items():
            limit = CLOSE * np.abs(value).max()
            np.testing.assert_allclose(left[name], value, rtol=0, atol=limit, err_msg=f"{step}: {name}")
        file = f"samples/{step}.jsonl"
        assert (got / file).read_text() == (expected / file).read_text()
    steps = [records(root, "train") for root in (got, expected)]
    assert [len(of_run) for of_run in steps] == [lost.STEPS] * 2
    for name in ("reward", "completion_length", "finished"):
        first, second = ([record[name] for record in of_run] for of_run in steps)
        assert first == second, name
    for name in ("loss", "policy_loss", "kl_reference"):
        np.testing.assert_allclose(*([r[name] for r in of_run] for of_run in steps), rtol=CLOSE, atol=CLOSE)


def test_one_process_continues_after_the_leader_is_killed(env, tmp_path):
    """The leader is killed while it saves, and one device goes on with all; the other cases are thorough."""
    second, first = tmp_path / "two", tmp_path / "one"
    ended = lost.signalled(
        second, "in a save", 0, signal.SIGKILL, env=env, devices=2, more=("mesh={fsdp: 2}", *AVERAGE)
    )
    assert lost.names_the_lost(ended, 0), ended
    recipe = (*lost.RECIPE, "mesh={}", *AVERAGE)
    run_here(*recipe, f"output={second}", "--resume").succeeded()
    uninterrupted = run_here(*recipe, f"output={first}").succeeded()
    assert_close_run(ended.root, uninterrupted.root)


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("moment", lost.MOMENTS)
def test_killed_process_is_named_and_the_run_resumes(whole, env, tmp_path, moment, victim):
    ended = lost.signalled(tmp_path, moment, victim, signal.SIGKILL, env=env)
    assert lost.names_the_lost(ended, victim), ended
    for code, _, errors in lost.go_on(tmp_path, env=env):
        assert code == 0, errors
    assert_same_run(ended.root, whole)


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [1, 4])
def test_it_continues_with_another_number_of_processes(whole, env, tmp_path, processes):
    ended = lost.signalled(tmp_path, "in a step", 1, signal.SIGKILL, env=env)
    assert lost.names_the_lost(ended, 1), ended
    for code, _, errors in lost.go_on(tmp_path, env=env, processes=processes):
        assert code == 0, errors
    assert_close_run(ended.root, whole)


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 1])
def test_a_preempted_process_stops_all_at_one_step(whole, env, tmp_path, victim):
    ended = lost.signalled(tmp_path, "in a step", victim, signal.SIGTERM, env=env)
    assert ended.codes == (130, 130), ended.errors
    assert "Traceback" not in "".join(ended.errors)
    (step,) = re.findall(r"interrupted after step (\d+) of 6; saved, continue with --resume", ended.errors[0])
    assert int(state_arrays(ended.root, int(step))["step"]) == int(step)
    assert max(int(path.name) for path in (ended.root / "checkpoints").iterdir()) == int(step)
    for code, _, errors in lost.go_on(tmp_path, env=env):
        assert code == 0, errors
    assert_same_run(ended.root, whole)


@pytest.mark.thorough
def test_a_second_signal_ends_all_at_once(whole, env, tmp_path):
    ended = lost.signalled(tmp_path, "in a step", 1, signal.SIGTERM, signal.SIGTERM, env=env)
    assert ended.codes == (130, 130), ended.errors
    assert ended.seconds < lost.LIMIT
    assert "error: process 1 of 2 failed: interrupted" in ended.errors[0]
    for code, _, errors in lost.go_on(tmp_path, env=env):
        assert code == 0, errors
    assert_same_run(ended.root, whole)


@pytest.mark.thorough
def test_a_damaged_checkpoint_is_set_aside_once(whole, env, tmp_path):
    root = tmp_path / lost.NAME
    shutil.copytree(whole, root)
    for path in root.glob(f"checkpoints/{lost.STEPS}/state/**/d/*"):
        os.truncate(path, path.stat().st_size // 2)
    ended = lost.go_on(tmp_path, env=env)
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert [text.count("is damaged and was skipped") for _, _, text in ended] == [1, 0]
    assert [path.name for path in (root / "damaged").iterdir()] == [f"{lost.STEPS}-0"]
    assert_same_run(root, whole)


def test_lost_slice_is_restored_from_the_memory_of_another(whole, env, tmp_path):
    """The first slice, and what its host has in memory, is lost after step 2; the last checkpoint is of step 0."""
    memory = tmp_path / "memory"
    more = (
        "mesh={data: 2, fsdp: 2, slices: 2}",
        f"checkpoint={{every: 50, emergency: {{folder: {memory}}}}}",
    )
    moment = "in a step"
    ended = lost.signalled(tmp_path, moment, 0, signal.SIGKILL, env=env, more=more)
    assert lost.names_the_lost(ended, 0), ended
    assert [path.name for path in (ended.root / "checkpoints").iterdir()] == ["0"]
    (of_run,) = memory.iterdir()
    shutil.rmtree(of_run / "0")
    done = lost.go_on(tmp_path, *more, env=env)
    for code, _, errors in done:
        assert code == 0, errors
    assert re.search(r"the run goes on from step [1-5], which the memory of a slice has", done[0][1] + done[0][2])
    assert (ended.root / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    assert_same_arrays(state_arrays(ended.root, lost.STEPS), state_arrays(whole, lost.STEPS))
    assert list(of_run.iterdir()) == []
