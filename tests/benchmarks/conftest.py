"""Programs that run once or twice are compiled without LLVM's optimisations, which take longer than they save."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def cheap_compilation() -> Iterator[None]:
    # Buffers are assigned before LLVM begins, so that memory is that of an optimised program.
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
