"""The files of configs/launch: what they start is a command of this trainer, and their tools accept them."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from train.__main__ import parser
from train.config.errors import GuardError, LostProcessError, UserError
from train.config.load import load
from train.process.interrupt import INTERRUPTED

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "configs/launch"
JOBS = ("job.yaml", "jobset.yaml", "jobset_tpu.yaml")
ENVIRONMENT = Path(os.environ.get("LAUNCH_ENV", ROOT / ".venv-launch"))


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yields the arguments of `python -m train` in each file."""
    for name in JOBS:
        (container,) = pod_of(name)["containers"]
        yield name, container["args"]
    yield "skypilot.yaml", _after_train(yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())["run"])
    (command,) = re.findall(r'--command "(.*?)" ', (LAUNCH / "xpk.sh").read_text(), re.DOTALL)
    yield "xpk.sh", _after_train(command)
    entrypoint = shlex.split(yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())["spec"]["entrypoint"])
    yield "kuberay.yaml", entrypoint[entrypoint.index("--storage") + 2 :]
    for name in ("slurm.sbatch", "slurm_container.sbatch", "tpu_vm.sh"):
        (example,) = re.findall(rf"^#   .*configs/launch/{re.escape(name)} (.*)$", (LAUNCH / name).read_text(), re.M)
        yield name, [*shlex.split(example), "--resume-or-start"]


def _after_train(command: str) -> list[str]:
    words = shlex.split(
        command.replace("\\\n", " ").replace("$(", "(").partition(" -m train ")[2].partition("--coord")[0]
    )
    return [word.replace("$SHARED", "/shared") for word in words]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((LAUNCH / name).read_text()))


