"""Compiled programs and their memory, on the CPU, whose compiler reports in the same words."""

import jax
import jax.numpy as jnp
import pytest

from tests import programs
from train.plan.compiler import hlo
from train.plan.compiler.lowering import compile_program, needed_memory


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("the total memory required for HLO temporaries (21.12G) exceeds available HBM (15.75G).", 21.12 * 2**30),
        ("XLA:TPU compile permanent error. Used 512.5M of 15.75G hbm. Exceeded hbm capacity", 512.5 * 2**20),
    ],
)
def test_oversized_program_is_reported(message, size):
    assert needed_memory(f"RESOURCE_EXHAUSTED: {message}") == round(size)


def test_other_errors_are_raised():
    assert needed_memory("INTERNAL: RET_CHECK failure") is None


def test_memory_of_a_program_with_a_donated_argument():
    def update(state, x):
        return state + x @ x.T, x.sum()

    state, x = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 32), jnp.float32)
    actual = compile_program(jax.jit(update, donate_argnums=0).lower(state, x))
    assert actual.arguments == 4 * (64 * 64 + 64 * 32)
    assert actual.aliased == 4 * 64 * 64
    # The results are the state, a scalar and the table of both.
    assert actual.aliased < actual.results < actual.aliased + 100
    assert hlo.parse(actual.text).entry
    assert "BufferAssignment" in actual.assignment


def test_program_that_was_kept_is_compiled_again(tmp_path):
    """A kept program does not say where its buffers are."""
    with programs.kept_in(tmp_path):
        for _ in range(2):
            lowered = jax.jit(lambda x: x @ x.T + 0.75).lower(jax.ShapeDtypeStruct((64, 32), jnp.float32))
            assert "BufferAssignment" in compile_program(lowered).assignment
        assert not list(tmp_path.iterdir())
