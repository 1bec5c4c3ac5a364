import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import other_seeds
from tests.masks import MASK, check_masked, draw

LP, OLD, ADV = draw(0.7, 0.7, 2.0)
D = (LP - OLD)[MASK]
A = ADV[MASK]
TOKENS = MASK.sum()


def check_mean(metric: kljax.WeightedSum, expected: np.ndarray) -> None:
    np.testing.assert_allclose(metric.value(), expected.mean(), 1e-12)
    np.testing.assert_allclose(metric.weight, len(expected))


def level_ratio(level: str) -> np.ndarray:
    """The ratios of a level, `[B, T]`."""
    total = np.where(MASK, LP - OLD, 0).sum(-1, keepdims=True)
    n = np.maximum(MASK.sum(-1, keepdims=True), 1)
    return np.exp({"token": LP - OLD, "sequence": total, "geometric": total / n}[level]) * np.ones(MASK.shape)


def test_clip_fractions_count_the_tokens_without_gradient() -> None:
    r = np.exp(D)
    clipped = np.where(A > 0, r > 1.3, r < 0.8)
    assert 0 < clipped.sum() < TOKENS
    check_mean(kljax.clip_fraction(LP, OLD, ADV, MASK, clip_low=0.2, clip_high=0.3), clipped)
    grad = jax.grad(lambda lp: kljax.ppo_clip_loss(lp, OLD, ADV, MASK, clip_low=0.2, clip_high=0.3).sum())
    np.testing.assert_array_equal(np.asarray(grad(jnp.asarray(LP)))[MASK] == 0, clipped)
    bounded = (A < 0) & (r > 1.5)
    assert bounded.any()
    check_mean(kljax.dual_clip_fraction(LP, OLD, ADV, MASK, dual_clip=1.5), bounded)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_clipped_tokens_of_either_side(level: str) -> None:
    r = level_ratio(level)
    low, high = MASK & (ADV < 0) & (r < 0.8), MASK & (ADV > 0) & (r > 1.2)
    for side, expected in (("low", low), ("high", high), ("both", low | high)):
        got = kljax.clipped_tokens(LP, OLD, ADV, MASK, side=side, level=level)
        np.testing.assert_array_equal(got, expected)
        check_mean(kljax.clip_fraction(LP, OLD, ADV, MASK, side=side, level=level), expected[MASK])
    assert other_seeds.shown(low.any())
    assert other_seeds.shown(high.any())
    bounded = (A < 0) & (r[MASK] > 1.1)
    check_mean(kljax.dual_clip_fraction(LP, OLD, ADV, MASK, dual_clip=1.1, level=level), bounded)


def test_least_and_most_clipped_rows() -> None:
    """TRL's `clip_ratio/low_min` and `high_max`: extremes of the clip fractions of rows."""
    clipped = kljax.clipped_tokens(LP, OLD, ADV, MASK)
    rows = kljax.Extremes.of(kljax.masked_mean(clipped, MASK, axis=-1), MASK.any(-1))
    expected = [np.asarray(clipped)[row][unmasked].mean() for row, unmasked in enumerate(MASK) if unmasked.any()]
    np.testing.assert_allclose([rows.min, rows.max], [min(expected), max(expected)], 1e-6)


def test_an_advantage_of_zero_is_not_clipped() -> None:
    lp, old, mask = jnp.array([3.0, -3.0]), jnp.zeros(2), jnp.ones(2, bool)
    assert kljax.clip_fraction(lp, old, jnp.zeros(2), mask).value() == 0


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_ratio_fraction_counts_tokens_or_rows(level: str) -> None:
    r = level_ratio(level)
    r = r[MASK] if level == "token" else r[MASK.any(-1), 0]
    check_mean(kljax.ratio_fraction(LP, OLD, MASK, lower=0.8, level=level), r < 0.8)
    check_mean(kljax.ratio_fraction(LP, OLD, MASK, upper=1.5, level=level), r > 1.5)
    check_mean(kljax.ratio_fraction(LP, OLD, MASK, lower=0.8, upper=1.5, level=level), (r < 0.8) | (r > 1.5))


def test_ratio_fraction_counts_infinities_and_nan() -> None:
    lp = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 0.0])
    metric = kljax.ratio_fraction(lp, jnp.zeros(4), jnp.ones(4, bool), lower=1.0, upper=1.0)
    assert metric.value() == 0.75


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="level: got 'row'"):
        kljax.clip_fraction(LP, OLD, ADV, MASK, level="row")
    with pytest.raises(ValueError, match="side: got 'upper'"):
        kljax.clipped_tokens(LP, OLD, ADV, MASK, side="upper")
    with pytest.raises(ValueError, match="dual_clip: got 1"):
        kljax.dual_clip_fraction(LP, OLD, ADV, MASK, dual_clip=1)
    with pytest.raises(ValueError, match=r"advantages: got shape \[6\]"):
        kljax.clip_fraction(LP, OLD, ADV[:, 0], MASK)
    with pytest.raises(ValueError, match="lower, upper: got None"):
        kljax.ratio_fraction(LP, OLD, MASK)


def test_values_with_an_active_clip_have_no_gradient() -> None:
    values, old, returns = draw(1.0, 1.0, 1.0, seed=3)
    clipped = np.clip(values, old - 0.3, old + 0.3)
    active = (clipped - returns) ** 2 > (values - returns) ** 2
    got = kljax.value_clip_fraction(values, old, returns, MASK, clip=0.3)
    assert 0 < active[MASK].sum() < MASK.sum()
    np.testing.assert_array_equal((got.sum, got.weight), (active[MASK].sum(), MASK.sum()))
    slope = jax.grad(lambda v: kljax.value_loss(v, old, returns, MASK, clip=0.3).sum())(jnp.asarray(values))
    np.testing.assert_array_equal((np.asarray(slope) == 0) & MASK, active & MASK)
    check_masked(lambda *x: kljax.value_clip_fraction(*x, MASK, clip=0.3), [values, old, returns])
    with pytest.raises(ValueError, match="clip: got 0, expected a number > 0"):
        kljax.value_clip_fraction(values, old, returns, MASK, clip=0)
