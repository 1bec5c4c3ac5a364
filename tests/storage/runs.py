"""The runs and commands of these tests, and the comparison of a run in a store with a local one."""

import filecmp
import subprocess
import sys
from pathlib import Path

from tests.integration.command import TINY, Run, assert_same_arrays, state_arrays

ROOT = Path(__file__).parents[2]
STEPS = 4
QUICK = (
    "configs/quickstart.yaml",
    *TINY,
    f"steps={STEPS}",
    "optim.warmup_steps=0",
    "warm_start.steps=30",
    "lora={rank: 2, alpha: 4.0}",
    "reference={source: base}",
    "kl.loss.coef=0.05",
)


def command(env: dict[str, str], module: str, *arguments: str, cwd: Path | None = None) -> Run:
    """Runs a command of the trainer to its end."""
    ended = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**env, "PYTHONPATH": str(ROOT)},
        cwd=cwd or ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return Run(ended.returncode, ended.stdout, ended.stderr)


def refused(ended: Run) -> str:
    """Asserts that a command ended with an error for users; returns its last line."""
    assert ended.returncode == 2, f"{ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.stderr.strip().splitlines()[-1]


def assert_same_run(copy: Path, local: Path) -> None:
    """Asserts that a copy of a run in a store has the metrics, samples and arrays of the local one, to the bit."""
    assert (copy / "metrics.jsonl").read_text() == (local / "metrics.jsonl").read_text()
    for step in (0, STEPS):
        assert_same_arrays(state_arrays(copy, step), state_arrays(local, step))
    names = [path.name for path in (local / "samples").iterdir()]
    assert filecmp.cmpfiles(copy / "samples", local / "samples", names, shallow=False)[0] == names
    assert (copy / "summary.json").is_file()
    assert not (copy / ".lock").exists()
    assert not list((copy / "damaged").glob("*"))
