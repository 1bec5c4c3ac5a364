import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.masks import MASK, draw

LP, OLD = draw(0.7, 0.7)
D = LP - OLD
ROWS = [D[row][unmasked] for row, unmasked in enumerate(MASK) if unmasked.any()]
LEVELS = {"token": D[MASK], "sequence": [r.sum() for r in ROWS], "geometric": [r.mean() for r in ROWS]}


@pytest.mark.parametrize("level", LEVELS)
def test_extremes(level: str) -> None:
    d = LEVELS[level]
    extremes = kljax.log_prob_diff_extremes(LP, OLD, MASK, level=level)
    np.testing.assert_allclose([extremes.min, extremes.max], [min(d), max(d)], 1e-13)
    absolute = kljax.log_prob_diff_extremes(LP, OLD, MASK, level=level, absolute=True)
    np.testing.assert_allclose([absolute.min, absolute.max], [min(np.abs(d)), max(np.abs(d))], 1e-13)


def test_nan_makes_both_extremes_nan() -> None:
    extremes = kljax.Extremes.of(jnp.array([1.0, jnp.nan]), jnp.array([True, True]))
    assert jnp.isnan(extremes.min)
    assert jnp.isnan((extremes + kljax.Extremes(0.0, 0.0)).max)


@pytest.mark.parametrize("level", LEVELS)
def test_quantiles_equal_numpy(level: str) -> None:
    quantiles = (0.0, 0.01, 0.3, 0.5, 0.99, 1.0)
    got = jax.jit(lambda lp, old: kljax.ratio_quantiles(lp, old, MASK, quantiles=quantiles, level=level))(LP, OLD)
    np.testing.assert_allclose(got, np.exp(np.quantile(LEVELS[level], quantiles)), 1e-12)


def test_quantiles_of_far_ratios() -> None:
    old, mask = np.zeros(5, np.float32), np.ones(5, bool)
    quantiles = jax.jit(
        lambda lp: kljax.ratio_quantiles(lp, old, mask, quantiles=(0.0, 0.1, 0.25, 0.5, 0.625, 0.75, 1.0))
    )
    got = quantiles(np.array([-np.inf, -200.0, 0.0, 80.0, np.inf], np.float32))
    np.testing.assert_allclose(got, [0, 0, 0, 1, np.exp(40.0), np.exp(80.0), np.inf], 1e-5)
    assert np.isnan(quantiles(np.array([-np.inf, np.nan, 0.0, 80.0, np.inf], np.float32))).all()


def test_quantiles_of_nothing_are_1() -> None:
    np.testing.assert_array_equal(kljax.ratio_quantiles(LP, OLD, np.zeros_like(MASK)), 1)
    np.testing.assert_array_equal(jax.jit(kljax.ratio_quantiles)(LP[:0], OLD[:0], MASK[:0]), 1)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match=r"quantiles: got \(0\.5, 1\.5\)"):
        kljax.ratio_quantiles(LP, OLD, MASK, quantiles=(0.5, 1.5))
    with pytest.raises(ValueError, match="level: got 'row'"):
        kljax.log_prob_diff_extremes(LP, OLD, MASK, level="row")
