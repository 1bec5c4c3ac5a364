"""Functions that JAX traces and NumPy runs: a mistake shows in the trace, and to compile a sweep takes longer.

Only for tests of what a function computes, not of how XLA rounds or what it compiles. `make test-newest` sets
KLJAX_TEST_XLA=1, with which XLA compiles them.
"""

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tests.kljax.calls import quick

Operation = Callable[..., Any]
Params = Mapping[str, Any]


class TracedStep(NamedTuple):
    """One operation of a traced function: a function of the values at `inputs`, whose results go to `outputs`."""

    run: Operation
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Traced(NamedTuple):
    """A traced function as steps over a list of values, which begins as `values` with the arguments at `arguments`."""

    values: list[Any]
    arguments: tuple[int, ...]
    steps: list[TracedStep]
    results: list[int]


def traced_program(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function as NumPy runs it, or compiled where the environment asks for that."""
    return quick(function) if os.environ.get("KLJAX_TEST_XLA") else in_numpy(function)


def in_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with the same results, as arrays of NumPy. JAX traces it once for each shape and dtype."""
    traced: dict[Any, tuple[Traced, Any]] = {}

    def run(*arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        kinds = tuple((np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)
        key = tree, kinds, jax.dtypes.canonicalize_dtype(float)
        if key not in traced:
            traced[key] = _trace(function, arguments)
        program, results = traced[key]
        return jax.tree.unflatten(results, _run(program, leaves))

    return run


def _run(traced: Traced, leaves: Sequence[Any]) -> list[Any]:
    values = list(traced.values)
    for slot, leaf in zip(traced.arguments, leaves, strict=True):
        values[slot] = leaf
    with np.errstate(all="ignore"):
        for run, inputs, outputs in traced.steps:
            results = run(*[values[slot] for slot in inputs])
            for slot, result in zip(outputs, results, strict=True):
                values[slot] = result
    return [values[slot] for slot in traced.results]


def _trace(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Traced, Any]:
    """Traces a function, with the functions inside it in place of their calls; and the structure of its results."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    values: list[Any] = []
    steps: list[TracedStep] = []

    def new(value: Any = None) -> int:
        values.append(_as_numpy(value) if isinstance(value, jax.Array) else value)
        return len(values) - 1

    def add(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[int]) -> list[int]:
        slots = dict(zip(jaxpr.constvars, map(new, consts), strict=True))
        slots |= zip(jaxpr.invars, arguments, strict=True)

        def slot_of(atom: Any) -> int:
            # A number in the source has the dtype of its place.
            return new(np.asarray(atom.val, atom.aval.dtype)) if hasattr(atom, "val") else slots[atom]

        for equation in jaxpr.eqns:
            inputs = [slot_of(atom) for atom in equation.invars]
            inner = equation.params.get(INSIDE.get(equation.primitive.name, ""))
            if inner is None:
                outputs = tuple(new() for _ in equation.outvars)
                steps.append(TracedStep(_operation(equation), tuple(inputs), outputs))
            else:
                outputs = tuple(add(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), inputs))
            slots |= zip(equation.outvars, outputs, strict=True)
        return [slot_of(atom) for atom in jaxpr.outvars]

    slots = tuple(new() for _ in closed.jaxpr.invars)
    results = add(closed.jaxpr, closed.consts, slots)
    return Traced(values, slots, steps, results), jax.tree.structure(shapes)


def _operation(equation: Any) -> Operation:
    """Returns an operation of NumPy, or of JAX where there is none."""
    name, params, dtype = equation.primitive.name, equation.params, equation.outvars[0].aval.dtype
    is_number = not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    if is_number and (name in ELEMENTWISE or name in OPERATIONS):
        function = ELEMENTWISE.get(name) or functools.partial(OPERATIONS[name], params)

        # NumPy has other rules for the dtype of a sum, and of a number beside an array.
        def run(*args: Any) -> tuple[Any]:
            return (np.asarray(function(*args), dtype),)

        return run
    primitive, keywords = equation.primitive, equation.primitive.get_bind_params(params)

    def run_in_jax(*args: Any) -> list[Any]:
        results = primitive.bind(*args, **keywords)
        results = results if primitive.multiple_results else [results]
        return [_as_numpy(x) for x in results]

    return run_in_jax


def _as_numpy(array: jax.Array) -> Any:
    """Returns numbers as an array of NumPy; random keys, and types that NumPy lacks, stay with JAX."""
    return np.asarray(array) if getattr(array.dtype, "kind", None) in {*"biuf"} else array


def _divide(first: Any, second: Any) -> Any:
    """Divides; integers are truncated towards 0."""
    if np.asarray(first).dtype.kind == "f":
        return np.divide(first, second)
    return np.sign(first) * np.sign(second) * (np.abs(first) // np.abs(second))


def _select(which: Any, first: Any, second: Any, *more: Any) -> Any:
    return np.choose(which, (first, second, *more)) if more else np.where(which, second, first)


def _broadcast(params: Params, array: Any, *_: Any) -> Any:
    shape = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], np.shape(array), strict=True):
        shape[axis] = size
    result = np.empty(params["shape"], array.dtype)
    result[...] = array.reshape(shape)
    return result


def _iota(params: Params, *_: Any) -> Any:
    shape = [1] * len(params["shape"])
    shape[params["dimension"]] = params["shape"][params["dimension"]]
    return np.broadcast_to(np.arange(math.prod(shape)).reshape(shape), params["shape"])


def _slice(params: Params, array: Any) -> Any:
    strides = params["strides"] or [1] * np.ndim(array)
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return array[tuple(slice(*bound) for bound in bounds)]


def _accumulate(function: Any, params: Params, array: Any) -> Any:
    axis = params["axis"]
    if params["reverse"]:
        return np.flip(function(np.flip(array, axis), axis=axis), axis)
    return function(array, axis=axis)


def _reduce(function: Any, params: Params, array: Any) -> Any:
    return function(array, axis=tuple(params["axes"]))


# Traced functions inside another one, by the name of their parameter.
INSIDE = {
    **{"jit": "jaxpr", "pjit": "jaxpr"},
    **{"closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"},
}
# Functions of numbers of the same position.
ELEMENTWISE: dict[str, Operation] = {
    **{name: getattr(np, name) for name in ("abs", "sign", "exp", "expm1", "log", "log1p", "sqrt", "square", "tanh")},
    **{"neg": np.negative, "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": _divide},
    **{"max": np.maximum, "min": np.minimum, "pow": np.power, "is_finite": np.isfinite, "copy": np.asarray},
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater},
    **{"ge": np.greater_equal, "not": np.invert, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": _select,
}
# Functions with parameters, which come first.
OPERATIONS: dict[str, Operation] = {
    **{f"reduce_{name}": functools.partial(_reduce, getattr(np, name)) for name in ("sum", "prod", "max", "min")},
    "reduce_and": functools.partial(_reduce, np.bitwise_and.reduce),
    "reduce_or": functools.partial(_reduce, np.bitwise_or.reduce),
    "cumsum": functools.partial(_accumulate, np.cumsum),
    "cumprod": functools.partial(_accumulate, np.cumprod),
    "integer_pow": lambda params, x: np.power(x, params["y"]),
    "convert_element_type": lambda params, x: x,
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "slice": _slice,
    "reshape": lambda params, x, *_: np.reshape(x, params["new_sizes"]),
    "squeeze": lambda params, x: np.squeeze(x, params["dimensions"]),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "concatenate": lambda params, *parts: np.concatenate(parts, params["dimension"]),
}
