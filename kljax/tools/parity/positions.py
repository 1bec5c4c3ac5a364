"""Masks and shifts by position, and how far a function moves when its argument does."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from kljax.tools.parity.recipe import MaskRule


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Positions that a mask may get wrong.

    Attributes:
      starts: `[B]` position of the first prompt token, behind padding on the left.
      lengths: `[B]` position after the last token.
      complete: `[B]` bool, rows that end with an end-of-sequence token; the others are cut at the limit.
      ends_known: whether the end-of-sequence token is known; else the longest completions are taken as cut.
      sizes: `[B]` tokens of each completion.
      groups: `[B]` prompt of each row.
      blank: `[B, T]` bool, tokens within rows that the mask or the gradient leaves out.
    """

    starts: np.ndarray
    lengths: np.ndarray
    complete: np.ndarray
    ends_known: bool
    sizes: np.ndarray
    groups: np.ndarray
    blank: np.ndarray


def _interleaved(layout: RowLayout) -> np.ndarray:
    """Returns the first row of every group, then the second of every group, and so on."""
    earlier = (layout.groups[:, None] == layout.groups[None, :]) & np.tri(len(layout.groups), k=-1, dtype=bool)
    return np.lexsort((layout.groups, earlier.sum(1)))


# Where the numbers of a row may come from: the source of each row.
ROW_ORDERS: dict[str, Callable[[RowLayout], np.ndarray]] = {
    "same": lambda layout: np.arange(len(layout.lengths)),
    "above": lambda layout: np.roll(np.arange(len(layout.lengths)), 1),
    "below": lambda layout: np.roll(np.arange(len(layout.lengths)), -1),
    "reversed": lambda layout: np.arange(len(layout.lengths))[::-1],
    "by length": lambda layout: np.argsort(layout.lengths, kind="stable"),
    "longest first": lambda layout: np.argsort(-layout.lengths, kind="stable"),
    "interleaved": _interleaved,
    "gathered": lambda layout: np.argsort(_interleaved(layout)),
}


def last_positions(mask: np.ndarray) -> np.ndarray:
    """Finds the last True of each row, `[B]`; the last position in a row without one.

    Args:
      mask: `[B, T]` bool.
    """
    last: np.ndarray = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
    return last


def layout_of(mask: np.ndarray, arrays: Mapping[str, np.ndarray], pad_id: int | None, eos_id: int | None) -> RowLayout:
    """Finds the padding on the left and the rows that are cut at the limit.

    Args:
      mask: `[B, T]` bool, the recorded mask; `lengths` and `prompt_lengths` take precedence.
      arrays: recorded arrays; without `tokens` no row has padding on its left.
      pad_id: None takes the token behind the rows, if it is always the same.
      eos_id: None takes the last token of the rows below the limit, if they share one.
    """
    rows, positions = np.arange(len(mask)), np.arange(mask.shape[1])
    some = mask.any(1)
    lengths = arrays.get("lengths", np.where(some, last_positions(mask) + 1, 0))
    prompts = arrays.get("prompt_lengths", np.where(some, mask.argmax(1), 0))
    tokens, sizes = arrays.get("tokens"), lengths - prompts
    below = sizes < sizes.max(initial=0)
    groups, blank = arrays.get("group_ids", rows), _blank(mask, prompts, lengths, arrays)
    if tokens is None:
        return RowLayout(np.zeros(len(mask), int), lengths, below, False, sizes, groups, blank)
    behind = tokens[positions >= lengths[:, None]]
    if pad_id is None and behind.size and (behind == behind[0]).all():
        pad_id = int(behind[0])
    starts = np.where((tokens != pad_id).any(1), (tokens != pad_id).argmax(1), 0) if pad_id is not None else 0 * sizes
    last = tokens[rows, np.maximum(lengths - 1, 0)]
    if eos_id is None and below.sum() > 1 and len(set(last[below].tolist())) == 1:
        eos_id = int(last[below][0])
    known = eos_id is not None
    complete = last == eos_id if known else below
    return RowLayout(np.minimum(starts, prompts), lengths, complete, known, sizes, groups, blank)


