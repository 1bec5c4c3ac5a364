"""Steps of the trainer's loop with logging, a checkpoint or a slow verifier, each beside steps without."""

import contextlib
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from benchmarks.harness.measure import Seconds
from benchmarks.harness.race import log
from benchmarks.suites.overhead.problem import StepSizes, config_of, learner_of
from train.config.schema import Checkpoint
from train.data.tasks import Example
from train.process.interrupt import Interrupt
from train.rollouts.open import open_source
from train.run.guard import StepGuard
from train.run.loop import train
from train.run.metrics import MetricsWriter
from train.weights.orbax import RunCheckpoints

CYCLE = ("after", "plain", "logged", "verified", "plain", "logged", "saved")
"""The kinds of steps in turns: nothing is written in a plain one, and a save goes on during the step after it."""
Step = tuple[float, float, float]
LOGGED = ("logged", "saved", "after")
VERIFIER = 0.1
"""Seconds of the verifier over the seconds of a plain step."""


def kind_of(step: int) -> str:
    """Returns the kind of a step, which counts from 1."""
    return CYCLE[(step - 1) % len(CYCLE)]


class TimedWriter:
    """Passes the metrics of the logged kinds of steps on, and times the calls."""

    def __init__(self, writer: MetricsWriter, clocks: "Clocks") -> None:
        self._writer, self._clocks = writer, clocks

    def write(self, phase: str, step: int, values: Mapping[str, Any]) -> None:
        if kind_of(step) in LOGGED:
            with self._clocks.stalled():
                self._writer.write(phase, step, values)

    def timing(self, step: int, values: Mapping[str, Any]) -> None:
        if kind_of(step) in LOGGED:
            with self._clocks.stalled():
                self._writer.timing(step, values)

    def samples(self, step: int, samples: Any) -> None:
        """No-op: nothing is evaluated."""


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
        self._interrupt, self.step, self._began, self._stalled = interrupt, 0, self._now(), 0.0

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """Counts the seconds of a block as the loop's in writing."""
        began = time.perf_counter()
        yield
        self._stalled += time.perf_counter() - began

    def advance(self, note: str) -> None:
        """Ends a step; the run stops behind the last one."""
        ended = self._now()
        self.step += 1
        if self.step % len(CYCLE) == 1:
            self.rounds.append({kind: [] for kind in dict.fromkeys(CYCLE)})
            log(f"round {len(self.rounds) - 1}")
        seconds = self.rounds[-1]
        wall, cpu = ended[0] - self._began[0], ended[1] - self._began[1]
        seconds[kind_of(self.step)].append((wall, cpu, self._stalled))
        self.verifier = VERIFIER * min((plain[0] for plain in seconds["plain"]), default=0.0)
        self._interrupt.requested = self.step == self._last - 1
        self._began, self._stalled = self._now(), 0.0

    def _now(self) -> Seconds:
        return time.perf_counter(), time.process_time()


def measure(work: StepSizes, rounds: int) -> tuple[list[dict[str, list[Step]]], int]:
    """Runs the loop; returns the seconds of the steps of each round by kind, and the bytes of a state."""
    config = config_of(work).model_copy(update={"checkpoint": Checkpoint(every=len(CYCLE))})
    learner, interrupt = learner_of(config), Interrupt()
    clocks = Clocks(rounds, interrupt)

    def score(example: Example, text: str, finished: bool) -> dict[str, float]:
        if kind_of(clocks.step + 1) == "verified":
            time.sleep(clocks.verifier / work.rows)
        return learner.context.task.score(example, text, finished)

    context = dataclasses.replace(learner.context, task=dataclasses.replace(learner.context.task, score=score))
    with tempfile.TemporaryDirectory() as directory, jax.set_mesh(context.mesh):
        root = pathlib.Path(directory)
        with (
            contextlib.closing(RunCheckpoints(root / "checkpoints", config.checkpoint)) as checkpoints,
            contextlib.closing(MetricsWriter(root)) as writer,
            contextlib.closing(open_source(context)) as source,
        ):
            checkpoints.carry = lambda: {"metrics": writer.mark()}
            watch = StepGuard(config, checkpoints, root / "nonfinite")
            watch.save = clocks.stalled()(watch.save)  # type: ignore[method-assign]
            state = train(
                context,
                learner.programs,
                source,
                learner.frozen,
                learner.state,
                writer=TimedWriter(writer, clocks),  # type: ignore[arg-type]
                watch=watch,
                interrupt=interrupt,
                advance=clocks.advance,
            )
    return clocks.rounds[1:], sum(leaf.nbytes for leaf in jax.tree.leaves(state))
