"""Padding of ids to the layout of a batch: prompts padded on the left, completions on the right."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from train.sequences.token_fields import TOKEN_FIELDS, TokenFields


class PaddedRows(TypedDict):
    """The arrays of `Completions`, `[B, P + C]`."""

    tokens: np.ndarray
    token_mask: np.ndarray
    completion_mask: np.ndarray
    fields: TokenFields


def pad_rows(
    prompts: Sequence[Sequence[int] | np.ndarray],
    completions: Sequence[Sequence[int] | np.ndarray],
    fields: Mapping[str, Sequence[Any]] | None = None,
    *,
    lengths: tuple[int, int],
    pad_id: int,
    sizes: Mapping[str, tuple[int, ...]] | None = None,
) -> PaddedRows:
    """Pads rows of ids to arrays; the masks come from the row lengths, so the pad id may be sampled.

    Args:
      prompts: prompt ids of each row, at most P.
      completions: completion ids of each row, at most C.
      fields: by the names of `TOKEN_FIELDS`, for each row the values of its completion ids, or of all its ids.
      lengths: P and C.
      pad_id: padding id.
      sizes: of the trailing axes of the fields that have any.

    Raises:
      ValueError: for a row that is longer than P or C.

    Example:
      >>> fields = {"rollout_log_probs": [[-1.0], [-2.0, -3.0]]}
      >>> rows = pad_rows([[5, 6], [7]], [[8], [9, 9]], fields, lengths=(3, 2), pad_id=0)
      >>> rows["tokens"].tolist()
      [[0, 5, 6, 8, 0], [0, 0, 7, 9, 9]]
      >>> rows["fields"]["rollout_log_probs"].tolist()
      [[0.0, 0.0, 0.0, -1.0, 0.0], [0.0, 0.0, 0.0, -2.0, -3.0]]
    """
    count = len(prompts)
    prompt_length, max_new_tokens = lengths
    tokens = np.full((count, prompt_length + max_new_tokens), pad_id, np.int32)
    token_mask = np.zeros(tokens.shape, bool)
    completion_mask = np.zeros(tokens.shape, bool)
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
    padded: TokenFields = {}
    for name, values in (fields or {}).items():
        field = TOKEN_FIELDS[name]
        padded[name] = np.full((*tokens.shape, *((sizes or {})[name] if field.axes else ())), field.fill, field.dtype)
        for row, row_values in enumerate(values):
            start = prompt_length - len(prompts[row]) if field.prompts else prompt_length
            field.write(row_values, padded[name][row, start : prompt_length + len(completions[row])])
    return PaddedRows(tokens=tokens, token_mask=token_mask, completion_mask=completion_mask, fields=padded)
