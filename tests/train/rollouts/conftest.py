"""Steps that the tests of this directory share, because their programs take long to compile."""

import dataclasses

import jax
import pytest

from tests import tiny
from train.rl.state import TrainState
from train.rollouts import JaxSource, first_past
from train.run.loop import Programs, rl_step

OPTIONS = ("kl.rollout.coef=1e-3", "optim.learning_rate=3e-3", "temperature=0.8", "rollout.samples_per_prompt=8")


class Steps:
    """Steps of runs that differ in their lag alone, which no program depends on."""

    def __init__(self) -> None:
        self.config = tiny.config_of(*OPTIONS)
        self.setting = tiny.setting_of(self.config)
        with jax.set_mesh(self.setting.mesh):
            self.programs = Programs.of(self.setting, tiny.state_of(self.config, self.setting.optimizer))
            self.source = JaxSource(self.setting)

    def first(self, lag: int) -> TrainState:
        """The state of a run with this lag before its first step."""
        state = tiny.state_of(self.config, self.setting.optimizer)
        return dataclasses.replace(state, past=first_past(state.trainable, lag))

    def run(self, state: TrainState, steps: int) -> tuple[TrainState, list[dict]]:
        """So many steps from a state on."""
        metrics = []
        with jax.set_mesh(self.setting.mesh):
            for step in range(int(state.step), int(state.step) + steps):
                state, values, _ = rl_step(self.setting, self.programs, self.source, state, step)
                metrics.append(values)
        return state, metrics


@pytest.fixture(scope="session")
def steps():
    return Steps()
