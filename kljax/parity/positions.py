"""Masks and shifts by position, and how far a function moves when its argument does."""

from collections.abc import Callable

import numpy as np

from kljax.parity.recipe import MaskRule


def apply_rule(mask: np.ndarray, rule: MaskRule) -> np.ndarray:
    """Returns the mask with the faults of a rule.

    Args:
      mask: `[B, T]` bool, the tokens of the completions.

    Returns:
      `[B, T]` bool, a copy.
    """
    position = np.arange(mask.shape[1])
    some = mask.any(1, keepdims=True)
    first = np.where(some, mask.argmax(1)[:, None], 0)
    last = np.where(some, mask.shape[1] - 1 - mask[:, ::-1].argmax(1)[:, None], -1)
    result = mask.copy()
    if rule.prompt:
        result |= some & (position < first) & (position > 0)
    if rule.pad:
        result |= position > last
    if not rule.last:
        result &= position != last
    return shift_rows(result, rule.shift)


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
    function: Callable[[np.ndarray], np.ndarray], at: np.ndarray, move: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a function's value and the largest change that moving its argument up or down makes.

    Args:
      function: of arrays, number by number or row by row.
      move: how far each number of the argument moves, of its shape.

    Returns:
      Value and change in float64; the change is 0 where it is not a number.
    """
    value, up, down = (np.asarray(function(at + sign * move), np.float64) for sign in (0, 1, -1))
    with np.errstate(all="ignore"):
        return value, np.nan_to_num(np.maximum(np.abs(up - value), np.abs(down - value)))
