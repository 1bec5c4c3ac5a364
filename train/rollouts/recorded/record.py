"""Parsing and validation of one row of a recording."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from train.config.float32 import fits_float32
from train.context import RunContext
from train.data.tasks import Example
from train.data.tokenizers import Tokenizer, decode_continuation, encode_continuation
from train.sequences.token_fields import TOKEN_FIELDS, recorded_names, shorten


@dataclasses.dataclass(frozen=True)
class RecordedCompletion:
    """A validated row.

    Attributes:
      group: key that the completions of a prompt share.
      prompt_ids, completion_ids: token ids, including BOS and EOS.
      text: text of the completion, for the verifier.
      fields: by the names of `TOKEN_FIELDS`, the values of each completion id, or of each id.
      finished: whether the completion ended with EOS or a stop.
      rewards: named rewards, including "reward"; None means that the task scores the completion.
      example: the prompt with its answer and all fields of the row.
      sampled: for each completion id whether it was sampled, and is no observation; None: all were.
      episode: the row in its group of the episode that it forked from, -1 if it has none; None: it is one itself.
      group_size: rows of the group that `episode` counts in.
    """

    group: Any
    prompt_ids: list[int]
    completion_ids: list[int]
    text: str
    fields: dict[str, list[Any]]
    finished: bool
    rewards: dict[str, float] | None
    example: Example
    sampled: list[bool] | None = None
    episode: int | None = None
    group_size: int | None = None


def parse_row(record: Mapping[str, Any], context: RunContext) -> RecordedCompletion:
    """Parses and checks a row, and encodes its texts if it has no ids.

    Raises:
      ValueError: a field is missing or wrong; names it with the value and the expected value.
    """
    answer = record.get("answer", "")
    if isinstance(answer, bytes):  # a column of Parquet without the type of text
        raise ValueError(f"answer: got {shorten(answer)}, expected text or a number")
    example = Example(
        _read_field(record, "prompt", str, "text") or "",
        str(answer),
        _read_field(record, "solution", str, "text") or "",
        record=record,
    )
    prompt_ids = _ids(record, "prompt_ids", context)
    if prompt_ids is None:
        if "prompt" not in record:
            raise ValueError("missing both prompt_ids and prompt, expected one of them")
        prompt_ids = context.tokenizer.prompt_ids(example)
    if not prompt_ids:
        raise ValueError("prompt_ids: got an empty list, expected at least one id")
    completion_ids, finished = _completion(record, prompt_ids, context)
    text = record.get("completion")
    episode, group_size = _episode(record)
    return RecordedCompletion(
        group=record.get("group", record.get("prompt_ids", record.get("prompt"))),
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        text=text if isinstance(text, str) else decode_continuation(context.tokenizer, prompt_ids, completion_ids),
        fields=_fields(record, prompt_ids, completion_ids, context),
        finished=finished,
        rewards=_rewards(record),
        example=example,
        sampled=_sampled(record, completion_ids),
        episode=episode,
        group_size=group_size,
    )


def _sampled(record: Mapping[str, Any], completion_ids: list[int]) -> list[bool] | None:
    """Returns which completion ids were sampled."""
    mask = record.get("completion_mask")
    if mask is None:
        return None
    if not isinstance(mask, list) or not all(isinstance(value, bool) for value in mask):
        raise ValueError(f"completion_mask: got {shorten(mask)}, expected a list of true and false")
    if len(mask) != len(completion_ids) or "completion_ids" not in record:
        raise ValueError(f"completion_mask: got {len(mask)} values, expected one for each of completion_ids")
    return mask


def _episode(record: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Returns the row of the episode of a row, and the rows of its group."""
    episode = record.get("episode")
    if episode is None:
        return None, None
    row = episode.get("row", "") if isinstance(episode, dict) else ""
    size = episode.get("of") if isinstance(episode, dict) else None
    if type(size) is not int or not (row is None or (type(row) is int and 0 <= row < size)):
        raise ValueError(
            f"episode: got {shorten(episode)}, expected {{'row': a row of the group or null, 'of': its rows}}"
        )
    return -1 if row is None else row, size


