"""Every public function in every transformation: the value and the gradients that it has eagerly on one device.

Transformations are compared with the jitted function, which is compared with the eager one. A mistake of a function
shows in its trace, which every function has here; `tests.kljax.jitted` says what runs it. JAX and the compiler rewrite
what is traced already, so the values are compared for a function of each kind of program. In `shard_map` they are
compared for every function that adds over devices; the rows of any other do not depend on each other, which its jitted
program shows.

The functions, and the calls of each, come from `tests.kljax.calls`, so a new public function is covered without being
listed. All calls of a function are compiled as one program per transformation.
"""

import dataclasses
import functools
import itertools
import operator
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kljax
from tests.kljax import calls
from tests.kljax.calls import (
    LENGTH,
    NOT_CALLED,
    ROWS,
    FunctionCall,
    callable_functions,
    calls_of,
    compiled,
    each_call,
    inputs,
)
from tests.kljax.jitted import EACH_KIND, WITH_HEAD, compiled_program, each_traced_call, numbers_of, program

# Without an `axis_name` although not a function of rows: inside `shard_map` their inputs are gathered first.
GATHERED = {"fingerprint": "a sum over leaves that are split over different axes, some of them over none"}
# `WITH_HEAD` is spread over explicit axes in a test of its own, `log_probs/test_mesh_axes.py`.
# No array enters their program, which so has no mesh.
WITHOUT_ARRAYS = ("fixed_kl", "scheduled_kl")
# With one of these the result of a row does not depend on the others, and there is nothing to add over devices.
REPLACE_AXIS_NAME = ("axis", "mean_kl")
CLOSE = {"rtol": 1e-12, "atol": 1e-13}
# Of the compiled function on one device: no sum has another order. The bits still differ, as XLA rounds `a * b + c`
# once where a kernel has both (none under XLA_FLAGS=--xla_cpu_max_isa=AVX), and divides by a scalar as by its
# reciprocal.
SAME_ORDER = {"rtol": 1e-14, "atol": 1e-15}


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    # The eager results as well: every one of their operations is compiled for itself.
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def jitted(name: str) -> tuple[list[Any], list[Any]]:
    """The results of both seeds."""
    return program(name)(inputs(name)), program(name)(inputs(name, 1))


@functools.cache
def compiled_results(name: str) -> tuple[list[Any], list[Any]]:
    """The results of both seeds, by XLA for every function: what rewrites a program keeps the order of its sums."""
    return compiled_program(name)(inputs(name)), compiled_program(name)(inputs(name, 1))


def check(
    name: str,
    results: list[Any],
    expected: list[Any],
    close: Mapping[str, float] = CLOSE,
    only: Sequence[FunctionCall] = (),
) -> None:
    for call, result, wanted in zip(only or calls_of(name), results, expected, strict=True):
        assert jax.tree.structure(result) == jax.tree.structure(wanted), call.name
        for (path, leaf), other in zip(jax.tree.leaves_with_path(result), jax.tree.leaves(wanted), strict=True):
            where = f"{call.name}{jax.tree_util.keystr(path)}"
            assert (leaf.dtype, leaf.shape) == (other.dtype, other.shape), where
            np.testing.assert_allclose(leaf, other, **close, err_msg=where)


def check_shapes(name: str, results: list[Any], leading: tuple[int, ...] = (), narrow: bool = False) -> None:
    """Compares structures, shapes and dtypes of results with their gradients; a list has results without them."""
    for call, result, full in zip(calls_of(name), results, jitted(name)[0], strict=True):
        wanted = [full[0]] if isinstance(result, list) else full
        assert jax.tree.structure(result) == jax.tree.structure(wanted), call.name
        for leaf, other in zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True):
            dtype = in_32_bits(other.dtype) if narrow else other.dtype
            assert (leaf.dtype, leaf.shape) == (dtype, (*leading, *other.shape)), call.name


def stacked(name: str) -> list[tuple[Any, Any]]:
    return [jax.tree.map(lambda *x: jnp.stack(x), *pair) for pair in zip(inputs(name), inputs(name, 1), strict=True)]


def check_both(name: str, results: list[Any]) -> None:
    for seed in (0, 1):
        check(name, jax.tree.map(lambda leaf, i=seed: leaf[i], results), compiled_results(name)[seed], SAME_ORDER)


def in_jit(name: str, every: bool) -> None:
    """Compares results without gradients, for which JAX compiles each operation of a derivative for itself."""
    pairs = zip(calls_of(name), jitted(name)[0], strict=True)
    chosen = [(call, out) for call, (out, _) in pairs if every or gives_a_number_first(call)]
    some = [call for call, _ in chosen]
    check(name, [out for _, out in chosen], jax.device_get([call() for call in some]), only=some)


def gives_a_number_first(call: FunctionCall) -> bool:
    """Whether it is the first call of its function, or the first with some number: one of Python, and traced in jit."""
    earlier = list(itertools.takewhile(lambda other: other.name != call.name, calls_of(call.of)))
    return not earlier or bool(call.scalars.keys() - {number for other in earlier for number in other.scalars})


def eager_gradients(name: str, count: int | None) -> None:
    """Compares the results with their gradients, of the first calls or of all."""
    some = calls_of(name)[:count]
    results = [call.value_and_grads(call.arrays, call.data) for call in some]
    check(name, jitted(name)[0][:count], jax.device_get(results), only=some)


def rows_alone(name: str) -> None:
    """Other numbers in the last rows change nothing in the first ones, neither results nor gradients."""
    half = ROWS // 2

    def mixed(one: jax.Array, other: jax.Array) -> Any:
        split = one.shape[:1] == (ROWS,) and not jnp.issubdtype(one.dtype, jax.dtypes.extended)
        return np.concatenate([np.asarray(one)[:half], np.asarray(other)[half:]]) if split else one

    def same(leaf: Any, wanted: Any) -> None:
        # Metrics of parts of a batch add up.
        if not is_metric(leaf) and leaf.shape[:1] == (ROWS,):
            np.testing.assert_array_equal(leaf[:half], wanted[:half])

    results = program(name)(jax.tree.map(mixed, inputs(name), inputs(name, 1)))
    jax.tree.map(same, results, jitted(name)[0], is_leaf=is_metric)


@functools.cache
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))


def spread(array: jax.Array, rows: Any, columns: Any) -> jax.Array:
    """Puts an array on the mesh, its rows and positions split over the given axes."""
    axes = [{ROWS: rows, LENGTH: columns}.get(size) for size in array.shape]
    return jax.device_put(array, NamedSharding(mesh(), P(*axes)))


def on_eight_devices(name: str, rows: Any, columns: Any) -> None:
    arguments = jax.tree.map(lambda array: spread(array, rows, columns), inputs(name))
    run = each_call(name, lambda call, arrays, data: call.value_and_grads(arrays, data))
    check(name, compiled(run, arguments), jitted(name)[0])


@functools.cache
def explicit_mesh() -> Mesh:
    """A mesh as `jax.make_mesh` makes it by default."""
    explicit = jax.make_mesh((8,), ("rows",))
    assert explicit.axis_types == (jax.sharding.AxisType.Explicit,)
    return explicit


def on_explicit_axes(name: str) -> Any:
    """The inputs in 32 bits with their rows split over explicit axes, without their numbers."""
    full = inputs(name)
    shardings = jax.tree.map(lambda spec: NamedSharding(explicit_mesh(), spec), by_rows(full))
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, in_32_bits(x.dtype), sharding=at), full, shardings)


def lowered_on_explicit_axes(name: str) -> None:
    """JAX checks the sharding of every operation as it traces; TPUs and GPUs have a rule for each.

    In float32 without 64-bit types, as a user's program has it: one trace shows this too.
    """
    with jax.enable_x64(False):
        lowered = lowered_for_tpu_and_cuda(name, on_explicit_axes(name))
    check_shapes(name, lowered.out_info, narrow=True)


def values_on_explicit_axes(name: str) -> None:
    arguments = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), inputs(name), on_explicit_axes(name))
    run = each_call(name, lambda call, arrays, data: call.value_and_grads(arrays, data))
    check(name, compiled(run, arguments), jitted(name)[0])


def in_vmap(name: str) -> None:
    run = each_traced_call(name, lambda function: jax.vmap(function, in_axes=(0, 0, None)))
    check_both(name, compiled(run, stacked(name), numbers_of(name)))


