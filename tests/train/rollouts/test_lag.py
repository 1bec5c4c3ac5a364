"""Sampling with an old policy: the ring holds exactly the last ones, and the rollout KL shows how old they are."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from tests import tiny
from train.checkpoint import Checkpoints, abstract
from train.config.schema import Checkpoint
from train.loop import Programs, rl_step, rollout_error
from train.rollouts import JaxSource, first_past, next_past, sampling_policy
from train.state import TrainState

OPTIONS = ("kl.rollout.coef=1e-3", "optim.learning_rate=3e-3", "temperature=0.8", "rollout.samples_per_prompt=8")


def numbered(lag: int) -> TrainState:
    """A state whose weights say how many updates they had."""
    state = tiny.state_of(tiny.config_of(f"rollout.policy_lag={lag}", "lora={rank: 2, alpha: 4.0}"), optax.identity())
    assert (state.past is None) == (lag == 0)
    zero = jax.tree.map(lambda x: 0 * x, state.trainable)
    return dataclasses.replace(state, trainable=zero, past=first_past(zero, lag))


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_the_policy_that_samples_is_so_many_updates_old(lag):
    state, seen = numbered(lag), []
    for _ in range(6):
        policy, made = sampling_policy(state, None)
        seen.append((float(jax.tree.leaves(policy.adapter)[0].max()), made))
        past = next_past(state)
        trainable = jax.tree.map(lambda x: x + 1, state.trainable)
        # What an update does to the buffers that it was given.
        jax.tree.map(lambda x: x.delete(), state.trainable)
        state = dataclasses.replace(state, trainable=trainable, past=past, step=state.step + 1)
    assert seen == [(max(step - lag, 0), max(step - lag, 0)) for step in range(6)]


def test_the_ring_leaves_the_value_head_out():
    config = tiny.config_of("advantage.estimator=gae", "loss.value_coef=0.5", "rollout.policy_lag=2")
    past = tiny.state_of(config, optax.identity()).past
    assert [set(weights) for weights in past] == [{"params"}] * 2


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


@pytest.fixture(scope="module")
def steps():
    return Steps()


def test_rollout_kl_is_nothing_without_a_lag_and_grows_with_it(steps):
    found = {lag: steps.run(steps.first(lag), 4)[1] for lag in (0, 1, 3)}
    kl = {lag: [values["rollout_kl"] for values in metrics] for lag, metrics in found.items()}
    error = {lag: [values["rollout_log_prob_error"] for values in metrics] for lag, metrics in found.items()}
    # The trainer's log-probs and the sampler's are those of one policy, at the temperature of both.
    assert max(np.abs(kl[0])) < 1e-10
    assert max(error[0]) < 1e-5
    # Nothing has moved at the first step; from then on, older policies are further away.
    assert kl[1][0] < 1e-10
    assert kl[3][0] < 1e-10
    assert 1e-10 < kl[1][3] < kl[3][3]
    assert error[0][3] < error[1][3] < error[3][3]


def test_the_ring_is_saved_and_restored(steps, tmp_path):
    """So a run that is continued samples with the very policies that the other would have."""
    whole, metrics = steps.run(steps.first(2), 4)
    half, _ = steps.run(steps.first(2), 2)
    checkpoints = Checkpoints(tmp_path, Checkpoint())
    checkpoints.save(half, 2)
    checkpoints.wait()
    restored = checkpoints.restore_last(half)
    checkpoints.close()
    assert abstract(restored.past) == abstract(half.past)
    continued, rest = steps.run(restored, 2)
    assert rest == metrics[2:]
    jax.tree.map(np.testing.assert_array_equal, (continued.trainable, continued.past), (whole.trainable, whole.past))


def test_the_error_is_that_of_completions_alone():
    batch = tiny.full_batch(np.full((tiny.ROWS, tiny.LENGTH), -3.0))
    error = rollout_error(batch)["rollout_log_prob_error"]
    mask = np.asarray(batch.completion_mask)
    difference = np.abs(np.asarray(batch.old_log_probs) - np.asarray(batch.rollout_log_probs))
    assert error == difference[mask].max() < difference.max() + 1
    spoiled = dataclasses.replace(batch, rollout_log_probs=batch.rollout_log_probs.at[~mask].set(np.nan))
    assert rollout_error(spoiled)["rollout_log_prob_error"] == error
    assert rollout_error(dataclasses.replace(batch, rollout_log_probs=None)) == {}
