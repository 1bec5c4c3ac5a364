"""The command, in a process of its own or in that of the tests, and the files that it writes."""

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from tests import programs, xla
from train.__main__ import main

ROOT = Path(__file__).parents[2]
TIMEOUT = 300

# A run of these is compilation and little else, but some completions are right, so that every term has a gradient.
TINY = (
    "model={layers: 1, width: 16, heads: 4, kv_heads: 2, head_dim: 8, mlp_width: 32}",
    "warm_start={steps: 60, batch_size: 16, learning_rate: 1e-2}",
    "rollout={prompts_per_step: 8, samples_per_prompt: 2}",
    "eval={every: 1, prompts: 8, batch_size: 8}",
    "checkpoint={every: 1, keep: 10}",
    "data.max_operand=4",
    "data.solutions=1",
)
# Runs that several files read, with two layers as the smoke run.
PPO = (
    "configs/ppo_adaptive_kl.yaml",
    *TINY,
    *("model.layers=2", "steps=4", "optim.epochs=2", "eval.greedy=false"),
    # No policy over 264 tokens has so high an entropy: the coefficient rises at every step.
    "loss.entropy_controller={type: adaptive, target: 6.0, delta: 1e-3}",
)
# Two steps of one update without a warm-up: the adapter is on after the first. At the temperature of the recipe
# a policy as small as this one would answer every prompt alike, and nothing would move.
LORA = (
    "configs/lora.yaml",
    *TINY,
    "model.layers=2",
    "steps=2",
    "lora.rank=2",
    "lora.alpha=4.0",
    "optim.warmup_steps=0",
    "optim.updates_per_batch=1",
    "temperature=1.0",
    "kl.loss={coef: 0.05, estimator: k3, gradient: k2}",
    "reference.monitor=exact",
)


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished command."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def root(self) -> Path:
        """The run directory that the command printed."""
        (line,) = (line for line in self.stdout.splitlines() if line.startswith("run directory: "))
        return Path(line.removeprefix("run directory: "))

    def succeeded(self) -> "Run":
        """Asserts that the command ended well and quietly; returns the run."""
        assert self.returncode == 0, f"exit code {self.returncode}\n{self.stdout}\n{self.stderr}"
        assert "Traceback" not in self.stderr
        return self


def environment(cache: Path) -> dict[str, str]:
    """Returns an environment with the CPU devices of the tests; `cache` keeps compiled programs for later runs."""
    remaining = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    settings = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla.flags(devices=8),
        "PYTHONPYCACHEPREFIX": os.environ.get("PYTHONPYCACHEPREFIX", str(cache / "bytecode")),
        "JAX_COMPILATION_CACHE_DIR": str(programs.directory_for(cache)),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return {**remaining, **settings}


def start(env: Mapping[str, str], *arguments: object) -> subprocess.Popen[str]:
    """Starts `python -m train ARGUMENTS` in the repository."""
    return subprocess.Popen(
        [sys.executable, "-m", "train", *map(str, arguments)],
        cwd=ROOT,
        env=dict(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> Run:
    """Waits for the end of a process."""
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    return Run(process.returncode, stdout, stderr)


def wait_for(process: subprocess.Popen[str], happens: Callable[[], bool]) -> None:
    """Waits until something happens or the process ends.

    Raises:
      TimeoutError: neither does.
    """
    deadline = time.monotonic() + TIMEOUT
    while process.poll() is None and not happens():
        if time.monotonic() > deadline:
            process.kill()
            raise TimeoutError(f"nothing happened in {TIMEOUT} s")
        time.sleep(0.001)


def run(env: Mapping[str, str], *arguments: object) -> Run:
    """Runs `python -m train ARGUMENTS` to its end."""
    return finish(start(env, *arguments))


def run_here(*arguments: object) -> Run:
    """Does the same in this process, which spares the imports; an exception that ends the command ends the test."""
    out, err = io.StringIO(), io.StringIO()
    # In a process of its own a warning goes to standard error; here pytest takes it.
    warnings = logging.StreamHandler(err)
    logging.getLogger("train").addHandler(warnings)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(argument) for argument in arguments])
    finally:
        logging.getLogger("train").removeHandler(warnings)
    return Run(code, out.getvalue(), err.getvalue())


def shared_run(directory: Path, *arguments: str, command: Callable[..., Run]) -> Run:
    """Returns one run for all tests and test processes that ask for these arguments; its output lies below `directory`.

    The first to come runs the command while the others wait, so nobody may change what the run wrote.
    """
    name = hashlib.sha256("\0".join(arguments).encode()).hexdigest()[:12]
    output, record = directory / name, directory / f"{name}.json"
    with (directory / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not record.exists():
            shutil.rmtree(output, ignore_errors=True)
            done = command(*arguments, f"output={output}")
            record.write_text(json.dumps(dataclasses.asdict(done)))
        return Run(**json.loads(record.read_text()))


def lines_written(root: Path, phase: str) -> int:
    """Counts the lines of a phase in the metrics of a run, which may be writing them."""
    path = root / "metrics.jsonl"
    return path.read_text().count(f'"phase": "{phase}"') if path.exists() else 0


def records(root: Path, phase: str) -> list[dict]:
    """Reads the records of one phase of `metrics.jsonl`."""
    lines = (root / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["phase"] == phase]


def recorded_rows(directory: Path, step: int) -> list[dict]:
    """Reads the rows of a recorded step as sequences: all `ids`, of each whether it is `trained`, and its log-prob."""
    rows = [json.loads(line) for line in (directory / f"{step - 1:08d}.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        if "parent" in row:  # of the first ids of an earlier row of its group, none is trained again
            group = number - number % row["episode"]["of"]
            shared = rows[group + row["parent"]["row"]]["ids"][: row["parent"]["tokens"]]
            row["ids"] = [*shared, *row["ids"]]
            row["trained"] = [False] * len(shared) + row["trained"]
            row["log_probs"] = [None] * len(shared) + row["log_probs"]
        if "ids" not in row:  # a completion
            before = len(row["prompt_ids"])
            row["ids"] = [*row["prompt_ids"], *row["completion_ids"]]
            row["trained"] = [False] * before + [True] * len(row["completion_ids"])
            row["log_probs"] = [None] * before + row["log_probs"]
    return rows


def saved_arrays(directory: Path) -> dict[str, np.ndarray]:
    """Reads every array of a directory that orbax saved, by its dotted name."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(directory).item_metadata.tree
        arguments = ocp.args.PyTreeRestore(
            restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        )
        restored = checkpointer.restore(directory, args=arguments)
    leaves = jax.tree_util.tree_leaves_with_path(restored)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


def state_arrays(root: Path, step: int) -> dict[str, np.ndarray]:
    """Reads the state that a run saved after a step."""
    return saved_arrays(root / "checkpoints" / str(step) / "state")


def assert_same_arrays(got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Compares bit by bit, which also tells -0 from 0 and one NaN from another."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype
        assert got[name].shape == value.shape
        assert got[name].tobytes() == value.tobytes(), name


def files(directory: Path) -> dict[str, bytes]:
    """Reads every file below a directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }
