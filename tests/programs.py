"""Compiled programs on disk: a test session compiles a program once, however many tests and processes need it."""

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src import lru_cache
from jax._src.interpreters import mlir
from jax.experimental.compilation_cache import compilation_cache


def share_mlir_context() -> None:
    """Lets JAX write every program of this process in the same MLIR context.

    By default each program has a context of its own: a quarter of the time to compile one operation, and megabytes.
    A release of JAX without this private function keeps its default.
    """
    make = getattr(mlir, "make_ir_context", None)
    if make is not None:
        mlir.make_ir_context = functools.cache(make)


def write_whole_files() -> None:
    """Lets JAX put a compiled program into a directory at once, so that no other process reads a part of it.

    A release of JAX without this private class keeps its default.
    """
    cache, suffix = getattr(lru_cache, "LRUCache", None), getattr(lru_cache, "_CACHE_SUFFIX", None)
    if cache is None or suffix is None:
        return

    def put(self: Any, key: str, value: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self.path, delete=False) as part:
            part.write(value)
        Path(part.name).replace(self.path / f"{key}{suffix}")

    cache.put = put


def session_directory(base: Path) -> Path:
    """Returns the directory that all test processes of a session share, given the base directory of one of them."""
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@contextlib.contextmanager
def kept_in(directory: Path) -> Iterator[None]:
    """Keeps every program that is compiled inside the block in a directory, and reads it from there."""
    settings = {
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}
    # JAX looks at the directory at its first compilation alone.
    compilation_cache.reset_cache()
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """Reads no program from the directory inside the block, and keeps none."""
    before = jax.config.jax_enable_compilation_cache
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
