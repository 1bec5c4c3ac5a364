"""Padding of rows of ids, which begin at column 0, to the arrays of a batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from train.sequences.token_fields import TOKEN_FIELDS, TokenFields


def pad_rows(
    prompts: Sequence[Sequence[int] | np.ndarray],
    completions: Sequence[Sequence[int] | np.ndarray],
    fields: Mapping[str, Sequence[Any]] | None = None,
    *,
    length: int,
    pad_id: int,
    sizes: Mapping[str, tuple[int, ...]] | None = None,
    sampled: Sequence[Sequence[bool] | np.ndarray] | None = None,
) -> dict[str, Any]:
    """Pads rows of ids to arrays of `Batch` and `Completions`; the pad id may be sampled, as masks come from lengths.

    Args:
      prompts: prompt ids of each row.
      completions: completion ids of each row.
      fields: by the names of `TOKEN_FIELDS`, for each row the values of its completion ids, or of all its ids.
      length: T.
      pad_id: padding id.
      sizes: of the trailing axes of the fields that have any.
      sampled: for each row whether its completion ids were sampled; None: all were.

    Raises:
      ValueError: for a row that is longer than T.

    Example:
      >>> fields = {"rollout_log_probs": [[-1.0], [-2.0, -3.0]]}
      >>> rows = pad_rows([[5, 6], [7]], [[8], [9, 9]], fields, length=4, pad_id=0)
      >>> rows["tokens"].tolist()
      [[5, 6, 8, 0], [7, 9, 9, 0]]
      >>> rows["fields"]["rollout_log_probs"].tolist()
      [[0.0, 0.0, -1.0, 0.0], [0.0, -2.0, -3.0, 0.0]]
    """
    begins = np.array([len(prompt) for prompt in prompts], np.int32)
    ends = begins + np.array([len(completion) for completion in completions], np.int32)
    tokens = np.full((len(prompts), length), pad_id, np.int32)
    completion_mask = np.zeros(tokens.shape, bool)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if ends[row] > length:
            raise ValueError(
                f"row {row}: got {len(prompt)} + {len(completion)} tokens, expected at most {length} together"
            )
        tokens[row, : begins[row]] = prompt
        tokens[row, begins[row] : ends[row]] = completion
        completion_mask[row, begins[row] : ends[row]] = True if sampled is None else sampled[row]
    padded: TokenFields = {}
    for name, values in (fields or {}).items():
        field = TOKEN_FIELDS[name]
        padded[name] = np.full((*tokens.shape, *((sizes or {})[name] if field.axes else ())), field.fill, field.dtype)
        for row, row_values in enumerate(values):
            field.write(row_values, padded[name][row, 0 if field.prompts else begins[row] : ends[row]])
    return {
        "tokens": tokens,
        "token_mask": np.arange(length) < ends[:, None],
        "completion_mask": completion_mask,
        "prompt_lengths": begins,
        "fields": padded,
    }