def _completion(record: Mapping[str, Any], prompt_ids: list[int], context: RunContext) -> tuple[list[int], bool]:
    """Returns the ids and `finished`, which defaults to whether the last id is an EOS id."""
    tokenizer = context.tokenizer
    finished = _read_field(record, "finished", bool, "true or false")
    ids = _ids(record, "completion_ids", context)
    if ids is not None:
        return ids, _ended(ids, tokenizer) if finished is None else finished
    text = _read_field(record, "completion", str, "text")
    if text is None:
        raise ValueError("missing both completion_ids and completion, expected one of them")
    finished = True if finished is None else finished
    ids = encode_continuation(tokenizer, prompt_ids, text)
    return ids if _ended(ids, tokenizer) or not finished else [*ids, tokenizer.eos_ids[0]], finished


def _ended(ids: list[int], tokenizer: Tokenizer) -> bool:
    return bool(ids) and ids[-1] in tokenizer.eos_ids


def _ids(record: Mapping[str, Any], name: str, context: RunContext) -> list[int] | None:
    values = record.get(name)
    if values is None:
        return None
    if not _are_ids(values, context):
        size = context.model.config.vocab_size
        raise ValueError(f"{name}: got {shorten(values)}, expected a list of ids from 0 to {size - 1}")
    return values


def _are_ids(values: Any, context: RunContext) -> bool:
    """Whether a value is a list of ids of the vocabulary."""
    size = context.model.config.vocab_size
    return isinstance(values, list) and all(type(value) is int and 0 <= value < size for value in values)


def _fields(
    record: Mapping[str, Any], prompt_ids: list[int], completion_ids: list[int], context: RunContext
) -> dict[str, list[Any]]:
    """Returns the per-token fields of a row, checked."""
    known = recorded_names()
    fields = {}
    for name in record.keys() - known.keys():
        # Fields of the user's own are for the verifier; a slip of the pen would leave out what the run is to use.
        if near := [other for other in difflib.get_close_matches(name, known, 1, 0.85) if other not in record]:
            raise ValueError(f"{name}: unknown field; did you mean {near[0]!r}? Otherwise rename it")
    for key, name in known.items():
        values = record.get(key)
        if values is None:
            continue
        field = TOKEN_FIELDS[name]
        ids = prompt_ids + completion_ids if field.prompts else completion_ids
        if "completion_ids" not in record:
            raise ValueError(f"{key}: given without completion_ids; add completion_ids")
        if field.sizes(values) is None:
            raise ValueError(f"{key}: got {shorten(values)}, expected {field.form}")
        if len(values) != len(ids):
            kind = "lists" if field.axes else "numbers"
            raise ValueError(f"{key}: got {len(values)} {kind}, expected {len(ids)}, one for each id")
        try:
            field.check(values, ids, context.model.config.vocab_size)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        fields[name] = values
    return fields


def _rewards(record: Mapping[str, Any]) -> dict[str, float] | None:
    rewards = record.get("rewards", {})
    if not isinstance(rewards, dict):
        raise ValueError(f"rewards: got {shorten(rewards)}, expected an object of numbers by name")
    named = dict(rewards) | ({"reward": record["reward"]} if "reward" in record else {})
    if not named:
        return None
    for name, value in named.items():
        if not fits_float32(value):
            raise ValueError(f"rewards.{name}: got {shorten(value)}, expected a finite number (float32)")
    if "reward" not in named:
        raise ValueError(f"rewards: got {', '.join(named)}, expected 'reward' among them")
    return {name: float(value) for name, value in named.items()}


def _read_field(record: Mapping[str, Any], name: str, kind: type, expected: str) -> Any:
    value = record.get(name)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name}: got {shorten(value)}, expected {expected}")
    return value
