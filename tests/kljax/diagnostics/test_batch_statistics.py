import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.masks import MASK, draw

LP, OLD = draw(0.7, 0.7)
TOKENS = MASK.sum()


def test_effective_sample_size() -> None:
    w = np.exp(LP)
    expected = w[MASK].sum() ** 2 / (TOKENS * (w[MASK] ** 2).sum())
    np.testing.assert_allclose(kljax.effective_sample_size(w, MASK), expected, 1e-12)
    np.testing.assert_allclose(kljax.effective_sample_size(1e200 * w, MASK), expected, 1e-12)
    assert kljax.effective_sample_size(0 * w, MASK) == 0
    assert kljax.effective_sample_size(w, np.zeros_like(MASK)) == 0


def test_effective_sample_size_of_parts() -> None:
    w = np.exp(LP)
    means = [kljax.mean_metric(w[part], MASK[part]) for part in (slice(0, 2), slice(2, 6))]
    squares = [kljax.mean_metric(w[part] ** 2, MASK[part]) for part in (slice(0, 2), slice(2, 6))]
    merged = (means[0] + means[1]).value() ** 2 / (squares[0] + squares[1]).value()
    np.testing.assert_allclose(merged, kljax.effective_sample_size(w, MASK), 1e-12)


def test_explained_variance() -> None:
    values, returns = LP, LP + 0.5 * OLD
    expected = 1 - (returns - values)[MASK].var() / returns[MASK].var()
    np.testing.assert_allclose(kljax.explained_variance(values, returns, MASK), expected, 1e-12)
    assert kljax.explained_variance(values, np.ones_like(values), MASK) == 0


def test_probability_correlation() -> None:
    expected = np.corrcoef(np.exp(LP[MASK]), np.exp(OLD[MASK]))[0, 1]
    assert abs(expected) < 0.9
    np.testing.assert_allclose(kljax.probability_correlation(LP, OLD, MASK), expected, 1e-12)
    np.testing.assert_allclose(kljax.probability_correlation(LP, LP, MASK), 1, 1e-14)
    assert kljax.probability_correlation(LP, jnp.zeros_like(LP), MASK) == 0
    assert kljax.probability_correlation(LP, OLD, np.zeros_like(MASK)) == 0


def test_probability_correlation_of_tiny_probabilities() -> None:
    lp = jnp.array([-80.0, -81.0, -82.0], jnp.float32)
    assert kljax.probability_correlation(lp, lp, jnp.ones(3, bool)) > 0.99


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        kljax.explained_variance(LP, OLD[1:], MASK)
    with pytest.raises(ValueError, match="shapes differ"):
        kljax.probability_correlation(LP, OLD[1:], MASK)
