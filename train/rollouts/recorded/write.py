"""Recording of rollouts, one file per step, in the format of `FileSource`."""

import json
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kljax._files import check_outside_of_runs, write_text_atomic
from train.config.errors import UserError
from train.distributed.global_arrays import RowSplit
from train.rollouts.recorded.files import count_file, file_name
from train.rollouts.recorded.row_checks import with_checks
from train.rollouts.source import Completions, SourceError
from train.sequences.batch import prompt_lengths
from train.sequences.token_fields import TOKEN_FIELDS, VERSIONS, recorded_names
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


def record_rows(completions: Completions, split: RowSplit, samples: int, longest: int) -> list[dict[str, Any]]:
    """Makes the own rows of a batch, with rewards before weights and penalties, which the reading config applies.

    Rows of episodes, and those with observations, are sequences. One that forked from an episode, or has none, says in
    `episode` which row of its group it belongs to. Other rows have a prompt and a completion.

    Args:
      completions: of the batch, judged.
      split: the own rows.
      samples: rows of a group.
      longest: P, the most tokens of a prompt.
    """
    masks = completions.token_mask, completions.completion_mask
    tokens, token_mask, completion_mask = map(split.select_own, (completions.tokens, *masks))
    recorded = [(key, name) for key, name in recorded_names().items() if name in completions.fields]
    fields = {name: split.select_own(completions.fields[name]) for _, name in recorded}
    episodes = split.own if completions.episode_rows is None else split.select_own(completions.episode_rows)
    prompts = split.select_own(prompt_lengths(completions))
    is_later = np.arange(tokens.shape[1]) >= prompts[:, None]
    is_sequence = completions.episode_rows is not None or (token_mask & ~completion_mask & is_later).any()
    rows = []
    for row, (example, text) in enumerate(zip(completions.examples, completions.texts, strict=True)):
        is_real = token_mask[row]
        number = int(split.own[row])
        ids = tokens[row][is_real].tolist()
        trained = completion_mask[row][is_real]
        prompt = int(prompts[row])
        record: dict[str, Any] = {
            "group": number // samples,
            "prompt": example.prompt,
            **({"ids": ids, "trained": trained.tolist()} if is_sequence else {"prompt_ids": ids[:prompt]}),
            "completion": text,
            **({} if is_sequence else {"completion_ids": ids[prompt:]}),
            "finished": bool(completions.finished[row]),
            "answer": example.answer,
            "rewards": {name: float(values[row]) for name, values in (completions.rewards or {}).items()},
        }
        if is_sequence and prompt != min(trained.argmax() if trained.any() else len(ids), longest):
            record["prompt_length"] = prompt
        if episodes[row] != number or (is_sequence and not trained.any()):
            place = int(episodes[row]) - number // samples * samples
            record["episode"] = {"row": place if episodes[row] >= 0 else None, "of": samples}
        failure = None if completions.failures is None else completions.failures[row]
        if failure is not None:
            record["failure"] = failure.recorded()
        for key, name in recorded:
            of_row = TOKEN_FIELDS[name].lists(fields[name][row][is_real])
            if not TOKEN_FIELDS[name].prompts:
                drawn = [value if is_drawn else None for value, is_drawn in zip(of_row, trained, strict=True)]
                of_row = drawn if is_sequence else of_row[prompt:]
            record["version" if is_sequence and name == VERSIONS else key] = of_row
        rows.append(record)
    return rows


def name_parents(rows: Sequence[dict[str, Any]], samples: int, longest: int) -> list[dict[str, Any]]:
    """Returns the rows of a batch, where a fork has only the ids after those that it shares with its `parent`.

    This is the earlier row of its episode with which it shares most.

    Args:
      rows: of `record_rows`, of all processes.
      samples: rows of a group.
      longest: P, the most tokens of a prompt.
    """
    written = []
    of_episodes: dict[tuple[int, int], list[tuple[int, dict[str, Any]]]] = {}
    for number, row in enumerate(rows):
        group, place = divmod(number, samples)
        episode = row.get("episode", {"row": place})["row"]
        earlier = of_episodes.setdefault((group, place if episode is None else episode), [])
        forks = ((_count_shared(row, parent), at, parent) for at, parent in earlier)
        shared, at, parent = max(forks, key=operator.itemgetter(0), default=(0, place, row))
        earlier.append((place, row))
        record = {name: value[shared:] if isinstance(value, list) else value for name, value in row.items()}
        if shared:
            record["parent"] = {"row": at, "tokens": shared}
            prompt = _prompt_of(row, longest)
            if prompt != min(_prompt_of(parent, longest), shared):
                record["prompt_length"] = prompt
        written.append(record)
    return written


def _prompt_of(row: Mapping[str, Any], longest: int) -> int:
    prompt: int = row.get("prompt_length", min([*row["trained"], True].index(True), longest))
    return prompt


def _count_shared(row: Mapping[str, Any], earlier: Mapping[str, Any]) -> int:
    """Counts the first ids of a row that it does not train, and that an earlier one has with equal values."""
    names = ["ids", *(key for key, name in recorded_names().items() if TOKEN_FIELDS[name].prompts and key in row)]
    most = min(len(row["ids"]), len(earlier["ids"]))
    differs = [row["trained"][n] or any(row[name][n] != earlier[name][n] for name in names) for n in range(most)]
    return [*differs, True].index(True)


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
