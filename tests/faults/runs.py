"""One tiny finished run of the real command, made once for all faults, and copies of it to harm."""

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from tests import xla
from tests.faults.case import Finished, run_command
from tests.integration.command import PPO, Run, environment, finish, saved_arrays, shared_run, start
from train.__main__ import main
from train.process.console import quiet_orbax

# The run is compiled as the tests compile, and so must be what continues it in this process.
os.environ.setdefault("XLA_FLAGS", xla.flags(devices=8))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

NAME = "ppo_adaptive_kl"
STEPS = 4
RECIPE = PPO
Arrays = dict[str, np.ndarray]
_SHARED: list[Path] = []


def share(directory: Path) -> None:
    """Takes the run from a directory that other tests use too, instead of making one."""
    _SHARED.append(directory)
    finished_run.cache_clear()


@functools.cache
def finished_run() -> Run:
    """Returns the run; nobody may change what it wrote."""
    directory = scratch() / "runs"
    directory.mkdir(exist_ok=True)
    return shared_run(directory, *RECIPE, command=started_run).succeeded()


def scratch() -> Path:
    """Returns the directory of this process of tests or faults."""
    if not _SHARED:
        made = Path(tempfile.mkdtemp(prefix="faults-"))
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        _SHARED.append(made)
    return _SHARED[-1]


def copied_run(output: Path) -> Path:
    """Copies the run below `output`, with the path of the output in its config left as it was."""
    return Path(shutil.copytree(finished_run().root, output / NAME))


def same_arrays(first: Arrays, second: Arrays) -> bool:
    """Whether two mappings have equal arrays, bit by bit."""
    return first.keys() == second.keys() and all(
        (item.dtype, item.shape, item.tobytes()) == (second[name].dtype, second[name].shape, second[name].tobytes())
        for name, item in first.items()
    )


def same_run(root: Path, expected: Path, step: int) -> bool:
    """Whether two runs have the same base, state after a step and metrics, bit by bit."""
    if (root / "metrics.jsonl").read_bytes() != (expected / "metrics.jsonl").read_bytes():
        return False
    with quiet_orbax():
        items = ("base", f"checkpoints/{step}/state")
        return all(same_arrays(saved_arrays(root / item), saved_arrays(expected / item)) for item in items)


def resume(output: Path, *overrides: str) -> Finished:
    """Continues the copy below `output` in this process."""
    return run_command(main, *RECIPE, f"output={output}", *overrides, "--resume")


def command_environment() -> dict[str, str]:
    """Returns the environment of a process of the command, with the compiled programs of the run."""
    return environment(scratch())


def started_run(*arguments: object) -> Run:
    """Runs the command in a process of its own."""
    return finish(start(command_environment(), *arguments))
