import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.masks import MASK, draw

VALUES, OLD, RETURNS = draw(1.0, 1.0, 1.0)


def test_unclipped() -> None:
    expected = np.where(MASK, 0.5 * (VALUES - RETURNS) ** 2, 0)
    np.testing.assert_allclose(kljax.value_loss(VALUES, OLD, RETURNS, MASK), expected, 1e-12)
    np.testing.assert_allclose(kljax.value_loss(VALUES, None, RETURNS, MASK), expected, 1e-12)


def test_clipped_value_and_gradient() -> None:
    clipped = np.clip(VALUES, OLD - 0.5, OLD + 0.5)
    larger = np.maximum((VALUES - RETURNS) ** 2, (clipped - RETURNS) ** 2)

    def loss(values: jax.Array) -> jax.Array:
        return kljax.value_loss(values, OLD, RETURNS, MASK, clip=0.5)

    np.testing.assert_allclose(loss(VALUES), np.where(MASK, 0.5 * larger, 0), 1e-12)
    moves = (abs(VALUES - OLD) <= 0.5) | ((clipped - RETURNS) ** 2 < (VALUES - RETURNS) ** 2)
    assert 0 < (MASK & ~moves).sum() < MASK.sum()
    grad = jax.grad(lambda values: loss(values).sum())(jnp.asarray(VALUES))
    np.testing.assert_allclose(grad, np.where(MASK & moves, VALUES - RETURNS, 0), 1e-12, 1e-14)


def test_gradient_is_halved_at_ties_not_at_bounds() -> None:
    values, old, returns = jnp.array([0.5, -0.5, 2.0]), jnp.zeros(3), jnp.array([4.0, -4.0, 1.25])
    grad = jax.grad(lambda v: kljax.value_loss(v, old, returns, jnp.ones(3, bool), clip=0.5).sum())(values)
    np.testing.assert_array_equal(grad, [-3.5, 3.5, 0.375])


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="clip: got 0, expected a number > 0"):
        kljax.value_loss(VALUES, OLD, RETURNS, MASK, clip=0)
    with pytest.raises(ValueError, match="old_values: got None"):
        kljax.value_loss(VALUES, None, RETURNS, MASK, clip=0.5)
    with pytest.raises(ValueError, match="shapes differ"):
        kljax.value_loss(VALUES, OLD, RETURNS[1:], MASK)
