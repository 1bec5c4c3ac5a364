"""A program that would compile a second time ends the run instead of slowing it down."""

import jax
import jax.numpy as jnp
import pytest

from train.rl.tracing import traced_once


def doubled(name: str | None = None):
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    return jax.jit(traced_once(double, name))


def test_repeated_shape_is_traced_once():
    double = doubled()
    for value in (1.0, 2.0):
        assert double(jnp.float32(value)) == 2 * value


@pytest.mark.parametrize("other", [jnp.ones(4), jnp.ones(3, jnp.int32)], ids=["shape", "dtype"])
def test_another_shape_or_dtype_is_an_error(other):
    double = doubled()
    double(jnp.ones(3))
    with pytest.raises(AssertionError, match="double is traced a second time"):
        double(other)


def test_the_program_has_the_name_it_is_given():
    lowered = doubled("first").lower(jnp.ones(3))
    assert "first" in lowered.as_text().splitlines()[0]
    first = doubled("first")
    first(jnp.ones(3))
    with pytest.raises(AssertionError, match="first"):
        first(jnp.ones(4))


def test_programs_of_one_definition_count_apart():
    """A second run in the same process, or a second test, needs no reset."""
    for _ in range(2):
        doubled()(jnp.ones(3))


def test_program_of_several_sizes_is_traced_per_size():
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    program = jax.jit(traced_once(double, size_of=lambda x: x.shape))
    for length in (3, 4, 3):
        program(jnp.ones(length))
    with pytest.raises(AssertionError, match="double is traced a second time"):
        program(jnp.ones(4, jnp.int32))


def test_cleared_caches_allow_another_trace_of_equal_arguments():
    double = doubled()
    for value in (1.0, 2.0):
        assert double(jnp.float32(value)) == 2 * value
        jax.clear_caches()
    with pytest.raises(AssertionError, match="traced a second time"):
        double(jnp.ones(4))
