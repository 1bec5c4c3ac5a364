"""Times what logging, checkpoints, a verifier and a server add to a step of the trainer, on a CPU.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --rounds 20 --json PATH --markdown PATH
    python -m benchmarks.overhead --recorded

One run of the trainer's loop takes turns: steps that write nothing, steps that write metrics, a step that also saves
the state, the step after it, during which the files are written, and a step whose verifier takes a tenth of a step.
Then a server whose answer takes as long as an update, which waits for the trainer, or works one step ahead of it.
With --recorded, steps with recorded completions alone, whose reference scores each row once, or in every epoch.

Each row is compared with the plain steps of its round, and the median of the rounds counts: by wall time, by the CPU
time of all threads, and by the time that the loop spends in writing, for which the devices wait. Curves are drawn when
a run has ended, so they are in no step. A missed target does not fail the command.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import pathlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import mean, median
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from benchmarks.harness import cli, machine
from benchmarks.harness.learner import Learner, grpo
from benchmarks.harness.measure import Seconds
from benchmarks.harness.race import log
from benchmarks.harness.report import Check, Report, table
from tests.train.rollouts.fake_server import serving
from train.config.plan import Plan
from train.config.schema import Checkpoint, Config
from train.data.tasks import Example
from train.process.interrupt import Interrupt
from train.rl.keys import purpose_key
from train.rl.policy import init_params
from train.rollouts.open import open_source
from train.run.guard import StepGuard
from train.run.loop import Programs, rl_step, train
from train.run.metrics import MetricsWriter
from train.run.setup import make_context
from train.weights.orbax import RunCheckpoints

STALL_LIMIT, VERIFIER_LIMIT, SERVER_LIMIT = 1.02, 1.02, 1.15
"""Targets: a step over one without writing, without a verifier, and over the longer of update and answer."""
TITLES = {
    "plain": "nothing is written",
    "logged": "metrics are written",
    "saved": "and the state is saved",
    "after": "the step after the save",
    "verified": "a verifier takes a tenth of the step",
}
COLUMNS = (("step", ""), ("s", ".3f"), ("over nothing", ".3f"), ("CPU s", ".3f"), ("over nothing", ".3f"),
           ("s in writing", ".4f"))  # fmt: skip
RECORDED_COLUMNS = (("recorded completions", ""), ("s", ".3f"), ("over every epoch", ".2f"), ("CPU s", ".3f"),
                    ("over every epoch", ".2f"))  # fmt: skip
SERVER_COLUMNS = (("with a server", ""), ("s", ".3f"), ("over the longer of both", ".2f"))
CYCLE = ("after", "plain", "logged", "verified", "plain", "logged", "saved")
"""The kinds of steps in turns: nothing is written in a plain one, and a save goes on during the step after it."""
LOGGED = ("logged", "saved", "after")
VERIFIER = 0.1
"""Seconds of the verifier over the seconds of a plain step."""
RECORDED = {
    f"{updates} update{'s' if updates > 1 else ''} on a batch, {scored}": (updates, mib)
    for updates in (1, 2)
    for scored, mib in {"scored once": 1024, "scored in every epoch": 0}.items()
}
"""Updates on a batch, as the policy is scored before the first of several; and MiB for the log-probs of the reference,
which are kept where it scores a row once."""
EPOCH = 2
"""Batches of the recording."""
AHEAD = {"ahead: 0": 0, "ahead: 1": 1}
BLOCK = 3
"""Steps of a contender with a server in a round; the first does not count, as a batch may lie ready."""
Step = tuple[float, float, float]
Value = TypeVar("Value")


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


def config_of(work: StepSizes, **more: Any) -> Config:
    """Returns the config of a run of GRPO with a KL to the base, which neither evaluates nor ends by itself."""
    heads = {"layers": 4, "width": work.width, "heads": 4, "kv_heads": 2, "head_dim": work.width // 4}
    raw = {
        "steps": 10**6,
        "model": {**heads, "mlp_width": 3 * work.width},
        "warm_start": {"steps": 0},
        "kl": {"loss": {"coef": 0.04}},
        "optim": {"epochs": 2},
        "eval": {"every": 10**6, "prompts": 1, "batch_size": 1},
    }
    return grpo(16, work.completion_length, work.prompts, work.samples, **raw | more)


def learner_of(config: Config) -> Learner:
    """Draws the weights; the programs compile at their first use."""
    context = make_context(config)
    return Learner.of(context, init_params(context.model, purpose_key(config.seed, "params"), context.mesh))


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
        self._interrupt, self.step, self._began, self._stalled = interrupt, 0, _now(), 0.0

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
        self._began, self._stalled = _now(), 0.0


def _now() -> Seconds:
    return time.perf_counter(), time.process_time()


def measure_steps(work: StepSizes, rounds: int) -> tuple[list[dict[str, list[Step]]], int]:
    """Runs the trainer's loop; returns the seconds of the steps of each round by kind, and the bytes of a state."""
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
            writer.write = clocks.logged(writer.write)  # type: ignore[method-assign]
            writer.timing = clocks.logged(writer.timing)  # type: ignore[method-assign]
            run = (context, learner.programs, source, learner.frozen, learner.state)
            state = train(*run, writer=writer, watch=watch, interrupt=interrupt, advance=clocks.advance)
    return clocks.rounds[1:], sum(leaf.nbytes for leaf in jax.tree.leaves(state))


