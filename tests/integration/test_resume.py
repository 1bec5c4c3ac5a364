"""A run that is stopped, however rudely, and continued ends bit by bit where the uninterrupted one ends.

PPO with a value head under the adaptive controller, eight updates a batch: everything that a state can hold moves.
"""

import itertools
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from pyarrow import parquet

from tests.integration.command import (
    PPO,
    TIMEOUT,
    Run,
    assert_same_arrays,
    files,
    finish,
    lines_written,
    records,
    run_here,
    saved_arrays,
    start,
    state_arrays,
)
from tests.processes import state_of
from train.run.recorder import recorded_steps

STEPS = 4
RECIPE = PPO
NAME = "ppo_adaptive_kl"


@pytest.fixture(scope="module")
def uninterrupted(shared):
    return shared(*RECIPE).succeeded()


@pytest.fixture
def resume(tmp_path):
    """`resume("key=value", ...)` continues the run of this test."""
    return lambda *arguments: run_here(*RECIPE, f"output={tmp_path}", *arguments, "--resume")


def assert_same_run(got: Path, expected: Path) -> None:
    """Compares base, states, metrics and rollouts: the arrays bit by bit, the metrics byte by byte."""
    assert (got / "metrics.jsonl").read_text() == (expected / "metrics.jsonl").read_text()
    assert_same_arrays(saved_arrays(got / "base"), saved_arrays(expected / "base"))
    for step in (0, STEPS):
        assert_same_arrays(state_arrays(got, step), state_arrays(expected, step))
    first, second = (json.loads((root / "summary.json").read_text()) for root in (got, expected))
    assert first | {"seconds": 0} == second | {"seconds": 0}
    assert recorded_steps(got / "rollouts") == recorded_steps(expected / "rollouts") == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        tables = [parquet.read_table(root / "rollouts" / f"{step:08d}.parquet") for root in (got, expected)]
        assert tables[0].equals(tables[1])


def copied(run: Run, output: Path) -> Path:
    """Copies a run, so that a test may harm it."""
    return Path(shutil.copytree(run.root, output / NAME))


def in_warm_start(root: Path) -> bool:
    return lines_written(root, "warm_start") > 1 and not list(root.glob("base*"))


def in_save_of_base(root: Path) -> bool:
    return bool(list(root.glob("base.*tmp*")))


def after_base(root: Path) -> bool:
    return (root / "base").is_dir() and not list(root.glob("checkpoints/*"))


def in_save(root: Path, step: int) -> bool:
    return bool(list(root.glob(f"checkpoints/{step}.*tmp*")))


def before_save(root: Path, step: int) -> bool:
    """Whether the lines of a step are there, and its checkpoint is not."""
    return lines_written(root, "train") == step and not list(root.glob(f"checkpoints/{step}*"))


MOMENTS = {
    "in the warm start": in_warm_start,
    "while the base is saved": in_save_of_base,
    "after the base": after_base,
    "while step 0 is saved": lambda root: in_save(root, 0),
}


def frozen_at(pid: int, root: Path, happens) -> bool:
    """Freezes the process at the first moment at which `happens(root)`; False if it ended without one.

    The process is frozen before it is looked at for good, so that the moment cannot pass between the two looks.
    """
    deadline = time.monotonic() + TIMEOUT
    for looks in itertools.count():
        if time.monotonic() > deadline:
            return False
        if happens(root):
            os.kill(pid, signal.SIGSTOP)
            while state_of(pid) not in "TZX":
                time.sleep(0.0005)
            if happens(root):
                return True
            os.kill(pid, signal.SIGCONT)
        # Without /proc, this look takes longer than a moment.
        elif looks % 50 == 0 and state_of(pid) in "ZX":
            return False
        time.sleep(0.002)


def test_every_part_of_the_state_moves(uninterrupted):
    first, last = (state_arrays(uninterrupted.root, step) for step in (0, STEPS))
    counts = [int(value) for name, value in last.items() if name.startswith("opt_state.") and name.endswith(".count")]
    assert set(counts) == {8 * STEPS}
    still = [name for name, value in first.items() if value.tobytes() == last[name].tobytes()]
    # A run in which every update is finite gives the guard nothing to count; the coefficients of Muon are constants.
    assert [name for name in still if not name.startswith("guard.") and not name.endswith(".ns_coeffs")] == []
    coefficients = [record["kl_coef"] for record in records(uninterrupted.root, "train")]
    assert len(set(coefficients)) == STEPS
    assert {record["step"] for record in records(uninterrupted.root, "train") if record["reward"] > 0}


# The files of any other moment are on disk as well while the next directory is saved.
IN_SAVES = ("while the base is saved", "while step 0 is saved")


