"""The task that a function of the user makes, with its examples and its score checked."""

from collections.abc import Iterable
from typing import Any

from train.config.errors import UserError
from train.config.schema import Config
from train.config.user_functions import make_with, user_code
from train.data.tasks.task import Example, Task
from train.data.tasks.user_score import TaskScore
from train.process.waiting import waiting_for


def load_user_task(config: Config) -> Task:
    """Calls the function that `config.task` names, and checks what it returns.

    Raises:
      UserError: the function fails, or its result is no task with examples.
    """
    name = config.task
    with waiting_for(f"task: {name}"):
        made = make_with("task", name, Task, **config.data.arguments)
        splits = {split: _examples(f"task: {name}: {split}", getattr(made, split)) for split in ("train", "eval")}
    for split in ("train", "eval") if config.eval.prompts else ("train",):
        if not splits[split]:
            raise UserError(f"task: {name} returned a task without examples in {split}")
    if not callable(made.score):
        raise UserError(
            f"task: {name}: score: got {made.score!r}, expected a function of (example, completion, finished)"
        )
    if type(made.workers) is not int or made.workers < 1:
        raise UserError(f"task: {name}: workers: got {made.workers!r}, expected an integer >= 1")
    rewards = tuple(made.rewards)
    return Task(str(made.name), **splits, score=TaskScore(name, made.score), rewards=rewards, workers=made.workers)


def _examples(label: str, values: Any) -> list[Example]:
    """Lists examples, which may come from a generator, and checks the texts of each."""
    if not isinstance(values, Iterable):
        raise UserError(f"{label}: got {type(values).__name__}, expected a list of Example")
    with user_code(label):
        examples = list(values)
    for index, example in enumerate(examples):
        if not isinstance(example, Example):
            raise UserError(f"{label}[{index}]: got {type(example).__name__}, expected Example (train.data.tasks)")
        for field in ("prompt", "solution"):
            text = getattr(example, field)
            if not isinstance(text, str):
                raise UserError(f"{label}[{index}].{field}: got {text!r}, expected text")
        for message in example.messages:
            if not isinstance(message, tuple | list) or [type(part) for part in message] != [str, str]:
                raise UserError(f"{label}[{index}].messages: got {message!r}, expected pairs of role and text")
    return examples
