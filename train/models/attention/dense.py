"""Attention under a mask in memory: of rows so short that it is small, and of shapes that a mesh does not divide."""

import jax
import jax.numpy as jnp
from jax import lax

from train.models.attention.spans import dense_mask


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
) -> jax.Array:
    """Computes `attend_in_blocks` with all scores at once, [R, T, N, H]."""
    mask = dense_mask(end, start, first)
    if softcap is None and sinks is None and query.dtype != jnp.float64:  # its softmax is in float32 whatever the type
        return jax.nn.dot_product_attention(query, key, value, mask=mask[:, None], scale=scale)
    rows, length, _, head_dim = query.shape
    grouped = query.reshape(rows, length, key.shape[2], -1, head_dim)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key, preferred_element_type=wide) * scale
    capped = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    masked = jnp.where(mask[:, None, None], capped, jnp.finfo(wide).min / 2)
    if sinks is None:
        weights = jax.nn.softmax(masked, axis=-1)
    else:
        sink = sinks.astype(wide).reshape(key.shape[2], -1, 1, 1)
        top = lax.stop_gradient(jnp.maximum(jnp.max(masked, axis=-1, keepdims=True), sink))
        exponentials = jnp.exp(masked - top)
        weights = exponentials / (jnp.sum(exponentials, axis=-1, keepdims=True) + jnp.exp(sink - top))
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights.astype(query.dtype), value).reshape(query.shape)
