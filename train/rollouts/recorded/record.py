"""Parsing and validation of one row of a recording."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any

from train.config.float32 import fits_float32
from train.context import RunContext
from train.data.tasks import Example
from train.data.tokenizers import decode_continuation, encode_continuation
from train.sequences.sample import Failure, Sample
from train.sequences.token_fields import TOKEN_FIELDS, TOKEN_REWARDS, VERSIONS, recorded_names, shorten

SEQUENCE = ("ids", "trained", "version", "rewards", "reward", "parent", "prompt_length", "episode")
"""Keys of a row that is a sequence, beside those of per-token fields."""


_Ids = tuple[list[int], list[bool], int]
"""The ids of a row, which of them are trained, and the length of the prompt."""


@dataclasses.dataclass(kw_only=True)
class RecordedRow(Sample):
    """A sample as it was written down: a validated row, of a sequence, or of a prompt and its completion.

    Attributes:
      group: key that the rows of a prompt share.
      example: the prompt with its answer and all fields of the row.
      episode: the row in its group of the episode that it forked from, -1 if it has none; None: it is one itself.
      group_size: rows of the group that `episode` counts in.
    """

    group: Any
    example: Example
    episode: int | None = None
    group_size: int | None = None


def find_parent(record: Mapping[str, Any], earlier: int) -> int | None:
    """Returns the number in its group of the row that a sequence continues; None if it continues none.

    Args:
      record: the row.
      earlier: rows of its group before it.

    Raises:
      ValueError: `parent` has another form, or there is no such row before it.
    """
    parent = record.get("parent")
    if parent is None or not _is_sequence(record):
        return None
    kinds = {name: type(value) for name, value in parent.items()} if isinstance(parent, dict) else {}
    if kinds not in ({"row": int, "tokens": int}, {"row": int, "tokens": int, "trained": bool}):
        raise ValueError(
            f"parent: got {shorten(parent)}, expected {{'row': an earlier row of the group, 'tokens': its first ids, "
            "which come before `ids`}, and perhaps 'trained': true or false"
        )
    row: int = parent["row"]
    if not 0 <= row < earlier:
        known = f"0 to {earlier - 1}" if earlier else "but this is the first one"
        raise ValueError(f"parent.row: got {row}, expected an earlier row of the group, {known}")
    return row


def parse_row(record: Mapping[str, Any], context: RunContext, parent: RecordedRow | None = None) -> RecordedRow:
    """Parses and checks a row, and encodes its texts if it has no ids.

    Args:
      record: the row.
      context: of the run.
      parent: the row that it continues, which `find_parent` names.

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
    finished = _read_field(record, "finished", bool, "true or false")
    text = record.get("completion")
    episode, group_size = _episode(record)
    if _is_sequence(record):
        ids, trained, prompt_length = _sequence(record, parent, context)
        if not any(trained) and episode is None:
            raise ValueError("trained: got no true, expected a trained id; a row without one says so in `episode`")
        if any(trained) and episode == -1:
            raise ValueError("episode.row: got null, expected a row of the group for a row with trained ids")
        group = ids[:prompt_length] if parent is None else parent.group
    else:
        ids, trained, prompt_length = _completion(record, example, context, finished=finished is not False)
        group = record.get("prompt") if record.get("prompt_ids") is None else record["prompt_ids"]
    if record.get("group") is not None:
        group = record["group"]
    row = RecordedRow(ids, trained, prompt_length, example=example, group=group, episode=episode, group_size=group_size)
    row.fields = _fields(record, row, parent, context)
    row.rewards = _rewards(record, row.fields)
    row.failure = Failure.read(record.get("failure"))
    is_text = not _is_sequence(record) and record.get("completion_ids") is None
    row.finished = is_text or _ended(row.completion_ids, context) if finished is None else finished
    if not isinstance(text, str):
        text = decode_continuation(context.tokenizer, row.prompt_ids, row.completion_ids)
    row.text = text
    return row


def _is_sequence(record: Mapping[str, Any]) -> bool:
    return record.get("ids") is not None


