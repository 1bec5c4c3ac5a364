"""The LM head, one chunk of columns after the other: cut, gathered over the mesh, and its gradient scattered back."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kljax._typing import Array
from kljax.log_probs._inputs import Weights
from kljax.log_probs._options import Axes, Spec

# What the compilers for TPU and GPU cut arrays into.
_LANES = 128


class Mesh(NamedTuple):
    """The mesh axes that split tokens, `D` of the head, and `V` of the head; all empty on one device."""

    tokens: Axes = ()
    embed: Axes = ()
    vocab: Axes = ()

    @classmethod
    def of(cls, spec: Spec) -> "Mesh":
        if spec.sharding is None:
            return cls()
        return cls(spec.sharding.token_axes(), *spec.sharding.head_axes(spec.layout))

    def sum_over_vocab(self, values: Any) -> Any:
        return lax.psum(values, self.vocab) if self.vocab else values

    def max_over_vocab(self, values: Array) -> Array:
        return lax.pmax(values, self.vocab) if self.vocab else values

    def sum_over_tokens(self, values: Array) -> Array:
        return lax.psum(values, self.tokens) if self.tokens else values

    def gather(self, chunk: Array, axis: int) -> Array:
        """A chunk of the head with all of `D`."""
        return lax.all_gather(chunk, self.embed, axis=axis, tiled=True) if self.embed else chunk

    def scatter(self, gradient: Array, axis: int) -> Array:
        """The part of a chunk's gradient that is kept here, summed over the tokens of all devices."""
        if self.embed:
            gradient = lax.psum_scatter(gradient, self.embed, scatter_dimension=axis, tiled=True)
        rest = tuple(name for name in self.tokens if name not in self.embed)
        return lax.psum(gradient, rest) if rest else gradient


class Columns(NamedTuple):
    """A chunk of columns, whose heads keep the layout of the spec.

    Attributes:
      start: the first one, counted from the first column held here.
      first: its token id.
      size: how many.
      head, ref_head, bias: their weights, with all of `D`; a reference that shares the head has it here as well.
      skip: how many at the front are left to the next chunk that holds them.
      known: `[size]` whether a column is a token and not skipped, None if all are.
    """

    start: Array
    first: Array
    size: int
    skip: Array
    head: Array
    ref_head: Array | None
    bias: Array | None
    known: Array | None


def over_columns(spec: Spec, weights: Weights, body: Callable[[Any, Columns], Any], carry: Any) -> Any:
    """`carry = body(carry, columns)` for all columns held here, in a scan over chunks of one width.

    Where they do not fit, the one that is visited first starts earlier: it is the last of the vocabulary, and what it
    shares with the one before is not known in it. What `body` writes for shared columns is written again later.
    """
    mesh, held = Mesh.of(spec), weights.head.shape[spec.vocab_axis]
    # Padding is at the end: on one device it is not visited, on many some may hold nothing else.
    local = held if mesh.vocab else spec.vocab_size
    width = chunk_width(local, spec.tile.vocab)
    count = -(-local // width)
    shared = count * width - local
    first = lax.axis_index(mesh.vocab) * held if mesh.vocab else jnp.int32(0)
    padded = bool(mesh.vocab) and spec.vocab_size < held * math.prod(lax.axis_size(axis) for axis in mesh.vocab)

    def cut(head: Array, hidden: Array, start: Array) -> Array:
        chunk = lax.dynamic_slice_in_dim(head, start, width, axis=spec.vocab_axis)
        return mesh.gather(chunk, spec.embed_axis).astype(_wider(hidden.dtype, head.dtype))

    def columns(start: Array, skip: Array) -> Columns:
        head = cut(weights.head, weights.hidden, start)
        # Shared with the reference it is data: also a derivative of the gradient passes it by.
        ref_head = None if weights.ref_hidden is None else lax.stop_gradient(head)
        if weights.ref_hidden is not None and weights.ref_head is not None:
            ref_head = cut(weights.ref_head, weights.ref_hidden, start)
        bias = None if weights.bias is None else lax.dynamic_slice_in_dim(weights.bias, start, width, axis=0)
        column = jnp.arange(width, dtype=jnp.int32)
        known = column >= skip if shared else None
        if padded:
            real = first + start + column < spec.vocab_size
            known = real if known is None else known & real
        return Columns(start, first + start, width, skip, head, ref_head, bias, known)

    if count == 1:
        return body(carry, columns(jnp.int32(0), jnp.int32(0)))
    order = jnp.arange(count, dtype=jnp.int32) - int(shared > 0)
    starts = jnp.where(order < 0, local - width, order * width)
    skips = jnp.where(order < 0, jnp.int32(shared), jnp.int32(0))
    return lax.scan(lambda c, x: (body(c, columns(*x)), None), carry, (starts, skips))[0]


def chunk_width(columns: int, limit: int) -> int:
    """Columns of one chunk: all of one size, as even as multiples of 128 allow."""
    even = -(-columns // -(-columns // limit))
    return min(limit, columns, -(-even // _LANES) * _LANES)


def _wider(a: jnp.dtype, b: jnp.dtype) -> jnp.dtype:
    """The type that holds both, also where the caller has forbidden to mix types unasked: here it is documented."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)
