"""Loads single functions of a release without what it depends on.

A package is registered without running its `__init__`; modules that are not installed are replaced by stubs that hold
just the names that are imported from them; a method is compiled from the source of its file.
"""

import ast
import contextlib
import importlib
import math
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np
import torch


class Placeholder:
    """Stands for a class that is only named in annotations."""

    def __class_getitem__(cls, item: object) -> type:
        return cls


def identity(value: Any = None, *_: object, **__: object) -> Any:
    """A decorator that does nothing."""
    return value


def stub(name: str, *placeholders: str, **attributes: object) -> types.ModuleType:
    """Registers a module that is not installed, with the names that are imported from it."""
    module = types.ModuleType(name)
    vars(module).update(dict.fromkeys(placeholders, Placeholder), **attributes)
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], leaf, module)
    return module


def bare(root: pathlib.Path, name: str) -> types.ModuleType:
    """Registers a package and those above it without running their `__init__`."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        package = ".".join(parts[:depth])
        if package not in sys.modules:
            stub(package).__path__ = [str(root.joinpath(*parts[:depth]))]
    return sys.modules[name]


def load(name: str) -> types.ModuleType:
    """Imports a module of a release whose packages are registered."""
    return importlib.import_module(name)


def function_from(path: pathlib.Path, name: str, names: Mapping[str, object]) -> Callable[..., Any]:
    """The function or method `name` of a file, compiled alone, without its decorators, where `names` exist."""
    tree = ast.parse(path.read_text())
    (actual,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    actual.decorator_list, actual.returns = [], None
    for argument in [*actual.args.args, *actual.args.kwonlyargs]:
        argument.annotation = None
    scope: dict[str, Any] = dict(names)
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    exec(compile(ast.fix_missing_locations(ast.Module([future, actual], [])), str(path), "exec"), scope)
    return scope[name]


def statements_from(path: pathlib.Path, function: str, first: str, last: str) -> Callable[..., dict[str, Any]]:
    """A part of a method: from the statement that starts with `first` to the next that starts with `last`.

    It becomes a function from the names that the statements read to all names after them.
    """
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    (method,) = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == function]
    bodies = [getattr(node, "body", []) for node in ast.walk(method)]
    for body in (body for body in bodies if isinstance(body, list)):
        texts = [ast.unparse(statement) for statement in body]
        starts = [i for i, text in enumerate(texts) if text.startswith(first)]
        ends = [i for i, text in enumerate(texts) if starts and i >= starts[0] and text.startswith(last)]
        if ends:
            code = compile(ast.Module(body[starts[0] : ends[0] + 1], []), str(path), "exec")
            break
    else:
        raise LookupError(f"{path}: no statements from {first!r} to {last!r} in {function}")

    def run(**names: object) -> dict[str, Any]:
        scope = {"torch": torch, "math": math, **names}
        exec(code, scope)
        return scope

    return run


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Forgets every module that was imported inside, so that one system's stub is not another's package."""
    before = dict(sys.modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] not in ("torch", "numpy", "tests"):
                del sys.modules[name]


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Inside, `torch.compile` leaves functions as they are, also as a decorator with options."""
    return mock.patch.object(torch, "compile", lambda function=None, **_: function or identity)


@contextlib.contextmanager
def widened() -> Iterator[None]:
    """Casts to float32 go to float64 inside, so that the formula is compared and not the rounding of the release."""
    narrow = torch.float32
    torch.set_default_dtype(torch.float64)
    to_double = mock.patch.object(torch.Tensor, "float", torch.Tensor.double)
    try:
        with (
            mock.patch.object(torch, "float32", torch.float64),
            mock.patch.object(np, "float32", np.float64),
            to_double,
        ):
            yield
    finally:
        torch.set_default_dtype(narrow)
