"""Functions of the user in the objective: errors name the field of the config, and results are checked."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from train.config.algorithms import Algorithm, UserFunction
from train.config.errors import UserError
from train.config.user_functions import user_code

Shape = tuple[int, ...]


def call_user(field: str, section: Algorithm, call: Callable[[], Any]) -> Any:
    """Calls the function of a section; errors of a function of the user name it and the field."""
    if not isinstance(section, UserFunction):
        return call()
    with user_code(f"{field}: {section.function}"):
        return call()


def check_result(
    field: str, section: Algorithm, result: Any, shapes: Sequence[Shape], *, booleans: bool = False, name: str = ""
) -> None:
    """Checks the array that a function of the user returned; shapes and dtypes are known while it is traced.

    Args:
      field: of the config, for the error.
      section: the choice of the function; one of the library needs no check.
      result: what it returned.
      shapes: the shapes that are right.
      booleans: whether a mask is right as well as floats.
      name: the name of a part of the result, for the error.

    Raises:
      UserError: it is no array of floats, or has another shape.
    """
    if not isinstance(section, UserFunction):
        return
    dtype = getattr(result, "dtype", None)
    shape = getattr(result, "shape", None)
    is_right_kind = dtype is not None and (
        jnp.issubdtype(dtype, jnp.floating) or (booleans and jnp.issubdtype(dtype, jnp.bool))
    )
    if is_right_kind and shape in shapes:
        return
    got = type(result).__name__ if dtype is None or shape is None else f"{dtype}{list(shape)}"
    kinds = "floats or booleans" if booleans else "floats"
    listed = " or ".join(str(list(shape)) for shape in shapes)
    part = f" {name}:" if name else ""
    raise UserError(f"{field}: {section.function} returned{part} {got}, expected {kinds} {listed}")
