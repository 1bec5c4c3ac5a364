"""Trace-time checks and conversions that name the argument they complain about."""

import dataclasses
import difflib
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kljax._typing import Array, ArrayLike, Mask, Scalar
from kljax.batches import Groups, Segments, has_known_values

Function = TypeVar("Function", bound=Callable[..., Any])
NUMBER = (int, float, np.number)
"""Types of a number that is known while a program is traced."""
# Fewer tokens that all lie between 0 and 1 may be made-up numbers; so many are probabilities.
MIN_PROBABILITIES = 16
# Each returns the end of a message for the argument and its unknown value, or nothing; the package adds the names of
# other systems, whose table is above this module.
CHOICE_HINTS: list[Callable[[str, object], str]] = []


def refuses(**arguments: str) -> Callable[[Function], Function]:
    """Makes a decorator for a function without these arguments, which says what to pass in place of each."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name, text in arguments.items():
                if name in kwargs:
                    raise TypeError(f"{name}: {text}")
            return function(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate


def check_choice(name: str, value: object, allowed: Iterable[str]) -> None:
    """Raises `ValueError` naming `name`, the value got and the allowed ones, unless `value` is one of `allowed`."""
    choices = list(allowed)
    if value in choices:
        return
    hints = closest(value, choices) + "".join(hint(name, value) for hint in CHOICE_HINTS)
    raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(choices)}{hints}")


def closest(value: object, allowed: Iterable[str]) -> str:
    """Returns the end of a message, "; did you mean 'x'?", with the allowed name nearest to `value`, or nothing."""
    close = difflib.get_close_matches(str(value), list(allowed), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_same_shape(**arrays: Mask | None) -> tuple[int, ...]:
    """Returns the one shape that all the arrays given have; raises `ValueError` naming each otherwise."""
    shapes = {name: np.shape(value) for name, value in arrays.items() if value is not None}
    first = next(iter(shapes.values()))
    if any(shape != first for shape in shapes.values()):
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(f"shapes differ: {listed}; all of them must have the same shape")
    return first


def check_mask(mask: Mask, name: str = "mask") -> Array:
    """Returns `mask` as booleans, False outside of its segments.

    Raises:
      TypeError: for floating-point weights.
      ValueError: for an integer that is neither 0 nor 1, as labels with -100 have; under `jit` it cannot be seen.
    """
    if isinstance(mask, Segments):
        return check_mask(mask.mask, f"{name}.mask") & (as_array(mask.ids) >= 0)
    mask = as_array(mask)
    if jnp.issubdtype(mask.dtype, jnp.floating):
        raise TypeError(
            f"{name}: got dtype {mask.dtype}, expected bool or an integer type holding 0 and 1; pass {name} > 0"
        )
    if mask.dtype != bool and has_known_values(mask):
        values = np.asarray(mask)
        wrong = values[(values != 0) & (values != 1)]
        if wrong.size:
            advice = f"{name} != -100" if (wrong == -100).any() else f"{name} > 0"
            raise ValueError(
                f"{name}: got {wrong[0]}, expected 0 and 1 only; for labels pass the positions to score, as {advice}"
            )
    return as_type(mask, bool)


def check_token_ids(name: str, ids: Array, vocab_size: int, mask: Array | None) -> None:
    """Checks ids of tokens to score; ids beyond the vocabulary are seen outside of `jit` only.

    Raises:
      TypeError: if the ids are not integers.
      ValueError: for an id outside `[0, vocab_size)` where the mask is set.
    """
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name}: got dtype {ids.dtype}, expected integer token ids")
    if not has_known_values(ids) or (mask is not None and not has_known_values(mask)):
        return
    scored = np.asarray(ids)[... if mask is None else np.asarray(mask)]
    wrong = scored[(scored < 0) | (scored >= vocab_size)]
    if wrong.size:
        raise ValueError(
            f"{name}: got {wrong[0]}, expected ids in [0, {vocab_size}), the columns of head; mask the positions that "
            "are not scored"
        )


def check_log_probs(**arrays: Array) -> None:
    """Raises `ValueError` for masked log-probs that are all probabilities; traced arrays and few tokens pass."""
    for name, array in arrays.items():
        if array.size < MIN_PROBABILITIES or not has_known_values(array):
            continue
        values = np.asarray(array)
        values = values[values != 0]
        if values.size >= MIN_PROBABILITIES and values.min() > 0 and values.max() <= 1:
            raise ValueError(
                f"{name}: got numbers from {values.min():.3g} to {values.max():.3g}, expected log-probs, which are at "
                f"most 0; for probabilities pass jnp.log({name})"
            )


def as_groups(group_ids: ArrayLike | Groups, num_groups: int | None, *, unknown: bool = False) -> Groups:
    """Returns the groups with a negative id on every padding row, made of ids and their number if they are given so.

    Raises:
      ValueError: for a number that is missing or given twice, a `valid` of another shape, or an id that is not below
        the number unless `unknown` allows it; under `jit` such an id cannot be seen.
      TypeError: if the ids are not integers, or the number is traced.
    """
    if isinstance(group_ids, Groups):
        check_only_with(
            num_groups is None, "has no meaning with kljax.Groups, which has it", {"num_groups": num_groups}
        )
        groups = group_ids
        name = "group_ids.ids"
        limit = "group_ids.count"
    elif num_groups is None:
        raise ValueError("num_groups: got None, expected the number of groups beside group_ids, or kljax.Groups")
    else:
        if isinstance(num_groups, jax.core.Tracer):
            raise TypeError(
                "num_groups: got a traced number, expected a Python number, the size of an array; under jit name it in "
                "static_argnames"
            )
        check_at_least("num_groups", num_groups, 1)
        groups = Groups(group_ids, num_groups)
        name = "group_ids"
        limit = "num_groups"
    ids = as_array(groups.ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name}: got dtype {ids.dtype}, expected an integer type")
    ids = ids.astype(int)
    if groups.valid is not None:
        check_same_shape(**{name: ids, "group_ids.valid": groups.valid})
        ids = jnp.where(check_mask(groups.valid, "group_ids.valid"), ids, -1)
    beyond = ids >= groups.count
    if has_known_values(beyond) and not unknown and beyond.any():
        raise ValueError(f"{name}: got {ids.max()}, expected ids below {limit} = {groups.count}")
    return dataclasses.replace(groups, ids=ids, valid=None)


def check_numbers(**values: object) -> None:
    """Raises `TypeError` naming a string or a boolean where a number is meant; arrays and absent values pass."""
    for name, value in values.items():
        if isinstance(value, (str, bytes, bool, np.bool_)):
            raise TypeError(f"{name}: got {value!r}, expected a number")


def check_at_least(name: str, value: object, low: float, *, strict: bool = False) -> None:
    """Raises `ValueError` if a Python number is below `low`; traced and absent values pass, other types do not."""
    check_numbers(**{name: value})
    if isinstance(value, NUMBER) and not (value > low if strict else value >= low):
        raise ValueError(f"{name}: got {value!r}, expected a number {'>' if strict else '>='} {low}")


def check_at_most(name: str, value: object, high: float, *, strict: bool = False) -> None:
    """Raises `ValueError` if a Python number is above `high`; traced and absent values pass, other types do not."""
    check_numbers(**{name: value})
    if isinstance(value, NUMBER) and not (value < high if strict else value <= high):
        raise ValueError(f"{name}: got {value!r}, expected a number {'<' if strict else '<='} {high}")


def check_scalar(name: str, value: Scalar) -> None:
    """Raises `ValueError` for an array with axes where one number is meant; inside `vmap` each element is one."""
    check_numbers(**{name: value})
    if np.shape(value) != ():
        raise ValueError(
            f"{name}: got shape {list(np.shape(value))}, expected a scalar; map over several with jax.vmap"
        )


def check_only_with(allowed: bool, explanation: str, arguments: Mapping[str, object]) -> None:
    """Raises `ValueError` naming each argument that was given although it has no meaning here."""
    present = [name for name, value in arguments.items() if value is not None]
    if present and not allowed:
        raise ValueError(f"{', '.join(present)}: {explanation}")


def as_array(value: ArrayLike) -> Array:
    """Converts to an array of JAX; an array of JAX is returned as it is, without an operation to trace.

    Raises:
      TypeError: naming the argument of the caller, for None, a text and objects.
    """
    if isinstance(value, jax.Array):
        return value
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{_argument(value)}: got {_kind(value)}, expected an array of numbers") from error


def as_real(value: ArrayLike) -> Array:
    """Converts to an array as `as_array` does; complex numbers, which would lose their imaginary part, are refused."""
    array = as_array(value)
    check_real(value, array)
    return array


def _kind(value: object) -> str:
    """Describes a value that is no array: its text, or its type and dtype."""
    if value is None or isinstance(value, (str, bytes)):
        return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
    dtype = getattr(value, "dtype", None)
    return type(value).__name__ if dtype is None else f"{type(value).__name__} of dtype {dtype}"


def _argument(value: object) -> str:
    """Returns the name of a value in the outermost function of this package that has it, for a message."""
    frame: FrameType | None = sys._getframe(1)
    name = "an argument"
    while frame is not None:
        code = frame.f_code
        if (frame.f_globals.get("__name__") or "").partition(".")[0] == __package__ and code.co_filename != __file__:
            parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            same = [parameter for parameter in parameters if frame.f_locals.get(parameter, frame) is value]
            # Several arguments may be None, or the same array.
            name = same[0] if len(same) == 1 or (same and value is not None) else name
        frame = frame.f_back
    return name


def check_real(value: ArrayLike, array: Array) -> None:
    """Raises `TypeError` naming the argument of the caller for a value whose array is complex."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{_argument(value)}: got dtype {array.dtype}, expected real numbers")


def as_type(array: Array, dtype: DTypeLike) -> Array:
    """Converts to a type; an array of that type is returned as it is, without an operation to trace."""
    return array if array.dtype == dtype and not array.weak_type else array.astype(dtype)


def as_float(*values: ArrayLike) -> list[Array]:
    """Converts to one common float type: float64 if any input is float64, else float32.

    Booleans alone become the default float type, as they bring no precision of their own.

    Raises:
      TypeError: naming the argument of the caller, for complex numbers, and as `as_array`.
    """
    arrays = [as_array(value) for value in values]
    for value, array in zip(values, arrays, strict=True):
        check_real(value, array)
    if all(array.dtype == bool for array in arrays):
        return [array.astype(jnp.result_type(float)) for array in arrays]
    wide = any(array.dtype == jnp.float64 for array in arrays)
    return [as_type(array, jnp.float64 if wide else jnp.float32) for array in arrays]
