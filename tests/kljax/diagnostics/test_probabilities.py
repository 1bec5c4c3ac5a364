import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.masks import MASK, check_masked, draw

LP, ROLLOUT = (-np.abs(x) - 0.1 for x in draw(1.0, 1.0))


def test_differences_of_probabilities() -> None:
    expected = np.where(MASK, np.exp(LP) - np.exp(ROLLOUT), 0)
    np.testing.assert_allclose(kljax.probability_diff(LP, ROLLOUT, MASK), expected, 1e-12, 1e-15)
    absolute = kljax.probability_diff(LP, ROLLOUT, MASK, absolute=True)
    np.testing.assert_allclose(absolute, abs(expected), 1e-12, 1e-15)
    check_masked(lambda *x: kljax.probability_diff(*x, MASK), [LP, ROLLOUT])


def test_mean_largest_and_standard_deviation() -> None:
    diff = kljax.probability_diff(LP, ROLLOUT, MASK, absolute=True)
    values = abs(np.exp(LP) - np.exp(ROLLOUT))[MASK]
    mean = kljax.mean_metric(diff, MASK)
    np.testing.assert_allclose(mean.value(), values.mean(), 1e-12)
    np.testing.assert_allclose(mean.std(kljax.mean_metric(diff**2, MASK)), values.std(), 1e-12)
    np.testing.assert_allclose(kljax.Extremes.of(diff, MASK).max, values.max(), 1e-12)


def test_close_probabilities_keep_their_relative_accuracy() -> None:
    rollout = np.float32(-0.7)
    lp = np.nextafter(rollout, np.float32(0))
    expected = np.exp(np.float64(rollout)) * np.expm1(np.float64(lp) - np.float64(rollout))
    got = kljax.probability_diff(jnp.array([lp]), jnp.array([rollout]), jnp.array([True]))
    np.testing.assert_allclose(got, [expected], 1e-6)


def test_tokens_without_probability() -> None:
    got = kljax.probability_diff(jnp.array([-jnp.inf, 0.0, -jnp.inf]), jnp.array([0.0, -jnp.inf, -jnp.inf]), [1, 1, 1])
    np.testing.assert_array_equal(got, [-1, 1, 0])
    with pytest.raises(ValueError, match=r"shapes differ: log_probs .* rollout_log_probs"):
        kljax.probability_diff(LP, ROLLOUT[1:], MASK)
