"""Rows of several groups to compare: not adjacent, a group of one, a group of none, padding rows with NaN."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import kljax

IDS = np.array([0, 1, 0, 2, 1, 0, 1, -1, -1])
REWARDS = np.array([1.0, 0.5, 0.0, 3.0, -2.0, 0.25, 4.0, np.nan, np.inf])
REAL = IDS >= 0
GROUPS = 4


def groups() -> list[np.ndarray]:
    """The rows of each group that has one."""
    return [np.flatnonzero(group == IDS) for group in np.unique(IDS[REAL])]


def dtype_of(advantages: Callable[[jax.Array], jax.Array], dtype: type) -> jnp.dtype:
    """The type of the advantages of rewards of a type."""
    return jax.eval_shape(advantages, jax.ShapeDtypeStruct(REWARDS.shape, dtype)).dtype


def check_rows(advantages: Callable[..., jax.Array], expected: np.ndarray) -> None:
    """Checks values, jit, padding rows by id and by `valid`, gradients, dtypes, and that a NaN stays in its group."""
    of_ids = jax.jit(lambda r: advantages(r, kljax.Groups(IDS, GROUPS)))
    np.testing.assert_allclose(of_ids(REWARDS), expected, 1e-12, 1e-14)
    marked = advantages(REWARDS, kljax.Groups(np.where(REAL, IDS, 1), GROUPS, REAL))
    np.testing.assert_array_equal(marked, advantages(REWARDS, kljax.Groups(IDS, GROUPS)))
    gradient = jax.jit(jax.grad(lambda r: jnp.square(of_ids(r)).sum()))(REWARDS)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[~REAL], 0)
    assert dtype_of(of_ids, jnp.bfloat16) == jnp.float32
    assert dtype_of(of_ids, jnp.float64) == jnp.float64
    spoiled = np.where(np.arange(len(IDS)) == 0, np.nan, REWARDS)
    got = of_ids(spoiled)
    assert np.isnan(got[IDS == 0]).any()
    np.testing.assert_allclose(got[REAL & (IDS != 0)], expected[REAL & (IDS != 0)], 1e-12, 1e-14)
