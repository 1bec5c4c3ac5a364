"""The promise that a program compiles once, kept by chex."""

from collections.abc import Callable
from typing import TypeVar

import chex

Function = TypeVar("Function", bound=Callable)


def traced_once(function: Function, name: str | None = None) -> Function:
    """`function`, raising AssertionError if JAX traces it a second time.

    chex tells functions apart by where they are defined and by name: two programs from one definition need two names.
    """
    if name is not None:
        function.__name__ = name
    return chex.assert_max_traces(function, n=1)


def forget_traces() -> None:
    """Starts the count anew; for a new run in the same process, whose programs are new ones."""
    chex.clear_trace_counter()
