"""A user-defined task: JSON lines of prompts, and a reward function given by name.

The function is called as `function(record, completion, finished)` with the fields of the line, the text of the
completion, and whether it ended with EOS. It returns a number, or a mapping of names to numbers with "reward" or the
names in `rewards.weights`. Accuracy averages "correct" (0 or 1); the default is 1 for a reward of at least 1.
"""

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from train.config.errors import UserError
from train.data.tasks.records import Record, read_records, text_of
from train.data.tasks.task import Example, Task

RewardFunction = Callable[[Mapping[str, Any], str, bool], float | Mapping[str, float]]


def _module(name: str) -> Any:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    if spec is None or spec.loader is None or not Path(name).is_file():
        raise ModuleNotFoundError(f"there is no file {name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    spec.loader.exec_module(module)
    return module


def find_function(name: str) -> RewardFunction:
    """Imports `module:function` or `path/to/file.py:function`.

    Raises:
      UserError: the import fails, or the object is not callable.
    """
    source, _, attribute = name.rpartition(":")
    try:
        function = getattr(_module(source), attribute)
    except Exception as error:  # any error of the user's module
        raise UserError(f"data.reward: cannot import {name!r}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise UserError(f"data.reward: got {name!r}, a {type(function).__name__}, expected a function")
    return function


def _named_rewards(returned: Any, where: str) -> dict[str, float]:
    """Converts the result of the reward function to named rewards."""
    named = dict(returned) if isinstance(returned, Mapping) else {"reward": returned}
    for name, value in named.items():
        if not isinstance(name, str) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"{where}: returned {name!r}: {value!r}, expected names and finite numbers")
    values = {name: float(value) for name, value in named.items()}
    if "correct" not in values:
        values["correct"] = float(values.get("reward", 0.0) >= 1)
    return values


def make_verifier(function: RewardFunction, name: str) -> Callable[[Example, str, bool], dict[str, float]]:
    """Wraps a reward function as a verifier; its errors name the example and end the run."""

    def score(example: Example, completion: str, finished: bool) -> dict[str, float]:
        where = f"data.reward: {name} for the prompt {example.prompt[:80]!r} and the completion {completion[:80]!r}"
        try:
            returned = function(example.record, completion, finished)
        except Exception as error:
            raise UserError(f"{where}: {type(error).__name__}: {error}") from error
        return _named_rewards(returned, where)

    return score


def _messages(value: Any, record: Record, field: str) -> tuple[tuple[str, str], ...]:
    def is_message(item: Any) -> bool:
        return isinstance(item, dict) and all(isinstance(item.get(name), str) for name in ("role", "content"))

    if not value or not all(is_message(item) for item in value):
        raise UserError(f"{record.where}: field {field!r}: expected text, or messages with 'role' and 'content'")
    return tuple((item["role"], item["content"]) for item in value)


def _optional(record: Record, name: str) -> str:
    value = record.fields.get(name, "")
    return value if isinstance(value, str) else str(value)


def read_examples(path: str | Path | None, field: str, *, prompt: str, answer: str, solution: str) -> list[Example]:
    """Reads the examples of a file or dataset in order; `prompt`, `answer` and `solution` are names of fields.

    A prompt may be a list of messages. A model without a chat template gets them as lines of `role: content`.

    Raises:
      UserError: the file is empty, or a line is malformed (names file, line and field).
    """
    examples = []
    for record in read_records(path, field, task="jsonl", expected=f"{prompt!r}"):
        messages: tuple[tuple[str, str], ...] = ()
        if isinstance(record.fields.get(prompt), list):
            messages = _messages(record.fields[prompt], record, prompt)
            text = "\n".join(f"{role}: {content}" for role, content in messages)
        else:
            text = text_of(record, prompt)
        examples.append(
            Example(text, _optional(record, answer), _optional(record, solution), messages, record=record.fields)
        )
    return examples


def load(
    *,
    train: str | Path | None,
    held_out: str | Path | None,
    reward: str | None,
    prompt: str,
    answer: str,
    solution: str,
) -> Task:
    """Loads the task from two sets of records and a reward function.

    Raises:
      UserError: a file is missing or malformed, or the function cannot be imported.
    """
    if reward is None:
        raise UserError("data.reward: missing; task jsonl needs a reward function: set data.reward=module:function")
    names = {"prompt": prompt, "answer": answer, "solution": solution}
    return Task(
        "jsonl",
        train=read_examples(train, "data.train", **names),
        eval=read_examples(held_out, "data.eval", **names),
        score=make_verifier(find_function(reward), reward),
    )
