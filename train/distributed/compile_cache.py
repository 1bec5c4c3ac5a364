"""Compiled programs, kept from run to run in a directory of the user.

XLA compiles for the CPU of this machine, and its compiler differs from release to release, so both have a directory of
their own. No trouble with the directory ends a run: it compiles instead.
"""

import os
import platform
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib

from kljax.checkpoint import text_hash
from train.config.errors import warn
from train.config.installation import user_caches
from train.distributed.exchange import exchange_json, of_leader
from train.distributed.peers import is_leader

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
MOST_BYTES = 8 * 2**30
"""Programs that nobody has read for longest are deleted beyond this size."""
FREE_BYTES = 2**30
"""Nothing is written to a disk with less room: the compiler of GPUs fails where it cannot write its measurements."""
NEVER = 1e9
"""Seconds of compilation from which a program is written, if none is to be."""
CPU_LINES = ("flags", "Features", "cpu family", "model\t", "CPU implementer", "CPU part")


class _Directory(NamedTuple):
    """A directory for programs: its path, why it cannot be used, and a file that marks it as writable, if it is."""

    path: str
    problem: str | None = None
    mark: str = ""


def start_compile_cache(field: str | bool) -> str:
    """Lets JAX keep its programs in a directory, of which all processes see the same; call it before the first program.

    Args:
      field: `compile_cache` of a config.

    Returns:
      A line for the user.
    """
    if not jax.config.values["jax_enable_compilation_cache"]:
        return "compile cache: off, as JAX_ENABLE_COMPILATION_CACHE says"
    if field is True and VARIABLE in os.environ:
        return f"compile cache: {os.environ[VARIABLE] or 'off'}, as {VARIABLE} says"
    if field is False:
        _use(None)
        return "compile cache: off"
    # Only the leader writes, so that a program is there for all processes or for none.
    made = _make(field) if is_leader() else _Directory("")
    path, problem, mark = of_leader("compile cache", made)
    kept = len(list(Path(path).glob("*-cache")))
    # A directory that is read-only has no mark, and as many programs for all processes.
    seen = exchange_json("compile cache", [fingerprint(), Path(path, mark).exists() if mark else kept])
    if is_leader() and mark:
        Path(path, mark).unlink(missing_ok=True)
    if problem is None and any(entry != seen[0] for entry in seen):
        others = "see another one" if all(entry[0] == seen[0][0] for entry in seen) else "have another CPU"
        problem = f"some processes {others}; set compile_cache to a directory that all see, with CPUs of one kind"
    if problem is not None:
        _use(None)
        return f"compile cache: off, because of {path}: {problem}"
    _use(Path(path), writable=bool(mark))
    return f"compile cache: {path}, {kept} programs{'' if mark else ', read-only'}"


@contextmanager
def compiled_anew() -> Iterator[None]:
    """Reads no program from a directory inside the block, and keeps none."""
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.values["jax_enable_compilation_cache"]
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def fingerprint() -> str:
    """Names the compiler and the CPU: releases of JAX and jaxlib, and a digest of the features of the CPU."""
    cpu = [platform.system(), platform.machine(), platform.processor()]
    with suppress(OSError):
        cpu += sorted({line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(CPU_LINES)})
    return f"jax-{jax.__version__}-{jaxlib.__version__}-{text_hash(chr(10).join(cpu).encode()).hexdigest()[:12]}"


def _make(field: str | bool) -> _Directory:
    """Makes the directory of this compiler and CPU, with a file that the other processes look for."""
    root = (user_caches() / "compiled" if isinstance(field, bool) else Path(field)).absolute()
    path = root / fingerprint()
    mark = f"mark-{secrets.token_hex(8)}"
    try:
        # Whoever writes a program runs code in the name of those that read it; a team may share a directory of its own.
        path.mkdir(mode=0o700 if isinstance(field, bool) else 0o777, parents=True, exist_ok=True)
        prune(root, MOST_BYTES)
        if shutil.disk_usage(path).free < FREE_BYTES:
            raise OSError(0, f"less than {FREE_BYTES // 2**20} MiB are free")
        (path / mark).touch()
    except OSError as error:
        readable = os.access(path, os.R_OK | os.X_OK) and any(path.glob("*-cache"))
        return _Directory(str(path), None if readable else error.strerror or str(error))
    return _Directory(str(path), mark=mark)


def prune(root: Path, most_bytes: int) -> None:
    """Deletes the programs that nobody has read for longest, of all releases, beyond a size."""
    states = {}
    for file in root.glob("jax-*/*-cache"):
        with suppress(OSError):  # another run may delete it
            states[file] = file.stat()
    size = sum(state.st_size for state in states.values())
    for file, state in sorted(states.items(), key=lambda pair: max(pair[1].st_atime, pair[1].st_mtime)):
        if size <= most_bytes:
            return
        with suppress(OSError):
            file.unlink()
        size -= state.st_size


def _use(path: Path | None, *, writable: bool = True) -> None:
    from jax.experimental.compilation_cache import compilation_cache

    settings = {
        "jax_compilation_cache_dir": None if path is None else str(path),
        "jax_persistent_cache_min_compile_time_secs": 0.0 if writable else NEVER,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    if not writable:
        # The compiler of GPUs would write its measurements beside the programs, and end if it cannot.
        settings["jax_persistent_cache_enable_xla_caches"] = ""
    for name, value in settings.items():
        jax.config.update(name, value)
    # JAX looks at the directory at its first compilation alone.
    compilation_cache.reset_cache()
    write_whole_files()
    warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry")


def write_whole_files() -> None:
    """Lets JAX put a program into its directory at once, so that no process reads a part of it, even after a kill.

    The first file that cannot be written is the last that is tried. A release of JAX without this private class keeps
    its default.
    """
    from jax._src import lru_cache

    cache = getattr(lru_cache, "LRUCache", None)
    suffix = getattr(lru_cache, "_CACHE_SUFFIX", None)
    if cache is None or suffix is None:
        return

    def put(self: Any, key: str, value: bytes) -> None:
        part = None
        try:
            with tempfile.NamedTemporaryFile(dir=self.path, prefix="part-", delete=False) as part:
                part.write(value)
            Path(part.name).replace(self.path / f"{key}{suffix}")
        except OSError as error:
            if part is not None:
                Path(part.name).unlink(missing_ok=True)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", NEVER)
            warn(f"compile cache: no more programs are written to {self.path}, because {error.strerror or error}")

    cache.put = put
