"""A user-defined task: JSON lines of prompts, and a reward function given by name.

The function is called as `function(record, completion, finished)` with the fields of the line, the text of the
completion, and whether it ended with EOS. It returns a number, or a mapping of names to numbers with "reward" or the
names in `rewards.weights`. Accuracy averages "correct" (0 or 1); the default is 1 for a reward of at least 1.
"""

from pathlib import Path
from typing import Any

from train.config.errors import UserError
from train.data.reward_signature import RecordFields
from train.data.tasks.records import Record, read_records, text_of
from train.data.tasks.reward_function import Verifier
from train.data.tasks.task import Example, Task


def _messages(value: Any, record: Record, field: str) -> tuple[tuple[str, str], ...]:
    def is_message(item: Any) -> bool:
        return isinstance(item, dict) and all(isinstance(item.get(name), str) for name in ("role", "content"))

    if not value or not all(is_message(item) for item in value):
        raise UserError(f"{record.where}: field {field!r}: expected text, or messages with 'role' and 'content'")
    return tuple((item["role"], item["content"]) for item in value)


def _optional(record: Record, name: str) -> str:
    value = record.fields.get(name)
    return "" if value is None else str(value)


def read_examples(path: str | Path | None, field: str, *, prompt: str, answer: str, solution: str) -> list[Example]:
    """Reads the examples of a file or dataset in order; `prompt`, `answer` and `solution` are names of fields.

    A prompt may be a list of messages. A model without a chat template gets them as lines of `role: content`.

    Raises:
      UserError: the file is empty, or a line is malformed (names file, line and field).
    """
    examples = []
    for record in read_records(path, field, expected=f"{prompt!r}"):
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
    workers: int,
    timeout: float,
) -> Task:
    """Loads the task from two sets of records and a reward function, which `workers` processes call.

    Raises:
      UserError: a file is missing or malformed, or the function cannot be imported.
    """
    if reward is None:
        raise UserError("data.reward: missing; task jsonl needs a reward function: set data.reward=module:function")
    names = {"prompt": prompt, "answer": answer, "solution": solution}
    to_train = read_examples(train, "data.train", **names)
    to_eval = read_examples(held_out, "data.eval", **names)
    first = next((example.record for example in (*to_train[:1], *to_eval[:1])), {})
    return Task(
        "jsonl",
        train=to_train,
        eval=to_eval,
        score=Verifier(reward, workers=workers, timeout=timeout, fields=RecordFields(prompt, answer, tuple(first))),
        workers=max(workers, 1),
    )