def _sequence(record: Mapping[str, Any], parent: RecordedRow | None, context: RunContext) -> _Ids:
    """Returns the tokens of a row with `ids`, behind those that it shares with its parent."""
    for name in ("prompt_ids", "completion_ids", "completion_mask"):
        if record.get(name) is not None:
            raise ValueError(f"ids: given beside {name}; set only one of them")
    own = _ids(record, "ids", context) or []
    trained = _flags(record, "trained", len(own), "ids")
    # Ids that do not fit before the completion are observations in it, as what a fork shares with its parent is.
    most = context.config.data.max_prompt_length
    shared = 0
    if parent is not None:
        shared = record["parent"]["tokens"]
        if not 1 <= shared <= len(parent.ids):
            raise ValueError(f"parent.tokens: got {shared}, expected 1 to {len(parent.ids)}, the ids of that row")
        own = parent.ids[:shared] + own
        trained = [record["parent"].get("trained", False) and flag for flag in parent.trained[:shared]] + trained
        most = min(parent.prompt_length, shared)
    before = trained.index(True) if any(trained) else len(own)
    if not before:
        problem = "trained: got true for the first id, expected false: it has no log-prob"
        raise ValueError(problem if own else "ids: got an empty list, expected at least one id")
    length = min(before, most) if record.get("prompt_length") is None else record["prompt_length"]
    if type(length) is not int or not 1 <= length <= before:
        raise ValueError(
            f"prompt_length: got {shorten(length)}, expected 1 to {before}, the ids before the first trained one"
        )
    return own, trained, length


def _completion(record: Mapping[str, Any], example: Example, context: RunContext, *, finished: bool) -> _Ids:
    """Returns the tokens of a row with a prompt and a completion; the text of one that is finished gets an EOS."""
    tokenizer = context.tokenizer
    prompt_ids = _ids(record, "prompt_ids", context)
    if prompt_ids is None:
        if "prompt" not in record:
            raise ValueError("missing both prompt_ids and prompt, expected one of them, or ids")
        prompt_ids = tokenizer.prompt_ids(example)
    if not prompt_ids:
        raise ValueError("prompt_ids: got an empty list, expected at least one id")
    ids = _ids(record, "completion_ids", context)
    if ids is None:
        text = _read_field(record, "completion", str, "text")
        if text is None:
            raise ValueError("missing both completion_ids and completion, expected one of them")
        ids = encode_continuation(tokenizer, prompt_ids, text)
        if finished and not _ended(ids, context):
            ids = [*ids, tokenizer.eos_ids[0]]
    sampled = [True] * len(ids)
    if record.get("completion_mask") is not None:
        sampled = _flags(record, "completion_mask", len(record.get("completion_ids") or ()), "completion_ids")
    return prompt_ids + ids, [False] * len(prompt_ids) + sampled, len(prompt_ids)


def _flags(record: Mapping[str, Any], name: str, count: int, ids: str) -> list[bool]:
    flags = record.get(name)
    if not isinstance(flags, list) or not all(isinstance(value, bool) for value in flags):
        raise ValueError(f"{name}: got {shorten(flags)}, expected a list of true and false")
    if len(flags) != count:
        raise ValueError(f"{name}: got {len(flags)} values, expected one for each of {ids}")
    return flags


