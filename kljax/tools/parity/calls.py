"""Calls of the library as programs: each is traced once for all numbers of its arguments."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kljax.systems import Call
from kljax.systems._call import parameters, run, steps
from kljax.tools.parity.dump import DumpError
from kljax.tools.parity.interpreter import program


def remembered(key: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the program of an earlier call with the key, or makes one of this function.

    Args:
      key: names the program, with all settings that the function closes over.
      function: of arrays, for `program`.

    Returns:
      The program, remembered for the life of the process.
    """
    if key not in _PROGRAMS:
        _PROGRAMS[key] = program(function)
    return _PROGRAMS[key]


_PROGRAMS: dict[str, Callable[..., Any]] = {}


def run_call(section: str, call: Call, arrays: Mapping[str, Any], **keywords: Any) -> Any:
    """Runs a call on arrays, traced once for all numbers of its arguments; returns the first of several results.

    Args:
      call: a call of `kljax.systems`.
      keywords: further arguments; they are part of the program.

    Returns:
      An array in the shape of the function's result.

    Raises:
      DumpError: naming the section, if the function refuses its arguments.
    """
    fixed, numbers = _split(call)

    def compute(arrays: Mapping[str, Any], numbers: list[Any]) -> Any:
        result = run(_join(fixed, iter(numbers)), arrays, **keywords)
        return result[0] if isinstance(result, tuple) else result

    try:
        return remembered(f"{fixed!r} {keywords!r}", compute)(_taken(call, arrays), numbers)
    except ValueError as error:
        raise DumpError(f"header.{section}: {error}") from error


def pull_call(section: str, call: Call, arrays: Mapping[str, Any], cotangent: np.ndarray) -> Any:
    """Differentiates a call by `log_probs`, traced as `run_call` traces it.

    Args:
      call: its result is `[B, T]`, or `[B]`, which is repeated for the tokens.
      arrays: by the names of the call, with `log_probs`.
      cotangent: `[B, T]` derivative of a scalar by the result.

    Returns:
      `[B, T]` derivative of that scalar by the log-probs.
    """
    fixed, numbers = _split(call)

    def compute(arrays: Mapping[str, Any], numbers: list[Any], cotangent: Any) -> Any:
        def values(log_probs: Any) -> Any:
            result = run(_join(fixed, iter(numbers)), {**arrays, "log_probs": log_probs})
            result = result[0] if isinstance(result, tuple) else result
            return jnp.broadcast_to(result.reshape(per_token(result.shape)), cotangent.shape)

        return jax.vjp(values, arrays["log_probs"])[1](cotangent)[0]

    inputs = {**_taken(call, arrays), "log_probs": arrays["log_probs"]}
    return remembered(f"pull {fixed!r}", compute)(inputs, numbers, cotangent)


def check_call(section: str, call: Call, arrays: Mapping[str, Any], **keywords: Any) -> None:
    """Checks the numbers of a call, which a program does not see.

    Raises:
      DumpError: naming the section, if the function refuses them.
    """
    try:
        jax.eval_shape(lambda arrays: run(call, arrays, **keywords), dict(arrays))
    except ValueError as error:
        raise DumpError(f"header.{section}: {error}") from error


def scalar_parameters(call: Call) -> list[str]:
    """Lists the parameters of a call's function that are real numbers, such as a clip or an epsilon.

    Returns:
      Names, in the order of the signature.
    """
    return [parameter.name for parameter in parameters(call) if str(parameter.annotation).startswith("float")]


def _taken(call: Call, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the arrays that some function of a call takes: a program copies all of its arguments to the device."""
    names = {step.renamed.get(p.name, p.name) for step, after in steps(call) for p in parameters(step, after)}
    return {name: array for name, array in arrays.items() if name in names}


def _split(call: Call) -> tuple[Call, list[float]]:
    """Takes the numbers out of a call and of the calls inside it; an ellipsis marks where they were."""
    traced = {name for name in scalar_parameters(call) if _is_number(call.arguments.get(name))}
    numbers = [float(value) for name, value in call.arguments.items() if name in traced]
    fixed = {name: ... if name in traced else value for name, value in call.arguments.items()}
    inner: dict[str, Any] = {}
    for kind in ("times", "plus", "then"):
        parts = [_split(step) for step in getattr(call, kind)]
        inner[kind] = tuple(part for part, _ in parts)
        numbers += [number for _, more in parts for number in more]
    return dataclasses.replace(call, arguments=fixed, **inner), numbers


def _join(call: Call, numbers: Iterator[Any]) -> Call:
    """Puts numbers back where `_split` took them."""
    arguments = {name: next(numbers) if value is ... else value for name, value in call.arguments.items()}
    inner: dict[str, Any] = {
        kind: tuple(_join(step, numbers) for step in getattr(call, kind)) for kind in ("times", "plus", "then")
    }
    return dataclasses.replace(call, arguments=arguments, **inner)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def without_none(call: Call) -> Call:
    """Removes arguments without a value, here and in the calls inside, so that each has its default.

    Args:
      call: a call whose arguments may be None.
    """
    arguments = {name: value for name, value in call.arguments.items() if value is not None}
    inner: dict[str, Any] = {
        kind: tuple(without_none(step) for step in getattr(call, kind)) for kind in ("times", "plus", "then")
    }
    return dataclasses.replace(call, arguments=arguments, **inner)


def per_token(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a result with an axis of tokens, which one number per row lacks.

    Args:
      shape: `(..., B, T)` or `(B,)`.

    Returns:
      `(..., B, T)` or `(B, 1)`, which broadcasts over tokens.
    """
    return shape if len(shape) > 1 else (*shape, 1)
