"""Keys and values: as a forward pass leaves them, and as decoding one token at a time reads them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from train.models.attention import Sight, attend, mask_of
from train.models.shared import SharedSight, attend_shared


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValues:
    """Rotated keys and values, [layers, B, S, K, H] (no leading axis inside a layer)."""

    key: jax.Array
    value: jax.Array

    def write(self, new: "KeyValues", column: int | jax.Array) -> "KeyValues":
        """This cache with `new` written into it.

        Args:
          new: fewer columns, of the same rows and layers.
          column: where they begin; a scalar, or [B] where every row has a column of its own and `new` is one column.
            A row whose column lies outside of the cache is left as it is.
        """
        axis = self.key.ndim - 3
        where = jnp.asarray(column)
        if where.ndim == 0:
            return jax.tree.map(lambda old, x: lax.dynamic_update_slice_in_dim(old, x, where, axis), self, new)

        def put(old: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
            return old.at[..., at, :, :].set(x[..., 0, :, :], mode="drop", wrap_negative_indices=False)

        rows = axis - 1
        return jax.tree.map(lambda old, x: jax.vmap(put, (rows, rows, 0), rows)(old, x, where), self, new)

    def attend(
        self,
        query: jax.Array,
        sight: Sight | SharedSight,
        *,
        sliding: bool | jax.Array,
        scale: float | None,
        softcap: float | None,
    ) -> jax.Array:
        """What queries [B, T, N, H] read from one layer's keys and values."""
        options: Any = {"sliding": sliding, "scale": scale, "softcap": softcap}
        if isinstance(sight, SharedSight):
            return attend_shared(query, self.key, self.value, sight, **options)
        return attend(query, self.key, self.value, sight, **options)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotCache:
    """Rotated keys [B, K, H, S] and values [B, K, S, H] of one layer: neither product of attention transposes them."""

    key: jax.Array
    value: jax.Array

    @classmethod
    def of(cls, layer: KeyValues) -> "SlotCache":
        """From keys and values [B, S, K, H] of one layer."""
        return cls(layer.key.transpose(0, 2, 3, 1), layer.value.transpose(0, 2, 1, 3))

    def write(self, new: KeyValues, column: int | jax.Array, row: int | jax.Array = 0) -> "SlotCache":
        """This cache with `new` [b, s, K, H] written from a row and a column (scalars) on."""
        block = SlotCache.of(new)
        return SlotCache(
            lax.dynamic_update_slice(self.key, block.key, (row, 0, 0, column)),
            lax.dynamic_update_slice(self.value, block.value, (row, 0, column, 0)),
        )

    def attend(
        self,
        query: jax.Array,
        sight: Sight | SharedSight,
        *,
        sliding: bool | jax.Array,
        scale: float | None,
        softcap: float | None,
    ) -> jax.Array:
        """What one query per row [B, 1, N, H] reads; the formula of `train.models.attention.attend`."""
        assert isinstance(sight, Sight)
        mask = mask_of(sight, sliding)
        rows, _, heads, width = query.shape
        grouped = query.reshape(rows, self.key.shape[1], -1, width)
        scores = self.scores(grouped, mask, scale=scale, softcap=softcap)
        weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
        output = jnp.einsum("bkgs,bksh->bkgh", weights, self.value).reshape(rows, 1, heads, width)
        return jnp.where(jnp.any(mask, axis=-1, keepdims=True), output, 0)

    def scores(self, query: jax.Array, seen: jax.Array, *, scale: float | None, softcap: float | None) -> jax.Array:
        """[B, K, G, S] of queries [B, K, G, H], float32 at least, very low where not `seen` (which broadcasts)."""
        wide = jnp.promote_types(query.dtype, jnp.float32)
        found = jnp.einsum("bkgh,bkhs->bkgs", query, self.key, preferred_element_type=wide)
        found = found * (query.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            found = softcap * jnp.tanh(found / softcap)
        return jnp.where(seen, found, jnp.finfo(wide).min / 2)
