import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

import kljax
from tests.kljax.advantages.group_rows import IDS, REAL, REWARDS, check_rows, groups


@pytest.mark.parametrize("singleton", ["zero", "reward"])
def test_maxrl_divides_by_a_positive_mean(singleton: str) -> None:
    expected = np.zeros(len(IDS))
    for rows in groups():
        r = REWARDS[rows]
        expected[rows] = (r - r.mean()) / (r.mean() + 0.01) if r.mean() > 0 else 0.0
        if len(rows) == 1:
            expected[rows] = r if singleton == "reward" else 0.0
    check_rows(functools.partial(kljax.maxrl_advantages, eps=0.01, singleton=singleton), expected)


def test_maxrl_of_failures_alone_is_zero() -> None:
    for rewards in ([0.0, 0.0], [-1.0, 0.5], [1.0, -1.0]):
        got = kljax.maxrl_advantages(np.array(rewards), np.zeros(2, int), num_groups=1)
        np.testing.assert_array_equal(got, 0)


def test_maxrl_is_the_gradient_of_log_success_rate() -> None:
    # Over all outcomes of one step: E[A grad log pi] = grad log p, if the mean is the true success rate p.
    logits, rewards = np.array([0.3, -0.2, 0.9]), np.array([1.0, 0.0, 1.0])
    p = softmax(logits)
    rate = (p * rewards).sum()
    advantages = (rewards - rate) / rate

    @jax.jit
    def both(logits: jax.Array) -> list[jax.Array]:
        log_rate = jax.grad(lambda z: jnp.log((jax.nn.softmax(z) * rewards).sum()))
        weighted = jax.grad(lambda z: (p * advantages * jax.nn.log_softmax(z)).sum())
        return [log_rate(logits), weighted(logits)]

    expected, got = both(logits)
    np.testing.assert_allclose(got, expected, 1e-12)
    # And a large group that holds each outcome in proportion gives those advantages.
    counts = np.round(p * 4000).astype(int)
    ids = np.zeros(counts.sum(), int)
    sampled = jax.jit(lambda r: kljax.maxrl_advantages(r, ids, num_groups=1))(np.repeat(rewards, counts))
    np.testing.assert_allclose(sampled[np.cumsum(counts) - 1], advantages, 1e-3)


@pytest.mark.parametrize("singleton", ["zero", "reward"])
def test_gpg_scales_with_the_share_of_rewarded_rows(singleton: str) -> None:
    expected = np.zeros(len(IDS))
    factor = REAL.sum() / np.count_nonzero(REWARDS[REAL])
    for rows in groups():
        r = REWARDS[rows]
        expected[rows] = factor * (r - r.mean())
        if len(rows) == 1:
            expected[rows] = factor * r if singleton == "reward" else 0.0
    check_rows(functools.partial(kljax.gpg_advantages, singleton=singleton), expected)
    nothing = kljax.gpg_advantages(np.zeros(3), np.zeros(3, int), num_groups=1, singleton=singleton)
    np.testing.assert_array_equal(nothing, 0)


@pytest.mark.parametrize("scale", ["std", "none"])
def test_pass_at_k_rewards_the_gain_over_others(scale: str) -> None:
    expected = np.zeros(len(IDS))
    for rows in groups():
        r = REWARDS[rows]
        if len(rows) > 1:
            low, high = np.sort(r)[-2:]
            divisor = r.std(ddof=1) + 1e-6 if scale == "std" else 1.0
            expected[rows[r.argmax()]] = (high - low) / divisor
    check_rows(functools.partial(kljax.pass_at_k_advantages, scale=scale), expected)


def test_pass_at_k_is_the_loss_without_rows() -> None:
    r = np.array([0.3, 2.0, 1.5, -1.0])
    got = kljax.pass_at_k_advantages(r, np.zeros(4, int), num_groups=1, scale="none")
    np.testing.assert_allclose(got, [r.max() - np.delete(r, i).max() for i in range(4)], 1e-14)


def test_two_best_rows_have_zero_and_finite_gradient() -> None:
    ids = np.zeros(3, int)
    value, gradient = jax.jit(
        jax.value_and_grad(lambda r: jnp.abs(kljax.pass_at_k_advantages(r, ids, num_groups=1, eps=0.0)).sum())
    )(np.array([2.0, 2.0, 1.0]))
    assert value == 0
    assert np.isfinite(gradient).all()


def test_errors_name_the_argument() -> None:
    r, ids = np.zeros(3), np.zeros(3, int)
    with pytest.raises(ValueError, match="scale: got 'mean', expected one of std, none"):
        kljax.pass_at_k_advantages(r, ids, num_groups=1, scale="mean")
    for function in (kljax.maxrl_advantages, kljax.gpg_advantages):
        with pytest.raises(ValueError, match="singleton: got 'one'"):
            function(r, ids, num_groups=1, singleton="one")
