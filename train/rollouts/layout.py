"""Ids of any length in the one layout of a batch: prompts padded on the left, completions on the right."""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np


class Laid(TypedDict):
    """The arrays of `Completions`, `[B, P + C]`."""

    tokens: np.ndarray
    token_mask: np.ndarray
    completion_mask: np.ndarray
    log_probs: np.ndarray | None


def lay_out(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]] | None,
    *,
    lengths: tuple[int, int],
    pad_id: int,
) -> Laid:
    """Rows of ids as arrays; masks come from the lengths of the rows, so that a pad id may be sampled.

    Args:
      prompts: ids of each row, at most P.
      completions: ids of each row, at most C.
      log_probs: one number for each id of a completion, or None.
      lengths: P and C.
      pad_id: what stands where nothing is.

    Example:
      >>> laid = lay_out([[5, 6], [7]], [[8], [9, 9]], [[-1.0], [-2.0, -3.0]], lengths=(3, 2), pad_id=0)
      >>> laid["tokens"].tolist()
      [[0, 5, 6, 8, 0], [0, 0, 7, 9, 9]]
      >>> laid["log_probs"].tolist()
      [[0.0, 0.0, 0.0, -1.0, 0.0], [0.0, 0.0, 0.0, -2.0, -3.0]]
    """
    rows, (width, room) = len(prompts), lengths
    tokens = np.full((rows, width + room), pad_id, np.int32)
    token_mask = np.zeros(tokens.shape, bool)
    completion_mask = np.zeros(tokens.shape, bool)
    values = np.zeros(tokens.shape, np.float32)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if len(prompt) > width or len(completion) > room:
            raise ValueError(
                f"row {row} has {len(prompt)} + {len(completion)} tokens, expected at most {width} + {room}"
            )
        end = width + len(completion)
        tokens[row, width - len(prompt) : end] = [*prompt, *completion]
        token_mask[row, width - len(prompt) : end] = True
        completion_mask[row, width:end] = True
        if log_probs is not None:
            values[row, width:end] = log_probs[row]
    return Laid(
        tokens=tokens,
        token_mask=token_mask,
        completion_mask=completion_mask,
        log_probs=None if log_probs is None else values,
    )
