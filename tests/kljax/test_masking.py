"""Masked statistics against `np.ma`, completion masks against loops, the shift, errors."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kljax
from tests import oracles

ROWS, LENGTH = 4, 6
AXES = st.sampled_from([None, 0, 1, -1, (0, 1)])
CLOSE = {"rtol": 1e-12, "atol": 1e-13}


def draw(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(3.0, 2.0, (ROWS, LENGTH))


def test_variance_over_devices_is_that_of_the_whole_batch() -> None:
    """Measured from one mean: the rows of the two devices are far apart."""
    values = jnp.asarray(draw(0) + 100 * (np.arange(ROWS) >= 2)[:, None])
    mask = jnp.asarray(draw(1) > 2)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    of_parts = jax.shard_map(
        lambda *arrays: kljax.masked_var(*arrays, axis_name="data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    chex.assert_trees_all_close(of_parts(values, mask), kljax.masked_var(values, mask), **CLOSE)


@given(seed=st.integers(0, 1000), mask=oracles.masks(ROWS, LENGTH), axis=AXES, ddof=st.sampled_from([0, 1]))
def test_statistics_equal_numpy_ma(seed: int, mask: np.ndarray, axis: int | tuple[int, ...] | None, ddof: int) -> None:
    values = draw(seed)
    reference = oracles.masked_array(values, mask)
    expected = [reference.sum(axis), reference.mean(axis), reference.var(axis, ddof=ddof)]
    expected = [np.ma.filled(np.ma.asarray(x, np.float64), 0.0) for x in expected]
    values = np.where(mask, values, np.nan)
    actual = [
        kljax.masked_sum(values, mask, axis=axis),
        kljax.masked_mean(values, mask, axis=axis),
        kljax.masked_var(values, mask, axis=axis, ddof=ddof),
    ]
    chex.assert_trees_all_close([np.asarray(x) for x in actual], expected, **CLOSE)


@given(seed=st.integers(0, 1000), mask=oracles.masks(ROWS, LENGTH), axis=AXES, ddof=st.sampled_from([0, 1]))
def test_whitened_values_have_mean_zero_and_variance_one(
    seed: int, mask: np.ndarray, axis: int | tuple[int, ...] | None, ddof: int
) -> None:
    values = draw(seed)
    white = kljax.masked_whiten(np.where(mask, values, np.inf), mask, axis=axis, ddof=ddof, eps=0.0)
    assert not white[~mask].any()
    varies = np.asarray(kljax.masked_var(values, mask, axis=axis, ddof=ddof)) > 0
    mean, var = kljax.masked_mean(white, mask, axis=axis), kljax.masked_var(white, mask, axis=axis, ddof=ddof)
    chex.assert_trees_all_close((mean, var), (np.zeros(mean.shape), varies.astype(float)), rtol=1e-11, atol=1e-12)
    shifted = kljax.masked_whiten(values, mask, axis=axis, ddof=ddof, eps=0.0, shift_mean=False)
    axes = axis if axis is not None else (0, 1)
    back = np.expand_dims(np.asarray(kljax.masked_mean(values, mask, axis=axis)), axes)
    chex.assert_trees_all_close(shifted, np.where(mask, white + back, 0.0), **CLOSE)


def test_gradients_of_the_statistics() -> None:
    values, mask = draw(0), oracles.MASK_KINDS[:ROWS]
    n = mask.sum()
    mean = values[mask].mean()

    def grad(function: object, **arguments: object) -> np.ndarray:
        return np.asarray(jax.grad(lambda v: function(v, mask, **arguments))(jnp.asarray(values)))

    chex.assert_trees_all_close(grad(kljax.masked_sum), mask.astype(float))
    chex.assert_trees_all_close(grad(kljax.masked_mean), mask / n, **CLOSE)
    expected = np.where(mask, 2 * (values - mean) / (n - 1), 0.0)
    chex.assert_trees_all_close(grad(kljax.masked_var), expected, **CLOSE)


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_values_give_zero_with_zero_gradient(count: int) -> None:
    mask = jnp.arange(5) < count
    values = jnp.full(5, 7.0)
    for function in (kljax.masked_var, lambda v, m: kljax.masked_whiten(v, m, eps=0.0).sum()):
        value, grad = jax.value_and_grad(lambda v, f=function: f(v, mask))(values)
        chex.assert_trees_all_equal((value, grad), (jnp.zeros(()), jnp.zeros(5)))
    chex.assert_trees_all_equal(kljax.masked_mean(values, mask), jnp.asarray(7.0 if count else 0.0))


def test_whitening_a_constant_gives_zero() -> None:
    # slime's single pass E[v^2] - E[v]^2 turns slightly negative for equal values: rsqrt of it is NaN.
    values, mask = jnp.full((3, 5), 0.1, jnp.float32), jnp.ones((3, 5), bool)
    chex.assert_trees_all_close(kljax.masked_whiten(values, mask), jnp.zeros((3, 5), jnp.float32), atol=1e-3, rtol=0)


def test_mean_of_a_constant_is_the_constant() -> None:
    # An epsilon in the divisor would make it 0.1 / (1 + 1e-8 / 3), which float64 tells apart.
    chex.assert_trees_all_close(kljax.masked_mean(jnp.full(3, 0.1), jnp.ones(3, bool)), jnp.asarray(0.1), rtol=1e-15)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64])
def test_narrow_floats_are_summed_in_float32(dtype: jnp.dtype) -> None:
    values, mask = jnp.ones(4096, dtype), jnp.ones(4096, bool)
    expected = jnp.float64 if dtype == jnp.float64 else jnp.float32
    for function in (kljax.masked_sum, kljax.masked_mean, kljax.masked_var, kljax.masked_whiten, kljax.masked):
        assert function(values, mask).dtype == expected
    chex.assert_trees_all_equal(kljax.masked_sum(values, mask), jnp.asarray(4096, expected))


def test_wide_eps_keeps_float32() -> None:
    values, eps = jnp.arange(3, dtype=jnp.float32), jnp.asarray(1e-8, jnp.float64)
    assert kljax.masked_whiten(values, jnp.ones(3, bool), eps=eps).dtype == jnp.float32


def test_leading_axes_vmap_and_jit() -> None:
    values, mask = jnp.asarray(draw(1)).reshape(2, 2, LENGTH), jnp.asarray(oracles.MASK_KINDS[:4]).reshape(2, 2, LENGTH)
    for function in (kljax.masked_mean, kljax.masked_var, kljax.masked_whiten):
        per_row = jax.jit(lambda v, m, f=function: f(v, m, axis=-1))(values, mask)
        mapped = jax.vmap(jax.vmap(function))(values, mask)
        chex.assert_trees_all_close(per_row, mapped, **CLOSE)


@given(prompt=st.integers(0, 5), completion=st.integers(0, 7), length=st.integers(1, 8))
def test_completion_mask_by_loop(prompt: int, completion: int, length: int) -> None:
    of_lengths = jax.jit(kljax.completion_mask, static_argnums=2)
    mask = of_lengths(np.array([prompt, 0]), np.array([completion, 1]), length)
    expected = [[prompt <= t < prompt + completion for t in range(length)], [t == 0 for t in range(length)]]
    np.testing.assert_array_equal(mask, expected)
    np.testing.assert_array_equal(of_lengths(np.asarray(prompt), np.asarray(completion), length), expected[0])


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_completion_mask_of_narrow_lengths(dtype: type) -> None:
    mask = kljax.completion_mask(np.array([100], dtype), np.array([200 if dtype == np.uint8 else 100], dtype), 400)
    np.testing.assert_array_equal(np.flatnonzero(mask)[[0, -1]], [100, 299 if dtype == np.uint8 else 199])


@given(mask=oracles.masks(ROWS, LENGTH))
def test_last_token_mask_by_loop(mask: np.ndarray) -> None:
    expected = np.zeros_like(mask)
    for row, unmasked in enumerate(mask):
        if unmasked.any():
            expected[row, np.flatnonzero(unmasked)[-1]] = True
    chex.assert_trees_all_equal(np.asarray(kljax.last_token_mask(mask)), expected)


def test_shift_right_moves_values_and_gradients() -> None:
    values = jnp.arange(1.0, 7.0).reshape(2, 3)
    chex.assert_trees_all_equal(kljax.shift_right(values), jnp.array([[0.0, 1.0, 2.0], [0.0, 4.0, 5.0]]))
    chex.assert_trees_all_equal(kljax.shift_right(values, -1.0)[:, 0], jnp.array([-1.0, -1.0]))
    assert kljax.shift_right(jnp.array([[True, False]]), False).dtype == bool
    grad = jax.grad(lambda v: (kljax.shift_right(v) * values).sum())(values)
    chex.assert_trees_all_equal(grad, jnp.array([[2.0, 3.0, 0.0], [5.0, 6.0, 0.0]]))


def test_shift_right_of_no_position_is_empty() -> None:
    assert kljax.shift_right(jnp.zeros((2, 0))).shape == (2, 0)


def test_shift_right_on_a_set_explicit_mesh() -> None:
    mesh = jax.make_mesh((2,), ("rows",))
    values = jnp.arange(1.0, 7.0).reshape(2, 3)
    with jax.set_mesh(mesh):
        shifted = jax.jit(kljax.shift_right)(jax.device_put(values, NamedSharding(mesh, P("rows"))))
    np.testing.assert_array_equal(shifted, [[0, 1, 2], [0, 4, 5]])


def test_masked_without_a_mask_keeps_everything() -> None:
    values = jnp.array([1.0, jnp.inf], jnp.bfloat16)
    chex.assert_trees_all_equal(kljax.masked(values, None), jnp.array([1.0, jnp.inf], jnp.float32))


@pytest.mark.parametrize("name", ["masked", "masked_sum", "masked_mean", "masked_var", "masked_whiten"])
def test_errors(name: str) -> None:
    function = getattr(kljax, name)
    with pytest.raises(ValueError, match=r"shapes differ: values \[2, 3\], mask \[2\]"):
        function(jnp.zeros((2, 3)), jnp.ones(2, bool))
    with pytest.raises(TypeError, match=r"mask: got dtype float32, expected bool or an integer type.*; pass mask > 0"):
        function(jnp.zeros(2), jnp.ones(2, jnp.float32))


def test_errors_of_arguments() -> None:
    with pytest.raises(ValueError, match=r"ddof: got -1, expected a number >= 0"):
        kljax.masked_var(jnp.zeros(2), jnp.ones(2, bool), ddof=-1)
    with pytest.raises(ValueError, match=r"prompt_lengths \[2\], completion_lengths \[3\]"):
        kljax.completion_mask(jnp.zeros(2, int), jnp.zeros(3, int), 4)
    with pytest.raises(TypeError, match="mask: got dtype"):
        kljax.last_token_mask(jnp.ones((1, 2)))