def traced_in_vmap(name: str) -> None:
    run = each_traced_call(name, lambda function: jax.vmap(function, in_axes=(0, 0, None)))
    check_shapes(name, jax.eval_shape(run, stacked(name), numbers_of(name)), (2,))


def in_scan(name: str) -> None:
    def run(call: FunctionCall, arrays: Any, data: Any) -> Any:
        return jax.lax.scan(lambda carry, x: (carry, call.value_and_grads(*x)), (), (arrays, data))[1]

    check_both(name, compiled(each_call(name, run), stacked(name)))


def in_remat(name: str) -> None:
    def run(call: FunctionCall, arrays: Any, data: Any) -> Any:
        return calls.value_and_grads(jax.checkpoint(lambda arrays: call(arrays, data)), arrays)

    check(name, compiled(each_call(name, run), inputs(name)), compiled_results(name)[0], SAME_ORDER)


def on_every_device(call: FunctionCall, arrays: Any, data: Any) -> Any:
    """The call inside `shard_map`, each device holding some of the rows, put together to the result of all rows."""
    results = zip(calls_of(call.of), jitted(call.of)[0], strict=True)
    full = next(out for each, (out, _) in results if each.name == call.name)
    add = {"axis_name": "rows"} if "axis_name" in calls.parameters(call.of) else {}
    if "group_ids" in data and not add:
        call, data = of_groups(call, data)
    if {*call.static, *call.scalars} & {*REPLACE_AXIS_NAME}:
        add = {}

    def on_one(arrays: Any, data: Any) -> Any:
        if call.of not in GATHERED:
            return jax.tree.map(added_if_metric, call(arrays, data, **add), is_leaf=is_metric)
        arrays, data = jax.tree.map(gathered, (arrays, data), specs)
        return jax.tree.map(own_part, call(arrays, data))

    devices = Mesh(np.array(jax.devices()[:8]), ("rows",))
    specs = by_rows((arrays, data))
    return jax.shard_map(on_one, mesh=devices, in_specs=specs, out_specs=by_rows(full))(arrays, data)


def of_groups(call: FunctionCall, data: Any) -> tuple[FunctionCall, Any]:
    """The call with its groups spread over the axis."""
    groups, known = data["group_ids"], {**call.static, **call.scalars}
    if not isinstance(groups, kljax.Groups):
        groups = kljax.Groups(groups, known.get("num_groups", calls.GROUPS))
    groups = dataclasses.replace(groups, axis_name="rows")
    static = {name: value for name, value in call.static.items() if name != "num_groups"}
    return call._replace(static=static), {**data, "group_ids": groups}


def by_rows(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: P("rows") if leaf.shape[:1] == (ROWS,) else P(), tree)


def is_metric(node: Any) -> bool:
    """Whether it is a metric of part of a batch, as `WeightedSum`, which `+` merges with those of other parts."""
    return dataclasses.is_dataclass(node) and hasattr(node, "__add__")


def added_if_metric(node: Any) -> Any:
    if not is_metric(node):
        return node
    parts = jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, "rows"), node)
    added = functools.reduce(operator.add, (jax.tree.map(lambda leaf, i=i: leaf[i], parts) for i in range(8)))
    return jax.tree.map(own_part, added)


def gathered(array: jax.Array, spec: P) -> jax.Array:
    """Every device's rows of an array that was split by rows; a key or the weights of a head are there already."""
    return jax.lax.all_gather(array, "rows", tiled=True) if spec == P("rows") else array


