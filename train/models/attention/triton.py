"""Attention over slots as a Pallas kernel for NVIDIA GPUs, forward and backward, without a mask in memory.

Each program reads from a table which blocks it visits: a block that no query needs costs nothing. Key-value heads are
not repeated. Shapes: R rows, T queries, W slots, N query heads, K key-value heads, G = N / K, H head width, c slots of
a block, n blocks of queries, m blocks of keys.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from train.models.attention.spans import RESULTS, is_key, needed_blocks, visits

Array = jax.Array
BLOCK = 64
"""Slots of a block: 64 x 64 scores of heads of 128 fit the registers of four warps."""
LOWEST = -1e30
_WITH_DOT: Any = triton if hasattr(triton, "dot") else pl
"""The module with the product, which depends on the release of JAX."""


class TritonStatics(NamedTuple):
    """Arguments that are constants in the compiled kernels."""

    scale: float
    softcap: float | None
    block: int
    interpret: bool


def triton_attention(
    query: Array,
    key: Array,
    value: Array,
    end: Array,
    start: Array,
    first: int | Array = 0,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    block: int = BLOCK,
    interpret: bool = False,
) -> Array:
    """Computes `attend_in_blocks` on an NVIDIA GPU; H is a power of 2. `interpret` runs it anywhere, slowly."""
    if sinks is None:
        sinks = jnp.full((query.shape[2],), LOWEST, jnp.float32)
    needed = needed_blocks(end, start, block, first)
    slots = jnp.full((1,), first, jnp.int32)
    spans = end, start, slots, *visits(needed), *visits(needed.swapaxes(1, 2))
    return _attend(TritonStatics(scale, softcap, block, interpret), query, key, value, sinks.astype(jnp.float32), spans)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    statics: TritonStatics, query: Array, key: Array, value: Array, sinks: Array, spans: tuple[Array, ...]
) -> Array:
    return _forward(statics, query, key, value, sinks, spans)[0]


def _forward(
    statics: TritonStatics, query: Array, key: Array, value: Array, sinks: Array, spans: tuple[Array, ...]
) -> tuple[Array, tuple[Any, ...]]:
    rows, length, heads, _ = query.shape
    end, start, first, table, count, *_ = spans
    specs = _Specs(query, key, statics.block)
    output, logsums = _call(
        functools.partial(_forward_kernel, statics=statics),
        (length // statics.block, rows, heads),
        [specs.query, specs.keys, specs.keys, specs.sink, specs.ends, specs.starts, specs.first, *specs.tables],
        [specs.query, specs.statistics],
        [jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct((rows, heads, length), jnp.float32)],
        statics,
    )(query, key, value, sinks, end, start, first, table, count)
    output, logsums = checkpoint_name((output, logsums), RESULTS)
    return output, (query, key, value, sinks, spans, output, logsums)


def _backward(statics: TritonStatics, kept: tuple[Any, ...], cotangent: Array) -> tuple[Any, ...]:
    query, key, value, sinks, spans, output, logsums = kept
    end, start, first, table, count, key_table, key_count = spans
    rows, length, heads, head_dim = query.shape
    block = statics.block
    kv_heads = key.shape[2]
    width = key.shape[1]
    delta = jnp.einsum("RTNH,RTNH->RNT", cotangent, output, preferred_element_type=jnp.float32)
    specs = _Specs(query, key, block)
    of_query = [specs.query, specs.statistics, specs.statistics]
    d_query = _call(
        functools.partial(_query_kernel, statics=statics),
        (length // block, rows, heads),
        [specs.query, specs.keys, specs.keys, specs.ends, specs.starts, specs.first, *specs.tables, *of_query],
        specs.query,
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        statics,
    )(query, key, value, end, start, first, table, count, cotangent, logsums, delta)
    group = heads // kv_heads
    queries = pl.BlockSpec((None, length, group, head_dim), lambda j, r, k: (r, 0, k, 0))
    keys = pl.BlockSpec((None, block, None, head_dim), lambda j, r, k: (r, j, k, 0))
    statistics = pl.BlockSpec((None, group, length), lambda j, r, k: (r, k, 0))
    d_key, d_value = _call(
        functools.partial(_key_kernel, statics=statics, group=group),
        (width // block, rows, kv_heads),
        [
            *(queries, keys, keys),
            pl.BlockSpec((None, block), lambda j, r, k: (r, j)),
            pl.BlockSpec((None, length), lambda j, r, k: (r, 0)),
            pl.BlockSpec((1,), lambda j, r, k: (0,)),
            pl.BlockSpec((None, None, length // block), lambda j, r, k: (r, j, 0)),
            pl.BlockSpec((None, 1), lambda j, r, k: (r, j)),
            *(queries, statistics, statistics),
        ],
        [keys, keys],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (key, value)],
        statics,
    )(query, key, value, end, start, first, key_table, key_count, cotangent, logsums, delta)
    d_sinks = -(jnp.exp(sinks[None, :, None] - logsums) * delta).sum((0, 2))
    return d_query, d_key, d_value, d_sinks, None


_attend.defvjp(_forward, _backward)


class _Specs:
    """The blocks of a program for one block of queries, one row and one head; keys and their ends are whole."""

    def __init__(self, query: Array, key: Array, block: int) -> None:
        group = query.shape[2] // key.shape[2]
        width = key.shape[1]
        head_dim = query.shape[3]
        self.query = pl.BlockSpec((None, block, None, head_dim), lambda i, r, n: (r, i, n, 0))
        self.keys = pl.BlockSpec((None, width, None, head_dim), lambda i, r, n: (r, 0, n // group, 0))
        self.ends = pl.BlockSpec((None, width), lambda i, r, n: (r, 0))
        self.starts = pl.BlockSpec((None, block), lambda i, r, n: (r, i))
        self.sink = pl.BlockSpec((1,), lambda i, r, n: (n,))
        self.first = pl.BlockSpec((1,), lambda i, r, n: (0,))
        self.statistics = pl.BlockSpec((None, None, block), lambda i, r, n: (r, n, i))
        self.tables = (
            pl.BlockSpec((None, None, width // block), lambda i, r, n: (r, i, 0)),
            pl.BlockSpec((None, 1), lambda i, r, n: (r, i)),
        )


def _call(
    kernel: functools.partial[None],
    grid: tuple[int, ...],
    in_specs: Sequence[Any],
    out_specs: Any,
    out_shape: Any,
    statics: TritonStatics,
) -> Callable[..., Any]:
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        interpret=statics.interpret,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        name=f"slots{kernel.func.__name__}",
    )


def _dot(first: Array, second: Array) -> Array:
    product: Array = _WITH_DOT.dot(first, second)
    return product


def _scores(query: Array, key: Array, statics: TritonStatics) -> tuple[Array, Array | None]:
    """Computes the scores [c, c], and the slope of the cap."""
    scores = _dot(query, key.T) * statics.scale
    if statics.softcap is None:
        return scores, None
    # Triton has no tanh on every GPU.
    tanh = 1 - 2 / (jnp.exp(2 * scores / statics.softcap) + 1)
    return statics.softcap * tanh, 1 - tanh * tanh


def _seen(i: Array, j: Array, first: Array, end: Array, start: Array, block: int) -> Array:
    """Returns the pairs [c, c] of query block i and key block j that attend."""
    queries = first + i * block + jnp.arange(block)
    keys = j * block + jnp.arange(block)
    return is_key(queries[:, None], keys[None], end[None], start[:, None])


def _forward_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    sink_ref: Any,
    end_ref: Any,
    start_ref: Any,
    first_ref: Any,
    table_ref: Any,
    count_ref: Any,
    output_ref: Any,
    logsum_ref: Any,
    *,
    statics: TritonStatics,
) -> None:
    i = pl.program_id(0)
    block = statics.block
    query = q_ref[...]
    start = start_ref[...]
    first = first_ref[0]
    sink = sink_ref[0]

    def visit(n: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        total, norm, top = state
        j = table_ref[n]
        at = pl.ds(j * block, block)
        seen = _seen(i, j, first, end_ref[at], start, block)
        scores = jnp.where(seen, _scores(query, k_ref[at, :], statics)[0], LOWEST)
        higher = jnp.maximum(top, scores.max(1))
        weights = jnp.where(seen, jnp.exp(scores - higher[:, None]), 0)
        shrink = jnp.exp(top - higher)
        total = total * shrink[:, None] + _dot(weights.astype(v_ref.dtype), v_ref[at, :])
        return total, norm * shrink + weights.sum(1), higher

    # Without a sink its share is exp(0) of the lowest score, which the first key shrinks to 0.
    state = jnp.zeros(query.shape, jnp.float32), jnp.ones((block,), jnp.float32), jnp.full((block,), sink)
    total, norm, top = lax.fori_loop(jnp.int32(0), count_ref[0], visit, state)
    output_ref[...] = (total / norm[:, None]).astype(output_ref.dtype)
    logsum_ref[...] = top + jnp.log(norm)


def _query_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    end_ref: Any,
    start_ref: Any,
    first_ref: Any,
    table_ref: Any,
    count_ref: Any,
    cotangent_ref: Any,
    logsum_ref: Any,
    delta_ref: Any,
    d_query_ref: Any,
    *,
    statics: TritonStatics,
) -> None:
    i = pl.program_id(0)
    block = statics.block
    query = q_ref[...]
    start = start_ref[...]
    first = first_ref[0]
    cotangent = cotangent_ref[...]
    logsum = logsum_ref[...]
    delta = delta_ref[...]

    def visit(n: Array, d_query: Array) -> Array:
        j = table_ref[n]
        at = pl.ds(j * block, block)
        key = k_ref[at, :]
        scores, slope = _scores(query, key, statics)
        seen = _seen(i, j, first, end_ref[at], start, block)
        weights = jnp.where(seen, jnp.exp(scores - logsum[:, None]), 0)
        d_scores = weights * (_dot(cotangent, v_ref[at, :].T) - delta[:, None])
        d_scores = d_scores if slope is None else d_scores * slope
        return d_query + _dot(d_scores.astype(key.dtype), key)

    d_query = lax.fori_loop(jnp.int32(0), count_ref[0], visit, jnp.zeros(query.shape, jnp.float32))
    d_query_ref[...] = (d_query * statics.scale).astype(d_query_ref.dtype)


def _key_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    end_ref: Any,
    start_ref: Any,
    first_ref: Any,
    table_ref: Any,
    count_ref: Any,
    cotangent_ref: Any,
    logsum_ref: Any,
    delta_ref: Any,
    d_key_ref: Any,
    d_value_ref: Any,
    *,
    statics: TritonStatics,
    group: int,
) -> None:
    j = pl.program_id(0)
    block = statics.block
    key = k_ref[...]
    value = v_ref[...]
    end = end_ref[...]
    first = first_ref[0]

    def visit(number: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        d_key, d_value = state
        i = table_ref[lax.div(number, jnp.int32(group))]
        head = lax.rem(number, jnp.int32(group))
        at = pl.ds(i * block, block)
        query = q_ref[at, head, :]
        cotangent = cotangent_ref[at, head, :]
        scores, slope = _scores(query, key, statics)
        seen = _seen(i, j, first, end, start_ref[at], block)
        weights = jnp.where(seen, jnp.exp(scores - logsum_ref[head, at][:, None]), 0)
        d_scores = weights * (_dot(cotangent, value.T) - delta_ref[head, at][:, None])
        d_scores = d_scores if slope is None else d_scores * slope
        d_value = d_value + _dot(weights.astype(cotangent.dtype).T, cotangent)
        return d_key + _dot(d_scores.astype(query.dtype).T, query), d_value

    zero = jnp.zeros(key.shape, jnp.float32)
    d_key, d_value = lax.fori_loop(jnp.int32(0), count_ref[0] * group, visit, (zero, zero))
    d_key_ref[...] = (d_key * statics.scale).astype(d_key_ref.dtype)
    d_value_ref[...] = d_value.astype(d_value_ref.dtype)
