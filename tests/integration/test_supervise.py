"""`--supervise` on the real command: a run that is killed is continued, and ends as the uninterrupted one."""

import os
import signal
from pathlib import Path

from tests.integration.command import assert_same_arrays, finish, run_here, start, state_arrays, wait_for

CONFIG = "configs/smoke.yaml"
STEPS = 2
NAME = "smoke"


def child_of(pid: int) -> int:
    """Returns the one process that a process has started."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def test_a_killed_run_in_a_numbered_directory_is_continued(shared, train, env, tmp_path):
    whole = shared(CONFIG, command=train).succeeded()
    taken = tmp_path / NAME / "file"
    taken.parent.mkdir()
    taken.write_text("")
    root = tmp_path / f"{NAME}-2"
    supervisor = start(env, CONFIG, f"output={tmp_path}", "--supervise", "--restarts=3")
    wait_for(supervisor, (root / "base").exists)
    os.kill(child_of(supervisor.pid), signal.SIGKILL)
    done = finish(supervisor).succeeded()
    assert f"killed by SIGKILL, as it is without memory: restart 1 of 3 without a new checkpoint, in 1 s: {root}" in (
        done.stderr
    )
    assert (root / "metrics.jsonl").read_text() == (whole.root / "metrics.jsonl").read_text()
    assert_same_arrays(state_arrays(root, STEPS), state_arrays(whole.root, STEPS))
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAME, root.name]


def test_a_mistake_in_the_config_is_not_started_again(tmp_path, capfd):
    done = run_here(CONFIG, f"output={tmp_path}", "steps=-1", "--supervise")
    assert done.returncode == 2
    errors = capfd.readouterr().err
    assert errors.count("steps: got -1") == 1
    assert "restart" not in errors
