"""Steps with recorded completions after their first epoch, with and without the log-probs that are kept of it."""

import contextlib
import json
import pathlib
import random
import tempfile
import time

import jax

from benchmarks.harness.measure import Seconds
from benchmarks.harness.race import log
from benchmarks.suites.overhead.problem import StepSizes, config_of, learner_of
from train.rollouts import open_source
from train.run.loop import Programs, rl_step

KEPT = {"scored once": 1024, "scored in every epoch": 0}
"""Memory for the log-probs of the reference, MiB."""
UPDATES = (1, 2)
"""Updates on a batch; the policy is scored before the first of several."""
EPOCH = 2
"""Batches of the recording."""


def names() -> list[tuple[int, str]]:
    """Returns the contenders: updates on a batch, and whether the reference scores a row once."""
    return [(updates, kept) for updates in UPDATES for kept in KEPT]


def title(updates: int, kept: str) -> str:
    """Returns the name of a contender in the report."""
    return f"{updates} update{'s' if updates > 1 else ''} on a batch, {kept}"


class RecordedSteps:
    """One contender: a run of its own on the recording."""

    def __init__(self, work: StepSizes, path: pathlib.Path, updates: int, kept: str) -> None:
        source = {"type": "file", "path": str(path), "max_reference_mib": KEPT[kept]}
        config = config_of(work, source=source)
        learner = learner_of(config.model_copy(update={"optim": config.optim.model_copy(update={"epochs": updates})}))
        self.learner, self._state, self._step = learner, learner.state, 0
        self._source = open_source(learner.context)
        self._programs = Programs.of(learner.context, learner.state, self._source)

    def epoch(self) -> Seconds:
        """Runs the steps of an epoch; returns the mean seconds of a step."""
        learner, began = self.learner, (time.perf_counter(), time.process_time())
        for _ in range(EPOCH):
            self._state, *_ = rl_step(
                learner.context, self._programs, self._source, learner.frozen, self._state, step=self._step
            )
            self._step += 1
        jax.block_until_ready(self._state)
        return (time.perf_counter() - began[0]) / EPOCH, (time.process_time() - began[1]) / EPOCH


def write_recording(work: StepSizes, path: pathlib.Path) -> None:
    """Writes completions of random digits."""
    draw = random.Random(0)
    with path.open("w") as file:
        for group in range(EPOCH * work.prompts):
            for _ in range(work.samples):
                ids = [ord("0") + draw.randrange(10) for _ in range(work.completion_length)]
                row = {"prompt_ids": [1, group % 10], "completion_ids": ids, "group": group, "reward": draw.random()}
                file.write(json.dumps(row) + "\n")


def measure(work: StepSizes, rounds: int) -> list[dict[str, Seconds]]:
    """Times epochs in interleaved rounds; returns the seconds of a step of each round, by contender."""
    found = list[dict[str, Seconds]]()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        path = pathlib.Path(directory) / "rows.jsonl"
        write_recording(work, path)
        contenders = {title(*name): RecordedSteps(work, path, *name) for name in names()}
        stack.enter_context(jax.set_mesh(next(iter(contenders.values())).learner.context.mesh))
        # The first round compiles, and is the first epoch.
        for number in range(rounds + 1):
            seconds = {name: contender.epoch() for name, contender in contenders.items()}
            found += [seconds] if number else []
            log(f"round {number} of {rounds}")
    return found