class SourceSteps:
    """A run of its own on the source of a config."""

    def __init__(self, learner: Learner, config: Config, stack: contextlib.ExitStack) -> None:
        self.frozen, self.state, self.number = learner.frozen, jax.tree.map(jnp.copy, learner.state), 0
        self.context = dataclasses.replace(learner.context, plan=Plan.of(config))
        self.source = stack.enter_context(contextlib.closing(open_source(self.context)))
        self.programs = Programs.of(self.context, self.state, self.source)

    def step(self) -> Mapping[str, float]:
        """Does a step; returns the seconds of its parts."""
        run = (self.context, self.programs, self.source, self.frozen, self.state)
        self.state, _, parts = rl_step(*run, step=self.number)
        self.number += 1
        return parts

    def epoch(self) -> Seconds:
        """Returns the mean seconds of a step of an epoch of the recording."""
        began = _now()
        for _ in range(EPOCH):
            self.step()
        jax.block_until_ready(self.state)
        wall, cpu = (after - before for after, before in zip(_now(), began, strict=True))
        return wall / EPOCH, cpu / EPOCH

    def block(self) -> dict[str, float]:
        """Returns the mean seconds of a step, of waiting for its answer, and of the rest."""
        steps = list[dict[str, float]]()
        for _ in range(BLOCK):
            began = time.perf_counter()
            answer = self.step()["rollout"]
            step = time.perf_counter() - began
            steps.append({"step": step, "answer": answer, "update": step - answer})
        return {part: mean(step[part] for step in steps[1:]) for part in steps[0]}


def interleaved(contenders: Mapping[str, Callable[[], Value]], rounds: int) -> Iterator[dict[str, Value]]:
    """Yields the results of each round by contender; the first round, which compiles, comes first."""
    for number in range(rounds + 1):
        yield {name: run() for name, run in contenders.items()}
        log(f"round {number} of {rounds}")


def measure_recorded(work: StepSizes, rounds: int) -> list[dict[str, Seconds]]:
    """Times epochs in interleaved rounds; returns the seconds of a step of each round, by contender."""
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        path = pathlib.Path(directory) / "rows.jsonl"
        with path.open("w") as file:
            for row in range(EPOCH * work.rows):
                ids, group = [ord("0") + draw.randrange(10) for _ in range(work.completion_length)], row // work.samples
                fields = {"prompt_ids": [1, group % 10], "completion_ids": ids, "group": group, "reward": draw.random()}
                file.write(json.dumps(fields) + "\n")
        contenders = {}
        for name, (updates, mib) in RECORDED.items():
            source = {"type": "file", "path": str(path), "max_reference_mib": mib}
            config = config_of(work, rollout={"source": source}, optim={"epochs": updates})
            contenders[name] = SourceSteps(learner_of(config), config, stack)
        stack.enter_context(jax.set_mesh(contenders[name].context.mesh))
        # The round that compiles is the first epoch.
        return list(interleaved({name: steps.epoch for name, steps in contenders.items()}, rounds))[1:]


def _answer(pace: Mapping[str, float], path: str, body: Mapping[str, Any]) -> tuple[int, str]:
    """Answers a request for completions after the seconds of an update; what is sampled does not matter."""
    answer: dict[str, list] = {"data": [{"id": "m"}]}
    if path != "/v1/models":
        time.sleep(pace["update"])
        ids = [ord("0") + (body["seed"] + index) % 10 for index in range(body["max_tokens"])]
        fields = {"token_ids": ids, "finish_reason": "length", "logprobs": {"token_logprobs": [-5.5] * len(ids)}}
        answer = {"choices": [{"index": index, **fields} for index in range(body["n"])]}
    return 200, json.dumps(answer)


