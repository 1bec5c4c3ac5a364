"""`k3 = exp(-x) - 1 + x` keeps its relative accuracy in float32, where the formula as written is only rounding."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import oracles

pytestmark = pytest.mark.xla


def log_ratios(low: float, high: float, dtype: type) -> np.ndarray:
    """Log-ratios of both signs between two sizes, spaced evenly in the logarithm, rounded to `dtype`."""
    sizes = np.geomspace(low, high, 4001)
    return np.concatenate([-sizes[::-1], sizes]).astype(dtype)


def relative_error(actual: jax.Array, exact: np.ndarray) -> float:
    return float(np.max(np.abs(np.asarray(actual, np.float64) - exact) / np.abs(exact)))


@pytest.mark.parametrize(("low", "high", "tolerance"), [(1e-6, 20.0, 1e-6), (1e-8, 50.0, 2e-6)])
def test_float32_relative_accuracy(low: float, high: float, tolerance: float) -> None:
    x = log_ratios(low, high, np.float32)
    values = kljax.k3(jnp.asarray(x), jnp.zeros(x.shape, jnp.float32))
    assert values.dtype == jnp.float32
    assert relative_error(values, oracles.k3(x)) < tolerance


def test_float32_gradient_accuracy() -> None:
    x = log_ratios(1e-8, 50.0, np.float32)
    grad = jax.grad(lambda lp: kljax.k3(lp, jnp.zeros(x.shape, jnp.float32)).sum())(jnp.asarray(x))
    assert relative_error(grad, np.asarray(-np.expm1(-x.astype(np.longdouble)), np.float64)) < 1e-6


def test_literal_formula_fails_unlike_the_implementation() -> None:
    x = log_ratios(1e-6, 2e-4, np.float32)
    naive = np.exp(-x) - np.float32(1) + x
    assert relative_error(naive, oracles.k3(x)) > 1
    assert (naive < 0).any()
    assert relative_error(kljax.k3(jnp.asarray(x), jnp.zeros(x.shape, jnp.float32)), oracles.k3(x)) < 1e-6


def test_policy_a_percent_from_its_reference() -> None:
    """The numbers of the README."""
    x = log_ratios(0.01, 0.011, np.float32)
    assert relative_error(np.exp(-x) - np.float32(1) + x, oracles.k3(x)) > 1e-3
    assert relative_error(kljax.k3(jnp.asarray(x), jnp.zeros(x.shape, jnp.float32)), oracles.k3(x)) < 2e-7


def test_float64_agrees_with_the_formula_of_the_systems() -> None:
    x = log_ratios(1e-8, 1.0, np.float64)
    chex.assert_trees_all_close(kljax.k3(jnp.asarray(x), jnp.zeros(x.shape)), np.exp(-x) - 1 + x, rtol=0, atol=1e-12)
    large = log_ratios(1.0, 20.0, np.float64)
    naive = np.exp(-large) - 1 + large
    chex.assert_trees_all_close(kljax.k3(jnp.asarray(large), jnp.zeros(large.shape)), naive, rtol=1e-12, atol=1e-12)


def test_float64_relative_accuracy() -> None:
    # The oracle works in extended precision, whose own cancellation is below 1e-15 only for |x| > 1e-3.
    x = log_ratios(1e-3, 50.0, np.float64)
    assert relative_error(kljax.k3(jnp.asarray(x), jnp.zeros(x.shape)), oracles.k3(x)) < 1e-14


def test_is_never_negative_and_zero_only_at_zero() -> None:
    x = log_ratios(1e-18, 80.0, np.float32)
    values = np.asarray(kljax.k3(jnp.asarray(x), jnp.zeros(x.shape, jnp.float32)))
    assert (values > 0).all()
    chex.assert_trees_all_equal(kljax.k3(jnp.zeros(1), jnp.zeros(1)), jnp.zeros(1))


def test_second_derivative_equals_the_formula() -> None:
    x = jnp.asarray([-3.0, -0.1, 0.0, 1e-6, 2.0])
    second = jax.vmap(jax.grad(jax.grad(lambda x: kljax.k3(x, jnp.zeros(())))))(x)
    chex.assert_trees_all_close(second, jnp.exp(-x), rtol=1e-12)


@pytest.mark.parametrize("x", [-100.0, -89.0])
def test_overflow_is_infinite_not_nan(x: float) -> None:
    values = kljax.k3(jnp.asarray([x], jnp.float32), jnp.zeros(1, jnp.float32))
    chex.assert_trees_all_equal(values, jnp.asarray([jnp.inf], jnp.float32))
