"""Calls every public function with the shapes of its annotations checked by jaxtyping and beartype.

A program of its own, `python -m tests.kljax.typed_calls`: annotations are jaxtyping's only if `KLJAX_CHECK_SHAPES` is
set before kljax is imported. Prints the functions that were checked; an argument or a result of another shape or type
is an error.
"""

from collections.abc import Callable
from typing import Any

import beartype
import jax
import jax.numpy as jnp
from jaxtyping import TypeCheckError, jaxtyped

import kljax
from tests.kljax import calls

# An int is a number where a float is expected.
NUMBERS = beartype.BeartypeConf(is_pep484_tower=True)


def typed(function: Callable[..., Any]) -> Callable[..., Any]:
    return jaxtyped(function, typechecker=beartype.beartype(conf=NUMBERS))


def check_that_a_wrong_shape_is_seen() -> None:
    try:
        typed(kljax.k1)(jnp.zeros((2, 3)), jnp.zeros((3, 2)))
    except TypeCheckError:
        return
    raise AssertionError("arrays of different shapes passed the check: is KLJAX_CHECK_SHAPES set?")


def checked_functions() -> list[str]:
    names = []
    for name in calls.callable_functions():
        function = getattr(kljax, name)
        function_calls = [call for call in calls.calls_of(name) if call.function is function]
        checked = typed(function) if function_calls else function
        for call in function_calls:
            # The method of the call: to name a callable object, JAX would print all its arrays.
            jax.eval_shape(call._replace(function=checked).__call__, call.arrays, call.data)
        names += [name] if function_calls else []
    return names


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    check_that_a_wrong_shape_is_seen()
    print(*checked_functions(), sep="\n")
