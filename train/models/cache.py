"""KV caches of a layer: as a forward pass leaves keys and values, and as decoding reads them token by token."""

import dataclasses
from typing import Protocol, Self

import jax
import jax.numpy as jnp
from jax import lax

from train.models.attention import AttentionMask, AttentionOptions, attend
from train.models.shared import SharedPromptMask, attend_shared


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
