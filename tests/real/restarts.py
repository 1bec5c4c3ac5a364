"""A short run on SmolLM2-135M-Instruct that is killed and continued, and one of two processes, against one run.

    python -m tests.real.restarts

The run that is killed at three moments has to end bit by bit where the other ends. Two processes with half of the rows
each have to sample the same tokens, and to agree within the rounding of a sum in two parts.
"""

import argparse
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from tests import xla
from tests.exactness import ONE, Distance, ProcessLayout, distance, run
from tests.integration.command import environment, finish, lines_written, start, state_arrays, wait_for
from train import real
from train.process.console import run_command

STEPS = 3
# The entropy has a gradient whatever the replies are, which are too short to be right.
SHORT = (
    *(real.CONFIG, f"steps={STEPS}", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=2"),
    *("data.max_completion_length=8", "loss.entropy_coef=0.01", "optim.micro_batches=2", "optim.warmup_steps=0"),
    *("eval.prompts=2", "eval.batch_size=2", "eval.greedy=false", "eval.every=3", "checkpoint={every: 1, keep: 9}"),
)
MOMENTS: Mapping[str, Callable[[Path], bool]] = {
    "in the first step": lambda root: (root / "checkpoints/0").is_dir(),
    "while step 1 is saved": lambda root: bool(list(root.glob("checkpoints/1*"))),
    "in the second step's save": lambda root: lines_written(root, "train") > 1,
}
TWO = ProcessLayout(2, 1, (2, 1, 1))
# Relative differences of losses and of arrays of the adapter, whose B, from 0, holds its changes alone.
LOSS, WEIGHTS, KL = 1e-5, 1e-3, 1e-6


def run_killed(recipe: Sequence[str], output: Path, env: Mapping[str, str]) -> Path:
    """Runs a recipe that is killed at each moment and continued; returns the run directory.

    Raises:
      RuntimeError: the run ended before a moment, or with an error.
    """
    root = output / "run"
    for number, moment in enumerate([*MOMENTS, None]):
        continued = ("--resume",) if number else ()
        process = start(env, *recipe, "name=run", f"output={output}", *continued)
        if moment is None:
            finish(process).succeeded()
            return root
        wait_for(process, lambda happens=MOMENTS[moment]: happens(root))  # type: ignore[misc]
        ended = process.poll() is not None
        process.send_signal(signal.SIGKILL)
        if ended:
            raise RuntimeError(f"the run ended before it was killed {moment}: {finish(process).stderr}")
        finish(process)
    return root


def differences(root: Path, expected: Path) -> list[str]:
    """Lists the metrics and arrays in which two runs differ in a bit."""
    metrics = [(item / "metrics.jsonl").read_text() for item in (root, expected)]
    differing = [] if metrics[0] == metrics[1] else ["metrics.jsonl"]
    for step in range(STEPS + 1):
        got, want = state_arrays(root, step), state_arrays(expected, step)
        names = sorted(got.keys() | want.keys())
        same = [name in got and name in want and got[name].tobytes() == want[name].tobytes() for name in names]
        differing += [f"step {step}: {name}" for name, equal in zip(names, same, strict=True) if not equal]
    return differing


def compare(folder: Path, scratch: Path) -> tuple[list[str], Distance]:
    """Runs all; returns the differences of the killed run, and how far the two processes are."""
    recipe = (*SHORT, f"model.path={folder}")
    env = {**environment(scratch), "XLA_FLAGS": xla.flags(devices=1)}
    expected = run(ONE, (), scratch / "one", env, common=recipe)
    moved = state_arrays(expected, STEPS)
    if not all(np.any(value) for name, value in moved.items() if name.startswith("trainable.")):
        raise RuntimeError("the run has not moved every matrix of the adapter")
    two = run(TWO, (), scratch / "two", env, common=recipe)
    return differences(run_killed(recipe, scratch / "killed", env), expected), distance(two, expected, 0, steps=STEPS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints both comparisons; the exit code is 1 if one fails, 2 for a user's error."""
    argparse.ArgumentParser(prog="python -m tests.real.restarts", description=str(__doc__)).parse_args(arguments)

    def run_all() -> int:
        with tempfile.TemporaryDirectory() as scratch:
            differing, far = compare(real.fetch(), Path(scratch))
        print(f"killed {', '.join(MOMENTS)}: {', '.join(differing) or 'the same to the bit'}")
        tokens = "the same tokens" if far.same_tokens else "other tokens"
        print(f"two processes: {tokens}, losses {far.loss:.1e}, adapter {far.weights:.1e}, KL {far.kl:.1e} nats")
        return int(bool(differing) or not agrees(far))

    return run_command(run_all)


def agrees(far: Distance) -> bool:
    """Tells whether two processes are within the bounds."""
    return far.same_tokens and far.loss <= LOSS and far.weights <= WEIGHTS and far.kl <= KL


if __name__ == "__main__":
    raise SystemExit(main())