@pytest.mark.parametrize(
    "moments", [IN_SAVES, pytest.param(sorted(MOMENTS.keys() - {*IN_SAVES}), marks=pytest.mark.thorough)], ids=", ".join
)
def test_killed_at_some_moments_and_interrupted(uninterrupted, env, resume, tmp_path, moments):
    """One command starts the run and continues it after a kill; Ctrl-C ends it.

    A frozen run leaves on disk what a kill leaves. Each copy, and the interrupted run, is continued.
    """
    root = tmp_path / NAME
    copies: list[Path] = []

    def copy() -> None:
        copies.append(tmp_path / f"copy-{len(copies)}")
        shutil.copytree(root, copies[-1] / root.name)

    command = (*RECIPE, f"output={tmp_path}", "--resume-or-start")
    run = start(env, *command)
    try:
        for name in (name for name in MOMENTS if name in moments):
            assert frozen_at(run.pid, root, MOMENTS[name]), f"{name}: the run ended before"
            copy()
            os.kill(run.pid, signal.SIGCONT)
        assert frozen_at(run.pid, root, lambda root: before_save(root, 1))
        run.kill()
        assert finish(run).returncode == -signal.SIGKILL
        run = start(env, *command)
        assert frozen_at(run.pid, root, lambda root: in_save(root, 2))
        copy()
        run.send_signal(signal.SIGINT)
        # The signal is there before the run goes on, so that it does not come at the end.
        time.sleep(0.5)
        os.kill(run.pid, signal.SIGCONT)
    except BaseException:
        run.kill()
        raise
    done = finish(run)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    step = lines_written(root, "train")
    assert 2 <= step < STEPS
    assert f"interrupted after step {step} of {STEPS}; saved, continue with --resume" in done.stderr
    assert int(state_arrays(root, step)["step"]) == step
    assert not (root / "summary.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [*(path.name for path in copies), NAME]
    for output in (*copies, tmp_path):
        assert_same_run(resume(f"output={output}").succeeded().root, uninterrupted.root)
    leftovers = [path for path in tmp_path.rglob("*") if "tmp" in path.name or path.name.endswith(".partial")]
    assert leftovers == []


def test_damaged_checkpoints_are_named_and_skipped(uninterrupted, resume, tmp_path):
    root = copied(uninterrupted, tmp_path)
    newest, before = (root / "checkpoints" / str(step) for step in (STEPS, STEPS - 1))
    data = [path for path in newest.glob("state/**/d/*") if path.is_file()]
    assert data
    for path in data:
        os.truncate(path, path.stat().st_size // 2)
    os.truncate(before / "state" / "_METADATA", 10)
    done = resume().succeeded()
    assert f"checkpoint {newest} is damaged" in done.stderr
    assert f"checkpoint {before} is damaged" in done.stderr
    assert f"checkpoint {root / 'checkpoints' / str(STEPS - 2)} is damaged" not in done.stderr
    assert f"RL {STEPS}/{STEPS}" in done.stdout
    assert_same_run(root, uninterrupted.root)


def test_resuming_a_finished_run_changes_nothing(uninterrupted, resume, tmp_path):
    root = copied(uninterrupted, tmp_path)
    before = files(root)
    done = resume().succeeded()
    # The lines after the table name the directory, which is another one here.
    table = uninterrupted.stdout[uninterrupted.stdout.index("held-out accuracy") : uninterrupted.stdout.index("done: ")]
    assert table in done.stdout
    after = files(root)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    # Only the path of the output differs, which is another one here.
    assert changed == {"config.yaml"}


@pytest.mark.thorough
def test_more_steps_equal_all_steps_at_once(uninterrupted, resume, tmp_path):
    run_here(*RECIPE, f"output={tmp_path}", "steps=2", "eval.every=3").succeeded()
    root = resume().succeeded().root
    assert_same_arrays(state_arrays(root, STEPS), state_arrays(uninterrupted.root, STEPS))
    assert records(root, "train") == records(uninterrupted.root, "train")


def test_another_learning_rate_cannot_continue_a_run(uninterrupted, resume, tmp_path):
    root = copied(uninterrupted, tmp_path)
    before = files(root)
    done = resume("optim.learning_rate=1e-5")
    assert done.returncode == 2
    rates = "optim.learning_rate: the run has 0.001, got 1e-05"
    assert done.stderr == f"error: --resume: the config differs from that of {root}: {rates}\n"
    assert files(root) == before


def test_resume_without_a_run_is_refused(resume, tmp_path):
    done = resume()
    assert done.returncode == 2
    assert done.stderr == f"error: --resume: there is no run at {tmp_path / NAME}; leave the flag out to start one\n"
    assert list(tmp_path.iterdir()) == []
