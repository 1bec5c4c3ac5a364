import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.masks import MASK

LAGS = np.random.default_rng(3).choice([-1, 0, 1, 2, 5, 6], MASK.shape, p=[0.2, 0.3, 0.2, 0.2, 0.05, 0.05])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bound", [0, 2, 5])
def test_older_tokens_are_rejected(level: str, bound: int) -> None:
    fresh = bound >= LAGS
    # What is masked rejects nothing.
    lags = np.where(MASK, LAGS, 99)
    expected = MASK & (fresh if level == "token" else (fresh | ~MASK).all(-1, keepdims=True))
    if bound == 2:
        assert 0 < expected.sum() < MASK.sum()
    got = jax.jit(lambda lags: kljax.max_lag_mask(lags, MASK, max_lag=bound, level=level))(lags)
    assert got.dtype == bool
    np.testing.assert_array_equal(got, expected)


def test_packed_rows_are_rejected_by_sequence() -> None:
    ids = jnp.array([0, 0, 1, 1, 1, -1])
    packed = kljax.Segments(jnp.array([1, 1, 1, 0, 1, 1], bool), ids)
    lags = jnp.array([0, 1, 3, 9, 0, 9])
    np.testing.assert_array_equal(kljax.max_lag_mask(lags, packed, max_lag=1), [1, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(kljax.max_lag_mask(lags, packed, max_lag=1, level="token"), [1, 1, 0, 0, 1, 0])


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="max_lag: got -1"):
        kljax.max_lag_mask(LAGS, MASK, max_lag=-1)
    with pytest.raises(ValueError, match="level: got 'row', expected one of token, sequence"):
        kljax.max_lag_mask(LAGS, MASK, max_lag=1, level="row")
    with pytest.raises(ValueError, match=r"shapes differ: lags \[3\]"):
        kljax.max_lag_mask(LAGS[0, :3], MASK, max_lag=1)
