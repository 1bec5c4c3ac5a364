"""Times what logging, checkpoints and a verifier add to a step of the trainer, on a CPU.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --rounds 20 --json PATH --markdown PATH

One run of the trainer's loop takes turns: steps that write nothing, steps that write metrics, a step that also saves
the state, the step after it, during which the files are written, and a step whose verifier takes a tenth of a step.

Each row is compared with the plain steps of its round, and the median of the rounds counts: by wall time, by the CPU
time of all threads, and by the time that the loop spends in writing, for which the devices wait. Curves are drawn when
a run has ended, so they are in no step. A missed target does not fail the command.
"""

import argparse
import contextlib
import dataclasses
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import mean, median
from typing import Any

import jax

from benchmarks.harness import cli, machine
from benchmarks.harness.learner import Learner, grpo
from benchmarks.harness.measure import Seconds
from benchmarks.harness.race import log
from benchmarks.harness.report import Check, Report, table
from train.config.schema import Checkpoint, Config
from train.data.tasks import Example
from train.models.parameters import init_params
from train.process.interrupt import Interrupt
from train.rl.keys import purpose_key
from train.rollouts.open import open_stream
from train.run.guard import StepGuard
from train.run.loop import train
from train.run.metrics import MetricsWriter
from train.run.setup import make_context
from train.weights.orbax import RunCheckpoints

STALL_LIMIT, VERIFIER_LIMIT = 1.02, 1.02
"""Targets: a step over one without writing, and without a verifier."""
TITLES = {
    "plain": "nothing is written",
    "logged": "metrics are written",
    "saved": "and the state is saved",
    "after": "the step after the save",
    "verified": "a verifier takes a tenth of the step",
}
COLUMNS = (("step", ""), ("s", ".3f"), ("over nothing", ".3f"), ("CPU s", ".3f"), ("over nothing", ".3f"),
           ("s in writing", ".4f"))  # fmt: skip
CYCLE = ("after", "plain", "logged", "verified", "plain", "logged", "saved")
"""The kinds of steps in turns: nothing is written in a plain one, and a save goes on during the step after it."""
LOGGED = ("logged", "saved", "after")
VERIFIER = 0.1
"""Seconds of the verifier over the seconds of a plain step."""
Step = tuple[float, float, float]


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """Sizes of the model and of a batch."""

    width: int = 256
    prompts: int = 8
    samples: int = 4
    completion_length: int = 32

    @property
    def rows(self) -> int:
        """Returns the completions of a batch."""
        return self.prompts * self.samples


QUICK = StepSizes(width=16, completion_length=4)
"""A smoke test: steps of milliseconds."""


