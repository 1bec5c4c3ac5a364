"""Attention over slots in plain JAX: blocks of scores that no query needs are neither computed nor stored.

The form of CPUs, of float64, and of every device without a kernel. Shapes: R rows, T queries, W slots, N query heads, K
key-value heads, G = N / K, H head width, c slots of a block.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from train.models.attention.spans import RESULTS, capped, is_key, needed_blocks, visits

Array = jax.Array
CPU_BLOCK = 128
"""Slots of a block without a kernel."""
LOOP = "key_blocks"
"""Scope of the loops whose length depends on the spans."""


class _Statics(NamedTuple):
    block: int
    softcap: float | None


def expected_visits(width: int) -> dict[str, float]:
    """Counts the blocks of keys that a block of queries visits on average, if each row of W slots is one sequence."""
    return {LOOP: (-(-width // CPU_BLOCK) + 1) / 2}


def attend_in_blocks(
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
    block: int = CPU_BLOCK,
) -> Array:
    """Computes attention [R, T, N, H] with an online softmax over the blocks of keys that a block of queries needs.

    A sequence has the same bits wherever it stands in a row, if it starts at a multiple of `block`.

    Args:
      query: [R, T, N, H].
      key: [R, W, K, H].
      value: [R, W, K, H].
      end: [R, W] int32, as `Spans` has it.
      start: [R, T] int32, of the queries; each attends to itself at least.
      first: slot of the first query, a multiple of `block`.
      scale: factor of the scores.
      softcap: scores z become `softcap * tanh(z / softcap)`; None: unchanged.
      sinks: [N], scores that no value follows; None: there are none.
      block: c, a divisor of T and W.

    Gradient:
      To queries, keys, values and sinks; the scores are computed again, block by block.
    """
    rows, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    wide = jnp.promote_types(query.dtype, jnp.float32)

    def tiles(x: Array) -> Array:
        """Cuts [R, S, heads, H] into blocks, [R S / c, K, heads / K c, H]."""
        x = x.reshape(-1, block, kv_heads, x.shape[2] // kv_heads, head_dim)
        return x.transpose(0, 2, 3, 1, 4).reshape(len(x), kv_heads, -1, head_dim)

    if sinks is None:
        sinks = jnp.full((heads,), -jnp.inf, wide)
    table, count = visits(needed_blocks(end, start, block, first))
    spans = end, start, jnp.asarray(first, jnp.int32), table, count
    output = _attend(_Statics(block, softcap), tiles(query * scale), tiles(key), tiles(value), sinks, spans)
    output = output.reshape(-1, kv_heads, heads // kv_heads, block, head_dim).transpose(0, 3, 1, 2, 4)
    return output.reshape(rows, length, heads, head_dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(statics: _Statics, query: Array, key: Array, value: Array, sinks: Array, spans: tuple[Array, ...]) -> Array:
    return _forward(statics, query, key, value, sinks, spans)[0]


def _forward(
    statics: _Statics, query: Array, key: Array, value: Array, sinks: Array, spans: tuple[Array, ...]
) -> tuple[Array, tuple[Any, ...]]:
    wide = jnp.promote_types(query.dtype, jnp.float32)
    lowest = jnp.finfo(wide).min
    sink = _by_query(sinks, query, wide)

    def of_query(i: Array, loop: Callable[..., Any], results: tuple[Array, Array]) -> tuple[Array, Array]:
        def step(j: Array, seen: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            total, norm, top = state
            scores = jnp.where(seen, _scores(statics, query[i], key[j])[0], lowest)
            higher = jnp.maximum(top, scores.max(-1))
            weights = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0)
            shrink = jnp.exp(top - higher)
            values = jnp.einsum("KTS,KSH->KTH", weights.astype(value.dtype), value[j], preferred_element_type=wide)
            return total * shrink[..., None] + values, norm * shrink + weights.sum(-1), higher

        top = jnp.maximum(sink, lowest)
        total, norm, top = loop(step, (jnp.zeros(query.shape[1:], wide), jnp.exp(sink - top), top))
        output, logsums = results
        output = lax.dynamic_update_index_in_dim(output, (total / norm[..., None]).astype(output.dtype), i, 0)
        return output, lax.dynamic_update_index_in_dim(logsums, top + jnp.log(norm), i, 0)

    empty = jnp.zeros_like(query), jnp.zeros(query.shape[:3], wide)
    output, logsums = checkpoint_name(_over_queries(statics, query, key, spans, of_query, empty), RESULTS)
    return output, (query, key, value, sinks, spans, output, logsums)


def _backward(statics: _Statics, kept: tuple[Any, ...], cotangent: Array) -> tuple[Any, ...]:
    query, key, value, sinks, spans, output, logsums = kept
    wide = logsums.dtype
    delta = (cotangent.astype(wide) * output.astype(wide)).sum(-1)
    product = functools.partial(jnp.einsum, preferred_element_type=wide)

    def of_query(i: Array, loop: Callable[..., Any], results: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        def step(j: Array, seen: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_query, d_key, d_value = state
            scores, slope = _scores(statics, query[i], key[j])
            weights = jnp.where(seen, jnp.exp(scores - logsums[i][..., None]), 0)
            d_scores = weights * (product("KTH,KSH->KTS", cotangent[i], value[j]) - delta[i][..., None])
            d_scores = (d_scores if slope is None else d_scores * slope).astype(query.dtype)
            d_key = d_key.at[j].add(product("KTS,KTH->KSH", d_scores, query[i]))
            d_value = d_value.at[j].add(product("KTS,KTH->KSH", weights.astype(query.dtype), cotangent[i]))
            return d_query + product("KTS,KSH->KTH", d_scores, key[j]), d_key, d_value

        d_queries, d_key, d_value = results
        d_query, d_key, d_value = loop(step, (jnp.zeros(query.shape[1:], wide), d_key, d_value))
        return lax.dynamic_update_index_in_dim(d_queries, d_query.astype(query.dtype), i, 0), d_key, d_value

    empty = jnp.zeros_like(query), jnp.zeros(key.shape, wide), jnp.zeros(value.shape, wide)
    d_query, d_key, d_value = _over_queries(statics, query, key, spans, of_query, empty)
    lost = jnp.exp(_by_query(sinks, query, wide) - logsums) * delta
    d_sinks = -lost.sum(0).reshape(len(sinks), -1).sum(-1).astype(sinks.dtype)
    return d_query, d_key.astype(key.dtype), d_value.astype(value.dtype), d_sinks, None


_attend.defvjp(_forward, _backward)


def _over_queries(
    statics: _Statics,
    query: Array,
    key: Array,
    spans: tuple[Array, ...],
    of_query: Callable[[Array, Callable[..., Any], Any], Any],
    results: Any,
) -> Any:
    """Calls `of_query(i, loop, results)` for every block of queries; returns the last results.

    `loop(step, state)` calls `step(j, seen, state)` for the blocks of keys that block i needs, where `seen` [G c, c]
    says which pairs are no keys of their queries.
    """
    end, start, first, table, count = spans
    block = statics.block
    queries = table.shape[1]
    keys = table.shape[2]
    group = query.shape[2] // block

    def body(number: Array, results: Any) -> Any:
        row = number // queries
        i = number % queries

        def loop(step: Callable[[Array, Array, Any], Any], state: Any) -> Any:
            slots = first + i * block + jnp.arange(block)[:, None]
            starts = lax.dynamic_slice(start, (row, i * block), (1, block)).reshape(block, 1)

            def visit(n: Array, state: Any) -> Any:
                j = table[row, i, n]
                ends = lax.dynamic_slice(end, (row, j * block), (1, block))
                seen = is_key(slots, j * block + jnp.arange(block), ends, starts)
                return step(row * keys + j, jnp.tile(seen, (group, 1)), state)

            with jax.named_scope(LOOP):
                return lax.fori_loop(jnp.int32(0), count[row, i], visit, state)

        return of_query(number, loop, results)

    return lax.fori_loop(jnp.int32(0), jnp.int32(len(query)), body, results)


def _scores(statics: _Statics, query: Array, key: Array) -> tuple[Array, Array | None]:
    """Computes the scores [K, G c, c] of two blocks in float32 at least, and the slope of the cap."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    return capped(jnp.einsum("KTH,KSH->KTS", query, key, preferred_element_type=wide), statics.softcap)


def _by_query(sinks: Array, query: Array, dtype: Any) -> Array:
    """Repeats sinks [N] for the queries of a block, [K, G c]."""
    kv_heads, queries = query.shape[1:3]
    groups = sinks.astype(dtype).reshape(kv_heads, -1)
    return jnp.repeat(groups, queries // groups.shape[1], axis=1)
