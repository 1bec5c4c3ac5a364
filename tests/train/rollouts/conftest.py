"""Steps that the tests of this directory share, because their programs take long to compile."""

import dataclasses
import threading
from collections import Counter
from contextlib import closing

import jax
import pytest

from tests import tiny
from tests.train.rollouts.fake_server import PROBES, Digits, serving
from train.config.plan import Plan
from train.data.tokenizers import ByteTokenizer
from train.process.interrupt import Interrupt
from train.rl.reference import FrozenWeights
from train.rl.state import TrainState
from train.rollouts.lag import initial_past
from train.rollouts.open import open_stream
from train.run.guard import StepGuard
from train.run.loop import rl_step, train
from train.run.programs import Programs
from train.weights.orbax import RunCheckpoints

OPTIONS = ("kl.rollout.coef=1e-3", "optim.learning_rate=3e-3", "temperature=0.8", "rollout.samples_per_prompt=8")
FROZEN = FrozenWeights(base=None, reference=None)


EOS = ByteTokenizer().eos_id
SOURCE = "rollout.source={{type: openai, url: '{}', model: m, retries: 0, timeout: 20.0}}"
AHEAD = ("rollout.ahead=1", "temperature=1.0", "eval.every=1000", "optim.learning_rate=3e-2")
REQUESTS, SECONDS = 4 * 8, 30


class Steps:
    """Steps of runs that differ in their lag alone, which no program depends on."""

    def __init__(self) -> None:
        self.config = tiny.config_of(*OPTIONS)
        self.context = tiny.context_of(self.config)
        with jax.set_mesh(self.context.mesh):
            self.programs = Programs.of(self.context, tiny.state_of(self.config, self.context.optimizer))
            self.stream = tiny.stream_of(self.context)

    def first(self, lag: int) -> TrainState:
        """The state of a run with this lag before its first step."""
        state = tiny.state_of(self.config, self.context.optimizer)
        return dataclasses.replace(state, past=initial_past(state.trainable, lag))

    def run(self, state: TrainState, steps: int) -> tuple[TrainState, list[dict]]:
        """So many steps from a state on."""
        metrics = []
        with jax.set_mesh(self.context.mesh):
            for step in range(int(state.step), int(state.step) + steps):
                state, values, _ = rl_step(self.context, self.programs, self.stream, FROZEN, state, step=step)
                metrics.append(values)
        return state, metrics


@pytest.fixture(scope="session")
def steps():
    return Steps()


class Versions:
    """Names each version of the weights by its step instead of sending it."""

    in_place = False

    def load(self, policy: object, step: int) -> str:
        return f"v{step}"

    def close(self) -> None:
        pass


class VersionedServer(Digits):
    """Draws other digits with other weights; lists the versions that were asked for, in their order."""

    def _choice(self, body: dict) -> dict:
        version = int(body["model"].removeprefix("v") if body["model"] != "m" else 0)
        return super()._choice(body | {"seed": body["seed"] + 3 * version})

    @property
    def versions(self) -> list[str]:
        requests = [body["model"] for body in self.bodies[PROBES:]]
        batches = [requests[start : start + REQUESTS] for start in range(0, len(requests), REQUESTS)]
        assert all(len({*batch}) == 1 for batch in batches)
        return [batch[0] for batch in batches]

    @property
    def bodies_by_version(self) -> dict[int, int]:
        """The number of requests of each version."""
        return dict(Counter(int(body["model"].removeprefix("v")) for body in self.bodies[PROBES:]))


class Writer:
    """Keeps the metrics of the steps."""

    def __init__(self) -> None:
        self.records: list[dict] = []

    def write(self, phase: str, step: int, values: dict) -> None:
        self.records.append({"step": step, **values})

    def timing(self, step: int, values: dict) -> None:
        pass


@pytest.fixture
def go_on(steps, tmp_path, monkeypatch):
    """Trains with a server until a step, from the last checkpoint if there is one, in a directory of this name."""
    monkeypatch.setattr("train.rollouts.server.source.make_sync", lambda *_: Versions())
    monkeypatch.setattr("train.run.loop.write_evaluation", lambda *_: None)

    def run(name, server, count, *options, stop_after=None, changes=(), programs=steps.programs):
        writer, interrupt = Writer(), Interrupt()

        def advance(note: str) -> None:
            interrupt.requested = len(writer.records) + 1 == stop_after

        with serving(server) as url, jax.set_mesh(steps.context.mesh):
            config = tiny.config_of(*OPTIONS, *AHEAD, SOURCE.format(url), f"steps={count}", *options)
            context = dataclasses.replace(steps.context, plan=Plan.of(config), **dict(changes))
            checkpoints = RunCheckpoints(tmp_path / name, config.checkpoint)
            first = steps.first(0)
            with closing(open_stream(context)) as stream, closing(checkpoints):
                state = checkpoints.restore_last(first) or first
                stream.attach(checkpoints, int(state.step))
                state = train(
                    context,
                    programs,
                    stream,
                    FROZEN,
                    state,
                    writer=writer,
                    watch=StepGuard(config, checkpoints, tmp_path / "nonfinite"),
                    interrupt=interrupt,
                    advance=advance,
                )
        assert not [thread for thread in threading.enumerate() if thread.name == "requests"]
        return state, writer.records

    return run