def config_of(work: StepSizes) -> Config:
    """Returns the config of a run of GRPO with a KL to the base, which neither evaluates nor ends by itself."""
    heads = {"layers": 4, "width": work.width, "heads": 4, "kv_heads": 2, "head_dim": work.width // 4}
    raw: dict[str, Any] = {
        "steps": 10**6,
        "model": {**heads, "mlp_width": 3 * work.width},
        "warm_start": {"steps": 0},
        "kl": {"loss": {"coef": 0.04}},
        "optim": {"epochs": 2},
        "eval": {"every": 10**6, "prompts": 1, "batch_size": 1},
    }
    return grpo(16, work.completion_length, work.prompts, work.samples, **raw)


def kind_of(step: int) -> str:
    """Returns the kind of a step, which counts from 1."""
    return CYCLE[(step - 1) % len(CYCLE)]


class Clocks:
    """Times the steps by their kind; the first round compiles and does not count.

    Attributes:
      rounds: the seconds of the steps of each kind for each round: wall, CPU, and in writing by the loop.
      step: the last finished one.
      verifier: seconds that the verifier of a step takes, spread over its completions.
    """

    def __init__(self, rounds: int, interrupt: Interrupt) -> None:
        self.rounds: list[dict[str, list[Step]]] = []
        self.verifier = 0.0
        self._last = (rounds + 1) * len(CYCLE)
        self._interrupt = interrupt
        self.step = 0
        self._began = _now()
        self._stalled = 0.0

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """Counts the seconds of a block as the loop's in writing."""
        began = time.perf_counter()
        yield
        self._stalled += time.perf_counter() - began

    def logged(self, write: Callable[..., None]) -> Callable[..., None]:
        """Times a function whose last arguments are step and values; it is not called for steps that do not log."""
        timed = self.stalled()(write)
        return lambda *arguments: timed(*arguments) if kind_of(arguments[-2]) in LOGGED else None

    def advance(self, note: str) -> None:
        """Ends a step; the run stops behind the last one."""
        ended = _now()
        self.step += 1
        if self.step % len(CYCLE) == 1:
            self.rounds.append({kind: [] for kind in dict.fromkeys(CYCLE)})
            log(f"round {len(self.rounds) - 1}")
        seconds = self.rounds[-1]
        wall, cpu = ended[0] - self._began[0], ended[1] - self._began[1]
        seconds[kind_of(self.step)].append((wall, cpu, self._stalled))
        self.verifier = VERIFIER * min((plain[0] for plain in seconds["plain"]), default=0.0)
        self._interrupt.requested = self.step == self._last - 1
        self._began = _now()
        self._stalled = 0.0


def _now() -> Seconds:
    return time.perf_counter(), time.process_time()


def measure_steps(work: StepSizes, rounds: int) -> tuple[list[dict[str, list[Step]]], int]:
    """Runs the trainer's loop; returns the seconds of the steps of each round by kind, and the bytes of a state."""
    config = config_of(work).model_copy(update={"checkpoint": Checkpoint(every=len(CYCLE))})
    context = make_context(config)
    interrupt = Interrupt()
    learner = Learner.of(context, init_params(context.model, purpose_key(config.seed, "params"), context.mesh))
    clocks = Clocks(rounds, interrupt)

    def score(example: Example, text: str, finished: bool) -> dict[str, float]:
        if kind_of(clocks.step + 1) == "verified":
            time.sleep(clocks.verifier / work.rows)
        return task.score(example, text, finished)

    task = context.task
    context = dataclasses.replace(context, task=dataclasses.replace(task, score=score))
    with tempfile.TemporaryDirectory() as directory, jax.set_mesh(context.mesh):
        root = pathlib.Path(directory)
        with (
            contextlib.closing(RunCheckpoints(root / "checkpoints", config.checkpoint)) as checkpoints,
            contextlib.closing(MetricsWriter(root)) as writer,
            contextlib.closing(open_stream(context)) as stream,
        ):
            checkpoints.carry = lambda: {"metrics": writer.mark()}
            watch = StepGuard(config, checkpoints, root / "nonfinite")
            watch.save = clocks.stalled()(watch.save)  # type: ignore[method-assign]
            writer.write = clocks.logged(writer.write)  # type: ignore[method-assign]
            writer.timing = clocks.logged(writer.timing)  # type: ignore[method-assign]
            run = (context, learner.programs, stream, learner.frozen, learner.state)
            state = train(*run, writer=writer, watch=watch, interrupt=interrupt, advance=clocks.advance)
    return clocks.rounds[1:], sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def report(fields: Mapping[str, Any]) -> Report:
    """Compares the steps of each round with each other; the medians of the rounds count."""
    work = StepSizes(**fields["work"])
    how = [f"{work.rows} completions of {work.completion_length} tokens, a width of {work.width}"]
    how += [f"a state of {fields['bytes'] / 1e6:.1f} MB", f"medians of {fields['rounds']} interleaved rounds"]
    # The mean seconds of each kind of step for each round: wall, CPU, and in writing.
    means = [
        {kind: tuple(map(mean, zip(*values, strict=True))) for kind, values in seconds.items()}
        for seconds in fields["steps"]
    ]
    rows = []
    over = dict[str, list[float]]()
    for kind, title in TITLES.items():
        wall, cpu, writing = (median(seconds[kind][clock] for seconds in means) for clock in range(3))
        # Over the plain steps of the round; the time in writing, over the rest of the step.
        over[kind] = [median(seconds[kind][clock] / seconds["plain"][clock] for seconds in means) for clock in range(2)]
        over[kind].append(1 + median(seconds[kind][2] / (seconds[kind][0] - seconds[kind][2]) for seconds in means))
        rows.append([title, wall, over[kind][0], cpu, over[kind][1], writing])
    # The loop's own time in writing is compared, which other programs on the machine prolong as they prolong the step;
    # the other value is that of the wall time of whole steps.
    checks = [
        Check("metrics in every step", STALL_LIMIT, over["logged"][2], over["logged"][0], digits=3),
        Check("the step that saves the state", STALL_LIMIT, over["saved"][2], over["saved"][0], digits=3),
        Check("a verifier of a tenth of the step", VERIFIER_LIMIT, over["verified"][0], digits=3),
    ]
    return Report([table(COLUMNS, rows)], checks, "whole steps", fields, how)


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    work = QUICK if options.quick else StepSizes()
    fields = machine.conditions() | {"rounds": options.rounds, "work": vars(work)}
    seconds, size = measure_steps(work, options.rounds)
    return fields | {"bytes": size, "steps": seconds}


main = cli.command(
    "overhead",
    __doc__,
    _measure,
    report,
    cli.option("--rounds", type=cli.positive, default=12, help="interleaved rounds; 12"),
    cli.option("--quick", action="store_true", help="a smoke test: a tiny model"),
)

if __name__ == "__main__":
    sys.exit(main())
