"""Calls of the library as programs: each is compiled once for all numbers of its arguments."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kljax.systems import Call
from kljax.systems._call import parameters, run, steps
from kljax.tools.parity.dump import DumpError

# A program runs a few times: its compilation costs more than its execution.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_PROGRAMS: dict[str, Callable[..., Any]] = {}


def remembered(key: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the program of an earlier call with the key, or makes one of this function."""
    if key not in _PROGRAMS:
        _PROGRAMS[key] = jax.jit(function, compiler_options=QUICK)
    return _PROGRAMS[key]


def run_call(section: str, call: Call, arrays: Mapping[str, Any], **keywords: Any) -> np.ndarray:
    """Runs a call on arrays, compiled once for all numbers of its arguments.

    Raises:
      DumpError: naming the section, if the function refuses its arguments.
    """
    fixed, numbers = _split(call)

    def compute(arrays: Mapping[str, Any], numbers: list[Any]) -> Any:
        result = run(_join(fixed, iter(numbers)), arrays, **keywords)
        return result[0] if isinstance(result, tuple) else result

    try:
        program = remembered(f"{fixed!r} {keywords!r}", compute)
        return np.asarray(program(_taken(call, arrays), numbers), np.float64)
    except ValueError as error:
        raise DumpError(f"header.{section}: {error}") from error


def pull_call(call: Call, arrays: Mapping[str, Any], cotangent: np.ndarray) -> np.ndarray:
    """Differentiates a call by `log_probs`, compiled as `run_call` compiles it.

    Returns `[B, T]` derivative of that scalar by the log-probs.
    """
    fixed, numbers = _split(call)

    def compute(arrays: Mapping[str, Any], numbers: list[Any], cotangent: Any) -> Any:
        def values(log_probs: Any) -> Any:
            result = run(_join(fixed, iter(numbers)), {**arrays, "log_probs": log_probs})
            result = result[0] if isinstance(result, tuple) else result
            return jnp.broadcast_to(result if result.ndim > 1 else result[:, None], cotangent.shape)

        return jax.vjp(values, arrays["log_probs"])[1](cotangent)[0]

    inputs = {**_taken(call, arrays), "log_probs": arrays["log_probs"]}
    return np.asarray(remembered(f"pull {fixed!r}", compute)(inputs, numbers, cotangent))


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
    """Lists the parameters of a call's function that are real numbers, such as a clip or an epsilon."""
    return [parameter.name for parameter in parameters(call) if str(parameter.annotation).startswith("float")]


def without_none(call: Call) -> Call:
    """Removes arguments without a value, here and in the calls inside, so that each has its default."""
    arguments = {name: value for name, value in call.arguments.items() if value is not None}
    inner: dict[str, Any] = {
        kind: tuple(without_none(step) for step in getattr(call, kind)) for kind in ("times", "plus", "then")
    }
    return dataclasses.replace(call, arguments=arguments, **inner)


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