def own_part(result: jax.Array) -> jax.Array:
    """This device's rows of a result of all rows, or the result itself, which is the same on every device."""
    if result.shape[:1] == (ROWS,):
        return jax.lax.dynamic_slice_in_dim(result, jax.lax.axis_index("rows") * (ROWS // 8), ROWS // 8)
    mean = jnp.issubdtype(result.dtype, jnp.floating)
    return jax.lax.pmean(result, "rows") if mean else jax.lax.pmax(result, "rows")


def value_and_grads_on_every_device(call: FunctionCall, arrays: Any, data: Any) -> Any:
    return calls.value_and_grads(lambda arrays: on_every_device(call, arrays, data), arrays)


def in_shard_map(name: str) -> None:
    jitted(name)  # before the trace, which reads its shapes
    check(name, compiled(each_call(name, value_and_grads_on_every_device), inputs(name)), jitted(name)[0])


def traced_in_shard_map(name: str) -> None:
    jitted(name)

    def run(call: FunctionCall, arrays: Any, data: Any) -> Any:
        # The derivatives of the library's own are few: the first call of a function shows them.
        if name in WITH_HEAD or call.name == calls_of(name)[0].name:
            return value_and_grads_on_every_device(call, arrays, data)
        return [on_every_device(call, arrays, data)]

    check_shapes(name, jax.eval_shape(each_call(name, run), inputs(name)))


def lowered_on_one_device(name: str) -> None:
    with jax.enable_x64(False):
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, in_32_bits(x.dtype)), inputs(name))
        lowered = lowered_for_tpu_and_cuda(name, arguments)
    check_shapes(name, lowered.out_info, narrow=True)


def lowered_for_tpu_and_cuda(name: str, given: Any) -> jax.stages.Lowered:
    run = each_call(name, lambda call, arrays, data: call.value_and_grads(arrays, data))
    return jax.jit(run).trace(given).lower(lowering_platforms=("tpu", "cuda"))


def in_32_bits(dtype: Any) -> Any:
    for wide, narrow in ((jnp.floating, jnp.float32), (jnp.signedinteger, jnp.int32)):
        if jnp.issubdtype(dtype, wide):
            return jnp.dtype(narrow)
    return dtype


TRANSFORMATIONS: dict[str, Callable[[str], None]] = {
    "jit": functools.partial(in_jit, every=False),
    "jit of every call": functools.partial(in_jit, every=True),
    "eager gradients": functools.partial(eager_gradients, count=None),
    "eager gradients of the first call": functools.partial(eager_gradients, count=1),
    "rows alone": rows_alone,
    "rows": functools.partial(on_eight_devices, rows=("a", "b"), columns=None),
    "columns": functools.partial(on_eight_devices, rows=None, columns=("a", "b")),
    "rows and columns": functools.partial(on_eight_devices, rows="a", columns="b"),
    "lowered on explicit axes": lowered_on_explicit_axes,
    "explicit axes": values_on_explicit_axes,
    "traced in vmap": traced_in_vmap,
    "vmap": in_vmap,
    "scan": in_scan,
    "remat": in_remat,
    "traced in shard_map": traced_in_shard_map,
    "shard_map": in_shard_map,
    "lowered on one device": lowered_on_one_device,
}


# What a new release of JAX may change is how programs are compiled and spread over devices.
ON_EVERY_JAX = (
    *("jit", "rows and columns", "explicit axes", "shard_map"),
    *("lowered on explicit axes", "traced in shard_map"),
)
# What vmap does to a function, scan and remat hardly do worse; rows and columns are split together in any case. Only
# checks ask whether values are known, so that jit leaves the operations of a call as they are.
THOROUGH = ("scan", "remat", "rows", "columns", "jit of every call", "eager gradients")
# Values in these are compared for one function of each kind of program: the operations of the library in them are those
# of a trace, which every function has. Those of an eager gradient are traced, as those of a jitted one are.
SUMS, LOOPS, GROUPS = "masked_whiten", "gae", "grpo_advantages"
REWRITTEN = {
    "eager gradients of the first call": EACH_KIND[:-1],
    "explicit axes": EACH_KIND,
    "shard_map": EACH_KIND,
    # Rules of JAX and its compiler alone: sums and groups of the split rows, and loops.
    "rows and columns": (SUMS, GROUPS, "token_log_probs"),
    "vmap": (LOOPS, GROUPS, "token_log_probs"),
}
# Where values are compared, a trace alone repeats it.
TRACES = {"traced in vmap": "vmap", "traced in shard_map": "shard_map"}


def adds_over_devices(name: str) -> bool:
    return bool({"axis_name", "group_ids"} & calls.parameters(name).keys()) or name in GATHERED


def applies(name: str, transformation: str) -> bool:
    """Whether there is something to test."""
    if transformation in TRACES:
        return is_thorough(name, TRACES[transformation])
    if transformation == "rows alone":
        return not adds_over_devices(name)
    if transformation == "explicit axes":
        # The operations of a function that is wrapped are the compiler's to spread.
        return hasattr(getattr(kljax, name), "__wrapped__")
    if transformation == "lowered on explicit axes":
        return name not in (*WITH_HEAD, *WITHOUT_ARRAYS)
    if transformation == "lowered on one device":
        return name in (*WITH_HEAD, *WITHOUT_ARRAYS)
    return True


