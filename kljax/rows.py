"""Reductions over the tokens of each sequence of a batch: its rows, or the segments of packed rows.

Without `segment_ids` every row, the last axis of an array, is one sequence. With `segment_ids`, `[..., T]` integers, a
row holds several: the consecutive positions that share an id are a segment, and a negative id marks a position that
belongs to none, such as padding. A statistic has the shape `[..., S]`, one number per sequence: `S = 1` without
segments, otherwise `num_segments`, by default `T`. `to_tokens` gives every token the number of its sequence.

Masked positions are selected away with `where`. The functions here take the same arguments:

- values: `[..., T]` values per token, of any float type; a mask: same shape, boolean, from `check_segments`.
- segment_ids: same shape, from `check_segments`.
- num_segments: the static number `S` of segments of a row, more than every id; None takes `T`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kljax._checks import as_float, check_mask, check_same_shape
from kljax._typing import Array, ArrayLike


def check_segments(segment_ids: ArrayLike | None, mask: ArrayLike) -> tuple[Array, Array | None]:
    """Checks the ids that a caller gives, once for every function of this module.

    Args:
      segment_ids: `[..., T]` integers, as above; None takes each row as one sequence.
      mask: same shape, boolean.

    Returns:
      The mask as booleans, False outside of every segment, and the ids as an array, or None.

    Raises:
      ValueError: unless the ids have the shape of the mask, lie below T and are each given to one run of positions.
        Under jit only the shape is known.
      TypeError: for ids that are not integers, or a mask of floats.
    """
    mask = check_mask(mask)
    if segment_ids is None:
        return mask, None
    check_same_shape(segment_ids=segment_ids, mask=mask)
    ids = jnp.asarray(segment_ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"segment_ids: got dtype {ids.dtype}, expected an integer type")
    if not isinstance(ids, jax.core.Tracer) and ids.is_fully_addressable and ids.size:
        _check_values(np.asarray(ids))
    return mask & (ids >= 0), ids


def row_sum(
    values: ArrayLike,
    mask: Array | None = None,
    *,
    segment_ids: Array | None = None,
    num_segments: int | None = None,
) -> Array:
    """Sums over the unmasked tokens of each sequence.

    Returns:
      `[..., S]`, float32 or float64; 0 without an unmasked token. A mask of None sums over all tokens.
    """
    (values,) = as_float(values)
    return _add(values if mask is None else jnp.where(mask, values, 0), segment_ids, num_segments)


def row_count(mask: Array, *, segment_ids: Array | None = None, num_segments: int | None = None) -> Array:
    """Counts the unmasked tokens of each sequence.

    Returns:
      `[..., S]` integers.
    """
    if segment_ids is None:
        return mask.sum(-1, keepdims=True)
    return _add(mask.astype(int), segment_ids, num_segments)


def row_any(mask: Array, *, segment_ids: Array | None = None, num_segments: int | None = None) -> Array:
    """Tells which sequences have an unmasked token.

    Returns:
      `[..., S]` booleans.
    """
    if segment_ids is None:
        return mask.any(-1, keepdims=True)
    return row_count(mask, segment_ids=segment_ids, num_segments=num_segments) > 0


def row_mean(
    values: ArrayLike,
    mask: Array,
    *,
    segment_ids: Array | None = None,
    num_segments: int | None = None,
) -> Array:
    """Averages over the unmasked tokens of each sequence.

    Returns:
      `[..., S]`, float32 or float64; 0 without an unmasked token.
    """
    total = row_sum(values, mask, segment_ids=segment_ids, num_segments=num_segments)
    count = row_count(mask, segment_ids=segment_ids, num_segments=num_segments)
    return total / jnp.maximum(count.astype(total.dtype), 1)


def row_max(
    values: Array,
    mask: Array,
    *,
    initial: float,
    segment_ids: Array | None = None,
    num_segments: int | None = None,
) -> Array:
    """Takes the largest of the unmasked tokens of each sequence and `initial`.

    Returns:
      `[..., S]`, the type of `values`; `initial` without an unmasked token.
    """
    values = jnp.where(mask, values, initial)
    if segment_ids is None:
        return values.max(-1, keepdims=True, initial=initial)
    largest = _per_segment(jax.ops.segment_max, values, segment_ids, num_segments)
    return jnp.maximum(largest, jnp.asarray(initial, values.dtype))


def row_first(mask: Array, *, segment_ids: Array | None = None, num_segments: int | None = None) -> Array:
    """Finds the first unmasked token of each sequence.

    Returns:
      `[..., S]` integers, its position in the row; 0 without an unmasked token.
    """
    if segment_ids is None:
        return jnp.argmax(mask, -1, keepdims=True)
    length = mask.shape[-1]
    # The largest distance to the end; positions count from the start of the row, not of the segment.
    ahead = row_max(length - positions(mask), mask, initial=0, segment_ids=segment_ids, num_segments=num_segments)
    return jnp.where(ahead > 0, length - ahead, 0)


def row_last(mask: Array, *, segment_ids: Array | None = None) -> Array:
    """Marks the last unmasked token of each sequence.

    Returns:
      `[..., T]` booleans, at most one of each sequence True.
    """
    if segment_ids is None:
        later = jnp.flip(jnp.cumsum(jnp.flip(mask, -1), -1), -1)
        return mask & (later == 1)
    position = positions(mask)
    last = row_max(position, mask, initial=-1, segment_ids=segment_ids)
    return mask & (position == to_tokens(last, mask.shape[-1], segment_ids=segment_ids))


def row_cumsum(values: Array, *, segment_ids: Array | None = None) -> Array:
    """Sums the values of each sequence up to and including each position.

    Returns:
      `[..., T]`, the type of the values; integers for booleans.
    """
    if segment_ids is None:
        return jnp.cumsum(values, -1)
    values = values.astype(int) if values.dtype == bool else values

    def combine(before: tuple[Array, Array], after: tuple[Array, Array]) -> tuple[Array, Array]:
        (total, has_start), (added, starts) = before, after
        return jnp.where(starts, added, total + added), has_start | starts

    return jax.lax.associative_scan(combine, (values, row_starts(segment_ids)), axis=-1)[0]


def row_starts(segment_ids: Array) -> Array:
    """Marks the first position of every segment.

    Returns:
      `[..., T]` booleans; True as well at the first of every run that belongs to no segment.
    """
    changes = segment_ids[..., 1:] != segment_ids[..., :-1]
    return jnp.concatenate([jnp.ones_like(segment_ids[..., :1], bool), changes], -1)


def row_ends(segment_ids: Array) -> Array:
    """Marks the last position of every segment.

    Returns:
      `[..., T]` booleans; True as well at the last of every run that belongs to no segment.
    """
    changes = segment_ids[..., 1:] != segment_ids[..., :-1]
    return jnp.concatenate([changes, jnp.ones_like(segment_ids[..., :1], bool)], -1)


def to_tokens(per_row: Array, length: int, *, segment_ids: Array | None = None) -> Array:
    """Gives every token the value of its sequence.

    Args:
      per_row: `[..., S]`, one value per sequence.
      length: the static number `T` of positions.
      segment_ids: `[..., T]`, from `check_segments`.

    Returns:
      `[..., T]`, the type of `per_row`. Positions of no segment hold 0 or False. An id of S or more, which cannot be
      seen under jit, makes a float NaN and a boolean False.
    """
    if segment_ids is None:
        return jnp.broadcast_to(per_row, (*per_row.shape[:-1], length))

    def take(values: Array, ids: Array) -> Array:
        outside = False if values.dtype == bool else None
        return values.at[jnp.maximum(ids, 0)].get(mode="fill", fill_value=outside)

    per_token = _over_rows(take, per_row.ndim)(per_row, segment_ids)
    return jnp.where(segment_ids >= 0, per_token, jnp.zeros((), per_row.dtype))


def to_sequences(per_token: Array, segment_ids: Array) -> Array:
    """Reads one value per segment, at the first position of each, masked or not.

    Args:
      per_token: `[..., T]`, equal over each segment.
      segment_ids: same shape, from `check_segments`.

    Returns:
      `[..., S]` with `S = T`; 0 or False for an id that no position has.
    """
    first = row_starts(segment_ids) & (segment_ids >= 0)
    chosen = jnp.where(first, per_token, jnp.zeros((), per_token.dtype))
    return _per_segment(jax.ops.segment_sum, chosen, segment_ids, None)


def positions(array: Array) -> Array:
    """Numbers the tokens of each row from 0.

    Returns:
      `[..., T]` integers, for an array `[..., T]`.
    """
    return jax.lax.broadcasted_iota(jnp.arange(0).dtype, array.shape, array.ndim - 1)


def _add(values: Array, segment_ids: Array | None, num_segments: int | None) -> Array:
    if segment_ids is None:
        return values.sum(-1, keepdims=True)
    return _per_segment(jax.ops.segment_sum, values, segment_ids, num_segments)


def _per_segment(reduce: Callable[..., Array], values: Array, segment_ids: Array, num_segments: int | None) -> Array:
    """Reduces every segment of every row; an id that is negative or too large reaches no segment."""
    length = values.shape[-1] if num_segments is None else num_segments

    def of_row(values: Array, ids: Array) -> Array:
        return reduce(values, jnp.where(ids < 0, length, ids), num_segments=length)

    return _over_rows(of_row, values.ndim)(values, segment_ids)


def _over_rows(function: Callable[..., Array], ndim: int) -> Callable[..., Array]:
    """Maps a function of single rows over all axes but the last."""
    for _ in range(ndim - 1):
        function = jax.vmap(function)
    return function


def _check_values(ids: np.ndarray) -> None:
    if ids.max() >= ids.shape[-1]:
        raise ValueError(
            f"segment_ids: got {ids.max()}, expected ids below T = {ids.shape[-1]}; number the segments of every row "
            "from 0, and mark padding by a negative id"
        )
    rows = ids.reshape(-1, ids.shape[-1])
    row, first = np.nonzero((rows >= 0) & (np.diff(rows, prepend=-1) != 0))
    runs, count = np.unique(np.stack([row, rows[row, first]]), axis=1, return_counts=True)
    if count.max(initial=0) > 1:
        wrong = rows[runs[0, np.argmax(count > 1)]]
        raise ValueError(f"segment_ids: got {wrong.tolist()}, expected each id in one run of consecutive positions")
