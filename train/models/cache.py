"""KV caches of a layer: as a forward pass leaves keys and values, and as decoding reads them token by token.

Rows that complete the same prompts share a cache, in which each prompt is stored once and read once for its rows.
"""

import dataclasses
from typing import Protocol, Self

import jax
import jax.numpy as jnp
from jax import lax

from train.models.attention import AttentionMask, AttentionOptions, SharedPromptMask, attend, attend_shared
from train.models.sharding import constrain


class LayerCache(Protocol):
    """The keys and values of one layer."""

    def write(self, new: "KeyValues", column: int | jax.Array) -> Self:
        """Returns this cache with `new` [B, s, K, H] written from a column on."""

    def attend(self, query: jax.Array, mask: AttentionMask | SharedPromptMask, options: AttentionOptions) -> jax.Array:
        """Computes the attention of queries [B, T, N, H] to these keys, [B, T, N, H]."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValues:
    """Rotated keys and values, [layers, B, S, K, H] (no leading axis inside a layer)."""

    key: jax.Array
    value: jax.Array

    def write(self, new: "KeyValues", column: int | jax.Array) -> "KeyValues":
        """Returns this cache with `new` written into it.

        Args:
          new: fewer columns, of the same rows and layers.
          column: where they begin; a scalar, or [B] for one column per row. A row whose column lies outside the cache
            is left unchanged.
        """
        axis = self.key.ndim - 3
        columns = jnp.asarray(column)
        if columns.ndim == 0:
            return jax.tree.map(lambda old, x: lax.dynamic_update_slice_in_dim(old, x, columns, axis), self, new)

        def put(old: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
            return old.at[..., at, :, :].set(x[..., 0, :, :], mode="drop", wrap_negative_indices=False)

        rows = axis - 1
        return jax.tree.map(lambda old, x: jax.vmap(put, (rows, rows, 0), rows)(old, x, columns), self, new)

    def attend(self, query: jax.Array, mask: AttentionMask | SharedPromptMask, options: AttentionOptions) -> jax.Array:
        """Computes the attention of queries [B, T, N, H] to one layer's keys, [B, T, N, H]."""
        if isinstance(mask, SharedPromptMask):
            return attend_shared(query, self.key, self.value, mask, options)
        return attend(query, self.key, self.value, mask, options)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotCache:
    """Rotated keys [B, K, H, S] and values [B, K, S, H] of one layer: neither product of attention transposes them."""

    key: jax.Array
    value: jax.Array

    @classmethod
    def of(cls, layer: KeyValues) -> "SlotCache":
        """Transposes keys and values [B, S, K, H] of one layer."""
        return cls(layer.key.transpose(0, 2, 3, 1), layer.value.transpose(0, 2, 1, 3))

    def write(self, new: KeyValues, column: int | jax.Array, row: int | jax.Array = 0) -> "SlotCache":
        """Returns this cache with `new` [b, s, K, H] written from a row and a column (scalars) on."""
        block = SlotCache.of(new)
        return SlotCache(
            lax.dynamic_update_slice(self.key, block.key, (row, 0, 0, column)),
            lax.dynamic_update_slice(self.value, block.value, (row, 0, column, 0)),
        )

    def attend(self, query: jax.Array, mask: AttentionMask | SharedPromptMask, options: AttentionOptions) -> jax.Array:
        """Computes the attention of one query per row, [B, 1, N, H]; the formula of `train.models.attention.attend`."""
        assert isinstance(mask, AttentionMask)
        seen = mask.for_layer(options.sliding)
        rows, _, heads, head_dim = query.shape
        grouped = query.reshape(rows, self.key.shape[1], -1, head_dim)
        weights = jax.nn.softmax(self.scores(grouped, seen, options), axis=-1).astype(query.dtype)
        output = jnp.einsum("BKGS,BKSH->BKGH", weights, self.value).reshape(rows, 1, heads, head_dim)
        return jnp.where(jnp.any(seen, axis=-1, keepdims=True), output, 0)

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
        if options.softcap is not None:
            scores = options.softcap * jnp.tanh(scores / options.softcap)
        return jnp.where(mask, scores, jnp.finfo(wide).min / 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupCache:
    """One layer's cache of R x G rows; the G rows of a prompt are consecutive.

    Attributes:
      prompts: the first P columns, of the R prompts.
      completions: the columns after these, of the R x G rows.
    """

    prompts: SlotCache
    completions: SlotCache

    @classmethod
    def of(cls, layer: KeyValues, group: int, max_new_tokens: int) -> "GroupCache":
        """Builds a cache from prompts [R, P, K, H], with `max_new_tokens` columns of zeros for each row."""
        prompts = SlotCache.of(layer)
        count, heads, head_dim, _ = prompts.key.shape
        key = jnp.zeros((count * group, heads, head_dim, max_new_tokens), prompts.key.dtype)
        completions = (constrain(x, "rows", "kv_heads", None, None) for x in (key, key.transpose(0, 1, 3, 2)))
        return cls(prompts, SlotCache(*completions))

    def write(self, new: KeyValues, column: int | jax.Array) -> "GroupCache":
        """Returns this cache with `new` [B, s, K, H] written from a column (a scalar, at least P) on."""
        return GroupCache(self.prompts, self.completions.write(new, column - self.prompts.key.shape[-1]))

    def attend(self, query: jax.Array, mask: AttentionMask | SharedPromptMask, options: AttentionOptions) -> jax.Array:
        """Computes the attention of one query per row, [B, 1, N, H]; the formula of `train.models.attention.attend`.

        One softmax over two arrays of scores: both are shifted by the larger of their maxima, and their sums of
        exponentials are added.
        """
        assert isinstance(mask, AttentionMask)
        rows, _, heads, head_dim = query.shape
        wide = jnp.promote_types(query.dtype, jnp.float32)
        columns = self.prompts.key.shape[-1]
        grouped = query.reshape(rows, self.completions.key.shape[1], -1, head_dim)
        seen = mask.for_layer(options.sliding)
        prompt_seen = jnp.broadcast_to(seen[..., :columns], (*grouped.shape[:1], 1, grouped.shape[2], columns))

        def weighted_values(weights: jax.Array, cache: SlotCache) -> jax.Array:
            return jnp.einsum("BKGS,BKSH->BKGH", weights.astype(query.dtype), cache.value, preferred_element_type=wide)

        near = self.completions.scores(grouped, seen[..., columns:], options)
        far = self.prompts.scores(self._by_prompt(grouped), self._by_prompt(prompt_seen), options)
        top = jnp.maximum(_max(near), self._by_row(_max(far)))
        near, far = jnp.exp(near - top), jnp.exp(far - self._by_prompt(top))
        output = weighted_values(near, self.completions) + self._by_row(weighted_values(far, self.prompts))
        output = output / (_sum(near) + self._by_row(_sum(far)))
        output = output.astype(query.dtype).reshape(rows, 1, heads, head_dim)
        return jnp.where(jnp.any(seen, axis=-1, keepdims=True), output, 0)

    def _by_prompt(self, x: jax.Array) -> jax.Array:
        """Regroups rows by prompt: [B, K, n, w] to [R, K, (B / R) n, w]."""
        count, (rows, heads, _, last) = self.prompts.key.shape[0], x.shape
        return x.reshape(count, rows // count, heads, -1, last).swapaxes(1, 2).reshape(count, heads, -1, last)

    def _by_row(self, x: jax.Array) -> jax.Array:
        """Inverts `_by_prompt`."""
        (count, heads, _, last), rows = x.shape, self.completions.key.shape[0]
        return x.reshape(count, heads, rows // count, -1, last).swapaxes(1, 2).reshape(rows, heads, -1, last)


def _max(x: jax.Array) -> jax.Array:
    return jnp.max(x, axis=-1, keepdims=True)


def _sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=-1, keepdims=True)