def is_thorough(name: str, transformation: str) -> bool:
    """Whether a test repeats in another setting what others hold."""
    if transformation in THOROUGH:
        return True
    if transformation == "shard_map" and adds_over_devices(name):
        return False
    if transformation == "jit":
        return name in WITH_HEAD and name not in EACH_KIND
    return transformation in REWRITTEN and name not in REWRITTEN[transformation]


def marks_of(name: str, transformation: str) -> list[pytest.MarkDecorator]:
    """Where it need not run."""
    rare = [] if transformation in ON_EVERY_JAX else [pytest.mark.one_jax]
    if is_thorough(name, transformation):
        return [*rare, pytest.mark.thorough]
    # What the tests of a change run: a function eagerly and jitted, and one of each kind with its sums over devices.
    quick = transformation == "jit" or (transformation == "shard_map" and name in EACH_KIND)
    return rare if quick else [*rare, pytest.mark.more]


CASES = [both for both in itertools.product(callable_functions(), TRANSFORMATIONS) if applies(*both)]


# All transformations of a function one after the other: they share its jitted results.
@pytest.mark.parametrize(("name", "transformation"), [pytest.param(*both, marks=marks_of(*both)) for both in CASES])
def test_value_and_gradients_are_the_eager_ones(name: str, transformation: str) -> None:
    TRANSFORMATIONS[transformation](name)


def test_every_public_function_is_called_or_exempt() -> None:
    public = set(calls.public_functions())
    assert set(NOT_CALLED) <= public
    for name in NOT_CALLED:
        with pytest.raises((AssertionError, KeyError, TypeError, ValueError, AttributeError)):
            [call() for call in calls_of(name)]
    for name in public - set(NOT_CALLED):
        assert calls_of(name), name


def test_only_checks_ask_whether_values_are_known() -> None:
    # Beside the sharding of a result, so that jit leaves the operations of a call as they are.
    root = pathlib.Path(kljax.__file__).parent
    question = re.compile(r"core\.Tracer|has_known_values|is_concrete")
    asking = {str(path.relative_to(root)) for path in root.rglob("*.py") if question.search(path.read_text())}
    assert asking == {"_checks.py", "_devices.py", "batches.py"}


def test_trace_on_an_auto_mesh_sees_no_split() -> None:
    # So it is that of one device, and a mistake in it can only be the compiler's.
    seen = []
    jax.eval_shape(lambda x: seen.append(jax.typeof(x).sharding.spec), spread(jnp.ones((ROWS, LENGTH)), "a", "b"))
    assert seen == [P(None, None)]


def test_rows_on_explicit_axes_are_not_moved() -> None:
    rows = NamedSharding(jax.make_mesh((8,), ("rows",)), P("rows"))
    rewards = jax.device_put(jnp.arange(16.0), rows)
    ids = jax.device_put(jnp.arange(16) // 4, rows)
    advantages = kljax.grpo_advantages(rewards, ids, num_groups=4)
    assert advantages.sharding == rows
    expected = kljax.grpo_advantages(jnp.arange(16.0), jnp.arange(16) // 4, num_groups=4)
    np.testing.assert_allclose(advantages, expected, **CLOSE)


@pytest.mark.parametrize("name", GATHERED)
def test_gathered_values_are_statistics_of_the_batch(name: str) -> None:
    assert "axis_name" not in calls.parameters(name)

    def part(rows: slice) -> Any:
        cut = [jax.tree.map(lambda x: x[rows] if x.shape[:1] == (ROWS,) else x, pair) for pair in inputs(name)]
        return each_call(name, lambda call, arrays, data: call(arrays, data))(cut)

    halves = [part(slice(None, ROWS // 2)), part(slice(ROWS // 2, None))]
    joined = jax.tree.map(lambda *x: jnp.concatenate(x) if x[0].ndim else x[0], *halves)
    with pytest.raises(AssertionError):
        check(name, joined, [call() for call in calls_of(name)])