def _episode(record: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Returns the row of the episode of a row, and the rows of its group."""
    episode = record.get("episode")
    if episode is None:
        return None, None
    # A null in a Parquet file is a field that is missing.
    row, size = (episode.get("row"), episode.get("of")) if isinstance(episode, dict) else (None, None)
    if type(size) is not int or not (row is None or (type(row) is int and 0 <= row < size)):
        raise ValueError(
            f"episode: got {shorten(episode)}, expected {{'row': a row of the group or null, 'of': its rows}}"
        )
    return -1 if row is None else row, size


def _ended(ids: list[int], context: RunContext) -> bool:
    return bool(ids) and ids[-1] in context.tokenizer.eos_ids


def _ids(record: Mapping[str, Any], name: str, context: RunContext) -> list[int] | None:
    values = record.get(name)
    if values is None:
        return None
    size = context.model.config.vocab_size
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < size for value in values):
        raise ValueError(f"{name}: got {shorten(values)}, expected a list of ids from 0 to {size - 1}")
    return values


def _fields(
    record: Mapping[str, Any], row: RecordedRow, parent: RecordedRow | None, context: RunContext
) -> dict[str, list[Any]]:
    """Returns the per-token fields of a row, checked, with a value for each id."""
    shared = 0 if parent is None else record["parent"]["tokens"]
    is_sequence = _is_sequence(record)
    known = {*recorded_names(), *(SEQUENCE if is_sequence else ())}
    for name in record.keys() - known:
        # Fields of the user's own are for the verifier; a slip of the pen would leave out what the run is to use.
        if near := [other for other in difflib.get_close_matches(name, known, 1, 0.85) if other not in record]:
            raise ValueError(f"{name}: unknown field; did you mean {near[0]!r}? Otherwise rename it")
    fields = {}
    for name, (key, values) in _given(record, len(row.ids) - shared).items():
        field = TOKEN_FIELDS[name]
        before = shared if is_sequence else 0 if field.prompts else row.prompt_length
        if not is_sequence and "completion_ids" not in record:
            raise ValueError(f"{key}: given without completion_ids; add completion_ids")
        ids = row.ids[before:]
        if not isinstance(values, list):
            raise ValueError(f"{key}: got {shorten(values)}, expected {field.form}")
        if len(values) != len(ids):
            kind = "lists" if field.axes else "numbers"
            raise ValueError(f"{key}: got {len(values)} {kind}, expected {len(ids)}, one for each id")
        needed = [field.prompts or flag for flag in row.trained]
        # A token that is not trained may have null.
        chosen = [n for n, value in enumerate(values) if needed[before + n] or value is not None]
        known_values = [values[n] for n in chosen]
        sizes = field.sizes(known_values)
        if sizes is None:
            raise ValueError(f"{key}: got {shorten(values)}, expected {field.form}")
        try:
            field.check(known_values, [ids[n] for n in chosen], context.model.config.vocab_size)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        empty = field.empty(sizes)
        earlier = [empty] * before if parent is None else parent.fields.get(name, [empty] * before)[:before]
        fields[name] = [value if has else empty for value, has in zip([*earlier, *values], needed, strict=True)]
    return fields


def _given(record: Mapping[str, Any], count: int) -> dict[str, tuple[str, Any]]:
    """Returns the values of per-token fields by their names, each with its key, for `count` ids."""
    given = {name: (key, record[key]) for key, name in recorded_names().items() if record.get(key) is not None}
    if not _is_sequence(record):
        return given
    short = {"version": VERSIONS, **({"rewards": TOKEN_REWARDS} if isinstance(record.get("rewards"), list) else {})}
    for key, name in short.items():
        value = record.get(key)
        if value is not None:
            if name in given:
                raise ValueError(f"{key}: given beside {given[name][0]}; set only one of them")
            given[name] = key, value if isinstance(value, list) else [value] * count
    return given


def _rewards(record: Mapping[str, Any], fields: Mapping[str, list[Any]]) -> dict[str, float] | None:
    rewards = {} if record.get("rewards") is None else record["rewards"]
    if _is_sequence(record) and isinstance(rewards, list):
        if any(value for value, trained in zip(rewards, record["trained"], strict=True) if not trained):
            raise ValueError(f"rewards: got {shorten(rewards)}, expected 0 or null for ids that are not trained")
        rewards = {"reward": math.fsum(fields[TOKEN_REWARDS])}
    elif _is_sequence(record) and not isinstance(rewards, dict):
        rewards = {"reward": rewards}
    if not isinstance(rewards, dict):
        raise ValueError(f"rewards: got {shorten(rewards)}, expected an object of numbers by name")
    named = dict(rewards) | ({} if record.get("reward") is None else {"reward": record["reward"]})
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
