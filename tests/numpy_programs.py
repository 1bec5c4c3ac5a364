"""Functions that JAX traces and NumPy runs: a mistake shows in the trace, and to compile a sweep takes longer.

Only for tests of what a function computes, not of how XLA rounds or what it compiles. With KLJAX_TEST_XLA=1, which
`make test-isa` and `make test-newest` set, XLA compiles them.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params
from jax.lax import GatherScatterMode, RoundingMethod

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


def in_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with the same results, as arrays of NumPy.

    JAX traces it once for each shape, dtype and keyword argument.
    """
    traced: dict[Any, tuple[Traced, Any]] = {}

    def run(*arguments: Any, **static: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        kinds = tuple((np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)
        key = tree, kinds, jax.dtypes.canonicalize_dtype(float), tuple(sorted(static.items()))
        if key not in traced:
            traced[key] = _trace(functools.partial(function, **static), arguments)
        program, results = traced[key]
        return jax.tree.unflatten(results, run_steps(program, leaves))

    return run


def run_steps(traced: Traced, leaves: Sequence[Any]) -> list[Any]:
    """Returns the results of a traced function, given its arguments."""
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
    """Traces a function; and the structure of its results."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return steps_of(closed), jax.tree.structure(shapes)


def steps_of(closed: Any) -> Traced:
    """Returns the steps of a trace, with the functions inside it in place of their calls."""
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
    return Traced(values, slots, steps, results)


def all_known_to_numpy(closed: Any) -> bool:
    """Says whether NumPy has the numbers and runs the operations of a trace, which does nothing else."""
    numbers = all(_is_known_number(aval) for aval in (*closed.in_avals, *closed.out_avals))
    return numbers and not closed.effects and all(map(known_to_numpy, closed.eqns))


def known_to_numpy(equation: Any) -> bool:
    """Says whether NumPy runs an operation, and every one of the functions inside it."""
    name, params = equation.primitive.name, equation.params
    # Later releases say otherwise which of its arguments are carried.
    known = "num_carry" in params if name == "scan" else any(name in table for table in TABLES)
    inner = (each for jaxpr in jaxprs_in_params(params) for each in jaxpr.eqns)
    return known and all(_is_known_number(atom.aval) for atom in equation.outvars) and all(map(known_to_numpy, inner))


def _is_known_number(aval: Any) -> bool:
    """Says whether NumPy has numbers of a dtype, and computes in it."""
    return getattr(aval.dtype, "kind", None) in {*"biuf"} and aval.dtype != np.float16


def _operation(equation: Any) -> Operation:
    """Returns an operation of NumPy, or of JAX where there is none."""
    name, params = equation.primitive.name, equation.params
    if name in OF_SEVERAL and known_to_numpy(equation):
        dtypes = [variable.aval.dtype for variable in equation.outvars]
        several = OF_SEVERAL[name](params)
        return lambda *args: [np.asarray(out, dtype) for out, dtype in zip(several(*args), dtypes, strict=True)]
    dtype = equation.outvars[0].aval.dtype
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


def _round(params: Params, array: Any) -> Any:
    """Rounds; halves go to the even number, or away from zero."""
    if params["rounding_method"] == RoundingMethod.TO_NEAREST_EVEN:
        return np.round(array)
    whole = np.trunc(array)
    return np.where(np.abs(array - whole) >= 0.5, whole + np.sign(array), whole)


def _to_dtype(params: Params, array: Any) -> Any:
    """Converts; a float beyond the integers becomes the nearest of them, and NaN becomes 0."""
    dtype = np.dtype(params["new_dtype"])
    if dtype.kind not in "iu" or np.asarray(array).dtype.kind != "f":
        return array
    limits = np.iinfo(str(dtype))
    low = array <= limits.min
    high = array >= limits.max
    inside = np.where(low | high | np.isnan(array), 0, array).astype(dtype)
    return np.where(low, limits.min, np.where(high, limits.max, inside))


def _dynamic_slice(params: Params, array: Any, *starts: Any) -> Any:
    limits = np.subtract(np.shape(array), params["slice_sizes"])
    return array[_range(starts, params["slice_sizes"], limits)]


def _dynamic_update_slice(params: Params, array: Any, update: Any, *starts: Any) -> Any:
    limits = np.subtract(np.shape(array), np.shape(update))
    result = np.array(array)
    result[_range(starts, np.shape(update), limits)] = update
    return result


def _range(starts: Sequence[Any], sizes: Sequence[int], limits: Sequence[int]) -> tuple[slice, ...]:
    """Returns the range of a window, which is moved inside of the array."""
    bounded = (min(max(int(start), 0), limit) for start, limit in zip(starts, limits, strict=True))
    return tuple(slice(start, start + size) for start, size in zip(bounded, sizes, strict=True))


def _pad(params: Params, array: Any, value: Any) -> Any:
    """Puts a value around and between elements; a negative width cuts elements off."""
    for axis, (low, high, between) in enumerate(params["padding_config"]):
        size = array.shape[axis]
        spread = size + max(size - 1, 0) * between
        shape = list(array.shape)
        shape[axis] = max(low, 0) + spread + max(high, 0)
        padded = np.moveaxis(np.full(shape, value, array.dtype), axis, 0)
        padded[max(low, 0) : max(low, 0) + spread : between + 1] = np.moveaxis(array, axis, 0)
        array = np.moveaxis(padded[max(-low, 0) : shape[axis] - max(-high, 0)], 0, axis)
    return array


def _dot(params: Params, first: Any, second: Any) -> Any:
    (summed, summed_of_second), (batch, batch_of_second) = params["dimension_numbers"]
    same = dict(zip((*summed_of_second, *batch_of_second), (*summed, *batch), strict=True))
    axes = range(np.ndim(first))
    axes_of_second = [same.get(axis, len(axes) + axis) for axis in range(np.ndim(second))]
    alone = [axis for axis in axes if axis not in same.values()]
    alone_of_second = [axis for axis in axes_of_second if axis >= len(axes)]
    return np.einsum(first, list(axes), second, axes_of_second, [*batch, *alone, *alone_of_second])


class Windows(NamedTuple):
    """Parts of an array: the indices of all their elements, by part, and whether each part is inside of the array."""

    elements: tuple[Any, ...]
    inside: Any


def _starts(indices: Any, axes: Sequence[int], batches: Mapping[int, int], dimensions: int) -> Any:
    """Returns where windows begin: at the indices in these axes, at the number of the batch in others, or at 0."""
    starts = np.zeros((*indices.shape[:-1], dimensions), int)
    starts[..., list(axes)] = indices
    for axis, of_indices in batches.items():
        starts[..., axis] = np.indices(indices.shape[:-1])[of_indices]
    return starts.reshape([-1, dimensions])


def _windows(starts: Any, sizes: Sequence[int], shape: Sequence[int], mode: Any) -> Windows:
    last = np.subtract(shape, sizes)
    inside = (mode == GatherScatterMode.CLIP) | np.all((starts >= 0) & (starts <= last), -1)
    bounded = np.clip(starts, 0, last)
    grid = np.indices(sizes)
    elements = (start.reshape([-1] + [1] * len(sizes)) + part for start, part in zip(bounded.T, grid, strict=True))
    return Windows(tuple(elements), inside)


def _outside(value: Any, dtype: Any) -> Any:
    """Returns what stands for elements outside of an array: the given value, or that of the dtype."""
    if value is None:
        value = {"f": np.nan, "b": True}.get(dtype.kind)
    if value is None:
        value = np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max
    return np.asarray(value, dtype)


def _gather(params: Params, array: Any, indices: Any) -> Any:
    numbers = params["dimension_numbers"]
    sizes = params["slice_sizes"]
    batches = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    starts = _starts(indices, numbers.start_index_map, batches, array.ndim)
    windows = _windows(starts, sizes, array.shape, params["mode"])
    inside = windows.inside.reshape([-1] + [1] * len(sizes))
    found = np.where(inside, array[windows.elements], _outside(params["fill_value"], array.dtype))
    kept = [size for axis, size in enumerate(sizes) if axis not in (*numbers.collapsed_slice_dims, *batches)]
    result = found.reshape([*indices.shape[:-1], *kept])
    return np.moveaxis(result, range(result.ndim - len(kept), result.ndim), numbers.offset_dims)


def _scatter(combine: Operation, params: Params, array: Any, indices: Any, updates: Any) -> Any:
    numbers = params["dimension_numbers"]
    batches = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    kept = iter(updates.shape[axis] for axis in numbers.update_window_dims)
    single = (*numbers.inserted_window_dims, *batches)
    sizes = [1 if axis in single else next(kept) for axis in range(array.ndim)]
    starts = _starts(indices, numbers.scatter_dims_to_operand_dims, batches, array.ndim)
    windows = _windows(starts, sizes, array.shape, params["mode"])
    last = range(updates.ndim - len(numbers.update_window_dims), updates.ndim)
    values = np.moveaxis(updates, numbers.update_window_dims, last).reshape([-1, *sizes])
    result = np.array(array)
    combine(result, tuple(at[windows.inside] for at in windows.elements), values[windows.inside])
    return result


def _put(array: Any, elements: Any, values: Any) -> None:
    array[elements] = values


def _sort(params: Params) -> Operation:
    axis = params["dimension"]

    def run(*arrays: Any) -> list[Any]:
        order = np.lexsort(arrays[: params["num_keys"]][::-1], axis)
        return [np.take_along_axis(array, order, axis) for array in arrays]

    return run


def _split(params: Params) -> Operation:
    return lambda array: np.split(array, np.cumsum(params["sizes"])[:-1], params["axis"])


def _scan(params: Params) -> Operation:
    body = steps_of(params["jaxpr"])
    fixed = params["num_consts"]
    carried = fixed + params["num_carry"]
    steps = range(params["length"])[:: -1 if params["reverse"] else 1]
    outputs = params["jaxpr"].out_avals[params["num_carry"] :]

    def run(*args: Any) -> list[Any]:
        carry = list(args[fixed:carried])
        collected = [np.empty((len(steps), *aval.shape), aval.dtype) for aval in outputs]
        for step in steps:
            results = run_steps(body, [*args[:fixed], *carry, *(x[step] for x in args[carried:])])
            carry = results[: len(carry)]
            for all_of_output, result in zip(collected, results[len(carry) :], strict=True):
                all_of_output[step] = result
        return [*carry, *collected]

    return run


def _while(params: Params) -> Operation:
    condition = steps_of(params["cond_jaxpr"])
    body = steps_of(params["body_jaxpr"])
    of_condition = params["cond_nconsts"]
    fixed = of_condition + params["body_nconsts"]

    def run(*args: Any) -> list[Any]:
        carry = list(args[fixed:])
        # Of a loop that is mapped, each part goes on by itself.
        while np.any(goes_on := run_steps(condition, [*args[:of_condition], *carry])[0]):
            following = run_steps(body, [*args[of_condition:fixed], *carry])
            carry = [_where_leading(goes_on, *both) for both in zip(following, carry, strict=True)]
        return carry

    return run


def _where_leading(which: Any, first: Any, second: Any) -> Any:
    """Chooses between arrays by their leading axes."""
    return np.where(np.reshape(which, [*np.shape(which), *[1] * (np.ndim(first) - np.ndim(which))]), first, second)


def _cond(params: Params) -> Operation:
    branches = [steps_of(branch) for branch in params["branches"]]
    return lambda index, *args: run_steps(branches[int(np.clip(index, 0, len(branches) - 1))], args)


def _index_of(function: Any, params: Params, array: Any) -> Any:
    return function(array, axis=params["axes"][0])


def _reduce(function: Any, params: Params, array: Any) -> Any:
    return function(array, axis=tuple(params["axes"]))


# Traced functions inside another one, by the name of their parameter.
INSIDE = {
    **{"jit": "jaxpr", "pjit": "jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr"},
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
    **{name: getattr(np, name) for name in ("floor", "ceil", "sin", "cos", "nextafter", "exp2", "cbrt")},
    "rem": np.fmod,
    "stop_gradient": np.asarray,
}
# Functions with parameters, which come first.
OPERATIONS: dict[str, Operation] = {
    **{f"reduce_{name}": functools.partial(_reduce, getattr(np, name)) for name in ("sum", "prod", "max", "min")},
    "reduce_and": functools.partial(_reduce, np.bitwise_and.reduce),
    "reduce_or": functools.partial(_reduce, np.bitwise_or.reduce),
    "cumsum": functools.partial(_accumulate, np.cumsum),
    "cumprod": functools.partial(_accumulate, np.cumprod),
    "integer_pow": lambda params, x: np.power(x, params["y"]),
    "convert_element_type": _to_dtype,
    **{f"cum{name}": functools.partial(_accumulate, getattr(np, f"{name}imum").accumulate) for name in ("max", "min")},
    "cumlogsumexp": functools.partial(_accumulate, np.logaddexp.accumulate),
    **{name: functools.partial(_index_of, getattr(np, name)) for name in ("argmax", "argmin")},
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "pad": _pad,
    "dot_general": _dot,
    "gather": _gather,
    "scatter": functools.partial(_scatter, _put),
    "scatter-add": functools.partial(_scatter, np.add.at),
    "scatter-min": functools.partial(_scatter, np.minimum.at),
    "scatter-max": functools.partial(_scatter, np.maximum.at),
    "stack": lambda params, *parts: np.stack(parts, params["axis"]),
    "tile": lambda params, x: np.tile(x, params["reps"]),
    "round": _round,
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "slice": _slice,
    "reshape": lambda params, x, *_: np.reshape(x, params["new_sizes"]),
    "squeeze": lambda params, x: np.squeeze(x, params["dimensions"]),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "concatenate": lambda params, *parts: np.concatenate(parts, params["dimension"]),
}
# Functions of parameters that return a function of several results.
OF_SEVERAL: dict[str, Callable[[Params], Operation]] = {
    "optimization_barrier": lambda params: lambda *args: args,
    "sort": _sort,
    "split": _split,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
TABLES = (INSIDE, ELEMENTWISE, OPERATIONS, OF_SEVERAL)
