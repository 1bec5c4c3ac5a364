"""One recorded completion: what a row may hold, and what is wrong with it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from train.data.prompts import encode_prompts
from train.data.tasks import Example
from train.rollouts.context import RunContext


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A row, checked.

    Attributes:
      group: what the completions of one prompt have in common.
      prompt_ids, completion_ids: tokens, those that begin and end a sequence included.
      text: the completion, which a task judges.
      log_probs: one for each id of the completion, or None.
      finished: the completion ended by itself.
      rewards: named, with "reward", the one that is optimised; None: the task judges.
      example: the prompt with its answer and whatever else the row has.
    """

    group: Any
    prompt_ids: list[int]
    completion_ids: list[int]
    text: str
    log_probs: list[float] | None
    finished: bool
    rewards: dict[str, float] | None
    example: Example


def read_record(record: Mapping[str, Any], context: RunContext) -> Recorded:
    """A row as the trainer needs it.

    Raises:
      ValueError: names the field, what was got and what was expected.
    """
    example = Example(
        _typed(record, "prompt", str, "text") or "",
        str(record.get("answer", "")),
        _typed(record, "solution", str, "text") or "",
        record=record,
    )
    prompt_ids = _ids(record, "prompt_ids", context)
    if prompt_ids is None:
        if "prompt" not in record:
            raise ValueError("missing both prompt_ids and prompt, expected one of them")
        prompt_ids = _encoded_prompt(example, context)
    if not prompt_ids:
        raise ValueError("prompt_ids: got an empty list, expected at least one id")
    completion_ids, finished = _completion(record, context)
    text = record.get("completion")
    return Recorded(
        group=record.get("group", record.get("prompt_ids", record.get("prompt"))),
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        text=text if isinstance(text, str) else context.tokenizer.decode(completion_ids),
        log_probs=_log_probs(record, completion_ids),
        finished=finished,
        rewards=_rewards(record),
        example=example,
    )


def _encoded_prompt(example: Example, context: RunContext) -> list[int]:
    """The ids that a run would show for this text, however long."""
    ids = context.tokenizer.prompt_ids(example)
    tokens, mask = encode_prompts([example], context.tokenizer, len(ids))
    return tokens[mask].tolist()


def _completion(record: Mapping[str, Any], context: RunContext) -> tuple[list[int], bool]:
    """Ids, and whether they ended by themselves: as the row says, else by what the last id is."""
    said = _typed(record, "finished", bool, "true or false")
    ids = _ids(record, "completion_ids", context)
    if ids is not None:
        ended = bool(ids) and ids[-1] in context.tokenizer.eos_ids
        return ids, ended if said is None else said
    text = _typed(record, "completion", str, "text")
    if text is None:
        raise ValueError("missing both completion_ids and completion, expected one of them")
    finished = True if said is None else said
    return context.tokenizer.encode(text) + [context.tokenizer.eos_ids[0]] * finished, finished


def _ids(record: Mapping[str, Any], name: str, context: RunContext) -> list[int] | None:
    values = record.get(name)
    if values is None:
        return None
    size = context.model.config.vocab_size
    wrong = not isinstance(values, list) or any(type(v) is not int or not 0 <= v < size for v in values)
    if wrong:
        raise ValueError(f"{name}: got {_shown(values)}, expected a list of ids from 0 to {size - 1}")
    return values


def _log_probs(record: Mapping[str, Any], completion_ids: list[int]) -> list[float] | None:
    values = record.get("log_probs")
    if values is None:
        return None
    if "completion_ids" not in record:
        raise ValueError("log_probs: given without completion_ids, so there are no ids that they belong to")
    if not isinstance(values, list) or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        raise ValueError(f"log_probs: got {_shown(values)}, expected a list of numbers")
    if len(values) != len(completion_ids):
        raise ValueError(f"log_probs: got {len(values)} numbers, expected {len(completion_ids)}, one for each id")
    if not all(math.isfinite(value) and value <= 1e-4 for value in values):
        raise ValueError(f"log_probs: got {_shown(values)}, expected finite numbers that are not positive")
    return [float(value) for value in values]


def _rewards(record: Mapping[str, Any]) -> dict[str, float] | None:
    rewards = record.get("rewards", {})
    if not isinstance(rewards, dict):
        raise ValueError(f"rewards: got {_shown(rewards)}, expected an object of numbers by name")
    found = dict(rewards) | ({"reward": record["reward"]} if "reward" in record else {})
    if not found:
        return None
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"rewards.{name}: got {_shown(value)}, expected a finite number")
    if "reward" not in found:
        raise ValueError(f"rewards: got {', '.join(found)}, expected 'reward' among them, which is optimised")
    return {name: float(value) for name, value in found.items()}


def _typed(record: Mapping[str, Any], name: str, kind: type, expected: str) -> Any:
    value = record.get(name)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name}: got {_shown(value)}, expected {expected}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
