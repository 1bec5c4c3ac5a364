import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.masks import MASK, draw

VALUES, NOISE = draw(1.0, 1.0)
KEPT = NOISE > -0.3
ROWS = [VALUES[row][unmasked] for row, unmasked in enumerate(MASK) if unmasked.any()]


def test_modes_of_a_mean() -> None:
    expected = {
        "token_mean": (VALUES[MASK].mean(), int(MASK.sum())),
        "seq_mean_token_mean": (np.mean([row.mean() for row in ROWS]), len(ROWS)),
        "seq_mean_token_sum": (np.mean([row.sum() for row in ROWS]), len(ROWS)),
        "seq_mean_token_max": (np.mean([abs(row).max() for row in ROWS]), len(ROWS)),
    }
    for mode, (value, weight) in expected.items():
        metric = kljax.mean_metric(VALUES, MASK, mode=mode)
        np.testing.assert_allclose(metric.value(), value, 1e-13)
        assert metric.weight == weight


def test_masked_fraction_of_tokens_and_of_rows() -> None:
    dropped = [~KEPT[row][unmasked] for row, unmasked in enumerate(MASK) if unmasked.any()]
    expected = {
        "token_mean": np.concatenate(dropped).mean(),
        "seq_mean_token_mean": np.mean([row.mean() for row in dropped]),
        "seq_mean_token_max": np.mean([row.any() for row in dropped]),
    }
    assert 0 < expected["seq_mean_token_max"] < 1
    for mode, value in expected.items():
        np.testing.assert_allclose(kljax.masked_fraction(KEPT, MASK, mode=mode).value(), value, 1e-6)


@pytest.mark.parametrize(("num_buckets", "max_length"), [(1, None), (3, None), (7, None), (3, 4), (4, 20), (10, None)])
def test_means_by_position_count_from_the_first_token(num_buckets: int, max_length: int | None) -> None:
    length = max_length or MASK.shape[1]
    buckets: list[list[float]] = [[] for _ in range(num_buckets)]
    for row, unmasked in enumerate(MASK):
        places = np.flatnonzero(unmasked)
        for position in places:
            bucket = min((position - places[0]) * num_buckets // length, num_buckets - 1)
            buckets[bucket].append(VALUES[row, position])
    metric = kljax.mean_by_position(VALUES, MASK, num_buckets=num_buckets, max_length=max_length)
    np.testing.assert_array_equal(metric.weight, [len(bucket) for bucket in buckets])
    np.testing.assert_allclose(metric.value(), [np.mean(bucket) if bucket else 0 for bucket in buckets], 1e-12)


def test_positions_do_not_depend_on_padding() -> None:
    def padded(array: np.ndarray, left: int, right: int) -> np.ndarray:
        return np.pad(array, ((0, 0), (left, right)))

    full = kljax.mean_by_position(VALUES, MASK, num_buckets=3, max_length=7)
    longer = kljax.mean_by_position(padded(VALUES, 2, 3), padded(MASK, 2, 3), num_buckets=3, max_length=7)
    np.testing.assert_array_equal(full.weight, longer.weight)
    np.testing.assert_allclose(full.sum, longer.sum, 1e-13)


def test_kl_by_position_covers_tokens_of_policy_a() -> None:
    kl = np.exp(NOISE - VALUES) - 1 + VALUES - NOISE
    expected = kljax.mean_by_position(kl, MASK, num_buckets=3)
    got = kljax.kl_by_position(VALUES, NOISE, MASK, num_buckets=3)
    np.testing.assert_allclose(got.value(), expected.value(), 1e-12)
    k1 = kljax.kl_by_position(VALUES, NOISE, MASK, num_buckets=1, estimator="k1")
    np.testing.assert_allclose(k1.value(), [(VALUES - NOISE)[MASK].mean()], 1e-12)


def test_arrays_of_means_pass_through_transformations() -> None:
    metric = jax.jit(lambda v, n: kljax.mean_by_position(v, MASK, num_buckets=3, max_length=n))(VALUES, jnp.array(7))
    eager = kljax.mean_by_position(VALUES, MASK, num_buckets=3)
    np.testing.assert_allclose((kljax.WeightedSum(0.0, 0.0) + metric).value(), eager.value(), 1e-13)
    stacked = jax.vmap(lambda v, m: kljax.mean_by_position(v, m, num_buckets=3))(VALUES, MASK)
    np.testing.assert_allclose(stacked.sum.sum(0), eager.sum, 1e-13)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="mode: got 'token'"):
        kljax.mean_metric(VALUES, MASK, mode="token")
    with pytest.raises(ValueError, match="num_buckets: got 0"):
        kljax.mean_by_position(VALUES, MASK, num_buckets=0)
    with pytest.raises(ValueError, match="max_length: got 0"):
        kljax.kl_by_position(VALUES, NOISE, MASK, num_buckets=2, max_length=0)
    with pytest.raises(TypeError, match="kept: got dtype float64"):
        kljax.masked_fraction(NOISE, MASK)


def test_fractions_of_booleans_are_as_wide_as_floats() -> None:
    selected, mask = jnp.array([True, False, True]), jnp.ones(3, bool)
    for metric in (
        kljax.masked_fraction(selected, mask),
        kljax.WeightedSum.of(selected, mask),
        kljax.mean_metric(selected, mask),
    ):
        assert (metric.sum.dtype, metric.weight.dtype) == (jnp.float64, jnp.float64)
    with jax.enable_x64(False):
        assert kljax.masked_fraction(selected, mask).sum.dtype == jnp.float32
