"""A call of this library as data, and how it runs on arrays by name."""

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import kljax
from kljax._checks import check_choice

_ARRAY = re.compile("ArrayLike|Mask")
NO_ARRAYS: Mapping[str, Any] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of this library as data: `scale * kljax.<function>(arrays, **arguments)`, and the calls combined with it.

    `call(arrays, **arguments)` runs it. `arrays` maps names to arrays: all of `required`, and any of `optional`. The
    arguments override the call's. The result is that of the function; of several arrays, `then` applies to the
    first. A missing or an unknown name raises `ValueError`. Names that belong to other calls are ignored, so that one
    batch serves several rows of the table.

    Attributes:
      function: the name of the function in `kljax`.
      arguments: its keyword arguments. Arguments that only the user can know (a length, a schedule) are left out and
        named in the `sources` of the entry.
      field: the field of the result that is meant, such as "max" of `Extremes`; empty for all of it.
      scale: a constant factor of the result.
      times: calls whose results multiply it as constants: importance weights, or a mask.
      then: calls applied to the result, one after the other.
      plus: calls whose results are added to it.
      renamed: parameter of the function -> its name in `arrays`, where the two differ.
      needs: parameters that have a default, but without which the call computes another number.
      takes: parameters of keyword arguments that `arrays` may hold.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> kljax.systems.Call("ppo_clip_loss", {"clip_high": 0.28})
      kljax.ppo_clip_loss(clip_high=0.28)
      >>> call = kljax.systems.get("verl/low_var_kl")
      >>> call.required, call.optional
      (('log_probs', 'ref_log_probs'), ('mask',))
      >>> print(call({"log_probs": jnp.array([-1.0, -60.0]), "ref_log_probs": jnp.array([-2.0, -1.0])}))
      [ 0.36787945 10.        ]
    """

    function: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=lambda: types.MappingProxyType({}))
    _: dataclasses.KW_ONLY
    field: str = ""
    scale: float = 1.0
    times: tuple["Call", ...] = ()
    then: tuple["Call", ...] = ()
    plus: tuple["Call", ...] = ()
    renamed: Mapping[str, str] = dataclasses.field(default_factory=lambda: types.MappingProxyType({}))
    needs: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    takes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __call__(self, arrays: Mapping[str, Any] = NO_ARRAYS, /, **arguments: Any) -> Any:
        """Runs the call on arrays by name, with further keyword arguments."""
        _check_names(self, arrays, arguments)
        inputs = {name: value for name, value in arrays.items() if name in (*self.required, *self.optional)}
        return run(self, inputs, **{name: inputs[name] for name in _keyword_names(self) & set(inputs)}, **arguments)

    @property
    def required(self) -> tuple[str, ...]:
        """The names that `arrays` or the keyword arguments have to hold."""
        return tuple(name for name, needed in _names(self).items() if needed)

    @property
    def optional(self) -> tuple[str, ...]:
        """The further names that `arrays` may hold."""
        return tuple(name for name, needed in _names(self).items() if not needed)

    def __repr__(self) -> str:
        factor = "" if self.scale == 1 else f"{self.scale:g} * "
        arguments = ", ".join(
            [
                *(f"{parameter}=<{name}>" for parameter, name in self.renamed.items()),
                *(f"{name}={value!r}" for name, value in self.arguments.items()),
            ]
        )
        combined = [
            f"{sign} {inner!r}"
            for sign, calls in (("*", self.times), ("+", self.plus), ("->", self.then))
            for inner in calls
        ]
        field = f".{self.field}" if self.field else ""
        return " ".join([f"{factor}kljax.{self.function}({arguments}){field}", *combined])


def run(call: Call, arrays: Mapping[str, Any], **keywords: Any) -> Any:
    """Runs a call without checking names.

    Args:
      arrays: arrays by the parameter names of this library, or by the names of `renamed`.
      keywords: further keyword arguments, passed to each function that has them; they override the call's.

    Returns:
      The result of the function, or a field of it, times the scale and the results of `times`, plus the results of
      `plus`, then passed through the calls of `then`. Where the function returns several arrays, `then` applies to the
      first.
    """
    result = getattr(kljax, call.function)(**_arguments(call, arrays, keywords))
    result = _scaled(call, getattr(result, call.field) if call.field else result)
    for factor in call.times:
        result = _product(result, jax.lax.stop_gradient(run(factor, arrays, **keywords)))
    for term in call.plus:
        result = result + run(term, arrays, **keywords)
    for step in call.then:
        first, *rest = result if isinstance(result, tuple) else (result,)
        first = _scaled(step, getattr(kljax, step.function)(first, **_arguments(step, arrays, keywords, after=True)))
        result = (first, *rest) if rest else first
    return result


def _scaled(call: Call, result: Any) -> Any:
    return result if call.scale == 1 else call.scale * result


def _arguments(call: Call, arrays: Mapping[str, Any], keywords: Mapping[str, Any], after: bool = False) -> Any:
    """Selects the arguments of the function: the user's keywords, then the call's, then arrays by position."""
    arguments = {}
    for parameter in parameters(call, after):
        name = call.renamed.get(parameter.name, parameter.name)
        if name in keywords:
            arguments[parameter.name] = keywords[name]
        elif parameter.name in call.arguments:
            arguments[parameter.name] = call.arguments[parameter.name]
        elif name in arrays and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            arguments[parameter.name] = arrays[name]
    return arguments


def parameters(call: Call, after: bool = False) -> tuple[inspect.Parameter, ...]:
    """Lists the parameters of the function; without the first one where it is the result of the step before."""
    known = _parameters_of(getattr(kljax, call.function))
    return known[1:] if after else known


@functools.cache
def _parameters_of(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(function).parameters.values())


def steps(call: Call, after: bool = False) -> Iterator[tuple[Call, bool]]:
    """Yields a call and the calls inside it, each with whether it takes the result of another."""
    yield call, after
    for inner in (*call.times, *call.plus):
        yield from steps(inner)
    for step in call.then:
        yield from steps(step, after=True)


def _names(call: Call) -> dict[str, bool]:
    """Returns the names of the inputs, each with whether it is required."""
    names: dict[str, bool] = {}
    for step, after in steps(call):
        step_parameters = parameters(step, after)
        # Ids need their number beside them, if they are no `Groups`.
        needs = {
            *call.needs,
            *("num_groups" for p in step_parameters if p.name == "group_ids" and p.default is p.empty),
        }
        for parameter in step_parameters:
            name = step.renamed.get(parameter.name, parameter.name)
            known = parameter.name in step.arguments
            by_position = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            required = not known and (parameter.default is parameter.empty or parameter.name in needs)
            if required or (by_position and not known) or parameter.name in call.takes:
                names[name] = names.get(name, False) or required
    return names


def _keyword_names(call: Call) -> set[str]:
    """Returns the names that are keyword arguments of some function of the call, or that its arguments hold."""
    return {
        step.renamed.get(parameter.name, parameter.name)
        for step, after in steps(call)
        for parameter in parameters(step, after)
        if parameter.kind is parameter.KEYWORD_ONLY or parameter.name in step.arguments
    }


def _check_names(call: Call, arrays: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    names = (*call.required, *call.optional)
    for name in arrays:
        if name not in names and name not in _array_names():
            check_choice("arrays", name, names)
    for name in arguments:
        check_choice(f"arguments of {call.function}", name, sorted({*names, *_keyword_names(call)}))
    if both := sorted(set(arrays) & set(arguments)):
        raise ValueError(f"arrays: got {', '.join(both)} as an argument as well; pass it once")
    counted = {step.renamed.get("num_groups", "num_groups") for step, _ in steps(call) if _has_groups(step, arrays)}
    if missing := [name for name in call.required if name not in (*arrays, *arguments, *counted)]:
        got = ", ".join([*arrays, *arguments]) or "nothing"
        optional = f" (optional: {', '.join(call.optional)})" if call.optional else ""
        raise ValueError(f"arrays: got {got}, expected {', '.join(call.required)}{optional}; add {', '.join(missing)}")


def _has_groups(call: Call, arrays: Mapping[str, Any]) -> bool:
    return isinstance(arrays.get(call.renamed.get("group_ids", "group_ids")), kljax.Groups)


@functools.cache
def _array_names() -> frozenset[str]:
    """Returns the names of the arrays that some public function takes."""
    functions = [thing for name in kljax.__all__ if inspect.isfunction(thing := getattr(kljax, name))]
    return frozenset(
        parameter.name
        for function in functions
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD or _ARRAY.search(str(parameter.annotation))
    )


def _product(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Multiplies values and weights, either of which may be a mask; a 0 hides NaN and infinity in the other."""
    if values.dtype == bool:
        return jnp.where(values, weights, 0)
    if weights.dtype == bool:
        return jnp.where(weights, values, 0)
    return jnp.where(weights != 0, weights * values, 0)
