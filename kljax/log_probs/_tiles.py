"""The loop over tiles: tokens packed into tiles of rows, the vocabulary cut into chunks of columns, on one device."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kljax._narrow import narrow_on_cpu, read_with
from kljax._typing import Array, HeadLayout
from kljax.log_probs._head import Axes, device_kind, embed_axis
from kljax.log_probs._inputs import Constants, Spec, Weights, scaled_logits, statistics_dtype

# Replaces the logit of an impossible token: its exponential is 0, and 0 times it is 0, unlike 0 times -infinity.
IMPOSSIBLE = -1e30
# The compilers for TPU and GPU pad arrays to multiples of this.
_LANES = 128
# Of a piece of the head that columns are taken from.
_FEWEST_COLUMNS = 2048


# ---- tokens ----


def tile_rows(tokens: int, limit: int) -> tuple[int, int]:
    """Returns the rows of a tile and the number of tiles for `tokens`, as even as multiples of 8 allow."""
    count = max(1, -(-tokens // limit))
    if count == 1:
        return max(1, tokens), 1
    rows = -(-tokens // count)
    return min(limit, -(-rows // 8) * 8), count


@dataclasses.dataclass(frozen=True)
class TilePacking:
    """Packing of `tokens` tokens into tiles of `tile_size` rows; the unmasked tokens come first, in their order.

    Attributes:
      tokens: number of tokens before the packing.
      tile_size: rows per tile.
      rows: rows of all tiles.
      tiles: number of tiles that hold a token; traced if there is a mask.
      mask: `[tokens]`, or None; the arrays below are None without a mask.
      row_of_token: `[tokens]` row of each unmasked token.
      token_of_row: `[rows]` token in each row.
      has_token: `[rows]` whether the row holds a token.
    """

    tokens: int
    tile_size: int
    rows: int
    tiles: int | Array
    mask: Array | None = None
    row_of_token: Array | None = None
    token_of_row: Array | None = None
    has_token: Array | None = None


def plan_packing(mask: Array | None, tokens: int, limit: int) -> TilePacking:
    """Returns the packing of the tokens where `mask` is true, or of all tokens for None, at `limit` rows per tile."""
    size, tiles = tile_rows(tokens, limit)
    rows = size * tiles
    if mask is None:
        return TilePacking(tokens, size, rows, tiles)
    row = jnp.cumsum(mask, dtype=jnp.int32) - 1
    # A masked token gets a row past the end, where a write is dropped.
    at = jnp.where(mask, row, rows)
    # Rows without a token repeat the first unmasked one: values that are finite for a token are finite for them.
    first = jnp.argmax(mask).astype(jnp.int32) if tokens else jnp.int32(0)
    token = jnp.full_like(row, first, shape=rows).at[at].set(jnp.arange(tokens, dtype=jnp.int32), mode="drop")
    count = mask.sum(dtype=jnp.int32)
    has_token = jnp.arange(rows, dtype=jnp.int32) < count
    return TilePacking(tokens, size, rows, (count + size - 1) // size, mask, jnp.maximum(row, 0), token, has_token)


def zero_unless(mask: Array, values: Array) -> Array:
    """Returns `[rows, ...]` values where the mask `[rows]` is true, else 0; a scalar stays if any row is true."""
    keep = mask.reshape(mask.shape + (1,) * (values.ndim - 1)) if values.ndim else mask.any()
    return jnp.where(keep, values, jnp.zeros((), values.dtype))


def pack(packing: TilePacking, values: Any, *, zero_padding: bool = False) -> Any:
    """Packs every array of a tree, `[tokens, ...]` -> `[rows, ...]`.

    Rows without a token repeat an unmasked token, or hold 0 with `zero_padding`, as cotangents of absent tokens must.
    """

    def pack_array(x: Array) -> Array:
        padding = ((0, packing.rows - packing.tokens), *((0, 0),) * (x.ndim - 1))
        if not packing.tokens:
            return jnp.pad(x, padding)
        if packing.token_of_row is not None and packing.has_token is not None:
            rows = jnp.take(x, packing.token_of_row, axis=0, mode="clip")
            return zero_unless(packing.has_token, rows) if zero_padding else rows
        if packing.rows == packing.tokens:
            return x
        return jnp.pad(x, padding, mode="constant" if zero_padding else "edge")

    return jax.tree.map(pack_array, values)


def unpack(packing: TilePacking, values: Any) -> Any:
    """Unpacks every array of a tree, `[rows, ...]` -> `[tokens, ...]`; masked tokens hold 0."""

    def unpack_array(x: Array) -> Array:
        if packing.mask is not None and packing.row_of_token is not None:
            return zero_unless(packing.mask, jnp.take(x, packing.row_of_token, axis=0, mode="clip"))
        return x[: packing.tokens]

    return jax.tree.map(unpack_array, values)


def get_tile(packing: TilePacking, index: Array, values: Any) -> Any:
    """Returns the rows of tile `index` of every array of a tree."""
    size = packing.tile_size
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, index * size, size, 0), values)


def set_tile(packing: TilePacking, index: Array, values: Any, tile: Any) -> Any:
    """Returns `values` with the rows of tile `index` replaced, for every array of a tree."""
    start = index * packing.tile_size
    return jax.tree.map(
        lambda x, rows: lax.dynamic_update_slice_in_dim(x, rows.astype(x.dtype), start, axis=0), values, tile
    )


# ---- the vocabulary ----


class MeshAxes(NamedTuple):
    """Mesh axes that split tokens, `D` of the head, and `V` of the head; all empty on one device."""

    tokens: Axes = ()
    embed: Axes = ()
    vocab: Axes = ()

    @classmethod
    def of(cls, spec: Spec) -> "MeshAxes":
        """Returns the axes of a sharding that have several devices; compilers keep an exchange with no other."""
        if spec.sharding is None:
            return cls()
        sizes = spec.sharding.resolved_mesh().shape
        axes = (spec.sharding.token_axes(), *spec.sharding.head_axes(spec.layout))
        return cls(*(tuple(name for name in names if sizes[name] > 1) for names in axes))

    def sum_over_vocab(self, values: Any) -> Any:
        """Sums over the devices that split the vocabulary."""
        return lax.psum(values, self.vocab) if self.vocab else values

    def max_over_vocab(self, values: Array) -> Array:
        """Returns the maximum over the devices that split the vocabulary."""
        return lax.pmax(values, self.vocab) if self.vocab else values

    def sum_over_tokens(self, values: Array) -> Array:
        """Sums over the devices that split the tokens."""
        return lax.psum(values, self.tokens) if self.tokens else values

    def gather_embed(self, chunk: Array, axis: int) -> Array:
        """Gathers all of `D` of a chunk of the head."""
        return lax.all_gather(chunk, self.embed, axis=axis, tiled=True) if self.embed else chunk

    def scatter_embed(self, gradient: Array, axis: int) -> Array:
        """Sums a chunk's gradient over the tokens of all devices, and returns this device's part of `D`."""
        if self.embed:
            gradient = lax.psum_scatter(gradient, self.embed, scatter_dimension=axis, tiled=True)
        rest = tuple(name for name in self.tokens if name not in self.embed)
        return lax.psum(gradient, rest) if rest else gradient

    def place_in_vocab(self, ids: Array, columns: int) -> tuple[Array, Array | None]:
        """Returns the columns of tokens on this device, of `columns`, and whether it has them; None if it has all."""
        if not self.vocab:
            return ids, None
        at = ids - lax.axis_index(self.vocab) * columns
        return at, (at >= 0) & (at < columns)

    def take_columns(self, head: Array, at: Array, embed: int) -> Array:
        """Returns the columns of the head at `at` `[rows]`, clipped, as `[rows, D]`.

        Where devices split `D`, each takes its part for the tokens of all, and they exchange the parts.
        """
        if self.embed:
            at = lax.all_gather(at, self.embed, tiled=True)
        columns = jnp.take(head, at, axis=0, mode="clip") if embed else _take_of_pieces(head, at)
        return lax.all_to_all(columns, self.embed, split_axis=0, concat_axis=1, tiled=True) if self.embed else columns


def _take_of_pieces(head: Array, at: Array) -> Array:
    """Returns columns of `[D, V]` as `[rows, D]`; TPUs transpose the array for it, here a piece as large as the result.

    Columns that the head does not have are 0.
    """
    columns = head.shape[1]
    width = min(columns, max(at.shape[0], _FEWEST_COLUMNS))

    def take(index: Array, result: Array) -> Array:
        start = jnp.minimum(index * width, columns - width)
        piece = lax.dynamic_slice_in_dim(head, start, width, axis=1)
        offset = at - start
        inside = (offset >= 0) & (offset < width)
        return jnp.where(inside[:, None], jnp.take(piece, offset, axis=1, mode="clip").T, result)

    empty = jnp.zeros_like(head, shape=(at.shape[0], head.shape[0]))
    return lax.fori_loop(0, -(-columns // width), take, empty)


class Chunk(NamedTuple):
    """A chunk of columns of the heads, in their layouts.

    Attributes:
      start: index of the first column on this device.
      first_id: token id of the first column.
      size: number of columns.
      skip: leading columns that belong to the next chunk as well and count there.
      head, ref_head: weights with all of `D`; a reference that shares the head has it here as well.
      bias, ref_bias: biases of the columns.
      valid: `[size]` whether a column is a token that counts in this chunk; None if all are.
    """

    start: Array
    first_id: Array
    size: int
    skip: Array
    head: Array
    ref_head: Array | None
    bias: Array | None
    ref_bias: Array | None
    valid: Array | None


def scan_chunks(spec: Spec, weights: Weights, body: Callable[[Any, Chunk], Any], carry: Any) -> Any:
    """Runs `carry = body(carry, chunk)` over all columns on this device, in a scan over chunks of one width.

    Where the width does not divide the columns, the last chunk of the vocabulary starts earlier and is visited first.
    It overlaps the chunk before it; the overlap counts in the other chunk, whose writes come later.
    """
    axes = MeshAxes.of(spec)
    local_size = weights.head.shape[1 - embed_axis(spec.layout)]
    # Padding is at the end: one device does not visit it, and some of many devices may hold nothing else.
    local = local_size if axes.vocab else spec.vocab_size
    width = chunk_width(local, spec.tile.vocab)
    count = -(-local // width)
    overlap = count * width - local
    first = lax.axis_index(axes.vocab) * local_size if axes.vocab else jnp.int32(0)
    kind = device_kind(spec.sharding)
    padded = bool(axes.vocab) and spec.vocab_size < local_size * math.prod(lax.axis_size(axis) for axis in axes.vocab)

    def columns_of(head: Array, hidden: Array, layout: HeadLayout, start: Array) -> Array:
        embed = embed_axis(layout)
        if narrow_on_cpu(head, kind):
            head, start = read_with(head, start)
        columns = lax.dynamic_slice_in_dim(head, start, width, axis=1 - embed)
        return axes.gather_embed(columns, embed).astype(_wider(hidden.dtype, head.dtype))

    def biases_of(bias: Array | None, start: Array) -> Array | None:
        return None if bias is None else lax.dynamic_slice_in_dim(bias, start, width, axis=0)

    def chunk_at(start: Array, skip: Array) -> Chunk:
        head = columns_of(weights.head, weights.hidden, spec.layout, start)
        # A shared head is a constant in the reference, also for a derivative of the gradient.
        ref_head = None if weights.ref_hidden is None else lax.stop_gradient(head)
        if weights.ref_hidden is not None and weights.ref_head is not None:
            ref_head = columns_of(weights.ref_head, weights.ref_hidden, spec.ref_layout, start)
        column = jnp.arange(width, dtype=jnp.int32)
        valid = column >= skip if overlap else None
        if padded:
            is_token = first + start + column < spec.vocab_size
            valid = is_token if valid is None else valid & is_token
        biases = biases_of(weights.bias, start), biases_of(weights.ref_bias, start)
        return Chunk(start, first + start, width, skip, head, ref_head, *biases, valid)

    if count == 1:
        return body(carry, chunk_at(jnp.int32(0), jnp.int32(0)))
    order = jnp.arange(count, dtype=jnp.int32) - int(overlap > 0)
    starts = jnp.where(order < 0, local - width, order * width)
    skips = jnp.where(order < 0, jnp.int32(overlap), jnp.int32(0))
    return lax.scan(lambda c, x: (body(c, chunk_at(*x)), None), carry, (starts, skips))[0]


def chunk_width(columns: int, limit: int) -> int:
    """Returns the width of all chunks, as even as multiples of 128 allow."""
    even = -(-columns // -(-columns // limit))
    return min(limit, columns, -(-even // _LANES) * _LANES)


def _wider(a: jnp.dtype, b: jnp.dtype) -> jnp.dtype:
    """Returns the type that holds both, also under strict promotion: the public functions document this one."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


