"""The programs of a test session are compiled once, and do not fill the memory maps of a process."""

import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache

from tests import programs


@pytest.mark.skipif(not programs.memory_maps(), reason="the system does not tell the memory maps of a process")
def test_programs_beyond_the_limit_are_dropped(tmp_path: pathlib.Path):
    """Below the limit a function that is compiled stays."""
    count = 50
    with programs.kept_in(tmp_path):
        before = programs.memory_maps()
        for size in range(2, 2 + count):
            jax.jit(lambda x: 2 * x + 1)(jnp.ones((size, 7, 3, 5)))
        compiled = programs.memory_maps()
        assert compiled >= before + 3 * count
        programs.forget_beyond(2 * compiled)
        assert programs.memory_maps() >= before + 3 * count
        programs.forget_beyond(before)
        assert programs.memory_maps() <= compiled - 3 * count


def test_program_compressed_quickly_is_read_by_any_process():
    """With the settings of the tests, and by the function that JAX has in the other processes."""
    program = bytes(range(256)) * 100
    compressed = compilation_cache.compress_executable(program)
    assert len(compressed) < len(program) / 10
    assert compilation_cache.decompress_executable(compressed) == program
