"""A program that would compile a second time ends the run instead of slowing it down."""

import jax
import jax.numpy as jnp
import pytest

from train.rl.tracing import forget_traces, traced_once


def doubled(name: str | None = None):
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    return jax.jit(traced_once(double, name))


def test_the_same_shape_again_is_no_second_trace():
    double = doubled()
    for value in (1.0, 2.0):
        assert double(jnp.float32(value)) == 2 * value


@pytest.mark.parametrize("other", [jnp.ones(4), jnp.ones(3, jnp.int32)], ids=["shape", "dtype"])
def test_another_shape_or_dtype_is_an_error(other):
    double = doubled()
    double(jnp.ones(3))
    with pytest.raises(AssertionError, match="double"):
        double(other)


def test_two_programs_of_one_definition_need_names():
    doubled("first")(jnp.ones(3))
    doubled("second")(jnp.ones(3))
    with pytest.raises(AssertionError, match="first"):
        doubled("first")(jnp.ones(3))


def test_a_new_run_counts_anew():
    doubled()(jnp.ones(3))
    forget_traces()
    doubled()(jnp.ones(3))