def job_of(name: str) -> dict[str, Any]:
    """The spec of the Job in a file."""
    spec = documents(name)[-1]["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in spec else spec


def pod_of(name: str) -> dict[str, Any]:
    return job_of(name)["template"]["spec"]


@pytest.mark.parametrize(("name", "arguments"), list(commands()))
def test_each_file_starts_a_config_that_loads(name, arguments):
    options = parser().parse_intermixed_args(arguments)
    config = load(str(ROOT / options.config), options.overrides).config
    assert options.resume_or_start or name == "kuberay.yaml"
    # The number of hosts may change without an edit of the config.
    assert -1 in config.mesh.axes().values()


def test_every_file_is_started_by_a_command_in_its_head():
    files = {path.name for path in LAUNCH.iterdir()} - {"ray_train.py"}
    assert files == {name for name, _ in commands()}
    for name in files:
        assert re.search(rf"^#   .*configs/launch/{re.escape(name)}", (LAUNCH / name).read_text(), re.M), name
        if name.endswith(("sh", "sbatch")):
            shell = "bash" if name.endswith("sbatch") else "sh"
            subprocess.run([shell, "-n", LAUNCH / name], check=True)


@pytest.mark.parametrize("name", JOBS)
def test_exit_codes_are_those_of_the_trainer(name):
    job = job_of(name)
    rules = {
        tuple(rule["onExitCodes"]["values"]): rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert rules == {(UserError.code, GuardError.code): "FailJob", (LostProcessError.code, INTERRUPTED): "Ignore"}
    (container,) = pod_of(name)["containers"]
    assert {
        rule["onExitCodes"]["containerName"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    } == {container["name"]}
    assert job["completions"] == job["parallelism"]
    variables = {entry["name"]: entry["value"] for entry in container.get("env", ())}
    if variables:
        assert int(variables["JAX_NUM_PROCESSES"]) == job["completions"]
        head = documents(name)[-1]
        host = {"Job": "kljax-0.kljax", "JobSet": "kljax-train-0-0.kljax"}[head["kind"]]
        assert variables["JAX_COORDINATOR_ADDRESS"] == f"{host}:8476"


def test_other_launchers_start_again_after_the_same_codes():
    codes = [LostProcessError.code, INTERRUPTED]
    recovery = documents("skypilot.yaml")[0]["resources"]["job_recovery"]
    assert recovery == {"max_restarts_on_errors": 0, "recover_on_exit_codes": codes}
    for name in ("slurm.sbatch", "slurm_container.sbatch"):
        assert re.findall(r"\$code -eq (\d+)", (LAUNCH / name).read_text()) == [str(code) for code in codes]
    # xpk restarts after 127 to 255 by itself.
    assert f"--restart-on-exit-codes {LostProcessError.code} " in (LAUNCH / "xpk.sh").read_text()
    assert f"LOST_OR_STOPPED = {codes[0]}, {codes[1]}\n" in (LAUNCH / "ray_train.py").read_text()


def in_environment(program: str, *arguments: object, env: dict[str, str] | None = None) -> str:
    """Runs a program of the environment of `make test-launch`, or skips the test."""
    path = ENVIRONMENT / program
    if not path.exists():
        pytest.skip(f"there is no {path}: make test-launch")
    done = subprocess.run(
        [str(path), *map(str, arguments)],
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


VALIDATE = """
import json, sys
import kubernetes_validate
from kubeflow_trainer_api import models
def lost(given, read, path):
    if isinstance(given, dict):
        return [name for key, value in given.items() for name in
                ([f"{path}.{key}"] if key not in read else lost(value, read[key], f"{path}.{key}"))]
    if isinstance(given, list):
        return [name for first, other in zip(given, read) for name in lost(first, other, path)]
    return [] if given == read else [path]
for document in json.load(sys.stdin):
    jobs = [document]
    if document["kind"] == "JobSet":
        assert not lost(document, models.JobsetV1alpha2JobSet.from_dict(document).to_dict(), "JobSet")
        specs = [entry["template"]["spec"] for entry in document["spec"]["replicatedJobs"]]
        jobs = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": spec} for spec in specs]
    for job in jobs:
        kubernetes_validate.validate(job, "1.37", strict=True)
"""


def validate(items: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    python = ENVIRONMENT / "bin/python"
    if not python.exists():
        pytest.skip(f"there is no {python}: make test-launch")
    return subprocess.run(
        [python, "-c", VALIDATE], input=json.dumps(items), capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", JOBS)
def test_schema_of_kubernetes_accepts_the_job(name):
    done = validate(documents(name))
    assert done.returncode == 0, done.stderr
    # A misspelt field is noticed, at the top and within.
    changed = documents(name)
    changed[-1]["spec"]["completion"] = 4
    assert validate(changed).returncode != 0
    changed = documents(name)
    spec = changed[-1]["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in spec else spec
    job["podFailurePolicy"]["rules"][0]["onExitCode"] = {}
    assert validate(changed).returncode != 0


def test_dry_run_of_xpk_makes_the_jobset():
    env = {"XPK": str(ENVIRONMENT / "xpk/bin/xpk"), "CLUSTER": "c", "IMAGE": "gcr.io/p/kljax-tpu", "SHARED": "/shared"}
    if not Path(env["XPK"]).exists():
        pytest.skip(f"there is no {env['XPK']}: make test-launch")
    command = ["sh", LAUNCH / "xpk.sh", "--dry-run", "--skip-validation", "--project", "p", "--zone", "us-east5-a"]
    done = subprocess.run(
        command,
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--resume-or-start" in done.stdout
    assert "replicas: 2" in done.stdout


def test_skypilot_reads_the_task(tmp_path):
    read = "import sys, sky; task = sky.Task.from_yaml(sys.argv[1]); print(task.num_nodes, *task.resources)"
    text = in_environment("skypilot/bin/python", "-c", read, LAUNCH / "skypilot.yaml", env={"HOME": str(tmp_path)})
    assert text.split()[0] == "4"
    assert "'H100': 8" in text


def test_driver_of_ray_compiles():
    subprocess.run([sys.executable, "-m", "py_compile", LAUNCH / "ray_train.py"], check=True)