def measure_server(work: StepSizes, rounds: int) -> list[dict[str, dict[str, float]]]:
    """Times steps in interleaved rounds by contender and part; an answer takes as long as the updates before."""
    results, pace = list[dict[str, dict[str, float]]](), {"update": 0.0}
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving(functools.partial(_answer, pace)))
        source = {"type": "openai", "url": url, "model": "m", "sync": "none"}
        configs = {name: config_of(work, rollout={"source": source, "ahead": steps}) for name, steps in AHEAD.items()}
        learner = learner_of(configs["ahead: 0"])
        stack.enter_context(jax.set_mesh(learner.context.mesh))
        blocks = {name: SourceSteps(learner, config, stack).block for name, config in configs.items()}
        for seconds in interleaved(blocks, rounds):
            pace["update"] = seconds["ahead: 0"]["update"]
            results.append(seconds)
    return results[1:]


def report(fields: Mapping[str, Any]) -> Report:
    """Compares the steps of each round with each other; the medians of the rounds count."""
    work = StepSizes(**fields["work"])
    how = [f"{work.rows} completions of {work.completion_length} tokens, a width of {work.width}"]
    if "recorded" in fields:
        how.append(f"medians of {fields['rounds']} interleaved rounds after the first epoch")
        return Report([table(RECORDED_COLUMNS, _recorded_rows(fields["recorded"]))], fields=fields, how=how)
    how += [f"a state of {fields['bytes'] / 1e6:.1f} MB", f"medians of {fields['rounds']} interleaved rounds"]
    # The mean seconds of each kind of step for each round: wall, CPU, and in writing.
    means = [
        {kind: tuple(map(mean, zip(*values, strict=True))) for kind, values in seconds.items()}
        for seconds in fields["steps"]
    ]
    rows, over = [], dict[str, list[float]]()
    for kind, title in TITLES.items():
        wall, cpu, writing = (median(seconds[kind][clock] for seconds in means) for clock in range(3))
        # Over the plain steps of the round; the time in writing, over the rest of the step.
        over[kind] = [median(seconds[kind][clock] / seconds["plain"][clock] for seconds in means) for clock in range(2)]
        over[kind].append(1 + median(seconds[kind][2] / (seconds[kind][0] - seconds[kind][2]) for seconds in means))
        rows.append([title, wall, over[kind][0], cpu, over[kind][1], writing])
    rounds, of_server = fields["server"], dict[str, float]()
    served: list[list[Any]] = [
        [f"the {part} alone", median(seconds["ahead: 0"][part] for seconds in rounds), None]
        for part in ("answer", "update")
    ]
    # Over the longer of answer and update, which are parts of the steps of the round that wait for each other.
    longer = [max(seconds["ahead: 0"]["answer"], seconds["ahead: 0"]["update"]) for seconds in rounds]
    for name in AHEAD:
        steps = [seconds[name]["step"] for seconds in rounds]
        of_server[name] = median(step / most for step, most in zip(steps, longer, strict=True))
        served.append([f"a step with `{name}`", median(steps), of_server[name]])
    # The loop's own time in writing is compared, which other programs on the machine prolong as they prolong the step;
    # the other value is that of the wall time of whole steps.
    checks = [
        Check("metrics in every step", STALL_LIMIT, over["logged"][2], over["logged"][0], digits=3),
        Check("the step that saves the state", STALL_LIMIT, over["saved"][2], over["saved"][0], digits=3),
        Check("a verifier of a tenth of the step", VERIFIER_LIMIT, over["verified"][0], digits=3),
        Check("a server one step ahead", SERVER_LIMIT, of_server["ahead: 1"]),
    ]
    return Report([table(COLUMNS, rows), table(SERVER_COLUMNS, served)], checks, "whole steps", fields, how)


def _recorded_rows(rounds: list[dict[str, Any]]) -> list[list[Any]]:
    names, rows = list(RECORDED), list[list[Any]]()
    for once, every in zip(names[::2], names[1::2], strict=True):
        for name in (once, every):
            rows.append([name])
            for clock in range(2):
                rows[-1].append(median(seconds[name][clock] for seconds in rounds))
                rows[-1].append(median(seconds[name][clock] / seconds[every][clock] for seconds in rounds))
    return rows


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    work = QUICK if options.quick else StepSizes()
    fields = machine.conditions() | {"rounds": options.rounds, "work": vars(work)}
    if options.recorded:
        return fields | {"recorded": measure_recorded(work, options.rounds)}
    seconds, size = measure_steps(work, options.rounds)
    return fields | {"bytes": size, "steps": seconds, "server": measure_server(work, options.rounds)}


main = cli.command(
    "overhead",
    __doc__,
    _measure,
    report,
    cli.rounds(12),
    cli.option("--recorded", action="store_true", help="time the steps with recorded completions alone"),
    cli.option("--quick", action="store_true", help="a smoke test: a tiny model"),
)

if __name__ == "__main__":
    sys.exit(main())
