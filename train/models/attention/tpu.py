"""Attention over slots as a Pallas kernel for TPUs, forward and backward, without a mask in memory.

The grid goes over rows, heads, blocks and steps; a table, which is there before the kernel starts, has the block of
each step. Steps beyond the needed ones read nothing and compute nothing. Shapes: R rows, T queries, W slots, N query
heads, K key-value heads, G = N / K, H head width, c slots of a block.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from train.models.attention.spans import RESULTS, capped, is_key, needed_blocks, visits

Array = jax.Array
LANES = 128
SUBLANES = 8
BLOCKS = (512, 256, 128)
"""Slots of a block: 512 x 512 scores of 256-wide heads fit a v5e, the smallest chip."""
LOWEST = -0.7 * float(jnp.finfo(jnp.float32).max)
NN = (((1,), (0,)), ((), ()))
"""The axes of a product."""
NT = (((1,), (1,)), ((), ()))
"""The axes of a product with the second matrix transposed."""


class TpuStatics(NamedTuple):
    """Arguments that are constants in the compiled kernels."""

    softcap: float | None
    block: int
    interpret: bool


def tpu_block(queries: int, keys: int) -> int:
    """Returns the slots of a block for T queries and W keys, multiples of 128: the largest of `BLOCKS` that divides."""
    return next(size for size in BLOCKS if not (queries % size or keys % size))


def tpu_attention(
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
    block: int | None = None,
    interpret: bool = False,
) -> Array:
    """Computes `attend_in_blocks` on a TPU; T and W are multiples of 128. `interpret` runs it anywhere, slowly."""
    if block is None:
        block = tpu_block(query.shape[1], key.shape[1])
    if sinks is None:
        sinks = jnp.full((query.shape[2],), LOWEST, jnp.float32)
    needed = needed_blocks(end, start, block, first)
    spans = end, start, jnp.full((1,), first, jnp.int32), *visits(needed), *visits(needed.swapaxes(1, 2))
    scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)
    heads_first = (x.swapaxes(1, 2) for x in (scaled, key, value))
    return _attend(TpuStatics(softcap, block, interpret), *heads_first, sinks.astype(jnp.float32), spans).swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    statics: TpuStatics, query: Array, key: Array, value: Array, sinks: Array, spans: tuple[Array, ...]
) -> Array:
    return _forward(statics, query, key, value, sinks, spans)[0]


def _forward(
    statics: TpuStatics, query: Array, key: Array, value: Array, sinks: Array, spans: tuple[Array, ...]
) -> tuple[Array, tuple[Any, ...]]:
    rows, heads, length, head_dim = query.shape
    end, start, first, table, count, *_ = spans
    block = statics.block
    queries, keys, ends, starts, statistics = _query_specs(block, head_dim, heads // key.shape[1])
    output, logsums = _call(
        _forward_kernel,
        2,
        (rows, heads, length // block, table.shape[2]),
        [queries, keys, keys, ends, starts],
        [queries, statistics],
        [jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct((rows, heads, 1, length), jnp.float32)],
        [(block, LANES), (block, LANES), (block, head_dim)],
        statics,
        *(table, count, first, sinks, query, key, value, _across_lanes(end), _across_sublanes(start)),
    )
    output, logsums = checkpoint_name((output, logsums), RESULTS)
    return output, (query, key, value, sinks, spans, output, logsums)


def _backward(statics: TpuStatics, kept: tuple[Any, ...], cotangent: Array) -> tuple[Any, ...]:
    query, key, value, sinks, spans, output, logsums = kept
    end, start, first, table, count, key_table, key_count = spans
    rows, heads, length, head_dim = query.shape
    kv_heads = key.shape[1]
    width = key.shape[2]
    block = statics.block
    group = heads // kv_heads
    delta = jnp.einsum("RNTH,RNTH->RNT", cotangent, output, preferred_element_type=jnp.float32)[:, :, None]

    queries, keys, ends, starts, statistics = _query_specs(block, head_dim, group)
    d_query = _call(
        _query_kernel,
        3,
        (rows, heads, length // block, table.shape[2]),
        [queries, keys, keys, ends, starts, queries, statistics, statistics],
        queries,
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        [(block, head_dim)],
        statics,
        *(table, count, first, sinks, query, key, value, _across_lanes(end), _across_sublanes(start)),
        *(cotangent, logsums, delta),
    )

    queries = pl.BlockSpec(
        (None, None, block, head_dim), lambda r, k, j, g, s, t, c, *_: (r, k * group + g, _step(t, c, r, j, s), 0)
    )
    keys = pl.BlockSpec((None, None, block, head_dim), lambda r, k, j, g, s, *_: (r, k, j, 0))
    statistics = pl.BlockSpec(
        (None, None, 1, block), lambda r, k, j, g, s, t, c, *_: (r, k * group + g, 0, _step(t, c, r, j, s))
    )
    d_key, d_value = _call(
        _key_kernel,
        4,
        (rows, kv_heads, width // block, group, key_table.shape[2]),
        [
            *(queries, keys, keys),
            pl.BlockSpec((None, block, LANES), lambda r, k, j, g, s, *_: (r, j, 0)),
            pl.BlockSpec((None, SUBLANES, block), lambda r, k, j, g, s, t, c, *_: (r, 0, _step(t, c, r, j, s))),
            *(queries, statistics, statistics),
        ],
        [keys, keys],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (key, value)],
        [(block, head_dim), (block, head_dim)],
        statics,
        *(key_table, key_count, first, sinks, query, key, value, _across_sublanes(end), _across_lanes(start)),
        *(cotangent, logsums, delta),
    )
    d_sinks = -(jnp.exp(sinks[None, :, None] - logsums[:, :, 0]) * delta[:, :, 0]).sum((0, 2))
    return d_query, d_key, d_value, d_sinks, None


_attend.defvjp(_forward, _backward)


def _query_specs(block: int, head_dim: int, group: int) -> tuple[pl.BlockSpec, ...]:
    """Returns the blocks of queries, keys, ends, starts and statistics in a step of a block of queries."""
    return (
        pl.BlockSpec((None, None, block, head_dim), lambda r, n, i, s, *_: (r, n, i, 0)),
        pl.BlockSpec(
            (None, None, block, head_dim),
            lambda r, n, i, s, t, c, *_: (r, lax.div(n, jnp.int32(group)), _step(t, c, r, i, s), 0),
        ),
        pl.BlockSpec((None, SUBLANES, block), lambda r, n, i, s, t, c, *_: (r, 0, _step(t, c, r, i, s))),
        pl.BlockSpec((None, block, LANES), lambda r, n, i, s, *_: (r, i, 0)),
        pl.BlockSpec((None, None, 1, block), lambda r, n, i, s, *_: (r, n, 0, i)),
    )


def _across_lanes(x: Array) -> Array:
    """Lays one number a slot, [R, W], along the lanes: [R, 8, W]."""
    return jnp.broadcast_to(x[:, None, :], (len(x), SUBLANES, x.shape[1]))


def _across_sublanes(x: Array) -> Array:
    """Lays one number a slot, [R, W], along the sublanes: [R, W, 128]."""
    return jnp.broadcast_to(x[:, :, None], (*x.shape, LANES))


def _step(table: Any, count: Any, row: Any, block: Any, step: Any) -> Any:
    """Returns the block of a step; beyond the needed ones that of the last, which is in memory already."""
    return table[row, block, jnp.clip(step, 0, jnp.maximum(count[row, block] - 1, 0))]


def _call(
    kernel: Callable[..., None],
    products: int,
    grid: tuple[int, ...],
    in_specs: Sequence[Any],
    out_specs: Any,
    out_shape: Any,
    scratch: Sequence[tuple[int, int]],
    statics: TpuStatics,
    *operands: Array,
) -> Any:
    """Runs a kernel whose first operands are scalars, table, counts, first slot of queries and sinks; then q, k and v.

    The compiler is told of `products` of each query with all keys up to it, as if a row were one sequence.
    """
    (rows, heads, queries, head_dim), keys = operands[4].shape, operands[5].shape[2]
    pairs = rows * heads * (queries * (keys - queries) + queries * (queries + 1) // 2)
    moved = sum(x.size * x.dtype.itemsize for x in (*operands, *jax.tree.leaves(out_shape)))
    run = pl.pallas_call(
        functools.partial(kernel, statics=statics),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=out_shape,
        interpret=statics.interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(*[pltpu.PARALLEL] * 3, *[pltpu.ARBITRARY] * (len(grid) - 3))
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * pairs * head_dim, transcendentals=pairs, bytes_accessed=moved
        ),
        name=f"slots{kernel.__name__}",
    )
    return run(*operands)


def _seen(i: Any, j: Any, first: Any, end: Array, start: Array, shape: tuple[int, int], queries: int) -> Array:
    """Returns the pairs that attend, of `shape`; `queries` is the axis of queries, and `end`, `start` broadcast."""
    slots = [lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (queries, 1 - queries)]
    return is_key(first + i * shape[queries] + slots[0], j * shape[1 - queries] + slots[1], end, start)


def _tiled(x: Array, columns: int) -> Array:
    """Repeats [c, 128] of one number a row for [c, columns]."""
    return jnp.tile(x, (1, -(-columns // LANES)))[:, :columns]


def _dot(first: Array, second: Array, dims: Any) -> Array:
    return lax.dot_general(first, second, dims, preferred_element_type=jnp.float32)


def _forward_kernel(
    table_ref: Any,
    count_ref: Any,
    first_ref: Any,
    sinks_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    end_ref: Any,
    start_ref: Any,
    output_ref: Any,
    logsum_ref: Any,
    top_ref: Any,
    norm_ref: Any,
    total_ref: Any,
    *,
    statics: TpuStatics,
) -> None:
    r, n, i, s = (pl.program_id(axis) for axis in range(4))
    block = statics.block

    @pl.when(s == 0)
    def start() -> None:
        total_ref[...] = jnp.zeros_like(total_ref)
        # Without a sink its share is exp(0) of the lowest score, which the first key shrinks to 0.
        norm_ref[...] = jnp.ones_like(norm_ref)
        top_ref[...] = jnp.full_like(top_ref, sinks_ref[n])

    @pl.when(s < count_ref[r, i])
    def visit() -> None:
        j = table_ref[r, i, s]
        scores, _ = capped(_dot(q_ref[...], k_ref[...], NT), statics.softcap)
        seen = _seen(i, j, first_ref[0], end_ref[:1], _tiled(start_ref[...], block), (block, block), 0)
        scores = jnp.where(seen, scores, LOWEST)
        higher = jnp.maximum(top_ref[...], scores.max(1)[:, None])
        weights = jnp.where(seen, jnp.exp(scores - _tiled(higher, block)), 0)
        shrink = jnp.exp(top_ref[...] - higher)
        norm_ref[...] = norm_ref[...] * shrink + weights.sum(1)[:, None]
        values = _dot(weights.astype(v_ref.dtype), v_ref[...], NN)
        total_ref[...] = total_ref[...] * _tiled(shrink, values.shape[1]) + values
        top_ref[...] = higher

    @pl.when(s == pl.num_programs(3) - 1)
    def end() -> None:
        output_ref[...] = (total_ref[...] / _tiled(norm_ref[...], total_ref.shape[1])).astype(output_ref.dtype)
        logsum_ref[...] = (top_ref[...] + jnp.log(norm_ref[...])).T[:1]


def _query_kernel(
    table_ref: Any,
    count_ref: Any,
    first_ref: Any,
    _: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    end_ref: Any,
    start_ref: Any,
    cotangent_ref: Any,
    logsum_ref: Any,
    delta_ref: Any,
    d_query_ref: Any,
    total_ref: Any,
    *,
    statics: TpuStatics,
) -> None:
    r = pl.program_id(0)
    i = pl.program_id(2)
    s = pl.program_id(3)
    block = statics.block

    @pl.when(s == 0)
    def start() -> None:
        total_ref[...] = jnp.zeros_like(total_ref)

    @pl.when(s < count_ref[r, i])
    def visit() -> None:
        j = table_ref[r, i, s]
        key = k_ref[...]
        scores, slope = capped(_dot(q_ref[...], key, NT), statics.softcap)
        seen = _seen(i, j, first_ref[0], end_ref[:1], _tiled(start_ref[...], block), (block, block), 0)
        weights = jnp.where(seen, jnp.exp(scores - jnp.expand_dims(logsum_ref[0], -1)), 0)
        d_scores = weights * (_dot(cotangent_ref[...], v_ref[...], NT) - jnp.expand_dims(delta_ref[0], -1))
        d_scores = d_scores if slope is None else d_scores * slope
        total_ref[...] += _dot(d_scores.astype(key.dtype), key, NN)

    @pl.when(s == pl.num_programs(3) - 1)
    def end() -> None:
        d_query_ref[...] = total_ref[...].astype(d_query_ref.dtype)


def _key_kernel(
    table_ref: Any,
    count_ref: Any,
    first_ref: Any,
    _: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    end_ref: Any,
    start_ref: Any,
    cotangent_ref: Any,
    logsum_ref: Any,
    delta_ref: Any,
    d_key_ref: Any,
    d_value_ref: Any,
    key_total_ref: Any,
    value_total_ref: Any,
    *,
    statics: TpuStatics,
) -> None:
    r, j, g, s = (pl.program_id(axis) for axis in (0, 2, 3, 4))
    block = statics.block

    @pl.when((g == 0) & (s == 0))
    def start() -> None:
        key_total_ref[...] = jnp.zeros_like(key_total_ref)
        value_total_ref[...] = jnp.zeros_like(value_total_ref)

    @pl.when(s < count_ref[r, j])
    def visit() -> None:
        i = table_ref[r, j, s]
        query = q_ref[...]
        cotangent = cotangent_ref[...]
        # Scores are [keys, queries] here, so that no product transposes them.
        scores, slope = capped(_dot(k_ref[...], query, NT), statics.softcap)
        seen = _seen(i, j, first_ref[0], _tiled(end_ref[...], block), start_ref[:1], (block, block), 1)
        weights = jnp.where(seen, jnp.exp(scores - logsum_ref[...]), 0)
        d_scores = weights * (_dot(v_ref[...], cotangent, NT) - delta_ref[...])
        d_scores = d_scores if slope is None else d_scores * slope
        value_total_ref[...] += _dot(weights.astype(cotangent.dtype), cotangent, NN)
        key_total_ref[...] += _dot(d_scores.astype(query.dtype), query, NN)

    @pl.when((g == pl.num_programs(3) - 1) & (s == pl.num_programs(4) - 1))
    def end() -> None:
        d_key_ref[...] = key_total_ref[...].astype(d_key_ref.dtype)
        d_value_ref[...] = value_total_ref[...].astype(d_value_ref.dtype)
