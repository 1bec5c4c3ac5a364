"""A guard against recompilation: a program that JAX traces a second time is an error, not a slow run."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def traced_once(
    function: Callable[Arguments, Result],
    name: str | None = None,
    *,
    size_of: Callable[Arguments, Hashable] = lambda *args, **kwargs: None,
) -> Callable[Arguments, Result]:
    """Wraps a function that is about to be jitted so that a second trace raises AssertionError.

    The count belongs to the returned wrapper: two wrappers of one function are two programs. Retracing after
    `jax.clear_caches` is allowed.

    Args:
      name: the name of the compiled program, in place of the function's.
      size_of: computes from the arguments the size of the program, for a function that has programs of several sizes.
    """
    traced: dict[Hashable, Any] = {}

    @functools.wraps(function)
    def counted(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        size = size_of(*args, **kwargs)
        arguments = _described((args, kwargs))
        if traced.setdefault(size, arguments) != arguments:
            raise AssertionError(
                f"{counted.__name__} is traced a second time: a shape, dtype or static argument changed between calls"
            )
        return function(*args, **kwargs)

    if name is not None:
        counted.__name__ = name
    return counted


def _described(arguments: Any) -> tuple[Any, ...]:
    """Returns what JAX compiles a program for: tree, shapes, dtypes and shardings of arrays, and all other values."""
    leaves, tree = jax.tree.flatten(arguments)
    return tree, *(jax.typeof(leaf) if isinstance(leaf, jax.Array | np.ndarray) else leaf for leaf in leaves)
