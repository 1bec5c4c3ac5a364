"""A mask with every kind of row, and the checks that each function of masked arrays passes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.kljax.calls import traced_program

# No token, every token, a single token, holes, right padding, left padding.
MASK = np.array(
    [
        [0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 1],
        [0, 0, 1, 0, 0, 0, 0],
        [1, 0, 1, 1, 0, 0, 1],
        [1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, 1, 1],
    ],
    dtype=bool,
)
ROWS, LENGTH = MASK.shape


def draw(*scales: float, seed: int = 0) -> list[np.ndarray]:
    """One float64 `[B, T]` array of normal numbers for each scale."""
    rng = np.random.default_rng(seed)
    return [scale * rng.normal(size=MASK.shape) for scale in scales]


def check_masked(function: Callable[..., Any], arrays: Sequence[np.ndarray], mask: np.ndarray = MASK) -> None:
    """Checks masked positions, NaN and infinity under the mask for value and gradient, and dtypes, all traced.

    `function(*arrays)` uses `mask` itself. Outputs of the shape of the mask must hold 0 where it is not set.
    """
    arrays = [np.asarray(array, np.float64) for array in arrays]

    def value_and_grads(*inputs: jax.Array) -> tuple[Any, tuple[jax.Array, ...]]:
        value, pull = jax.vjp(function, *inputs)
        cotangents = jax.tree.map(
            lambda leaf: jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape), value
        )
        return value, pull(cotangents)

    run = traced_program(value_and_grads)
    clean = [np.where(mask, array, 0.0) for array in arrays]
    expected_value, expected_grads = run(*clean)
    for leaf in jax.tree.leaves(expected_value):
        assert np.isfinite(leaf).all()
        if leaf.shape == mask.shape:
            np.testing.assert_array_equal(np.asarray(leaf)[~mask], 0)
    for grad in expected_grads:
        assert np.isfinite(grad).all()
        np.testing.assert_array_equal(np.asarray(grad)[~mask], 0)
    poisoned = ([np.where(mask, array, poison) for array in arrays] for poison in (np.nan, np.inf, -np.inf))
    for hidden in (arrays, *poisoned):
        value, grads = run(*hidden)
        jax.tree.map(np.testing.assert_array_equal, value, expected_value)
        jax.tree.map(np.testing.assert_array_equal, grads, expected_grads)
    for leaf in jax.tree.leaves(jax.eval_shape(function, *[jnp.asarray(array, jnp.bfloat16) for array in arrays])):
        assert leaf.dtype == jnp.float32
    for leaf in jax.tree.leaves(expected_value):
        assert leaf.dtype == jnp.float64
