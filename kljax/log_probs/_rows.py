"""Tokens in tiles: those under the mask are left out, and the rest packed to the front."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kljax._typing import Array
from kljax.log_probs._tiles import tile_rows


@dataclasses.dataclass(frozen=True)
class Rows:
    """A packing of `total` tokens into tiles of `size` rows.

    Attributes:
      total: tokens before the packing.
      size: rows of a tile.
      padded: rows of all tiles there could be.
      tiles: tiles that hold a token; traced if there is a mask.
      keep: `[total]` mask, or None.
      place: `[total]` the row of each token that is kept.
      source: `[padded]` the token in each row.
      live: `[padded]` whether there is one.
    """

    total: int
    size: int
    padded: int
    tiles: int | Array
    keep: Array | None = None
    place: Array | None = None
    source: Array | None = None
    live: Array | None = None


def arrange(mask: Array | None, total: int, limit: int) -> Rows:
    """Packs the tokens that `mask` keeps, in their order; all of them for None."""
    size, tiles = tile_rows(total, limit)
    padded = size * tiles
    if mask is None:
        return Rows(total, size, padded, tiles)
    place = jnp.cumsum(mask, dtype=jnp.int32) - 1
    # The place of a token that is left out is past the end, where a write is dropped.
    at = jnp.where(mask, place, padded)
    # Rows without a token repeat the first that is kept: what is finite for a token is finite for them.
    first = jnp.argmax(mask).astype(jnp.int32) if total else jnp.int32(0)
    source = jnp.full_like(place, first, shape=padded).at[at].set(jnp.arange(total, dtype=jnp.int32), mode="drop")
    count = mask.sum(dtype=jnp.int32)
    live = jnp.arange(padded, dtype=jnp.int32) < count
    return Rows(total, size, padded, (count + size - 1) // size, mask, jnp.maximum(place, 0), source, live)


def _select(keep: Array, values: Array) -> Array:
    return jnp.where(keep.reshape(keep.shape + (1,) * (values.ndim - 1)), values, 0)


def pack(rows: Rows, values: Any, *, empty: bool = False) -> Any:
    """`[total, ...]` -> `[padded, ...]` for every array of a tree.

    Rows without a token repeat one that is kept, or hold 0 with `empty`, as what a loss says of no token has to.
    """

    def one(x: Array) -> Array:
        short = ((0, rows.padded - rows.total), *((0, 0),) * (x.ndim - 1))
        if not rows.total:
            return jnp.pad(x, short)
        if rows.source is not None and rows.live is not None:
            chosen = jnp.take(x, rows.source, axis=0, mode="clip")
            return _select(rows.live, chosen) if empty else chosen
        return x if rows.padded == rows.total else jnp.pad(x, short, mode="constant" if empty else "edge")

    return jax.tree.map(one, values)


def unpack(rows: Rows, values: Any) -> Any:
    """`[padded, ...]` -> `[total, ...]` for every array of a tree; tokens that were left out hold 0."""

    def one(x: Array) -> Array:
        if rows.keep is not None and rows.place is not None:
            return _select(rows.keep, jnp.take(x, rows.place, axis=0, mode="clip"))
        return x[: rows.total]

    return jax.tree.map(one, values)


def tile_of(rows: Rows, index: Array, values: Any) -> Any:
    """The rows of tile `index`, of every array of a tree."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, index * rows.size, rows.size, 0), values)


def put_tile(rows: Rows, index: Array, values: Any, tile: Any) -> Any:
    """`values` with the rows of tile `index` replaced, for every array of a tree."""
    return jax.tree.map(
        lambda x, part: lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), index * rows.size, 0), values, tile
    )
