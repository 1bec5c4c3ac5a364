"""Running a `Call` on arrays that are known by name."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import kljax
from kljax.systems._row import Call


def run(call: Call, arrays: Mapping[str, Any], **keywords: Any) -> Any:
    """The result of a call.

    Args:
      call: what to run.
      arrays: the arrays by the names that the parameters of this library have.
      keywords: further keyword arguments, each given to the calls that have it; they win over those of the call.

    Returns:
      What the function returns, times the scale and the results of `times`, plus those of `plus`; then the calls of
      `then` are applied to it, to the first array where it is several.
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
        changed = _apply(step, first, arrays, keywords)
        result = (changed, *rest) if rest else changed
    return result


def lacks(call: Call, given: Collection[str]) -> set[str]:
    """The parameters of a call, and of those in it, that have no default and are not given."""
    parameters = inspect.signature(getattr(kljax, call.function)).parameters.values()
    missing = {p.name for p in parameters if p.default is p.empty} - set(call.arguments) - set(given)
    for inner in (*call.times, *call.plus):
        missing |= lacks(inner, given)
    return missing


def _product(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Values times weights, either of which may be a mask; where one is 0 the other reaches nothing."""
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
    """The arguments that the function has; those of the call itself are never dropped, so that a wrong one raises."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names or name in call.arguments}
