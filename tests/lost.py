"""Runs of the real command in several processes, one of which gets a signal at a moment."""

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests import peers
from tests.integration.command import lines_written

NAME = "smoke"
STEPS = 6
RECIPE = (
    "configs/smoke.yaml",
    "mesh={data: 2, fsdp: 2}",
    f"steps={STEPS}",
    "warm_start={steps: 20, batch_size: 8, learning_rate: 1e-2}",
    "checkpoint={every: 1, keep: 10}",
    "eval={every: 6, prompts: 8, batch_size: 8, greedy: false}",
    # The gradient of the entropy is far from 0, and SGD, unlike Adam, does not enlarge what rounds.
    "loss.entropy_coef=1.0",
    "optim.optimizer=sgd",
    "optim.learning_rate=0.1",
)
DEVICES = 4
"""Devices of all processes together."""
LIMIT = 15
"""Seconds in which the others have to end."""


MOMENTS: Mapping[str, Callable[[Path], bool]] = {
    "in the warm start": lambda root: lines_written(root, "warm_start") > 1,
    "in the save of the base": lambda root: bool(list(root.glob("base.*tmp*"))),
    "in a compilation": lambda root: (root / "base").exists(),
    "in a step": lambda root: lines_written(root, "train") > 1,
    "in a save": lambda root: bool(list(root.glob("checkpoints/[2-9]*tmp*"))),
}


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of all processes.

    Attributes:
      codes: their exit codes; None for a process that went on.
      seconds: from the signal to the end of the last of the others.
      errors: the standard error of each.
      pid: of the process that got the signal.
      root: the run directory.
    """

    codes: tuple[int | None, ...]
    seconds: float
    errors: tuple[str, ...]
    pid: int
    root: Path


def signalled(
    output: Path,
    moment: str,
    victim: int,
    *numbers: signal.Signals,
    env: Mapping[str, str],
    processes: int = 2,
    devices: int = DEVICES,
    more: tuple[str, ...] = (),
) -> Ended:
    """Starts the recipe and sends signals to one process at a moment; waits for the end of the others."""
    root = output / NAME
    arguments = (*RECIPE, f"output={output}", *more)
    with peers.started("train", *arguments, processes=processes, devices=devices // processes, env=env) as started:
        until = time.monotonic() + 300
        while not MOMENTS[moment](root) and all(peer.returncode is None for peer in started):
            assert time.monotonic() < until, [peer.stderr for peer in started]
            time.sleep(0.002)
        for number in numbers:
            started[victim].process.send_signal(number)
            time.sleep(0.05)
        began = time.monotonic()
        others = [peer for number, peer in enumerate(started) if number != victim]
        with contextlib.suppress(TimeoutError):
            peers.wait(others, 60)
        seconds = time.monotonic() - began
        started[victim].process.kill() if signal.SIGSTOP in numbers else peers.wait(started, 30)
        codes = tuple(peer.returncode for peer in started)
        return Ended(codes, seconds, tuple(peer.stderr for peer in started), started[victim].process.pid, root)


def names_the_lost(ended: Ended, victim: int) -> bool:
    """Whether every other process ended in time with code 75 and a message that names the lost one and its step.

    Where the leader is lost, JAX may abort the others first.
    """
    text = f"error: process {victim} of {len(ended.codes)} ("
    return ended.seconds < LIMIT and all(
        (code == 75 and text in error and f"pid {ended.pid}) is lost" in error and "Traceback" not in error)
        or (victim == 0 and names_the_leader(code, error))
        for number, (code, error) in enumerate(zip(ended.codes, ended.errors, strict=True))
        if number != victim
    )


def names_the_leader(code: int | None, error: str) -> bool:
    """Whether JAX has aborted a process, with a message that names the leader."""
    return code == -signal.SIGABRT and "Either the leader task was preempted/died" in error


def go_on(
    output: Path, *more: str, env: Mapping[str, str], processes: int = 2, resume: bool = True
) -> list[tuple[int, str, str]]:
    """Runs the recipe to its end; returns exit code, output and errors of each process."""
    arguments = (*RECIPE, f"output={output}", *more, *(["--resume"] if resume else []))
    return peers.run("train", *arguments, processes=processes, devices=DEVICES // processes, env=env)


def uninterrupted(output: Path, env: Mapping[str, str]) -> Path:
    """Runs the recipe in two processes without a fault; returns its directory."""
    os.makedirs(output, exist_ok=True)
    for code, _, errors in go_on(output, env=env, resume=False):
        assert code == 0, errors
    return output / NAME