def _blank(mask: np.ndarray, prompts: np.ndarray, lengths: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Finds the tokens of completions that the mask leaves out, or else tokens of the mask without a gradient.

    Only where they lie within a row, between tokens that are trained, does a rule of their own say something.
    """
    position, gradient = np.arange(mask.shape[1]), arrays.get("grad_log_probs")
    inside = (position >= prompts[:, None]) & (position < lengths[:, None])
    trained = mask
    if gradient is not None and not (inside & ~mask).any():
        # A token without a loss has no gradient in any case.
        kl, token_loss = (
            arrays.get(name, np.full(mask.shape, other)) for name, other in (("kl", 0), ("token_loss", 1))
        )
        trained = mask & ((gradient != 0) | ((token_loss == 0) & (kl == 0)))
    blank = (inside | mask) & ~trained
    before, after = np.maximum.accumulate(trained, 1), np.maximum.accumulate(trained[:, ::-1], 1)[:, ::-1]
    none: np.ndarray = np.zeros_like(mask)
    return np.asarray(blank) if (blank & before & after).any() else none


def apply_rule(mask: np.ndarray, rule: MaskRule, layout: RowLayout) -> np.ndarray:
    """Returns the mask with the faults of a rule.

    Args:
      mask: `[B, T]` bool, the tokens of the completions.

    Returns:
      `[B, T]` bool, a copy.
    """
    position, start = np.arange(mask.shape[1]), layout.starts[:, None]
    some = mask.any(1, keepdims=True)
    first = np.where(some, mask.argmax(1)[:, None], layout.lengths[:, None])
    last = np.where(some, last_positions(mask)[:, None], -1)
    result = mask.copy()
    if rule.prompt != "none":
        result |= some & (position < first) & (position >= start + (rule.prompt == "predicted")) & (position > 0)
    if rule.left:
        result |= (position < start) & (position > 0)
    if rule.pad:
        result |= position > last
    if rule.extra:
        end = layout.lengths[:, None]
        result |= (position >= end) & (position < end + rule.extra) & (position > 0)
    if rule.before:
        result |= (position < first) & (position >= first - rule.before) & (position > 0)
    if rule.last != "all":
        result &= (position != last) | ((rule.last == "cut") & ~layout.complete[:, None])
    return shift_rows(_without_left_out(result, first, last, rule, layout), rule.shift)


def _without_left_out(
    mask: np.ndarray, first: np.ndarray, last: np.ndarray, rule: MaskRule, layout: RowLayout
) -> np.ndarray:
    """Takes the tokens out of a mask that a rule leaves out, besides last tokens; changes and returns the mask."""
    position = np.arange(mask.shape[1])
    if not rule.first:
        mask &= position != first
    if rule.size is not None:
        mask &= position < first + rule.size
    if rule.tail is not None:
        mask &= position > last - rule.tail
    if rule.longest:
        mask &= position >= (layout.lengths - layout.sizes).max(initial=0)
    if not rule.inside:
        mask &= ~layout.blank
    if not rule.final:
        mask[-1] = False
    if not rule.cut:
        mask &= layout.complete[:, None]
    return mask


def shift_rows(array: np.ndarray, by: int) -> np.ndarray:
    """Moves rows to the right by a number of positions, filled with 0; negative moves to the left.

    Args:
      array: `[B, T]`.

    Returns:
      `[B, T]`, the dtype of the array; the array itself if `by` is 0.
    """
    if by == 0:
        return array
    result = np.zeros_like(array)
    if by > 0:
        result[:, by:] = array[:, :-by]
    else:
        result[:, :by] = array[:, -by:]
    return result


def over_tokens(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Repeats the number of each row for its tokens.

    Args:
      array: `[B]`, or `[B, T]`, which stays as it is.
      shape: `(B, T)`.

    Returns:
      `[B, T]`; read-only where numbers are repeated.
    """
    return np.broadcast_to(array[:, None], shape) if array.ndim == 1 else array


def value_and_change(
    function: Callable[[np.ndarray], np.ndarray], at: np.ndarray, move: np.ndarray, *, stacked: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a function's value and the largest change that moving its argument up or down makes.

    Args:
      function: of arrays, number by number or row by row.
      move: how far each number of the argument moves, of its shape.
      stacked: whether the function takes arguments with a leading axis, so that it is called once.

    Returns:
      Value and change in float64; the change is 0 where it is not a number.
    """
    points = np.stack([at, at + move, at - move])
    value, up, down = np.asarray(function(points) if stacked else [function(point) for point in points], np.float64)
    with np.errstate(all="ignore"):
        return value, np.nan_to_num(np.maximum(np.abs(up - value), np.abs(down - value)))
