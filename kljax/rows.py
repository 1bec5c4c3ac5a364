"""Reductions over the tokens of each sequence of a batch: its rows, or the segments of packed rows.

With a plain mask every row, the last axis of an array, is one sequence; with `Segments` a row holds several. A
statistic has the shape `[..., S]`, one number per sequence: `S = 1` with a plain mask, otherwise T, or more where pairs
of segments need it. `to_tokens` gives every token the number of its sequence.

Masked positions are selected away with `where`. The functions take values `[..., T]` of any float type, and a mask of
the same shape, boolean or `Segments`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kljax._checks import as_array, as_float, check_mask
from kljax._typing import Array, ArrayLike, Mask
from kljax.batches import Segments


def segment_ids(mask: Mask) -> Array | None:
    """Returns the `[..., T]` ids of packed rows, or None for a plain mask."""
    return as_array(mask.ids) if isinstance(mask, Segments) else None


def narrowed(mask: Mask, kept: Array) -> Mask:
    """Returns the mask `kept` over the segments of another mask, if that has some."""
    _, *ids = jax.tree.leaves(mask)
    return jax.tree.unflatten(jax.tree.structure(mask), [kept, *ids])


def row_sum(values: ArrayLike, mask: Mask, *, num_segments: int | None = None) -> Array:
    """Sums over the unmasked tokens of each sequence.

    Returns:
      `[..., S]`, float32 or float64; 0 without an unmasked token.
    """
    (values,) = as_float(values)
    return _add(jnp.where(check_mask(mask), values, 0), segment_ids(mask), num_segments)


def row_count(mask: Mask) -> Array:
    """Counts the unmasked tokens of each sequence.

    Returns:
      `[..., S]` integers.
    """
    return _add(check_mask(mask).astype(int), segment_ids(mask))


def row_any(mask: Mask) -> Array:
    """Tells which sequences have an unmasked token.

    Returns:
      `[..., S]` booleans.
    """
    if segment_ids(mask) is None:
        return check_mask(mask).any(-1, keepdims=True)
    return row_count(mask) > 0


def row_mean(values: ArrayLike, mask: Mask) -> Array:
    """Averages over the unmasked tokens of each sequence.

    Returns:
      `[..., S]`, float32 or float64; 0 without an unmasked token.
    """
    total = row_sum(values, mask)
    return total / jnp.maximum(row_count(mask).astype(total.dtype), 1)


def row_max(values: Array, mask: Mask, *, initial: float) -> Array:
    """Takes the largest of the unmasked tokens of each sequence and `initial`.

    Returns:
      `[..., S]`, the type of `values`; `initial` without an unmasked token.
    """
    values = jnp.where(check_mask(mask), values, initial)
    ids = segment_ids(mask)
    if ids is None:
        return values.max(-1, keepdims=True, initial=initial)
    largest = _per_segment(jax.ops.segment_max, values, ids)
    return jnp.maximum(largest, jnp.asarray(initial, values.dtype))


def row_first(mask: Mask) -> Array:
    """Finds the first unmasked token of each sequence.

    Returns:
      `[..., S]` integers, its position in the row; 0 without an unmasked token.
    """
    unmasked = check_mask(mask)
    if segment_ids(mask) is None:
        return jnp.argmax(unmasked, -1, keepdims=True)
    length = unmasked.shape[-1]
    # The largest distance to the end; positions count from the start of the row, not of the segment.
    ahead = row_max(length - positions(unmasked), mask, initial=0)
    return jnp.where(ahead > 0, length - ahead, 0)


def row_last(mask: Mask) -> Array:
    """Marks the last unmasked token of each sequence.

    Returns:
      `[..., T]` booleans, at most one of each sequence True.
    """
    unmasked = check_mask(mask)
    if segment_ids(mask) is None:
        later = jnp.flip(jnp.cumsum(jnp.flip(unmasked, -1), -1), -1)
        return unmasked & (later == 1)
    position = positions(unmasked)
    return unmasked & (position == to_tokens(row_max(position, mask, initial=-1), mask))


def row_cumsum(values: Array, mask: Mask) -> Array:
    """Sums the values of each sequence up to and including each position, masked or not.

    Returns:
      `[..., T]`, the type of the values; integers for booleans.
    """
    ids = segment_ids(mask)
    if ids is None:
        return jnp.cumsum(values, -1)
    values = values.astype(int) if values.dtype == bool else values

    def combine(before: tuple[Array, Array], after: tuple[Array, Array]) -> tuple[Array, Array]:
        (total, has_start), (added, starts) = before, after
        return jnp.where(starts, added, total + added), has_start | starts

    return jax.lax.associative_scan(combine, (values, row_starts(ids)), axis=-1)[0]


def row_starts(ids: Array) -> Array:
    """Marks the first position of every segment.

    Returns:
      `[..., T]` booleans; True as well at the first of every run that belongs to no segment.
    """
    changes = ids[..., 1:] != ids[..., :-1]
    return jnp.concatenate([jnp.ones_like(ids[..., :1], bool), changes], -1)


def row_ends(ids: Array) -> Array:
    """Marks the last position of every segment.

    Returns:
      `[..., T]` booleans; True as well at the last of every run that belongs to no segment.
    """
    changes = ids[..., 1:] != ids[..., :-1]
    return jnp.concatenate([changes, jnp.ones_like(ids[..., :1], bool)], -1)


def to_tokens(per_row: Array, mask: Mask) -> Array:
    """Gives every token, masked or not, the value of its sequence.

    Returns:
      `[..., T]`, the type of `per_row`, which is `[..., S]`. Positions of no segment hold 0 or False. An id of S or
      more, which cannot be seen under jit, makes a float NaN and a boolean False.
    """
    ids = segment_ids(mask)
    if ids is None:
        return jnp.broadcast_to(per_row, (*per_row.shape[:-1], check_mask(mask).shape[-1]))
    return take_by_id(per_row, ids)


def to_sequences(per_token: Array, ids: Array) -> Array:
    """Reads one value per segment, at the first position of each, masked or not.

    Returns:
      `[..., S]` with `S = T`; 0 or False for an id that no position has.
    """
    first = row_starts(ids) & (ids >= 0)
    return add_by_id(jnp.where(first, per_token, jnp.zeros((), per_token.dtype)), ids, ids.shape[-1])


def add_by_id(values: Array, ids: Array, count: int) -> Array:
    """Adds up the values of each row that share an id.

    Returns:
      `[..., count]`; values with an id that is negative or too large are left out.
    """
    return _per_segment(jax.ops.segment_sum, values, ids, count)


def take_by_id(per_id: Array, ids: Array) -> Array:
    """Gives every position the value of its id, 0 or False if the id is negative, NaN or False if it is too large."""

    def take(values: Array, ids: Array) -> Array:
        outside = False if values.dtype == bool else None
        return values.at[jnp.maximum(ids, 0)].get(mode="fill", fill_value=outside)

    taken = _over_rows(take, per_id.ndim)(per_id, ids.astype(int))
    return jnp.where(ids >= 0, taken, jnp.zeros((), per_id.dtype))


def positions(array: Array) -> Array:
    """Numbers the tokens of each row from 0.

    Returns:
      `[..., T]` integers, for an array `[..., T]`.
    """
    return jax.lax.broadcasted_iota(jnp.arange(0).dtype, array.shape, array.ndim - 1)


def _add(values: Array, ids: Array | None, count: int | None = None) -> Array:
    return values.sum(-1, keepdims=True) if ids is None else _per_segment(jax.ops.segment_sum, values, ids, count)


def _per_segment(reduce: Callable[..., Array], values: Array, ids: Array, count: int | None = None) -> Array:
    """Reduces every segment of every row; an id that is negative or too large reaches no segment."""
    length = values.shape[-1] if count is None else count

    def of_row(values: Array, ids: Array) -> Array:
        return reduce(values, jnp.where(ids < 0, length, ids), num_segments=length)

    return _over_rows(of_row, values.ndim)(values, ids.astype(int))


def _over_rows(function: Callable[..., Array], ndim: int) -> Callable[..., Array]:
    """Maps a function of single rows over all axes but the last."""
    for _ in range(ndim - 1):
        function = jax.vmap(function)
    return function
