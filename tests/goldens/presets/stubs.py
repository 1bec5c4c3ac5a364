"""Stands in for packages that a system imports and its update on a CPU does not use."""

import contextlib
import importlib.machinery
import pathlib
import sys
import types
from collections.abc import Iterator
from unittest import mock


class Anything(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> mock.MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")


class _Finder:
    """Finds every module below some packages, and every module that is not installed and that a release imports."""

    def __init__(self, packages: tuple[str, ...], root: pathlib.Path | None = None) -> None:
        self.packages, self.root = set(packages), root

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        """Finds a module that is replaced."""
        top = name.partition(".")[0]
        if top not in self.packages and not self._imported_by_release(top):
            return None
        self.packages.add(top)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def _imported_by_release(self, top: str) -> bool:
        """Whether the statement that imports is in a file of the release, and not in a package that it uses."""
        if self.root is None or top in sys.modules:
            return False
        frame = sys._getframe(2)
        while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        return pathlib.Path(frame.f_code.co_filename).is_relative_to(self.root)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Makes an empty module."""
        return Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing."""


def replace(*packages: str) -> None:
    """Replaces packages, and everything below them, by modules that have every name."""
    sys.meta_path.insert(0, _Finder(packages))  # type: ignore[arg-type]


@contextlib.contextmanager
def missing_replaced(root: pathlib.Path) -> Iterator[None]:
    """Replaces, while a release below `root` is imported, the modules that it imports and that are not installed."""
    finder = _Finder((), root.resolve())
    sys.meta_path.append(finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
