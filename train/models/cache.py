"""The states of layers: what a forward pass leaves of earlier tokens, and what decoding reads and extends.

The sampler knows two protocols alone: `PromptState`, which a stack of layers leaves of prompts, and `LayerState`, which
it keeps while rows are decoded. Attention keeps keys and values. Rows that complete the same prompts share a cache, in
which each prompt is stored once and read once for its rows.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from train.models.attention import AttentionOptions, attend
from train.models.attention.spans import Spans, capped, token_positions
from train.models.sharding import constrain, split_by_hand

STACK_AXES = ("layers", "rows", "kv_heads", None, None)
"""Logical axes of the keys and of the values of a stack."""


class PromptState(Protocol):
    """The state after N prompts of a stack of layers: a pytree of arrays [L, N, ...]."""

    def for_rows(self, group: int, columns: int) -> "LayerState":
        """Builds the state of N * group rows, `group` for each prompt, which get up to `columns` more tokens."""


class LayerState(Protocol):
    """The state of a stack of layers, or of one of them, while rows are decoded: all they keep of earlier tokens."""

    def layers(self) -> list[Self]:
        """Lists the states of the layers of a stack."""

    def at_layer(self, number: jax.Array) -> Any:
        """Returns one layer of a stack in place: what the layer returns for it has the new stack as `stack`."""

    def write_prompt(self, new: PromptState, row: jax.Array) -> Self:
        """Returns this state with one prompt's, [L, 1, ...], in a row, whose next token follows it."""

    def doubled(self) -> Self:
        """Returns this state with twice the columns, outside of a program; the narrow arrays are freed."""


