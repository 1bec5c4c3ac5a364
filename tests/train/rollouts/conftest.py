"""Steps that the tests of this directory share, because their programs take long to compile."""

import dataclasses

import jax
import pytest

from tests import tiny
from train.rl.reference import FrozenWeights
from train.rl.state import TrainState
from train.rollouts.jax_source import JaxSource
from train.rollouts.lag import initial_past
from train.run.loop import Programs, rl_step

OPTIONS = ("kl.rollout.coef=1e-3", "optim.learning_rate=3e-3", "temperature=0.8", "rollout.samples_per_prompt=8")
FROZEN = FrozenWeights(base=None, reference=None)


class Steps:
    """Steps of runs that differ in their lag alone, which no program depends on."""

    def __init__(self) -> None:
        self.config = tiny.config_of(*OPTIONS)
        self.context = tiny.context_of(self.config)
        with jax.set_mesh(self.context.mesh):
            self.programs = Programs.of(self.context, tiny.state_of(self.config, self.context.optimizer))
            self.source = JaxSource(self.context)

    def first(self, lag: int) -> TrainState:
        """The state of a run with this lag before its first step."""
        state = tiny.state_of(self.config, self.context.optimizer)
        return dataclasses.replace(state, past=initial_past(state.trainable, lag))

    def run(self, state: TrainState, steps: int) -> tuple[TrainState, list[dict]]:
        """So many steps from a state on."""
        metrics = []
        with jax.set_mesh(self.context.mesh):
            for step in range(int(state.step), int(state.step) + steps):
                state, values, _ = rl_step(self.context, self.programs, self.source, FROZEN, state, step=step)
                metrics.append(values)
        return state, metrics


@pytest.fixture(scope="session")
def steps():
    return Steps()
