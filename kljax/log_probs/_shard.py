"""What one device works on, tile by tile: its packed tokens against its columns of the head."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kljax._typing import Array
from kljax.log_probs._columns import Columns, Mesh, over_columns
from kljax.log_probs._inputs import Data, Weights, scaled_logits, statistics_dtype
from kljax.log_probs._options import Spec
from kljax.log_probs._rows import Rows, arrange, pack, put_tile, tile_of

# Stands for the logit of a token that is impossible: its exponential is 0 and, unlike -infinity, 0 times it is 0.
IMPOSSIBLE = -1e30


class Tokens(NamedTuple):
    """What is known of each row before the vocabulary: `[rows, D]` hidden states, ids, inverse temperatures."""

    hidden: Array
    inverse_temperature: Array
    targets: Array | None = None
    ref_hidden: Array | None = None


class Logits(NamedTuple):
    """`[rows, columns]` logits of a tile; `slope` is what a change of the product changes them by."""

    values: Array
    slope: Array


class Shard(NamedTuple):
    """The problem of one device: options, its part of the arrays, how its tokens are packed, and the packed tokens."""

    spec: Spec
    weights: Weights
    data: Data
    rows: Rows
    tokens: Tokens
    dtype: jnp.dtype

    @classmethod
    def of(cls, spec: Spec, weights: Weights, data: Data) -> "Shard":
        def flat(x: Any) -> Any:
            return jax.tree.map(lambda x: x.reshape(-1), x)

        def wide(x: Array | None) -> Array | None:
            return None if x is None else x.reshape(-1, x.shape[-1])

        hidden = weights.hidden.reshape(-1, weights.hidden.shape[-1])
        rows = arrange(flat(data.mask), hidden.shape[0], spec.tile.tokens)
        tokens = Tokens(hidden, flat(data.inverse_temperature), flat(data.targets), wide(weights.ref_hidden))
        return cls(spec, weights, data, rows, pack(rows, tokens), statistics_dtype(weights))

    @property
    def mesh(self) -> Mesh:
        return Mesh.of(self.spec)

    def over_tiles(self, body: Callable[[Array, Any], Any], carry: Any) -> Any:
        """`carry = body(index, carry)` for every tile of tokens that holds one."""
        return lax.fori_loop(0, self.rows.tiles, body, carry)

    def over_columns(self, body: Callable[[Any, Columns], Any], carry: Any) -> Any:
        return over_columns(self.spec, self.weights, body, carry)

    def tile_of(self, index: Array, values: Any) -> Any:
        return tile_of(self.rows, index, values)

    def put_tile(self, index: Array, values: Any, tile: Any) -> Any:
        return put_tile(self.rows, index, values, tile)

    def logits(self, columns: Columns, tokens: Tokens) -> tuple[Logits, Logits | None]:
        """Logits of a tile, of the policy and, if there is one, of the reference; `IMPOSSIBLE` for what is no token."""

        def of(hidden: Array, head: Array, bias: Array | None) -> Logits:
            product = self._dot(hidden.astype(head.dtype), head, 1, self.spec.embed_axis)
            values, slope = scaled_logits(product, bias, tokens.inverse_temperature[:, None], self.data)
            values = jnp.maximum(values, IMPOSSIBLE)
            return Logits(
                values if columns.known is None else jnp.where(columns.known[None], values, IMPOSSIBLE), slope
            )

        policy = of(tokens.hidden, columns.head, columns.bias)
        if tokens.ref_hidden is None or columns.ref_head is None:
            return policy, None
        return policy, of(tokens.ref_hidden, columns.ref_head, lax.stop_gradient(columns.bias))

    def to_hidden(self, slopes: Array, head: Array) -> Array:
        """`[rows, columns]` slopes of the products -> `[rows, D]` slopes of the hidden states."""
        return self._dot(slopes.astype(head.dtype), head, 1, self.spec.vocab_axis)

    def to_head(self, slopes: Array, hidden: Array, head: Array) -> Array:
        """`[rows, columns]` slopes of the products -> those of the chunk of the head, in its layout."""
        slopes, hidden = slopes.astype(head.dtype), hidden.astype(head.dtype)
        return self._dot(*((hidden, slopes) if self.spec.layout == "dv" else (slopes, hidden)), 0, 0)

    def _dot(self, a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
        return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=self.dtype)


def is_target(columns: Columns, tokens: Tokens) -> Array:
    """`[rows, columns]`, whether the column is the target of the row; false everywhere where there are no targets."""
    if tokens.targets is None:
        return jnp.zeros((), bool)
    ids = lax.broadcasted_iota(jnp.int32, (tokens.targets.shape[0], columns.size), 1)
    found = ids == (tokens.targets - columns.first)[:, None]
    return found if columns.known is None else found & columns.known[None]
