"""Compiled programs, kept in memory and on disk: a program is compiled once, whatever test and session needs it."""

import contextlib
import functools
import gc
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src import compilation_cache
from jax._src.interpreters import mlir

from train.distributed import compile_cache

VARIABLE = "KLJAX_TEST_PROGRAMS"
"""Names the directory in which programs stay for later sessions; without it they stay for one."""
MOST_BYTES = 2**30
"""Programs that no session has read for longest are deleted beyond this size."""
# What this process compiled, by key and backend.
_executables: dict[tuple[str, Any], tuple[Any, Any]] = {}


def share_mlir_context() -> None:
    """Lets JAX write every program of this process in the same MLIR context.

    By default each program has a context of its own: a quarter of the time to compile one operation, and megabytes.
    A release of JAX without this private function keeps its default.
    """
    make = getattr(mlir, "make_ir_context", None)
    if make is not None:
        mlir.make_ir_context = functools.cache(make)


def compress_quickly() -> None:
    """Lets JAX compress a program that it writes for other test processes in a third of the time.

    Any process reads what is written so. A release of JAX without this private function keeps its default, and so does
    one that has found zstandard, which is quicker still.
    """
    others = any(getattr(compilation_cache, name, None) for name in ("zstd", "zstandard"))
    if hasattr(compilation_cache, "compress_executable") and not others:
        compilation_cache.compress_executable = functools.partial(zlib.compress, level=1)


def keep_in_memory() -> None:
    """Lets JAX find in memory what this process compiled already.

    To read a small program from a file takes half as long as to compile it. A release of JAX without these private
    functions keeps its default.
    """
    names = "put_executable_and_time", "get_executable_and_time"
    if not all(hasattr(compilation_cache, name) for name in names):
        return
    write, read = (getattr(compilation_cache, name) for name in names)

    def put(key: str, name: str, executable: Any, backend: Any, seconds: Any) -> None:
        _executables[key, backend] = executable, seconds
        write(key, name, executable, backend, seconds)

    def get(key: str, options: Any, backend: Any, *more: Any, **others: Any) -> tuple[Any, Any]:
        return _executables.get((key, backend)) or read(key, options, backend, *more, **others)

    compilation_cache.put_executable_and_time, compilation_cache.get_executable_and_time = put, get


def memory_maps() -> int:
    """Returns the number of memory maps of this process; 0 where the system does not tell."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


def forget_beyond(maps: int) -> None:
    """Drops every compiled program of this process once it has more memory maps than this.

    A program has three maps. Linux allows a process 65,530 of them by default, and XLA ends the process beyond that.
    """
    if memory_maps() > maps:
        _executables.clear()
        jax.clear_caches()
        gc.collect()


def session_directory(base: Path) -> Path:
    """Returns the directory that all test processes of a session share, given the base directory of one of them."""
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def directory_for(session: Path) -> Path:
    """Returns where programs are kept, given the directory of a session: apart for every compiler and kind of CPU."""
    return Path(os.environ.get(VARIABLE) or session / "programs") / compile_cache.fingerprint()


def make_room() -> None:
    """Deletes the programs that no session has read for longest, where they stay for later ones."""
    if VARIABLE in os.environ:
        compile_cache.prune(Path(os.environ[VARIABLE]), MOST_BYTES)


@pytest.fixture(autouse=True, scope="session")
def _kept_for_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the programs of all tests, and of doctests."""
    with kept_in(directory_for(session_directory(tmp_path_factory.getbasetemp()))):
        yield


@contextlib.contextmanager
def kept_in(directory: Path) -> Iterator[None]:
    """Keeps the programs that are compiled inside the block in a directory, and reads them from there."""
    settings = {
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_persistent_cache_enable_xla_caches": jax.config.values["jax_persistent_cache_enable_xla_caches"],
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