class LayerCache(Protocol):
    """The keys and values of one layer."""

    def write(self, new: "KeyValues", column: jax.Array) -> Self:
        """Returns this cache with `new` [B, s, K, H] written from a column on."""

    def attend(self, query: jax.Array, mask: "CacheMask", options: AttentionOptions) -> jax.Array:
        """Computes the attention of one query per row, [B, 1, N, H], to these keys."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheMask:
    """The columns of a cache that the query of each row attends to.

    Attributes:
      full: [B, S] bool, in full layers.
      sliding: [B, S] bool, in sliding layers; None if the model has none.
    """

    full: jax.Array
    sliding: jax.Array | None = None

    def for_layer(self, sliding: bool | jax.Array) -> jax.Array:
        """Selects the mask of a sliding or a full layer, [B, 1, 1, S]; `sliding` may be traced."""
        mask = self.full
        if sliding is not False:
            assert self.sliding is not None
            mask = self.sliding if sliding is True else jnp.where(sliding, self.sliding, self.full)
        return mask[:, None, None]


def cache_mask(
    token_mask: jax.Array, window: int | None, positions: jax.Array, key_positions: jax.Array | None
) -> CacheMask:
    """Builds the mask of one query per row over the columns of a KV cache.

    Args:
      token_mask: [B, S] bool, the columns that the query attends to, its own included.
      window: tokens of these that a sliding layer attends to; None: the model has no such layer.
      positions: [B] int32, positions of the queries; not read without `key_positions`.
      key_positions: [B, S] int32, positions of the columns; None: columns are in order, and a query is the last token.
    """
    sliding = None
    if window is not None:
        if key_positions is None:
            key_positions = token_positions(token_mask)
            positions = key_positions[:, -1]
        sliding = token_mask & (positions[:, None] - key_positions < window)
    return CacheMask(token_mask, sliding)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecoderState:
    """The states of all layers while rows are decoded.

    Attributes:
      stacks: the state of each stack, in the order of `layer_stacks`; or a list of its layers' if `unrolled`.
      columns: the number of tokens after the prompt for which there is a place.
      unrolled: whether each layer has a state of its own.
    """

    stacks: tuple[Any, ...]
    columns: int = dataclasses.field(metadata={"static": True})
    unrolled: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def of(cls, prompts: Sequence[PromptState], group: int, columns: int, *, unroll: bool = False) -> "DecoderState":
        """Builds the state of rows that complete prompts.

        Args:
          prompts: of each stack, from `Transformer.prefill`.
          group: the number of rows of each prompt, which are consecutive.
          columns: the most tokens of a completion.
          unroll: whether each layer gets a state of its own.
        """
        stacks = [stack.for_rows(group, columns) for stack in prompts]
        return cls(tuple(stack.layers() if unroll else stack for stack in stacks), columns, unroll)

    def write_prompt(self, prompts: Sequence[PromptState], prompt: jax.Array, row: jax.Array) -> "DecoderState":
        """Copies the state after one prompt into one row."""
        # A gather instead of a slice: if prompts are split over devices, only this prompt is sent.
        new = jax.tree.map(lambda x: jnp.take(x, prompt[None], axis=1, mode="clip"), tuple(prompts))

        def write(stack: Any, new: PromptState) -> Any:
            if not self.unrolled:
                return stack.write_prompt(new, row)
            layers = (jax.tree.map(lambda x, number=number: x[number], new) for number in range(len(stack)))
            return [old.write_prompt(x, row) for old, x in zip(stack, layers, strict=True)]

        return dataclasses.replace(self, stacks=tuple(map(write, self.stacks, new)))

    def doubled(self) -> "DecoderState":
        """Doubles the columns, outside of a program; the narrow arrays are freed."""
        stacks = ([layer.doubled() for layer in stack] if self.unrolled else stack.doubled() for stack in self.stacks)
        return dataclasses.replace(self, stacks=tuple(stacks), columns=2 * self.columns)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValues:
    """Rotated keys and values, [layers, B, S, K, H] (no leading axis inside a layer)."""

    key: jax.Array
    value: jax.Array

    def for_rows(self, group: int, columns: int) -> "GroupCache":
        """Builds a cache whose rows read the keys and values of their prompt, with `columns` of zeros for each row."""
        prompts = SlotCache.of(self)
        rows = prompts.value.shape[-4] * group
        return jax.tree.map(_split, GroupCache(prompts, SlotCache.zeros(prompts, rows, columns)))

    def attend(self, query: jax.Array, spans: Spans, options: AttentionOptions) -> jax.Array:
        """Computes the attention of queries [B, T, N, H] to one layer's keys, [B, T, N, H]."""
        return attend(query, self.key, self.value, spans, options)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotCache:
    """Rotated keys [B, K, H, S] and values [B, K, S, H] of one layer: neither product of attention transposes them.

    A stack of layers has keys and values [L, B, K, S, H], whose columns are contiguous.
    """

    key: jax.Array
    value: jax.Array

    @classmethod
    def of(cls, keys: KeyValues) -> "SlotCache":
        """Transposes keys and values [B, S, K, H] of one layer, or of a stack [L, B, S, K, H]."""
        stack = cls(keys.key.swapaxes(-3, -2), keys.value.swapaxes(-3, -2))
        return stack if stack.is_stack else cls(stack.key.swapaxes(-2, -1), stack.value)

    @classmethod
    def zeros(cls, like: "SlotCache", rows: int, columns: int) -> "SlotCache":
        """Makes an empty cache of other rows and columns."""
        *layers, _, heads, _, head_dim = like.value.shape
        value = jnp.zeros((*layers, rows, heads, columns, head_dim), like.value.dtype)
        return cls(value if like.is_stack else value.swapaxes(-2, -1), value)

    @property
    def is_stack(self) -> bool:
        """Whether this has a leading axis of layers."""
        return self.value.ndim == len(STACK_AXES)

    @property
    def columns(self) -> int:
        """S."""
        return self.value.shape[-2]

    def layer(self, number: int | jax.Array) -> "SlotCache":
        """Returns one layer of a stack."""
        layer = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), self)
        return SlotCache(layer.key.swapaxes(-2, -1), layer.value)

    def write(self, new: KeyValues, *, row: int | jax.Array = 0, column: int | jax.Array = 0) -> "SlotCache":
        """Returns this cache with `new` [..., b, s, K, H] written from a row and a column (scalars) on."""
        block = SlotCache.of(new)
        if self.is_stack:
            return self._write_stack(block, (0, row, 0, column, 0))
        return SlotCache(
            lax.dynamic_update_slice(self.key, block.key, (row, 0, 0, column)),
            lax.dynamic_update_slice(self.value, block.value, (row, 0, column, 0)),
        )

    def write_layer(self, new: KeyValues, layer: jax.Array, column: jax.Array) -> "SlotCache":
        """Returns this stack with `new` [b, s, K, H] written into one layer, from a column on."""
        return self._write_stack(SlotCache.of(jax.tree.map(lambda x: x[None], new)), (layer, 0, 0, column, 0))

    def _write_stack(self, block: "SlotCache", start: tuple[int | jax.Array, ...]) -> "SlotCache":
        written = jax.tree.map(lambda old, x: lax.dynamic_update_slice(old, x, start), self, block)
        return jax.tree.map(split_by_hand(_keep_layout, in_axes=(STACK_AXES,), out_axes=STACK_AXES), written)

    def scores(self, query: jax.Array, mask: jax.Array, options: AttentionOptions) -> jax.Array:
        """Computes scores [B, K, G, S] of queries [B, K, G, H], in float32 at least; very low where masked.

        Args:
          query: [B, K, G, H].
          mask: bool, broadcasts to [B, K, G, S].
          options: scale and softcap.
        """
        wide = jnp.promote_types(query.dtype, jnp.float32)
        scores = jnp.einsum("BKGH,BKHS->BKGS", query, self.key, preferred_element_type=wide)
        scores = scores * (query.shape[-1] ** -0.5 if options.scale is None else options.scale)
        return jnp.where(mask, capped(scores, options.softcap)[0], jnp.finfo(wide).min / 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupCache:
    """One layer's cache of R x G rows, or a stack of layers; the G rows of a prompt are consecutive.

    Attributes:
      prompts: the first P columns, of the R prompts.
      completions: the columns after these, of the R x G rows.
    """

    prompts: SlotCache
    completions: SlotCache

    def layers(self) -> list["GroupCache"]:
        """Lists the caches of a stack."""
        layers = range(len(self.prompts.value))
        return [GroupCache(self.prompts.layer(number), self.completions.layer(number)) for number in layers]

    def at_layer(self, number: jax.Array) -> "StackedLayer":
        """Returns one layer of a stack, which is written in place."""
        return StackedLayer(self, number)

    def write_prompt(self, new: KeyValues, row: jax.Array) -> "GroupCache":
        """Returns this cache with the keys and values [..., 1, P, K, H] of one prompt written into a row."""
        return GroupCache(self.prompts.write(new, row=row), self.completions)

    def doubled(self) -> "GroupCache":
        """Returns this cache with twice the columns of completions."""
        return GroupCache(self.prompts, doubled(self.completions))

    def write(self, new: KeyValues, column: jax.Array) -> "GroupCache":
        """Returns this cache with `new` [B, s, K, H] written from a column (a scalar, at least P) on."""
        column = column - self.prompts.columns
        return GroupCache(self.prompts, self.completions.write(new, column=column))

    def attend(self, query: jax.Array, mask: CacheMask, options: AttentionOptions) -> jax.Array:
        """Computes the attention of one query per row, [B, 1, N, H]; the formula of `train.models.attention.attend`.

        One softmax over two arrays of scores: both are shifted by the larger of their maxima, and their sums of
        exponentials are added, with that of the sink.
        """
        rows, _, _, head_dim = query.shape
        grouped = query.reshape(rows, self.completions.key.shape[1], -1, head_dim)
        return self.attend_grouped(grouped, self._by_prompt(grouped), mask, options)

    def attend_grouped(
        self, grouped: jax.Array, by_prompt: jax.Array, mask: CacheMask, options: AttentionOptions
    ) -> jax.Array:
        """Computes `attend` of queries by row [B, K, n, H] and by prompt [R, K, (B / R) n, H]."""
        rows, _, _, head_dim = grouped.shape
        wide = jnp.promote_types(grouped.dtype, jnp.float32)
        columns = self.prompts.columns
        seen = mask.for_layer(options.sliding)
        prompt_seen = jnp.broadcast_to(seen[..., :columns], (*grouped.shape[:1], 1, grouped.shape[2], columns))

        def weighted_values(weights: jax.Array, cache: SlotCache) -> jax.Array:
            return jnp.einsum(
                "BKGS,BKSH->BKGH", weights.astype(grouped.dtype), cache.value, preferred_element_type=wide
            )

        near = self.completions.scores(grouped, seen[..., columns:], options)
        far = self.prompts.scores(by_prompt, self._by_prompt(prompt_seen), options)
        top = jnp.maximum(_max(near), self._by_row(_max(far)))
        if options.sinks is not None:
            sinks = options.sinks.astype(wide).reshape(*grouped.shape[1:3], 1)
            top = jnp.maximum(top, sinks)
        near = jnp.exp(near - top)
        far = jnp.exp(far - self._by_prompt(top))
        output = weighted_values(near, self.completions) + self._by_row(weighted_values(far, self.prompts))
        total = _sum(near) + self._by_row(_sum(far))
        output = output / (total if options.sinks is None else total + jnp.exp(sinks - top))
        output = output.astype(grouped.dtype).reshape(rows, 1, -1, head_dim)
        return jnp.where(jnp.any(seen, axis=-1, keepdims=True), output, 0)

    def _by_prompt(self, x: jax.Array) -> jax.Array:
        """Regroups rows by prompt: [B, K, n, w] to [R, K, (B / R) n, w]."""
        count = self.prompts.key.shape[0]
        rows, heads, _, last = x.shape
        return x.reshape(count, rows // count, heads, -1, last).swapaxes(1, 2).reshape(count, heads, -1, last)

    def _by_row(self, x: jax.Array) -> jax.Array:
        """Inverts `_by_prompt`."""
        count, heads, _, last = x.shape
        rows = self.completions.key.shape[0]
        return x.reshape(count, heads, rows // count, -1, last).swapaxes(1, 2).reshape(rows, heads, -1, last)


@dataclasses.dataclass(frozen=True)
class StackedLayer:
    """One layer of a stack of caches: the stack is written in place, and only this layer of it is read."""

    stack: GroupCache
    layer: jax.Array

    def write(self, new: KeyValues, column: jax.Array) -> "StackedLayer":
        """Returns the layer of a stack with `new` [B, s, K, H] written from a column (a scalar, at least P) on."""
        column = column - self.stack.prompts.columns
        completions = self.stack.completions.write_layer(new, self.layer, column)
        return StackedLayer(GroupCache(self.stack.prompts, completions), self.layer)

    def attend(self, query: jax.Array, mask: CacheMask, options: AttentionOptions) -> jax.Array:
        """Computes the attention of one query per row, [B, 1, N, H], as `GroupCache.attend`."""
        cache = GroupCache(self.stack.prompts.layer(self.layer), self.stack.completions.layer(self.layer))
        return cache.attend(query, mask, options)


def _keep_layout(x: jax.Array) -> jax.Array:
    """Keeps the axes of a stack in their order in memory, which both products of attention read.

    Left to itself, the compiler of TPUs lays it out for the write of a column, and copies it before it reads it.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def doubled(cache: SlotCache) -> SlotCache:
    """Doubles the columns of a cache outside of a program, one array at a time: each narrow one is freed at once."""

    def double(x: jax.Array, axis: int) -> jax.Array:
        wide = double_columns(x, axis)
        x.delete()
        return wide

    return SlotCache(double(cache.key, -2 if cache.is_stack else -1), double(cache.value, -2))


@functools.partial(jax.jit, static_argnums=1)
def double_columns(x: jax.Array, axis: int) -> jax.Array:
    """Repeats the columns of keys or values, so that column n is found at n and after all others."""
    return _split(jnp.concatenate([x, x], axis))


def _split(x: jax.Array) -> jax.Array:
    """Splits keys or values over the mesh, by rows and key-value heads."""
    return constrain(x, *STACK_AXES[-x.ndim :])


def _max(x: jax.Array) -> jax.Array:
    return jnp.max(x, axis=-1, keepdims=True)


def _sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=-1, keepdims=True)
