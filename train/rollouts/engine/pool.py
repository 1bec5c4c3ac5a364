"""The pool of KV caches: a row for each session, which stays on the device between its turns.

Shapes: R rows of S columns, N new tokens in E segments of at most T tokens, K key-value heads, H head width. A mesh
splits each of R, N and E into D equal shards. Numbers of rows, tokens and segments count from the first of their shard,
so that no program moves a row from one shard to another.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from train.models.attention import AttentionOptions
from train.models.attention.spans import capped
from train.models.cache import KeyValues, SlotCache
from train.models.config import DecoderConfig
from train.models.sharding import constrain, device_kind, split_by_hand

Pool: TypeAlias = list[SlotCache]
"""The cache of each layer, keys [R, K, H, S] and values [R, K, S, H]."""
POOL_AXES = ("rows", "kv_heads", None, None)
"""Logical axes of keys and of values."""
TOKEN_AXES = ("rows", None, "kv_heads", None)
"""Logical axes of the keys and of the values of new tokens."""
ROWS = ("rows",)


def make_pool(config: DecoderConfig, rows: int, columns: int) -> Pool:
    """Makes an empty pool."""
    shape = (rows, config.kv_heads, columns, config.head_dim)
    dtype = jnp.dtype(config.dtype)
    keys = (jnp.zeros(shape, dtype).swapaxes(-2, -1) for _ in range(config.layers))
    return split_pool([SlotCache(key, jnp.zeros(shape, dtype)) for key in keys])


def split_pool(pool: Pool) -> Pool:
    """Splits keys and values over the mesh, by rows and key-value heads."""
    return jax.tree.map(lambda x: constrain(x, *POOL_AXES), pool)


def take_rows(cache: SlotCache, rows: jax.Array | None, columns: int) -> SlotCache:
    """Copies rows of one layer, with their first columns; `rows` None: all of them."""
    if rows is None:
        return SlotCache(cache.key[..., :columns], cache.value[..., :columns, :])
    take = slice_rows if device_kind().startswith("TPU") else gather_rows
    return split_by_hand(functools.partial(take, columns=columns), (POOL_AXES, ROWS), POOL_AXES)(cache, rows)


def gather_rows(cache: SlotCache, rows: jax.Array, columns: int) -> SlotCache:
    """Copies rows of one shard at once."""
    return SlotCache(cache.key[rows][..., :columns], cache.value[rows][..., :columns, :])


def slice_rows(cache: SlotCache, rows: jax.Array, columns: int) -> SlotCache:
    """Copies rows of one shard one after the other.

    The compiler of TPUs lays the operand of a gather out as its result is read: it would copy the whole pool.
    """
    heads, head_dim = cache.key.shape[1:3]

    def body(index: jax.Array, taken: SlotCache) -> SlotCache:
        def copy(x: jax.Array, y: jax.Array) -> jax.Array:
            row = lax.dynamic_slice(x, (rows[index], 0, 0, 0), (1, *y.shape[1:]))
            return lax.dynamic_update_slice_in_dim(y, row, index, 0)

        return jax.tree.map(copy, cache, taken)

    key = jnp.zeros((len(rows), heads, head_dim, columns), cache.key.dtype)
    return lax.fori_loop(0, len(rows), body, SlotCache(key, key.swapaxes(-2, -1)))


def put_rows(pool: Pool, rows: jax.Array, starts: jax.Array, new: Pool) -> Pool:
    """Writes the columns of `new`, B rows of each layer, into rows [B] of the pool, each from its own column on."""

    def put(cache: SlotCache, new: SlotCache, rows: jax.Array, starts: jax.Array) -> SlotCache:
        def body(index: jax.Array, cache: SlotCache) -> SlotCache:
            key, value = (lax.dynamic_index_in_dim(x, index, keepdims=True) for x in (new.key, new.value))
            return SlotCache(
                lax.dynamic_update_slice(cache.key, key, (rows[index], 0, 0, starts[index])),
                lax.dynamic_update_slice(cache.value, value, (rows[index], 0, starts[index], 0)),
            )

        return lax.fori_loop(0, len(rows), body, cache)

    put = split_by_hand(put, (POOL_AXES, POOL_AXES, ROWS, ROWS), POOL_AXES)
    return [put(cache, x, rows, starts) for cache, x in zip(pool, new, strict=True)]


def copy_rows(pool: Pool, sources: jax.Array, targets: jax.Array) -> Pool:
    """Copies a row [D] of each shard in every layer: a session that begins as another one does."""

    def copy(pool: Pool, source: jax.Array, target: jax.Array) -> Pool:
        taken = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, source[0], 1), pool)
        return jax.tree.map(lambda x, row: lax.dynamic_update_slice_in_dim(x, row, target[0], 0), pool, taken)

    return split_by_hand(copy, (POOL_AXES, ROWS, ROWS), POOL_AXES)(pool, sources, targets)


def last_tokens(hidden: jax.Array, segments: "NewTokens") -> jax.Array:
    """Gathers the hidden states [E, W] of the last token of each segment from those of all tokens, [D, N / D, W]."""

    def take(hidden: jax.Array, numbers: jax.Array) -> jax.Array:
        return hidden[0][numbers]

    last = jnp.maximum(segments.counts - 1, 0)[:, None]
    numbers = jnp.take_along_axis(segments.members, last, axis=1)[:, 0]
    return split_by_hand(take, (("rows", None, None), ROWS), ("rows", None))(hidden, numbers)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NewTokens:
    """New tokens of several rows, in each shard one after the other without padding between; arrays of the host.

    Segments may share tokens, if their rows begin alike: both then get the keys and values.

    Attributes:
      tokens: [N] int32.
      positions: [N] int32, of each token in its row.
      real: [N] bool, the tokens of segments.
      members: [E, T] int32, the tokens of each segment; any number after its end.
      counts: [E] int32, tokens of each segment; 0: there is none.
      places: [N] int32, where each token is in E x T, of one of its segments.
      lengths: [E] int32, tokens that the row of each segment has already.
    """

    tokens: Any
    positions: Any
    real: Any
    members: Any
    counts: Any
    places: Any
    lengths: Any

    def mask(self, columns: int, window: int | None) -> "SegmentMask":
        """Builds the mask of the tokens of segments over `columns` old columns and the new tokens."""
        width = self.members.shape[1]
        new = jnp.arange(width)
        old_mask = jnp.arange(columns) < self.lengths[:, None]
        new_mask = (new <= new[:, None]) & (new < self.counts[:, None, None])
        full = jnp.concatenate([jnp.broadcast_to(old_mask[:, None], (*self.members.shape, columns)), new_mask], axis=-1)
        if window is None:
            return SegmentMask(full, None)
        query = self.lengths[:, None] + new
        key = jnp.concatenate([jnp.broadcast_to(jnp.arange(columns), (len(query), columns)), query], axis=-1)
        return SegmentMask(full, full & (query[:, :, None] - key[:, None] < window))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SegmentMask:
    """The masks of the tokens of segments, [E, T, S + T] bool: of full layers, and of sliding ones if any."""

    full: jax.Array
    sliding: jax.Array | None

    def for_layer(self, sliding: bool | jax.Array) -> jax.Array:
        """Selects the mask of a sliding or a full layer; `sliding` may be traced."""
        if sliding is False:
            return self.full
        assert self.sliding is not None
        return self.sliding if sliding is True else jnp.where(sliding, self.sliding, self.full)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SegmentCache:
    """One layer's old columns of the rows of E segments, and the keys and values of N new tokens: a `LayerCache`.

    Attributes:
      old: [E, ...] of S columns.
      members, places: of `NewTokens`.
      new: [D, N / D, K, H]; None before `write`.
    """

    old: SlotCache
    members: jax.Array
    places: jax.Array
    new: KeyValues | None = None

    def write(self, new: KeyValues, column: jax.Array) -> "SegmentCache":
        """Keeps the new keys and values apart from the old ones, for a program that puts them into the pool."""
        return dataclasses.replace(self, new=new)

    def segments(self) -> KeyValues:
        """Returns the new keys and values by segment, [E, T, K, H]."""
        return split_by_hand(_by_segment, (TOKEN_AXES, ("rows", None)), TOKEN_AXES)(self.new, self.members)

    def attend(self, query: jax.Array, mask: SegmentMask, options: AttentionOptions) -> jax.Array:
        """Computes the attention [D, N / D, heads, H] of new tokens to the old columns of their row and to new ones."""

        def attend(query: jax.Array, old: SlotCache, new: KeyValues, numbers: Any, *rest: Any) -> jax.Array:
            members, places = numbers
            mask, sinks = rest
            shard = SegmentCache(old, members, places, new)
            return shard._attend(query, mask, dataclasses.replace(options, sinks=sinks))

        heads = ("rows", None, "heads", None)
        axes = (heads, POOL_AXES, TOKEN_AXES, ROWS, ("rows", None, None), ("heads",))
        numbers = self.members, self.places
        seen = mask.for_layer(options.sliding)
        return split_by_hand(attend, axes, heads)(query, self.old, self.new, numbers, seen, options.sinks)

    def _attend(self, query: jax.Array, mask: jax.Array, options: AttentionOptions) -> jax.Array:
        """Computes `attend` in one shard, with a mask [E, T, S + T]."""
        assert self.new is not None
        new = _by_segment(self.new, self.members)
        segments, width = self.members.shape
        heads = query.shape[2]
        kv_heads = new.key.shape[2]
        head_dim = query.shape[3]
        wide = jnp.promote_types(query.dtype, jnp.float32)
        grouped = query[0][self.members].reshape(segments, width, kv_heads, -1, head_dim)
        products: Any = {"preferred_element_type": wide}
        scale = head_dim**-0.5 if options.scale is None else options.scale
        seen = mask[:, None, None]
        columns = self.old.columns
        old_scores = jnp.einsum("ETKGH,EKHS->EKGTS", grouped, self.old.key, **products) * scale
        new_scores = jnp.einsum("ETKGH,EUKH->EKGTU", grouped, new.key, **products) * scale
        lowest = jnp.finfo(wide).min / 2
        old_scores = jnp.where(seen[..., :columns], capped(old_scores, options.softcap)[0], lowest)
        new_scores = jnp.where(seen[..., columns:], capped(new_scores, options.softcap)[0], lowest)
        top = jnp.maximum(jnp.max(old_scores, -1, keepdims=True), jnp.max(new_scores, -1, keepdims=True))
        if options.sinks is not None:
            sinks = options.sinks.astype(wide).reshape(kv_heads, -1, 1, 1)
            top = jnp.maximum(top, sinks)
        old_weights = jnp.exp(old_scores - top)
        new_weights = jnp.exp(new_scores - top)
        total = jnp.sum(old_weights, -1, keepdims=True) + jnp.sum(new_weights, -1, keepdims=True)
        total = total if options.sinks is None else total + jnp.exp(sinks - top)
        output = jnp.einsum("EKGTS,EKSH->EKGTH", old_weights.astype(query.dtype), self.old.value, **products)
        output += jnp.einsum("EKGTU,EUKH->EKGTH", new_weights.astype(query.dtype), new.value, **products)
        output = jnp.moveaxis(output / total, 3, 1)
        flat = output.astype(query.dtype).reshape(segments * width, heads, head_dim)
        return flat[self.places][None]


def _by_segment(new: KeyValues, members: jax.Array) -> KeyValues:
    """Sorts the keys and values of the tokens of one shard, [1, N, K, H], by segment."""
    return KeyValues(new.key[0][members], new.value[0][members])


def by_stack(caches: Sequence[Any], layers: Sequence[Sequence[int]]) -> tuple[list[Any], ...]:
    """Sorts the caches of all layers by the stacks that have them."""
    return tuple([caches[layer] for layer in stack] for stack in layers)


def by_layer(stacks: Sequence[Sequence[Any]], layers: Sequence[Sequence[int]]) -> list[Any]:
    """Inverts `by_stack`."""
    pairs = (pair for stack, numbers in zip(stacks, layers, strict=True) for pair in zip(numbers, stack, strict=True))
    return [cache for _, cache in sorted(pairs, key=lambda pair: pair[0])]
