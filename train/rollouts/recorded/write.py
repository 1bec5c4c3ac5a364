"""Recording of rollouts, one file per step, in the format of `FileSource`."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kljax._files import check_outside_of_runs, write_text_atomic
from train.config.errors import UserError
from train.distributed.global_arrays import RowSplit
from train.rollouts.recorded.files import count_file, file_name
from train.rollouts.recorded.row_checks import with_checks
from train.rollouts.row_checks import has_holes
from train.rollouts.source import Completions, SourceError
from train.sequences.token_fields import TOKEN_FIELDS, recorded_names
from train.storage.paths import as_path
from train.weights.files import usable_directory


def open_recording(path: str, *, continued: bool) -> Path:
    """Creates or checks the directory of the recordings; a new run needs a directory without recordings.

    Raises:
      UserError: the directory is not writable, or has recordings of another run.
    """
    directory = as_path(path, "rollout.record")
    try:
        check_outside_of_runs(directory, option="rollout.record")
        usable_directory(directory)
    except ValueError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"rollout.record: cannot write to the directory {path!r}: {error.strerror}") from error
    if not continued and any(directory.glob("*.jsonl")):
        raise UserError(f"rollout.record: got {path!r}, which holds recordings already; name a directory of this run")
    return directory


def record_rows(
    completions: Completions, scores: Mapping[str, np.ndarray], split: RowSplit, samples: int, prompt_length: int
) -> list[dict[str, Any]]:
    """Makes the own rows of a batch, with rewards before weights and penalties, which the reading config applies.

    A row with observations says in `completion_mask` which of its `completion_ids` were sampled. One that forked from
    an episode, or has none, says in `episode` which row of its group it belongs to.

    Args:
      completions: of the batch.
      scores: named rewards, each [B].
      split: the own rows.
      samples: rows of a group.
      prompt_length: P.

    Raises:
      SourceError: a row has observations, and kept tokens, which they lack.
    """
    masks = completions.token_mask, completions.completion_mask
    tokens, token_mask, completion_mask = map(split.select_own, (completions.tokens, *masks))
    holes = has_holes(token_mask, completion_mask)
    if holes.any() and "kept_ids" in completions.fields:
        row = int(split.own[np.argmax(holes)])
        raise SourceError(
            f"rollout.record: row {row} has tokens between its completions, as the observations of an episode, which "
            "have no kept_ids; set rollout.record=null"
        )
    recorded = [(key, name) for key, name in recorded_names().items() if name in completions.fields]
    fields = {key: (TOKEN_FIELDS[name], split.select_own(completions.fields[name])) for key, name in recorded}
    after_prompt = np.arange(tokens.shape[1]) >= prompt_length
    episodes = split.own if completions.episode_rows is None else split.select_own(completions.episode_rows)
    rows = []
    for row, (example, text) in enumerate(zip(completions.examples, completions.texts, strict=True)):
        is_completion = token_mask[row] & after_prompt
        is_sampled = completion_mask[row][is_completion]
        number = int(split.own[row])
        record: dict[str, Any] = {
            "group": number // samples,
            "prompt": example.prompt,
            "prompt_ids": tokens[row][token_mask[row] & ~after_prompt].tolist(),
            "completion": text,
            "completion_ids": tokens[row][is_completion].tolist(),
            "finished": bool(completions.finished[row]),
            "answer": example.answer,
            "rewards": {name: float(values[row]) for name, values in scores.items()},
        }
        if not is_sampled.all():
            record["completion_mask"] = is_sampled.tolist()
        if episodes[row] != number:
            place = int(episodes[row]) - number // samples * samples
            record["episode"] = {"row": place if episodes[row] >= 0 else None, "of": samples}
        for key, (field, values) in fields.items():
            of_row = values[row][token_mask[row] if field.prompts else is_completion]
            if field.null is not None and not field.prompts:
                of_row = np.where(is_sampled, of_row, field.null)
            record[key] = field.lists(of_row)
        rows.append(record)
    return rows


def write_rows(directory: Path, step: int, rows: list[dict[str, Any]]) -> None:
    """Writes the file of a step atomically; a step that is repeated after a resume overwrites it.

    Raises:
      SourceError: the file cannot be written.
    """
    lines = "".join(_escape(json.dumps(row, ensure_ascii=False)) + "\n" for row in with_checks(rows))
    file = directory / file_name(step)
    try:
        write_text_atomic(file, lines)
        count_file(directory, step)
    except OSError as error:
        raise SourceError(f"rollout.record: cannot write {file}: {error.strerror}") from error


def _escape(text: str) -> str:
    """Escapes lone surrogates of a prompt or an answer: they have no UTF-8, but JSON can hold them."""
    return re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)
