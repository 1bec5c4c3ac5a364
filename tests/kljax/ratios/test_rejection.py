import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.kljax.ratios.level_ratios import LP, OLD, level_ratio
from tests.masks import MASK


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("lower", "upper"), [(0.7, 1.3), (None, 1.0), (0.9, None)])
def test_rejection_mask(level: str, lower: float | None, upper: float | None) -> None:
    ratio = level_ratio(level)
    inside = (ratio >= (lower or 0)) & (ratio <= (upper or np.inf))
    lp, old = np.where(MASK, LP, np.nan), np.where(MASK, OLD, np.inf)
    got = jax.jit(lambda lp, old: kljax.rejection_mask(lp, old, MASK, level=level, lower=lower, upper=upper))(lp, old)
    assert got.dtype == bool
    np.testing.assert_array_equal(got, MASK & inside)


def test_rejection_bounds_are_inclusive_and_nan_is_rejected() -> None:
    lp, old = jnp.array([0.0, jnp.nan, -jnp.inf]), jnp.zeros(3)
    got = kljax.rejection_mask(lp, old, jnp.ones(3, bool), lower=1.0, upper=1.0)
    np.testing.assert_array_equal(got, [True, False, False])


def test_veto_drops_rows_with_one_bad_token() -> None:
    lp = np.where(MASK, 0.0, -50.0)  # what is masked vetoes nothing
    lp[3, 2] = -11.0
    lp[4, 0] = -9.0
    lp[5, 4] = np.nan
    got = kljax.veto_mask(lp, np.zeros_like(lp), MASK, min_ratio=np.exp(-10.0))
    expected = MASK.copy()
    expected[[3, 5]] = False
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("low", "high"), [(None, 1.5), (0.4, 1.8), (0.6, None)])
def test_veto_has_two_sides(low: float | None, high: float | None) -> None:
    ratio = np.exp(LP - OLD)
    bad = MASK & ((ratio < (low or 0)) | (ratio > (high or np.inf)))
    expected = MASK & ~bad.any(-1, keepdims=True)
    assert 0 < expected.sum() < MASK.sum()
    np.testing.assert_array_equal(kljax.veto_mask(LP, OLD, MASK, min_ratio=low, max_ratio=high), expected)


def test_far_log_ratios_are_rejected() -> None:
    lp = jnp.array([[200.0, -200.0, jnp.inf, -jnp.inf, 0.0]], jnp.float32)
    old, mask = jnp.zeros((1, 5), jnp.float32), jnp.ones((1, 5), bool)
    near = [[False, False, False, False, True]]
    np.testing.assert_array_equal(kljax.rejection_mask(lp, old, mask, lower=0.5, upper=2.0), near)
    rows = kljax.rejection_mask(lp.T, old.T, mask.T, level="sequence", lower=0.5, upper=2.0)
    np.testing.assert_array_equal(rows.T, near)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="lower, upper"):
        kljax.rejection_mask(LP, OLD, MASK)
    with pytest.raises(ValueError, match=r"lower: got 2\.0, expected at most upper = 1\.0"):
        kljax.rejection_mask(LP, OLD, MASK, lower=2.0, upper=1.0)
    with pytest.raises(ValueError, match=r"lower: got .*, expected at most upper"):
        kljax.rejection_mask(LP, OLD, MASK, lower=np.float32(2), upper=np.float32(1))
    with pytest.raises(ValueError, match=r"min_ratio: got 2, expected at most max_ratio = 0\.5"):
        kljax.veto_mask(LP, OLD, MASK, min_ratio=2, max_ratio=0.5)
    with pytest.raises(ValueError, match="min_ratio: got -1"):
        kljax.veto_mask(LP, OLD, MASK, min_ratio=-1)
    with pytest.raises(ValueError, match="min_ratio, max_ratio: got None for both"):
        kljax.veto_mask(LP, OLD, MASK, min_ratio=None)
