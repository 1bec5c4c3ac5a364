"""Sampling with an old policy: the ring holds exactly the last ones, and the rollout KL shows how old they are."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from tests import tiny
from train.config.schema import Checkpoint
from train.rl.state import TrainState
from train.rollouts.lag import initial_past, next_past, sampling_policy
from train.weights.emergency import abstract
from train.weights.orbax import RunCheckpoints


def numbered(lag: int) -> TrainState:
    """A state whose weights say how many updates they had."""
    state = tiny.state_of(tiny.config_of(f"rollout.policy_lag={lag}", "lora={rank: 2, alpha: 4.0}"), optax.identity())
    assert (state.past is None) == (lag == 0)
    zero = jax.tree.map(lambda x: 0 * x, state.trainable)
    return dataclasses.replace(state, trainable=zero, past=initial_past(zero, lag))


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_sampling_policy_lags_by_its_updates(lag):
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
    config = tiny.config_of("advantage.type=gae", "loss.value_coef=0.5", "rollout.policy_lag=2")
    past = tiny.state_of(config, optax.identity()).past
    assert [set(weights) for weights in past] == [{"params"}] * 2


def test_rollout_kl_is_zero_without_a_lag(steps):
    metrics = steps.run(steps.first(0), 4)[1]
    # The trainer's log-probs and the sampler's are those of one policy, at the temperature of both.
    assert max(abs(values["rollout_kl"]) for values in metrics) < 1e-10
    assert max(values["rollout_log_prob_error"] for values in metrics) < 1e-5


def test_rollout_kl_exists_from_the_first_update(steps):
    for lag in (1, 3):
        first, *others = (values["rollout_kl"] for values in steps.run(steps.first(lag), 4)[1])
        assert first < 1e-10
        assert min(others) > 1e-10


def at_distance(steps, lag: int) -> TrainState:
    """A state that every update moved by the same, so that the policy that samples is `lag` times as far away."""
    state = steps.first(lag)
    past = tuple(tiny.moved(state.trainable, 3e-3 * distance) for distance in range(lag, 0, -1))
    return dataclasses.replace(state, past=past)


def test_rollout_kl_grows_with_the_policy_lag(steps):
    (near,), (far,) = (steps.run(at_distance(steps, lag), 1)[1] for lag in (1, 3))
    # Log-ratios are 3 times as large and the KL 9 times, to first order. Each is a mean of some 150 squares, with a
    # standard deviation of 12 %: the logarithm of their ratio is 2.2 with one of 0.17, and 0.7 is 9 of these away.
    assert far["rollout_kl"] > 2 * near["rollout_kl"] > 1e-7
    assert min(near["rollout_log_prob_error"], far["rollout_log_prob_error"]) > 1e-3


def test_the_ring_is_saved_and_restored(steps, tmp_path):
    """So a run that is continued samples with the very policies that the other would have."""
    full, metrics = steps.run(steps.first(2), 4)
    half, _ = steps.run(steps.first(2), 2)
    checkpoints = RunCheckpoints(tmp_path, Checkpoint())
    checkpoints.save(half, 2)
    checkpoints.wait()
    restored = checkpoints.restore_last(half)
    checkpoints.close()
    assert abstract(restored.past) == abstract(half.past)
    continued, rest = steps.run(restored, 2)
    assert rest == metrics[2:]
    jax.tree.map(np.testing.assert_array_equal, (continued.trainable, continued.past), (full.trainable, full.past))
