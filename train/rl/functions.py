"""A function that the config chooses: called with what its parameters name, and checked if it is the user's."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from train.config.algorithms import Algorithm, UserFunction
from train.config.errors import UserError
from train.config.plan import arrays_of
from train.config.signatures import Signature, load_function
from train.config.user_functions import user_code

Shape = tuple[int, ...]
Supply = Mapping[str, Callable[[], jax.Array]]


@dataclasses.dataclass(frozen=True)
class ChosenFunction:
    """A function of the library or of the user, with the options that the config gives it.

    Attributes:
      field: of the config, for errors of a function of the user.
      signature: its parameters.
      section: the section of the config with its options.
    """

    field: str
    signature: Signature
    section: Algorithm

    @property
    def is_of_user(self) -> bool:
        """Whether the user wrote it."""
        return isinstance(self.section, UserFunction)

    def call(self, arrays: Supply, **others: Any) -> Any:
        """Calls it with the arrays and the options that its parameters name.

        Args:
          arrays: array by name, made when it is needed.
          others: arguments that the trainer sets; arguments that the function does not have are dropped.
        """
        supplied = {name: arrays[array]() for name, array in arrays_of(self.signature, arrays).items()}
        fixed = {name: value for name, value in others.items() if name in self.signature}
        section = self.section
        named = f"{self.field}: {section.function}" if isinstance(section, UserFunction) else None
        with nullcontext() if named is None else user_code(named):
            return load_function(self.signature.target)(**supplied, **fixed, **section.options())

    def check(self, result: Any, shapes: Sequence[Shape], *, booleans: bool = False, name: str = "") -> None:
        """Checks an array that a function of the user returned; shapes and dtypes are known while it is traced.

        Args:
          result: what it returned.
          shapes: the shapes that are right.
          booleans: whether a mask is right as well as floats.
          name: the name of a part of the result, for the error.

        Raises:
          UserError: it is no array of floats, or has another shape.
        """
        if not isinstance(self.section, UserFunction):
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
        raise UserError(f"{self.field}: {self.section.function} returned{part} {got}, expected {kinds} {listed}")
