"""Masks and shifts by position, and how far a function moves when its argument does."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kljax.tools.parity.recipe import MaskRule


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Positions that a mask may get wrong, of each row `[B]`."""

    starts: np.ndarray  # of the prompt, behind padding on the left
    prompts: np.ndarray  # of the first completion token
    lengths: np.ndarray  # after the last token
    complete: np.ndarray  # whether the row ends with an end-of-sequence token; the others are cut at the limit
    ends_known: bool  # whether that token is known; else the longest completions are taken as cut
    tools: np.ndarray | None  # `[B, T]` the tokens of a tool's answer; None if they are not recorded

    def completions(self, length: int) -> np.ndarray:
        """Returns the tokens of the completions, `[B, length]` bool."""
        position = np.arange(length)
        return np.asarray((position >= self.prompts[:, None]) & (position < self.lengths[:, None]))

    def of_rows(self, rows: np.ndarray) -> "RowLayout":
        """Returns the layout of some rows."""
        return RowLayout(*(x[rows] if isinstance(x, np.ndarray) else x for x in vars(self).values()))


def last_positions(mask: np.ndarray) -> np.ndarray:
    """Finds the last True of each row, `[B]`; the last position in a row without one."""
    last: np.ndarray = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
    return last


def tokens_after(mask: np.ndarray) -> np.ndarray:
    """Counts the tokens of a mask from each position to the end of the row, its own included, `[B, T]`."""
    return mask[:, ::-1].cumsum(1)[:, ::-1]


def layout_of(mask: np.ndarray, arrays: Mapping[str, np.ndarray], pad_id: int | None, eos: Sequence[int]) -> RowLayout:
    """Finds the padding on the left and the rows that are cut at the limit."""
    some = mask.any(1)
    lengths = arrays["lengths"] if "lengths" in arrays else np.where(some, last_positions(mask) + 1, 0)
    prompts = arrays["prompt_lengths"] if "prompt_lengths" in arrays else np.where(some, mask.argmax(1), 0)
    tools = arrays["tool_mask"] == 0 if "tool_mask" in arrays else None
    sizes = lengths - prompts
    below = sizes < sizes.max(initial=0)
    if "tokens" not in arrays:
        return RowLayout(np.zeros(len(mask), int), prompts, lengths, below, False, tools)
    tokens = arrays["tokens"]
    behind = tokens[np.arange(mask.shape[1]) >= lengths[:, None]]
    if pad_id is None and behind.size and (behind == behind[0]).all():
        pad_id = int(behind[0])
    starts = np.where((tokens != pad_id).any(1), (tokens != pad_id).argmax(1), 0) if pad_id is not None else 0 * sizes
    last = tokens[np.arange(len(mask)), np.maximum(lengths - 1, 0)]
    if not eos and below.sum() > 1 and len(set(last[below].tolist())) == 1:
        eos = [int(last[below][0])]
    complete = np.isin(last, eos) if eos else below
    return RowLayout(np.minimum(starts, prompts), prompts, lengths, complete, bool(eos), tools)


def apply_rule(mask: np.ndarray, rule: MaskRule, layout: RowLayout) -> np.ndarray:
    """Returns the mask `[B, T]` with the changes of a rule; the mask itself if the rule changes nothing."""
    if rule == MaskRule():
        return mask
    position = np.arange(mask.shape[1])
    start = layout.starts[:, None]
    end = layout.lengths[:, None]
    completions = layout.completions(mask.shape[1])
    cut = ~layout.complete[:, None]
    result = mask.copy()
    if rule.truncated is not None:
        result = result | (completions & cut) if rule.truncated else result & ~cut
    if rule.tools is not None and layout.tools is not None:
        answers = completions & layout.tools & result.any(1, keepdims=True)
        result = result | answers if rule.tools else result & ~answers
    some = result.any(1, keepdims=True)
    first = np.where(some, result.argmax(1)[:, None], end)
    last = np.where(some, last_positions(result)[:, None], -1)
    if rule.prompt:
        result |= some & (position < first) & (position >= start) & (position > 0)
    if rule.left:
        result |= (position < start) & (position > 0)
    if rule.pad:
        result |= position > last
    if rule.extra:
        result |= (position >= end) & (position < end + rule.extra) & (position > 0)
    if rule.last != "all":
        result &= (position != last) | ((rule.last == "cut") & cut)
    if not rule.first:
        result &= position != first
    return shift_rows(result, rule.shift)


def shift_rows(array: np.ndarray, by: int) -> np.ndarray:
    """Moves rows to the right by a number of positions, filled with 0; negative moves to the left."""
    if by == 0:
        return array
    result = np.zeros_like(array)
    if by > 0:
        result[:, by:] = array[:, :-by]
    else:
        result[:, :by] = array[:, -by:]
    return result


def over_tokens(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Repeats the number of each row for its tokens, `[B, T]`; read-only where numbers are repeated."""
    return np.broadcast_to(array[:, None], shape) if array.ndim == 1 else array


def row_mean(values: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Returns the mean of each row over its tokens, `[B, 1]`."""
    mean: np.ndarray = np.where(used, values, 0).sum(1, keepdims=True) / np.maximum(used.sum(1, keepdims=True), 1)
    return mean


def value_and_change(
    function: Callable[[np.ndarray], np.ndarray], at: np.ndarray, move: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a function's value and the largest change that moving its argument up or down makes."""
    value, up, down = (np.asarray(function(point), np.float64) for point in (at, at + move, at - move))
    with np.errstate(all="ignore"):
        return value, np.nan_to_num(np.maximum(np.abs(up - value), np.abs(down - value)))
