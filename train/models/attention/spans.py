"""Which slots a slot attends to: two numbers a slot, and the blocks of slots that they leave to compute.

Shapes: R rows, W slots, T queries.
"""

import dataclasses

import jax
import jax.numpy as jnp

RESULTS = "attention"
"""Name of the output and the log-sums that a gradient of ours needs; with `remat: dots` they are kept."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spans:
    """The keys of each query: slot i attends to slot j if and only if `start[i] <= j <= i < end[j]`.

    A row holds sequences in depth-first order, so that the slots that continue a token are an interval. `end` alone
    says the causal mask of every tree of sequences. Along a path slots grow with the depth, so a window of w tokens is
    the bound `start`: the slot of the ancestor w - 1 above. Without a window it is the slot of the root, which lets
    kernels skip the sequences before.

    Attributes:
      end: [R, W] int32, one past the last slot that continues the token; slot + 1 at padding, which nobody reads.
      start: [R, W] int32, the first key of a query in full layers; the slot itself at padding.
      window_start: [R, W] int32, the same in sliding layers; None if the model has none.
      lengths: [R] int32, if every row is one sequence from slot 0 on; None for any other row.
      window: tokens that a sliding layer attends to, the query included.
      group: (P, C), if every row is a prompt of P slots and then completions of C slots, padded; None for any other.
    """

    end: jax.Array
    start: jax.Array
    window_start: jax.Array | None = None
    lengths: jax.Array | None = None
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    group: tuple[int, int] | None = dataclasses.field(default=None, metadata={"static": True})

    def for_layer(self, sliding: bool | jax.Array) -> jax.Array:
        """Selects `start` of a sliding or a full layer; `sliding` may be traced."""
        if sliding is False:
            return self.start
        assert self.window_start is not None
        return self.window_start if sliding is True else jnp.where(sliding, self.window_start, self.start)


def token_positions(token_mask: jax.Array) -> jax.Array:
    """Counts the real tokens of the row before each one, [B, T] int32."""
    return jnp.maximum(jnp.cumsum(token_mask, axis=-1, dtype=jnp.int32) - 1, 0)


def row_spans(token_mask: jax.Array, window: int | None) -> Spans:
    """Builds the spans of rows of one sequence each, whose padding may be anywhere.

    Args:
      token_mask: [B, T] bool, True at real tokens.
      window: real tokens that a sliding layer attends to, the query included; None: the model has no such layer.
    """
    width = token_mask.shape[1]
    slots = jnp.arange(width, dtype=jnp.int32)
    last = jnp.max(jnp.where(token_mask, slots + 1, 0), axis=-1, keepdims=True)
    first = jnp.min(jnp.where(token_mask, slots, width), axis=-1, keepdims=True)
    window_start = None
    if window is not None:
        order = jnp.argsort(~token_mask, axis=-1, stable=True).astype(jnp.int32)
        above = jnp.maximum(token_positions(token_mask) - (window - 1), 0)
        window_start = jnp.where(token_mask, jnp.take_along_axis(order, above, axis=-1), slots)
    return Spans(
        end=jnp.where(token_mask, last, slots + 1),
        start=jnp.where(token_mask, first, slots),
        window_start=window_start,
        window=window,
    )


def is_key(queries: jax.Array, keys: jax.Array, end: jax.Array, start: jax.Array) -> jax.Array:
    """Whether queries attend to keys; all four broadcast: slots of queries and of keys, `end` of keys, `start`."""
    return (start <= keys) & (keys <= queries) & (queries < end)


def capped(scores: jax.Array, softcap: float | None) -> tuple[jax.Array, jax.Array | None]:
    """Caps scores z to `softcap * tanh(z / softcap)`, and returns its slope; without a cap the scores and None."""
    if softcap is None:
        return scores, None
    tanh = jnp.tanh(scores / softcap)
    return softcap * tanh, 1 - tanh * tanh


def dense_mask(end: jax.Array, start: jax.Array, first: int | jax.Array = 0) -> jax.Array:
    """Computes the mask [R, T, W] of queries from slot `first` on, with `end` [R, W] and `start` [R, T]."""
    slots = jnp.arange(end.shape[-1])
    queries = first + jnp.arange(start.shape[-1])
    return is_key(queries[:, None], slots, end[:, None, :], start[:, :, None])


def needed_blocks(end: jax.Array, start: jax.Array, block: int, first: int | jax.Array = 0) -> jax.Array:
    """Finds the blocks of keys that each block of queries has to visit, [R, T / block, W / block] bool.

    They follow from the extremes of each block: one program serves all rows of a width, and no array has two axes of
    slots. A block may be visited in vain, none that has a key is left out.

    Args:
      end: [R, W].
      start: [R, T].
      block: a divisor of T and W.
      first: slot of the first query, a multiple of `block`.
    """
    rows = len(end)
    last_reader = end.reshape(rows, 1, -1, block).max(-1)
    first_key = start.reshape(rows, -1, 1, block).min(-1)
    query = first // block + jnp.arange(start.shape[1] // block)[:, None]
    key = jnp.arange(end.shape[1] // block)
    return (key <= query) & (last_reader > query * block) & (first_key < (key + 1) * block)


def visits(needed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lists the needed blocks: their numbers in front, [..., n] int32, and how many there are, [...] int32."""
    order = jnp.argsort(~needed, axis=-1, stable=True).astype(jnp.int32)
    return order, needed.sum(-1, dtype=jnp.int32)
