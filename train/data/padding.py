"""Padding of ids to the layout of a batch: prompts padded on the left, completions on the right."""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np


class PaddedRows(TypedDict):
    """The arrays of `Completions`, `[B, P + C]`."""

    tokens: np.ndarray
    token_mask: np.ndarray
    completion_mask: np.ndarray
    log_probs: np.ndarray | None
    kept_ids: np.ndarray | None


def pad_rows(
    prompts: Sequence[Sequence[int] | np.ndarray],
    completions: Sequence[Sequence[int] | np.ndarray],
    log_probs: Sequence[Sequence[float]] | None,
    kept_ids: Sequence[Sequence[Sequence[int]]] | None = None,
    *,
    lengths: tuple[int, int],
    pad_id: int,
    kept_tokens: int = 0,
) -> PaddedRows:
    """Pads rows of ids to arrays; the masks come from the row lengths, so the pad id may be sampled.

    Args:
      prompts: prompt ids of each row, at most P.
      completions: completion ids of each row, at most C.
      log_probs: log-prob of each completion id, or None.
      kept_ids: for each completion id the tokens that the sampler kept, at most K; or None.
      lengths: P and C.
      pad_id: padding id.
      kept_tokens: K.

    Raises:
      ValueError: for a row that is longer than P or C.

    Example:
      >>> rows = pad_rows([[5, 6], [7]], [[8], [9, 9]], [[-1.0], [-2.0, -3.0]], lengths=(3, 2), pad_id=0)
      >>> rows["tokens"].tolist()
      [[0, 5, 6, 8, 0], [0, 0, 7, 9, 9]]
      >>> rows["log_probs"].tolist()
      [[0.0, 0.0, 0.0, -1.0, 0.0], [0.0, 0.0, 0.0, -2.0, -3.0]]
    """
    count, (prompt_length, max_new_tokens) = len(prompts), lengths
    tokens = np.full((count, prompt_length + max_new_tokens), pad_id, np.int32)
    token_mask = np.zeros(tokens.shape, bool)
    completion_mask = np.zeros(tokens.shape, bool)
    values = np.zeros(tokens.shape, np.float32)
    kept = np.full((*tokens.shape, kept_tokens), -1, np.int32)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if len(prompt) > prompt_length or len(completion) > max_new_tokens:
            raise ValueError(
                f"row {row}: got {len(prompt)} + {len(completion)} tokens, expected at most "
                f"{prompt_length} + {max_new_tokens}"
            )
        end = prompt_length + len(completion)
        tokens[row, prompt_length - len(prompt) : prompt_length] = prompt
        tokens[row, prompt_length:end] = completion
        token_mask[row, prompt_length - len(prompt) : end] = True
        completion_mask[row, prompt_length:end] = True
        if log_probs is not None:
            values[row, prompt_length:end] = log_probs[row]
        for column, ids in enumerate(kept_ids[row] if kept_ids is not None else (), start=prompt_length):
            kept[row, column, : len(ids)] = ids
    return PaddedRows(
        tokens=tokens,
        token_mask=token_mask,
        completion_mask=completion_mask,
        log_probs=None if log_probs is None else values,
        kept_ids=None if kept_ids is None else kept,
    )
