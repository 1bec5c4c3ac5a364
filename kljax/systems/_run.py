"""Runs a `Call` on arrays by name."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import kljax
from kljax.systems._entry import Call


def run(call: Call, arrays: Mapping[str, Any], **keywords: Any) -> Any:
    """Runs a call.

    Args:
      call: the call.
      arrays: arrays by the parameter names of this library.
      keywords: further keyword arguments, passed to each function that has them; they override those of the call.

    Returns:
      The result of the function, times the scale and the results of `times`, plus those of `plus`, then passed through
      the calls of `then`. Where the function returns several arrays, `then` applies to the first.
    """
    function = getattr(kljax, call.function)
    parameters = inspect.signature(function).parameters.values()
    inputs = {p.name: arrays[p.name] for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name in arrays}
    result = function(**inputs, **_accepted(function, {**call.arguments, **keywords}, call))
    if call.scale != 1:
        result = call.scale * result
    for factor in call.times:
        result = _product(result, jax.lax.stop_gradient(run(factor, arrays, **keywords)))
    for term in call.plus:
        result = result + run(term, arrays, **keywords)
    for step in call.then:
        first, *rest = result if isinstance(result, tuple) else (result,)
        first = _apply(step, first, arrays, keywords)
        result = (first, *rest) if rest else first
    return result


def missing_arguments(call: Call, available: Collection[str]) -> set[str]:
    """Lists the parameters without a default, of a call and its `times` and `plus`, that are not available."""
    parameters = inspect.signature(getattr(kljax, call.function)).parameters.values()
    missing = {p.name for p in parameters if p.default is p.empty} - set(call.arguments) - set(available)
    for inner in (*call.times, *call.plus):
        missing |= missing_arguments(inner, available)
    return missing


def _product(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Multiplies values and weights, either of which may be a mask; a 0 hides NaN and infinity in the other."""
    if values.dtype == bool:
        return jnp.where(values, weights, 0)
    if weights.dtype == bool:
        return jnp.where(weights, values, 0)
    return jnp.where(weights != 0, weights * values, 0)


def _apply(step: Call, value: Any, arrays: Mapping[str, Any], keywords: Mapping[str, Any]) -> Any:
    function = getattr(kljax, step.function)
    _, *others = inspect.signature(function).parameters.values()
    positional = [arrays[p.name] for p in others if p.kind is p.POSITIONAL_OR_KEYWORD]
    return step.scale * function(value, *positional, **_accepted(function, {**step.arguments, **keywords}, step))


def _accepted(function: Any, arguments: Mapping[str, Any], call: Call) -> dict[str, Any]:
    """Selects the arguments that the function has; arguments of the call stay, so that a wrong one raises."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names or name in call.arguments}
