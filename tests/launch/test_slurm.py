"""The recipe of SLURM, run for real: two processes that find each other, a signal, and the run that goes on."""

import os
import time
from pathlib import Path

import pytest

from tests import xla
from tests.integration.command import lines_written
from tests.launch import slurm

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs/launch/slurm.sbatch"

pytestmark = pytest.mark.skipif(slurm.missing() is not None, reason=slurm.missing() or "")


def test_job_runs_two_processes_and_goes_on_after_a_signal(tmp_path):
    (tmp_path / "slurm").mkdir()
    # A node without GPUs.
    recipe = tmp_path / "kljax.sbatch"
    recipe.write_text("".join(line for line in RECIPE.read_text().splitlines(True) if "gpus-per-node" not in line))
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla.flags(devices=1), "PYTHON": str(ROOT / ".venv/bin/python")}
    with slurm.running(tmp_path / "slurm") as own:
        env = {**own, **settings}
        options = ["--nodes=1", "--ntasks-per-node=2", f"--chdir={ROOT}", f"--output={tmp_path}/log"]
        arguments = ["configs/smoke.yaml", "steps=6", "mesh.data=-1", f"output={tmp_path}/runs", "log.format=json"]
        arguments += [f"compile_cache={tmp_path}/programs"]
        slurm.call(env, "sbatch", "--test-only", *options, str(recipe), *arguments, check=True)
        job = slurm.call(env, "sbatch", "--parsable", *options, str(recipe), *arguments, check=True).strip()
        run = tmp_path / "runs/smoke"
        _wait(lambda: lines_written(run, "train") >= 1, tmp_path)
        # As at the end of its time, and when it is preempted: the processes get the signal, the script does not.
        slurm.call(env, "scancel", "--signal=TERM", job, check=True)
        _wait((run / "summary.json").exists, tmp_path)
        _wait(lambda: not slurm.call(env, "squeue", "--noheader", f"--jobs={job}").strip(), tmp_path)
        record = slurm.call(env, "scontrol", "show", "job", job)
    log = (tmp_path / "log").read_text()
    assert "interrupted after step" in log, log
    assert "mesh: data=2 x fsdp=1 x tensor=1" in log, log
    assert "Restarts=1" in record, record
    assert "ExitCode=0:0" in record, record


def _wait(happens, tmp_path: Path) -> None:
    deadline = time.monotonic() + float(os.environ.get("LAUNCH_SECONDS", "420"))
    while not happens():
        if time.monotonic() > deadline:
            log = tmp_path / "log"
            raise TimeoutError(log.read_text() if log.exists() else "the job has not started")
        time.sleep(0.5)