# ---- both, on one device ----


class Tokens(NamedTuple):
    """Inputs of each row: `[rows, D]` hidden states, `[rows]` temperatures and ids, `[rows, K]` ids of kept tokens."""

    hidden: Array
    inverse_temperature: Array
    targets: Array | None = None
    ref_hidden: Array | None = None
    kept: Array | None = None


class Logits(NamedTuple):
    """`[rows, columns]` logits of a tile, and their slope to the products before the scale."""

    values: Array
    slope: Array


class DeviceView(NamedTuple):
    """Inputs of one device: static options, its part of the arrays, the packing, and its packed tokens."""

    spec: Spec
    weights: Weights
    constants: Constants
    packing: TilePacking
    tokens: Tokens
    dtype: jnp.dtype

    @classmethod
    def of(cls, spec: Spec, weights: Weights, constants: Constants) -> "DeviceView":
        """Flattens the leading axes and packs the unmasked tokens."""

        def flat(x: Array | None, ndim: int) -> Array | None:
            return None if x is None else x.reshape(-1, *x.shape[x.ndim - ndim :])

        hidden = weights.hidden.reshape(-1, weights.hidden.shape[-1])
        packing = plan_packing(flat(constants.mask, 0), hidden.shape[0], spec.tile.tokens)
        tokens = Tokens(
            hidden=hidden,
            inverse_temperature=constants.inverse_temperature.reshape(-1),
            targets=flat(constants.targets, 0),
            ref_hidden=flat(weights.ref_hidden, 1),
            kept=flat(constants.kept, 1),
        )
        return cls(spec, weights, constants, packing, pack(packing, tokens), statistics_dtype(weights))

    @property
    def axes(self) -> MeshAxes:
        """Mesh axes of the sharding."""
        return MeshAxes.of(self.spec)

    @property
    def ref_scale(self) -> Array:
        """The logit scale of the reference."""
        assert self.constants.ref_logit_scale is not None
        return self.constants.ref_logit_scale

    def loop_tiles(self, body: Callable[[Array, Any], Any], carry: Any) -> Any:
        """Runs `carry = body(index, carry)` over the tiles of rows that hold a token."""
        # The name tells a plan of the program which loop depends on the mask.
        with jax.named_scope("token_tiles"):
            return lax.fori_loop(0, self.packing.tiles, body, carry)

    def scan_chunks(self, body: Callable[[Any, Chunk], Any], carry: Any) -> Any:
        """Runs `carry = body(carry, chunk)` over the vocabulary."""
        return scan_chunks(self.spec, self.weights, body, carry)

    def get_tile(self, index: Array, values: Any) -> Any:
        """Returns the rows of tile `index` of every array of a tree."""
        return get_tile(self.packing, index, values)

    def set_tile(self, index: Array, values: Any, tile: Any) -> Any:
        """Returns `values` with the rows of tile `index` replaced."""
        return set_tile(self.packing, index, values, tile)

    def logits(self, chunk: Chunk, tokens: Tokens) -> tuple[Logits, Logits | None]:
        """Returns the logits of a tile, of the policy and of the reference; invalid columns are `IMPOSSIBLE`."""
        temperature = tokens.inverse_temperature[:, None]
        constants = self.constants
        spec = self.spec

        def of(hidden: Array, head: Array, layout: HeadLayout, bias: Array | None, options: tuple[Any, Any]) -> Logits:
            product = self._dot(hidden.astype(head.dtype), head, 1, embed_axis(layout))
            values, slope = scaled_logits(product, bias, temperature, *options)
            values = jnp.maximum(values, IMPOSSIBLE)
            return Logits(values if chunk.valid is None else jnp.where(chunk.valid[None], values, IMPOSSIBLE), slope)

        options = constants.logit_scale, constants.softcap
        policy = of(tokens.hidden, chunk.head, spec.layout, chunk.bias, options)
        if tokens.ref_hidden is None or chunk.ref_head is None:
            return policy, None
        options = self.ref_scale, constants.ref_softcap
        return policy, of(tokens.ref_hidden, chunk.ref_head, spec.ref_layout, chunk.ref_bias, options)

    def grad_hidden(self, grads: Array, head: Array, layout: HeadLayout) -> Array:
        """Maps gradients of the products, `[rows, columns]`, to gradients of the hidden states, `[rows, D]`."""
        return self._dot(grads.astype(head.dtype), head, 1, 1 - embed_axis(layout))

    def grad_head(self, grads: Array, hidden: Array, head: Array, layout: HeadLayout) -> Array:
        """Maps gradients of the products, `[rows, columns]`, to gradients of a chunk of the head, in its layout."""
        grads = grads.astype(head.dtype)
        hidden = hidden.astype(head.dtype)
        return self._dot(*((hidden, grads) if layout == "dv" else (grads, hidden)), 0, 0)

    def turn(self, hidden: Array, head: Array) -> Array:
        """Returns hidden states as `[D, rows]`, whose product with gradients is the fastest; the barrier keeps them."""
        return lax.optimization_barrier(hidden.astype(head.dtype).T)

    def grad_head_of_turned(self, grads: Array, turned: Array) -> Array:
        """Does the same as `grad_head` in the layout "dv" with hidden states `[D, rows]`."""
        return self._dot(turned, grads.astype(turned.dtype), 1, 0)

    def _dot(self, a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
        return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=self.dtype)


def is_target(chunk: Chunk, tokens: Tokens) -> Array:
    """Returns `[rows, columns]`, whether the column is the target of the row; a scalar False without targets."""
    if tokens.targets is None:
        return jnp.zeros((), bool)
    ids = lax.broadcasted_iota(jnp.int32, (tokens.targets.shape[0], chunk.size), 1)
    matches = ids == (tokens.targets - chunk.first_id)[:, None]
    return matches if chunk.valid is None else matches & chunk.valid[None]


def is_kept(chunk: Chunk, tokens: Tokens) -> Array:
    """Returns `[rows, columns]`, whether the column is the target of the row or one of its kept tokens."""
    assert tokens.kept is not None
    local = (tokens.kept - chunk.first_id).T
    ids = lax.broadcasted_iota(jnp.int32, (*local.shape, chunk.size), 2)
    listed = (ids == local[:, :, None]).any(0)
    listed = listed if chunk.valid is None else listed & chunk.valid[None]
    return listed | is_target(chunk, tokens)
