import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

import kljax
from tests.kljax.advantages.group_rows import GROUPS, IDS, REAL, REWARDS, check_rows, groups
from tests.masks import MASK, check_masked, draw


def less_baseline(baseline, singleton: str) -> np.ndarray:
    expected = np.zeros(len(IDS))
    for rows in groups():
        r = REWARDS[rows]
        alone = r if singleton == "reward" else 0.0
        expected[rows] = alone if len(rows) == 1 else r - baseline(r)
    return expected


@pytest.mark.parametrize("singleton", ["zero", "reward"])
@pytest.mark.parametrize("tau", [0.01, 0.5, 20.0])
def test_opmd_subtracts_the_soft_value(tau: float, singleton: str) -> None:
    options = {"tau": tau, "singleton": singleton}
    expected = less_baseline(lambda r: tau * (logsumexp(r / tau) - np.log(len(r))), singleton)
    check_rows(functools.partial(kljax.opmd_advantages, **options), expected)
    check_rows(functools.partial(kljax.opmd_advantages, baseline="mean", **options), less_baseline(np.mean, singleton))


def test_soft_value_lies_between_mean_and_maximum() -> None:
    r, ids = np.array([1.0, 0.0, 0.5], np.float32), np.zeros(3, int)

    @jax.jit
    def advantages(r: jax.Array, tau: float) -> jax.Array:
        return kljax.opmd_advantages(r, ids, num_groups=1, tau=tau)

    to_mean = advantages(r, 1e4)
    # mean + var / (2 tau): the second term is what a difference of logarithms would lose.
    np.testing.assert_allclose(to_mean, r - 0.5 - r.var() / 2e4, rtol=0, atol=3e-8)
    to_maximum = advantages(r, 1e-3)
    np.testing.assert_allclose(to_maximum, r - 1 + 1e-3 * np.log(3), rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda r: advantages(r, 0.5)[0]))(r)
    soft = np.exp(r / 0.5) / np.exp(r / 0.5).sum()
    np.testing.assert_allclose(gradient, np.eye(3)[0] - soft, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("singleton", ["zero", "reward"])
def test_asymre_shifts_the_baseline_except_for_single_rows(singleton: str) -> None:
    expected = less_baseline(lambda r: r.mean() - 0.1, singleton)
    check_rows(functools.partial(kljax.asymre_advantages, singleton=singleton), expected)


def test_equal_rewards_have_no_soft_advantage() -> None:
    r, ids = np.full(7, 0.1, np.float32), np.zeros(7, int)
    for baseline in ("mean", "logavgexp"):
        advantages = functools.partial(kljax.opmd_advantages, num_groups=1, baseline=baseline, tau=0.3)
        np.testing.assert_array_equal(jax.jit(lambda r, f=advantages: f(r, ids))(r), 0)


def test_remax_compares_returns_with_the_greedy_reward() -> None:
    (rewards,), baselines = draw(1.0), np.arange(len(MASK)) - 2.5
    advantages, returns = kljax.remax_advantages(rewards, baselines, MASK)
    for row, mask in enumerate(MASK):
        for t in range(len(mask)):
            later = sum(rewards[row, u] for u in range(t, len(mask)) if mask[u])
            np.testing.assert_allclose(returns[row, t], mask[t] * later, 1e-12, 1e-14)
            np.testing.assert_allclose(advantages[row, t], mask[t] * (later - baselines[row]), 1e-12, 1e-14)
    check_masked(lambda r: kljax.remax_advantages(r, jnp.asarray(baselines, r.dtype), MASK), [rewards])


def test_rae_follows_the_row_order() -> None:
    baselines = np.array([0.5, -1.0, 0.0, 2.0])
    expected, now = np.zeros(len(IDS)), baselines.copy()
    for i in np.flatnonzero(REAL):
        expected[i] = REWARDS[i] - now[IDS[i]]
        now[IDS[i]] = 0.9 * now[IDS[i]] + 0.1 * REWARDS[i]
    advantages, after = jax.jit(lambda r, b: kljax.rae_advantages(r, b, IDS, decay=0.9))(REWARDS, baselines)
    np.testing.assert_allclose(advantages, expected, 1e-12, 1e-14)
    np.testing.assert_allclose(after, now, 1e-12)
    assert after[3] == 2.0  # nobody played it


def test_rae_in_parts_equals_rae_of_all_rows() -> None:
    start = np.zeros(GROUPS)
    full, last = kljax.rae_advantages(REWARDS, start, IDS)
    first, between = kljax.rae_advantages(REWARDS[:4], start, IDS[:4])
    second, after = kljax.rae_advantages(REWARDS[4:], between, IDS[4:])
    np.testing.assert_array_equal(np.concatenate([first, second]), full)
    np.testing.assert_array_equal(after, last)
    marked = kljax.rae_advantages(REWARDS, start, kljax.Groups(np.where(REAL, IDS, 1), GROUPS, REAL))
    jax.tree.map(np.testing.assert_array_equal, marked, (full, last))
    gradient = jax.grad(lambda r: kljax.rae_advantages(r, start, IDS)[0].sum())(jnp.asarray(REWARDS))
    assert np.isfinite(gradient).all()


def test_infinite_reward_of_one_role_stays_in_it() -> None:
    rewards, ids = np.array([np.inf, 1.0, 0.5]), np.array([0, 1, 1])
    advantages, after = kljax.rae_advantages(rewards, np.zeros(3), ids, decay=0.5)
    np.testing.assert_array_equal(advantages, [np.inf, 1.0, 0.0])
    np.testing.assert_array_equal(after, [np.inf, 0.5, 0.0])


def test_errors_name_the_argument() -> None:
    r, ids = np.zeros(3), np.zeros(3, int)
    with pytest.raises(ValueError, match="baseline: got 'median', expected one of mean, logavgexp"):
        kljax.opmd_advantages(r, ids, num_groups=1, baseline="median")
    with pytest.raises(ValueError, match="tau: got 0, expected a number > 0"):
        kljax.opmd_advantages(r, ids, num_groups=1, tau=0)
    with pytest.raises(ValueError, match="singleton: got 'one'"):
        kljax.asymre_advantages(r, ids, num_groups=1, singleton="one")
    with pytest.raises(ValueError, match="decay: got -1"):
        kljax.rae_advantages(r, r, ids, decay=-1)
    with pytest.raises(ValueError, match="group_ids: got 3, expected ids below num_groups = 2"):
        kljax.rae_advantages(r, np.zeros(2), np.array([0, 3, 1]))
    with pytest.raises(ValueError, match="baselines: got 2, expected 3, one for each group"):
        kljax.rae_advantages(r, np.zeros(2), kljax.Groups(ids, 3))
    with pytest.raises(ValueError, match=r"advantages: got shape \[3\]"):
        kljax.remax_advantages(np.zeros(MASK.shape), r, MASK)
