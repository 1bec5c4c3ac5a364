"""The bound by norm: sums in any order stay within it, ten times its error does not."""

import numpy as np
import pytest

from tests import rounding

TREE = {"a": np.array([3.0, 1e-9], np.float32), "b": np.array([[4.0]], np.float32)}


@pytest.mark.parametrize("terms", [6, 64, 1000])
def test_sums_in_two_orders_differ_within_the_bound(terms):
    """The error of a sum is a walk; over 2,000 sums its mean square is within a tenth of what was counted."""
    values = np.random.default_rng(terms).normal(size=(2000, terms))
    numbers = values.astype(np.float32)
    expected = numbers.sum(axis=1, dtype=np.float64)
    for ordered in (numbers, numbers[:, ::-1]):
        actual = np.cumsum(ordered, axis=1, dtype=np.float32)[:, -1]
        rounding.assert_close_by_norm(actual, expected, roundings=rounding.of_sum(terms))
        with pytest.raises(AssertionError, match="roundings of the norm"):
            rounding.assert_close_by_norm(actual, expected, roundings=rounding.of_sum(terms) / 10)


def test_a_planted_error_of_ten_bounds_fails():
    rounding.assert_close_by_norm(TREE, TREE, roundings=0)
    for scale in (None, 100.0):
        actual = rounding.planted(TREE, roundings=8, scale=scale)
        rounding.assert_close_by_norm(actual, TREE, roundings=8.1, scale=scale)
        with pytest.raises(AssertionError, match=r"the difference is 8 roundings of the norm, the bound 0\.8"):
            rounding.assert_close_by_norm(actual, TREE, roundings=0.8, scale=scale)


def test_small_value_may_change_within_the_norm():
    rounding.assert_close_by_norm(TREE | {"a": np.array([3.0, 3e-7])}, TREE, roundings=1.1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_values_are_never_close(value):
    with pytest.raises(AssertionError):
        rounding.assert_close_by_norm(TREE | {"b": np.array([[value]])}, TREE, roundings=1e9)


def test_another_shape_or_structure_is_never_close():
    with pytest.raises(AssertionError):
        rounding.assert_close_by_norm(TREE | {"b": np.array([4.0])}, TREE, roundings=1e9)
    with pytest.raises(AssertionError):
        rounding.assert_close_by_norm({"a": TREE["a"]}, TREE, roundings=1e9)


def test_a_gradient_has_more_roundings_than_log_probs():
    single, three = (rounding.of_decoder(layers=3, longest_sum=24, passes=passes) for passes in (1, 3))
    assert single == pytest.approx(2 * 33**0.5 * 2)
    assert three == pytest.approx(single * 3**0.5)


def test_measured_bound_follows_the_amplification():
    weights = {"x": np.full(4, 2.0, np.float32)}
    once, cubed, cancelled = (
        rounding.of_weights(function, weights, longest_sum=1)
        for function in (lambda w: w, lambda w: w["x"] ** 3, lambda w: w["x"] - np.float32(1.98))
    )
    # The root mean square of 64 random numbers has a spread of 9 %: within seven of these.
    assert once == pytest.approx(4, rel=0.6)
    assert cubed == pytest.approx(3 * once, rel=1e-2)
    assert cancelled == pytest.approx(100 * once, rel=1e-2)
