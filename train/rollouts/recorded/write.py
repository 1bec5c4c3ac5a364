"""Recording: what was sampled, judged and trained on, a file a step, in the form that a `FileSource` reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train.config.errors import UserError
from train.rollouts.source import Completions, SourceError
from train.weights.files import usable_directory, write_text_atomic


def open_recording(path: str, *, continued: bool) -> Path:
    """The directory to record to; a new run does not write where there are recordings.

    Raises:
      UserError: it is no directory, cannot be made or written to, or holds recordings of another run.
    """
    directory = Path(path)
    try:
        usable_directory(directory)
    except OSError as error:
        raise UserError(f"rollout.record: cannot write to the directory {path!r}: {error.strerror}") from error
    if not continued and any(directory.glob("*.jsonl")):
        raise UserError(f"rollout.record: got {path!r}, which holds recordings already; name a directory of this run")
    return directory


def record_rows(completions: Completions, scores: Mapping[str, np.ndarray], samples: int) -> list[dict[str, Any]]:
    """The rows of one batch: rewards before weights and penalties, which a reader's config adds; whole log-probs."""
    arrays = completions.tokens, completions.token_mask, completions.completion_mask, completions.log_probs
    tokens, token_mask, completion_mask, log_probs = jax.device_get(arrays)
    rows = []
    for row, (example, text) in enumerate(zip(completions.examples, completions.texts, strict=True)):
        answered = completion_mask[row]
        record: dict[str, Any] = {
            "group": row // samples,
            "prompt": example.prompt,
            "prompt_ids": tokens[row][token_mask[row] & ~answered].tolist(),
            "completion": text,
            "completion_ids": tokens[row][answered].tolist(),
            "finished": bool(completions.finished[row]),
            "answer": example.answer,
            "rewards": {name: float(values[row]) for name, values in scores.items()},
        }
        if log_probs is not None:
            record["log_probs"] = log_probs[row][answered].astype(float).tolist()
        rows.append(record)
    return rows


def write_rows(directory: Path, step: int, rows: list[dict[str, Any]]) -> None:
    """The file of a step, whole or not at all; a step that is run again after a resume writes it again.

    Raises:
      SourceError: it cannot be written.
    """
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file = directory / f"{step:08d}.jsonl"
    try:
        write_text_atomic(file, lines)
    except OSError as error:
        raise SourceError(f"rollout.record: cannot write {file}: {error.strerror}") from error
