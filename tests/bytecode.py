"""Sources are compiled by one of the test processes that start together, and read by the others.

Without it every process compiles the same sources at the same time, where no bytecode is there yet.
"""

import contextlib
import fcntl
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from _pytest.assertion import rewrite


@contextlib.contextmanager
def turn_of(source: Path) -> Iterator[None]:
    """Waits until no other process is inside the block with the same source.

    Where a file cannot be locked it does not wait.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(source.open("rb"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compiled_once(get_code: Callable[..., CodeType | None]) -> Callable[..., CodeType | None]:
    """Returns the method of a loader such that one process compiles a source without bytecode."""

    def get(self: Any, name: str) -> CodeType | None:
        source = self.get_filename(name)
        if os.path.exists(importlib.util.cache_from_source(source)):
            return get_code(self, name)
        with turn_of(Path(source)):
            return get_code(self, name)

    return get


def rewritten_once(exec_module: Callable[..., None]) -> Callable[..., None]:
    """Returns the method of pytest's loader such that one process rewrites the assertions of a source."""

    def execute(self: Any, module: ModuleType) -> None:
        source = Path(str(module.__file__))
        bytecode = rewrite.get_cache_dir(source) / f"{source.stem}{rewrite.PYC_TAIL}"
        if not bytecode.exists():
            with turn_of(source):
                if not bytecode.exists():
                    bytecode.parent.mkdir(parents=True, exist_ok=True)
                    about, code = rewrite._rewrite_test(source, self.config)
                    rewrite._write_pyc(self.config.stash[rewrite.assertstate_key], code, about, bytecode)
        exec_module(self, module)

    return execute


def share() -> None:
    """Lets this process wait for sources that another one compiles.

    A release of pytest without these private functions rewrites a source in every process, as by default.
    """
    if sys.dont_write_bytecode or "PYTEST_XDIST_WORKER" not in os.environ:
        return
    loader: Any = importlib.machinery.SourceFileLoader
    loader.get_code = compiled_once(loader.get_code)
    names = "get_cache_dir", "PYC_TAIL", "_write_pyc", "_rewrite_test", "assertstate_key"
    if all(hasattr(rewrite, name) for name in names):
        hook: Any = rewrite.AssertionRewritingHook
        hook.exec_module = rewritten_once(hook.exec_module)
