"""Attention behind one function. Shapes: B rows, T queries, S keys, N query heads, K key-value heads, H head width."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from train.models.kernels import choose_kernel, cudnn_attention, splash_attention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sight:
    """Which keys the queries see.

    Attributes:
      full: [B, 1, T, S] bool, in full layers.
      sliding: [B, 1, T, S] bool, in sliding layers; None where the model has none.
      segments: [B, S] int32 where the queries are the last T of the tokens that the keys are: equal numbers see each
        other up to themselves, 0 is padding. None elsewhere (decoding), and where no kernel is wanted.
      window: tokens that a sliding layer sees.
    """

    full: jax.Array
    sliding: jax.Array | None = None
    segments: jax.Array | None = None
    window: int | None = dataclasses.field(default=None, metadata={"static": True})


def token_ranks(token_mask: jax.Array) -> jax.Array:
    """Number of real tokens of the row before each one, [B, T] int32; the same as its position without segments."""
    return jnp.maximum(jnp.cumsum(token_mask, axis=-1, dtype=jnp.int32) - 1, 0)


def token_positions(token_mask: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
    """Position of every real token within its segment, [B, T] int32; the first is 0 whatever the padding.

    Args:
      token_mask: [B, T] bool; segment_ids: [B, T] int32, one run of equal numbers per sequence; None: a row is one.
    """
    ranks = token_ranks(token_mask)
    if segment_ids is None:
        return ranks
    columns = jnp.arange(token_mask.shape[-1])
    # Column of the last real token before each one; the one before the first real token is the first column.
    last = lax.cummax(jnp.where(token_mask, columns, 0), axis=1)
    last = jnp.pad(last, ((0, 0), (1, 0)))[:, :-1]
    begins = token_mask & (segment_ids != jnp.take_along_axis(segment_ids, last, axis=1))
    return ranks - lax.cummax(jnp.where(begins, ranks, 0), axis=1)


def token_sight(token_mask: jax.Array, segment_ids: jax.Array | None, window: int | None, *, first: int = 0) -> Sight:
    """What tokens [B, S] see of each other: real ones of their segment, up to themselves; padding sees nothing.

    Args:
      token_mask: [B, S] bool; segment_ids: [B, S] int32, any numbers >= 0, or None.
      window: real tokens that a sliding layer sees, the query's own included; None: the model has no such layer.
      first: the first column that asks; there are T = S - first queries.
    """
    ids = jnp.zeros(token_mask.shape, jnp.int32) if segment_ids is None else segment_ids
    columns = jnp.arange(token_mask.shape[-1])
    seen = (columns <= columns[first:, None])[None] & token_mask[:, None, :] & token_mask[:, first:, None]
    if segment_ids is not None:
        seen = seen & (ids[:, None, :] == ids[:, first:, None])
    near = None
    if window is not None:
        ranks = token_ranks(token_mask)
        near = (seen & (ranks[:, first:, None] - ranks[:, None, :] < window))[:, None]
    return Sight(seen[:, None], near, jnp.where(token_mask, ids + 1, 0), window)


def cache_sight(
    token_mask: jax.Array,
    window: int | None,
    positions: jax.Array | None = None,
    key_positions: jax.Array | None = None,
) -> Sight:
    """What one query per row sees of a cache: the columns of `token_mask` [B, S]; a sliding layer the last `window`.

    Columns are in order, and the query's is the last real one, unless `positions` [B] of the queries and
    `key_positions` [B, S] say otherwise.
    """
    near = None
    if window is not None:
        ranks = token_ranks(token_mask) if key_positions is None else key_positions
        own = ranks[:, -1] if positions is None or key_positions is None else positions
        near = (token_mask & (own[:, None] - ranks < window))[:, None, None, :]
    return Sight(token_mask[:, None, None, :], near)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sight: Sight,
    *,
    sliding: bool | jax.Array = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Grouped-query attention, [B, T, N, H]; exactly 0, with zero gradient, for a query that sees no key.

    Whole sequences go through splash attention on TPU and through cuDNN on NVIDIA GPUs where these take the shape and
    the type (`choose_kernel`); everything else through XLA. On TPU a window counts columns, so padding inside of a
    sequence, which nothing here makes, would use it up.

    Args:
      query: [B, T, N, H]; key, value: [B, S, K, H] with N a multiple of K, finite also where they are not seen.
      sight: what the queries see.
      sliding: whether this is a sliding layer, also as a traced scalar.
      scale: of the scores; None: `H ** -0.5`.
      softcap: scores z become `softcap * tanh(z / softcap)`.
    """
    mask = mask_of(sight, sliding)
    kernel = None if sight.segments is None else choose_kernel(query, key, softcap)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if kernel == "splash" and sight.segments is not None:
        output = splash_attention(
            query, key, value, sight.segments, window=sight.window, sliding=sliding, scale=scale, softcap=softcap
        )
        return jnp.where(sight.segments[:, -query.shape[1] :, None, None] > 0, output, 0)
    if kernel == "cudnn":
        output = cudnn_attention(query, key, value, mask, scale=scale)
    elif softcap is None:
        output = jax.nn.dot_product_attention(query, key, value, mask=mask, scale=scale)
    else:
        output = _capped(query, key, value, mask, scale=scale, softcap=softcap)
    # Softmax over nothing is uniform over the padding; dropping it keeps padding out of value and gradient.
    return jnp.where(jnp.any(mask, axis=-1)[:, 0, :, None, None], output, 0)


def mask_of(sight: Sight, sliding: bool | jax.Array) -> jax.Array:
    """[B, 1, T, S] bool of a layer of this kind."""
    if sliding is False:
        return sight.full
    assert sight.sliding is not None
    return sight.sliding if sliding is True else jnp.where(sliding, sight.sliding, sight.full)


def _capped(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, *, scale: float, softcap: float
) -> jax.Array:
    rows, length, heads, width = query.shape
    grouped = query.reshape(rows, length, key.shape[2], -1, width)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=wide) * scale
    capped = softcap * jnp.tanh(scores / softcap)
    lowest = jnp.finfo(wide).min / 2
    weights = jax.nn.softmax(jnp.where(mask[:, :, None], capped, lowest), axis=-1).astype(query.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(rows, length, heads, width)
