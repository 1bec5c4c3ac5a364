import jax
import numpy as np
import pytest

import kljax

# Six trajectories of two prompts, of 1 to 4 steps each; the steps of a trajectory in their order, two padding rows.
TRAJECTORY = np.array([0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 4, 5, 5, -1, -1])
PROMPT = np.array([0, 0, 0, 1, 0, 1])[TRAJECTORY]
REAL = TRAJECTORY >= 0
LAST = REAL & np.append(TRAJECTORY[1:] != TRAJECTORY[:-1], True)
RNG = np.random.default_rng(0)
STEP_REWARDS = np.where(REAL, RNG.normal(size=TRAJECTORY.shape), np.nan)
STATES = np.where(REAL, RNG.integers(0, 3, TRAJECTORY.shape), -1)


@pytest.mark.parametrize("divide", [False, True])
def test_every_step_has_its_trajectory_advantage(divide: bool) -> None:
    advantages = np.where(LAST, np.arange(15.0), np.where(REAL, 0, np.nan))
    got = jax.jit(lambda a: kljax.broadcast_to_steps(a, TRAJECTORY, num_groups=6, divide_by_steps=divide))(advantages)
    for i in np.flatnonzero(REAL):
        same = TRAJECTORY[i] == TRAJECTORY
        assert got[i] == advantages[same & LAST][0] / (same.sum() if divide else 1)
    np.testing.assert_array_equal(got[~REAL], 0)


def test_step_wise_grpo_of_trinity() -> None:
    shared = kljax.broadcast_to_steps(
        kljax.grpo_advantages(STEP_REWARDS, kljax.Groups(np.where(REAL, PROMPT, -1), 2, valid=LAST)),
        TRAJECTORY,
        num_groups=6,
    )
    for i in np.flatnonzero(REAL):
        rivals = STEP_REWARDS[LAST & (PROMPT[i] == PROMPT)]
        step_reward = STEP_REWARDS[LAST & (TRAJECTORY[i] == TRAJECTORY)][0]
        np.testing.assert_allclose(shared[i], (step_reward - rivals.mean()) / (rivals.std(ddof=1) + 1e-6), 1e-12)


def test_gigpo_of_trinity() -> None:
    gamma, omega, length = 0.9, 0.5, 4
    # Returns over the steps of each trajectory: the steps stand where tokens stood.
    position = np.array([np.sum(TRAJECTORY[:i] == TRAJECTORY[i]) for i in range(15)])
    by_step, there = np.zeros((6, length)), np.zeros((6, length), bool)
    by_step[TRAJECTORY[REAL], position[REAL]], there[TRAJECTORY[REAL], position[REAL]] = STEP_REWARDS[REAL], True
    returns = kljax.reinforce_plus_plus_returns(by_step, there, gamma=gamma)[TRAJECTORY, position]
    episodes = np.where(LAST, by_step.sum(1)[TRAJECTORY], 0)
    episode = kljax.grpo_advantages(episodes, kljax.Groups(np.where(REAL, PROMPT, -1), 2, LAST), scale="none")
    step = kljax.grpo_advantages(returns, STATES, num_groups=3, scale="none")
    got = kljax.broadcast_to_steps(episode, TRAJECTORY, num_groups=6) + omega * step

    discounted = np.zeros(15)
    for i in np.flatnonzero(REAL):
        later = [j for j in np.flatnonzero(TRAJECTORY[i] == TRAJECTORY) if j >= i]
        discounted[i] = sum(gamma ** (j - i) * STEP_REWARDS[j] for j in later)
    for i in np.flatnonzero(REAL):
        totals = {k: STEP_REWARDS[k == TRAJECTORY].sum() for k in set(TRAJECTORY[PROMPT[i] == PROMPT]) - {-1}}
        of_episode = totals[TRAJECTORY[i]] - np.mean(list(totals.values()))
        of_step = discounted[i] - discounted[STATES[i] == STATES].mean()
        np.testing.assert_allclose(got[i], of_episode + omega * of_step, 1e-12, 1e-14)
    np.testing.assert_array_equal(got[~REAL], 0)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="shapes differ: advantages"):
        kljax.broadcast_to_steps(np.zeros(3), np.zeros(2, int), num_groups=1)
    with pytest.raises(ValueError, match="group_ids: got 2, expected ids below num_groups = 2"):
        kljax.broadcast_to_steps(np.zeros(2), np.array([0, 2]), num_groups=2)
    with pytest.raises(ValueError, match="num_groups: got 0"):
        kljax.broadcast_to_steps(np.zeros(2), np.zeros(2, int), num_groups=0)
