"""Cheap settings for programs that run once or twice, in a process that holds much from other tests."""

import gc
from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def cheap_compilation() -> Iterator[None]:
    """Compiles without LLVM's optimisations, which take longer than they save."""
    # Buffers are assigned before LLVM begins, so that memory is that of an optimised program.
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True, scope="module")
def cheap_collection() -> Iterator[None]:
    """Leaves what other tests hold out of the garbage collections that the commands make before each run."""
    gc.freeze()
    yield
    gc.unfreeze()
