"""The LM head, one chunk of columns after the other: cut, gathered over the mesh, and its gradient scattered back."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

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
    """A chunk of columns. Heads keep the layout of the spec; `start` counts from the first column held here.

    `first` is the id of the first token of the chunk; `known` says which columns are tokens, None if all are.
    """

    start: int | Array
    first: int | Array
    size: int
    head: Array
    ref_head: Array | None
    bias: Array | None
    known: Array | None


Body = Callable[[Any, Columns], Any]


def over_columns(spec: Spec, weights: Weights, mesh: Mesh, body: Body, carry: Any) -> Any:
    """`carry = body(carry, columns)` for all columns held here: whole chunks in a scan, the remainder as one more."""
    held = weights.head.shape[spec.vocab_axis]
    split = bool(mesh.vocab)
    # Padding is all at the end: on one device it is not visited, on many some hold nothing else.
    local = held if split else spec.vocab_size
    size = min(spec.tile.vocab, local)
    whole, rest = divmod(local, size)
    first = lax.axis_index(mesh.vocab) * held if split else 0
    types = [jnp.result_type(weights.hidden, weights.head)]
    if weights.ref_hidden is not None:
        types.append(
            jnp.result_type(weights.ref_hidden, weights.head if weights.ref_head is None else weights.ref_head)
        )

    def cut(head: Array | None, start: int | Array, width: int, dtype: jnp.dtype) -> Array | None:
        if head is None:
            return None
        chunk = lax.dynamic_slice_in_dim(head, start, width, axis=spec.vocab_axis)
        return mesh.gather(chunk, spec.embed_axis).astype(dtype)

    def columns(start: int | Array, width: int) -> Columns:
        padded = split and spec.vocab_size < held * math.prod(lax.axis_size(axis) for axis in mesh.vocab)
        head = cut(weights.head, start, width, types[0])
        assert head is not None
        return Columns(
            start=start,
            first=first + start,
            size=width,
            head=head,
            ref_head=cut(weights.ref_head, start, width, types[-1]),
            bias=None if weights.bias is None else lax.dynamic_slice_in_dim(weights.bias, start, width, axis=0),
            known=first + start + jnp.arange(width) < spec.vocab_size if padded else None,
        )

    if whole == 1:
        carry = body(carry, columns(0, size))
    else:
        carry, _ = lax.scan(lambda c, i: (body(c, columns(i * size, size)), None), carry, jnp.arange(whole))
    return body(carry, columns(whole * size, rest)) if rest else carry
