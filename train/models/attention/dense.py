"""Attention under a mask in memory: of rows so short that it is small, and of shapes that a mesh does not divide."""

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from train.models.attention.spans import capped, dense_mask

QUERIES = 64
"""Queries of a block, at least: a block reads no key after its last query."""
MOST_BLOCKS = 8
"""Blocks of a row, at most."""


def attend_densely(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    end: jax.Array,
    start: jax.Array,
    first: int | jax.Array = 0,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    split: bool = False,
) -> jax.Array:
    """Computes `attend_in_blocks` with all scores at once, [R, T, N, H]; `split`: in blocks of whole rows' queries."""
    mask = dense_mask(end, start, first)
    length = query.shape[1]
    count = max(1, min(length // QUERIES, MOST_BLOCKS)) if split else 1
    edges = [length * block // count for block in range(count + 1)]

    def block(begin: int, stop: int) -> jax.Array:
        keys = stop if split else key.shape[1]
        seen = mask[:, begin:stop, :keys]
        return _attend(query[:, begin:stop], key[:, :keys], value[:, :keys], seen, scale, softcap, sinks)

    return jnp.concatenate([block(*edge) for edge in itertools.pairwise(edges)], axis=1)


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    scale: float,
    softcap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    if softcap is None and sinks is None and query.dtype != jnp.float64:  # its softmax is in float32 whatever the type
        return jax.nn.dot_product_attention(query, key, value, mask=mask[:, None], scale=scale)
    rows, length, _, head_dim = query.shape
    grouped = query.reshape(rows, length, key.shape[2], -1, head_dim)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key, preferred_element_type=wide) * scale
    masked = jnp.where(mask[:, None, None], capped(scores, softcap)[0], jnp.finfo(wide).min / 2)
    if sinks is None:
        weights = jax.nn.softmax(masked, axis=-1)
    else:
        sink = sinks.astype(wide).reshape(key.shape[2], -1, 1, 1)
        top = lax.stop_gradient(jnp.maximum(jnp.max(masked, axis=-1, keepdims=True), sink))
        exponentials = jnp.exp(masked - top)
        weights = exponentials / (jnp.sum(exponentials, axis=-1, keepdims=True) + jnp.exp(sink - top))
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights.astype(query.dtype), value).reshape(query.shape)
