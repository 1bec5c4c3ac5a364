"""Attention behind one function. Shapes: B rows, T queries, S keys, N query heads, K key-value heads, H head width.

G = N / K query heads share a key-value head.

"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from train.models.kernels import choose_kernel, cudnn_attention, splash_attention
from train.models.sharding import axis_size

QUERY_BLOCK, MAX_QUERY_BLOCKS = 64, 8
"""Whole sequences go through XLA in blocks of at least so many queries, and at most so many blocks: at 8 of them 44 %
of the scores are left out, of 50 % at best."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """The keys that each query attends to.

    Attributes:
      full: [B, 1, T, S] bool, in full layers.
      sliding: [B, 1, T, S] bool, in sliding layers; None if the model has none.
      segments: [B, S] int32 for whole sequences, whose queries are the last T tokens: a token attends to tokens of its
        number up to itself, 0 is padding. None while decoding, and if no kernel is wanted.
      window: number of tokens that a sliding layer attends to.
      by_segments: whether `segments` tell the keys. They do not where completions of a segment share its prompt.
    """

    full: jax.Array
    sliding: jax.Array | None = None
    segments: jax.Array | None = None
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    by_segments: bool = dataclasses.field(default=True, metadata={"static": True})

    def for_layer(self, sliding: bool | jax.Array) -> jax.Array:
        """Selects the mask [B, 1, T, S] of a sliding or a full layer; `sliding` may be traced."""
        if sliding is False:
            return self.full
        assert self.sliding is not None
        return self.sliding if sliding is True else jnp.where(sliding, self.sliding, self.full)


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """How scores are computed.

    Attributes:
      sliding: whether this is a sliding layer, also as a traced scalar.
      scale: factor of the scores; None: `H ** -0.5`.
      softcap: scores z become `softcap * tanh(z / softcap)`; None: unchanged.
      sinks: [N] float, a score of each head that no key has and no value follows: its share of the softmax is lost.
        None: there is none.
    """

    sliding: bool | jax.Array = False
    scale: float | None = None
    softcap: float | None = None
    sinks: jax.Array | None = None


def token_positions(token_mask: jax.Array) -> jax.Array:
    """Counts the real tokens of the row before each one, [B, T] int32."""
    return jnp.maximum(jnp.cumsum(token_mask, axis=-1, dtype=jnp.int32) - 1, 0)


def causal_mask(token_mask: jax.Array, window: int | None, *, first: int = 0) -> AttentionMask:
    """Builds the mask of whole sequences: real tokens up to the query; padding attends to nothing.

    Args:
      token_mask: [B, S] bool, True at real tokens.
      window: real tokens that a sliding layer attends to, the query included; None: the model has no such layer.
      first: column of the first query; there are T = S - first queries.
    """
    columns = jnp.arange(token_mask.shape[-1])
    full = (columns <= columns[first:, None])[None] & token_mask[:, None, :] & token_mask[:, first:, None]
    sliding = None
    if window is not None:
        positions = token_positions(token_mask)
        sliding = (full & (positions[:, first:, None] - positions[:, None, :] < window))[:, None]
    return AttentionMask(full[:, None], sliding, token_mask.astype(jnp.int32), window)


def cache_mask(
    token_mask: jax.Array,
    window: int | None,
    positions: jax.Array | None = None,
    key_positions: jax.Array | None = None,
) -> AttentionMask:
    """Builds the mask of one query per row over the columns of a KV cache.

    Args:
      token_mask: [B, S] bool, the columns that the query attends to, its own included.
      window: tokens of these that a sliding layer attends to; None: the model has no such layer.
      positions: [B] int32, positions of the queries; None: each query is the last real token.
      key_positions: [B, S] int32, positions of the columns; None: columns are in order.
    """
    sliding = None
    if window is not None:
        ranks = token_positions(token_mask) if key_positions is None else key_positions
        query = ranks[:, -1] if positions is None or key_positions is None else positions
        sliding = (token_mask & (query[:, None] - ranks < window))[:, None, None, :]
    return AttentionMask(token_mask[:, None, None, :], sliding)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: AttentionMask,
    options: AttentionOptions = AttentionOptions(),
) -> jax.Array:
    """Computes grouped-query attention, [B, T, N, H]; exactly 0, with zero gradient, for a query without keys.

    Whole sequences go through splash attention on TPU and through cuDNN on NVIDIA GPUs if these take the shape and
    the type (`choose_kernel`); everything else goes through XLA. Splash attention counts a window in columns, so
    padding inside a sequence would use it up; the trainer has none.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H] with N a multiple of K, finite also where masked.
      value: [B, S, K, H], finite also where masked.
      mask: the keys of each query.
      options: layer kind, scale, softcap and sinks.
    """
    seen = mask.for_layer(options.sliding)
    kernel = None if mask.segments is None else choose_kernel(query, key, options.softcap, options.sinks)
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    if kernel == "splash" and mask.by_segments and mask.segments is not None:
        output = splash_attention(
            query,
            key,
            value,
            mask.segments,
            window=mask.window,
            sliding=options.sliding,
            scale=scale,
            softcap=options.softcap,
            sinks=options.sinks,
        )
        return jnp.where(mask.segments[:, -query.shape[1] :, None, None] > 0, output, 0)
    if kernel == "cudnn":
        output = cudnn_attention(query, key, value, seen, scale=scale)
    else:
        is_plain = options.softcap is None and options.sinks is None
        if is_plain and query.dtype != jnp.float64:  # its softmax is in float32 whatever the type
            products = functools.partial(jax.nn.dot_product_attention, scale=scale)
        else:
            products = functools.partial(_attend, scale=scale, softcap=options.softcap, sinks=options.sinks)
        # A split axis of tokens would be gathered by the slices of a block.
        is_causal = mask.segments is not None and axis_size("tokens") == 1
        blocks = min(query.shape[1] // QUERY_BLOCK, MAX_QUERY_BLOCKS) if is_causal else 1
        output = _attend_in_blocks(products, query, key, value, seen, blocks=max(blocks, 1))
    # Softmax over no key is uniform over the padding; the where keeps padding out of value and gradient.
    return jnp.where(jnp.any(seen, axis=-1)[:, 0, :, None, None], output, 0)


def _attend_in_blocks(
    products: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    *,
    blocks: int,
) -> jax.Array:
    """Computes attention a block of queries at a time; a block reads no key after its last query.

    Args:
      products: computes [B, T, N, H] of queries, keys, values and `mask`.
      query: [B, T, N, H], the last T of S tokens if there are several blocks.
      key: [B, S, K, H].
      value: [B, S, K, H].
      mask: [B, 1, T, S] bool, False at keys after the query if there are several blocks.
      blocks: number of blocks.
    """
    length = query.shape[1]
    edges = [length * block // blocks for block in range(blocks)] + [length]
    outputs = []
    for first, last in itertools.pairwise(edges):
        keys = key.shape[1] - (length - last)
        outputs.append(
            products(query[:, first:last], key[:, :keys], value[:, :keys], mask=mask[:, :, first:last, :keys])
        )
    return jnp.concatenate(outputs, axis=1)


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    *,
    scale: float,
    softcap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    rows, length, heads, head_dim = query.shape
    grouped = query.reshape(rows, length, key.shape[2], -1, head_dim)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key, preferred_element_type=wide) * scale
    capped = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    lowest = jnp.finfo(wide).min / 2
    masked = jnp.where(mask[:, :, None], capped, lowest)
    if sinks is None:
        weights = jax.nn.softmax(masked, axis=-1)
    else:
        sink = sinks.astype(wide).reshape(key.shape[2], -1, 1, 1)
        top = lax.stop_gradient(jnp.maximum(jnp.max(masked, axis=-1, keepdims=True), sink))
        exponentials = jnp.exp(masked - top)
        weights = exponentials / (jnp.sum(exponentials, axis=-1, keepdims=True) + jnp.exp(sink - top))
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights.astype(query.dtype), value).reshape(rows, length, heads, head_dim)
