"""One tile: its logits, and the three matrix products. Products accumulate in the type of the statistics."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from kljax._typing import Array
from kljax.log_probs._columns import Columns
from kljax.log_probs._inputs import IMPOSSIBLE, Data, scaled_logits
from kljax.log_probs._options import Spec


class Logits(NamedTuple):
    """`[rows, columns]` logits of a tile; `slope` is what a change of the product changes them by."""

    values: Array
    slope: Array


class Tokens(NamedTuple):
    """What is known of each row before the vocabulary: `[rows, D]` hidden states, ids, inverse temperatures."""

    hidden: Array
    inverse_temperature: Array
    targets: Array | None = None
    ref_hidden: Array | None = None


def _dot(a: Array, b: Array, a_axis: int, b_axis: int, dtype: jnp.dtype) -> Array:
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=dtype)


def logits_of(
    spec: Spec, hidden: Array, head: Array, columns: Columns, tokens: Tokens, data: Data, dtype: jnp.dtype
) -> Logits:
    """Logits of the rows of `hidden` for the columns of `head`; columns that are no tokens are `IMPOSSIBLE`."""
    product = _dot(hidden.astype(head.dtype), head, 1, spec.embed_axis, dtype)
    values, slope = scaled_logits(product, columns.bias, tokens.inverse_temperature[:, None], data)
    values = jnp.maximum(values, IMPOSSIBLE)
    if columns.known is not None:
        values = jnp.where(columns.known, values, IMPOSSIBLE)
    return Logits(values, slope)


def pair_of_logits(
    spec: Spec, columns: Columns, tokens: Tokens, data: Data, dtype: jnp.dtype
) -> tuple[Logits, Logits | None]:
    """Logits of the policy and, if there is one, of the reference."""
    policy = logits_of(spec, tokens.hidden, columns.head, columns, tokens, data, dtype)
    if tokens.ref_hidden is None:
        return policy, None
    head = columns.head if columns.ref_head is None else columns.ref_head
    return policy, logits_of(spec, tokens.ref_hidden, head, columns, tokens, data, dtype)


def is_target(columns: Columns, tokens: Tokens) -> Array:
    """`[rows, columns]`, whether the column is the target of the row."""
    assert tokens.targets is not None
    ids = lax.broadcasted_iota(jnp.int32, (tokens.targets.shape[0], columns.size), 1)
    return ids == (tokens.targets - columns.first)[:, None]


def to_hidden(spec: Spec, slopes: Array, head: Array, dtype: jnp.dtype) -> Array:
    """`[rows, columns]` slopes of the products -> `[rows, D]` slopes of the hidden states."""
    return _dot(slopes.astype(head.dtype), head, 1, spec.vocab_axis, dtype)


def to_head(spec: Spec, slopes: Array, hidden: Array, head: Array, dtype: jnp.dtype) -> Array:
    """`[rows, columns]` slopes of the products -> those of the chunk of the head, in its layout."""
    slopes, hidden = slopes.astype(head.dtype), hidden.astype(head.dtype)
    pair = (hidden, slopes) if spec.layout == "dv" else (slopes, hidden)
    return _dot(*pair, 0, 0, dtype)
