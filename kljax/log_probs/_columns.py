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
      known: `[size]` whether a column is a token, None if all are.
    """

    start: Array
    first: Array
    size: int
    head: Array
    ref_head: Array | None
    bias: Array | None
    known: Array | None


def over_columns(spec: Spec, weights: Weights, body: Callable[[Any, Columns], Any], carry: Any) -> Any:
    """`carry = body(carry, columns)` for all columns held here: whole chunks in a scan, the remainder as one more."""
    mesh, held = Mesh.of(spec), weights.head.shape[spec.vocab_axis]
    # Padding is at the end: on one device it is not visited, on many some may hold nothing else.
    local = held if mesh.vocab else spec.vocab_size
    size = min(spec.tile.vocab, local)
    whole, rest = divmod(local, size)
    first = lax.axis_index(mesh.vocab) * held if mesh.vocab else jnp.int32(0)
    padded = bool(mesh.vocab) and spec.vocab_size < held * math.prod(lax.axis_size(axis) for axis in mesh.vocab)

    def cut(head: Array, hidden: Array, start: Array, width: int) -> Array:
        chunk = lax.dynamic_slice_in_dim(head, start, width, axis=spec.vocab_axis)
        return mesh.gather(chunk, spec.embed_axis).astype(_wider(hidden.dtype, head.dtype))

    def columns(start: Array, width: int) -> Columns:
        head = cut(weights.head, weights.hidden, start, width)
        # Shared with the reference it is data: also a derivative of the gradient passes it by.
        ref_head = None if weights.ref_hidden is None else lax.stop_gradient(head)
        if weights.ref_hidden is not None and weights.ref_head is not None:
            ref_head = cut(weights.ref_head, weights.ref_hidden, start, width)
        bias = None if weights.bias is None else lax.dynamic_slice_in_dim(weights.bias, start, width, axis=0)
        known = first + start + jnp.arange(width, dtype=jnp.int32) < spec.vocab_size if padded else None
        return Columns(start, first + start, width, head, ref_head, bias, known)

    if whole == 1:
        carry = body(carry, columns(jnp.int32(0), size))
    else:
        carry, _ = lax.scan(
            lambda c, i: (body(c, columns(i * size, size)), None), carry, jnp.arange(whole, dtype=jnp.int32)
        )
    return body(carry, columns(jnp.int32(whole * size), rest)) if rest else carry


def _wider(a: jnp.dtype, b: jnp.dtype) -> jnp.dtype:
    """The type that holds both, also where the caller has forbidden to mix types unasked: here it is documented."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)
