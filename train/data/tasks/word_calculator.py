"""Word problems with larger numbers for an instruct model with a calculator, and demonstrations of its use."""

import dataclasses
import json

from train.data.environments.word_calculator import compute
from train.data.tasks.task import SPLIT_SEED, Example, Task
from train.data.tasks.word_problems import make_problems, numbers_of, score

NUMBERS = range(12, 99)
SIGNS = "+-*"
"""Of the kinds of problems, which come by turns."""
SYSTEM = (
    'You can compute. Write <tool_call>{"name": "calc", "arguments": {"expression": "2*3"}}</tool_call> '
    "and you get the result."
)


def task(problems: int, held_out: int) -> Task:
    """Makes the task.

    Args:
      problems: number of training problems.
      held_out: number of held-out problems; none has the numbers of a training problem of its kind.
    """
    made = make_problems(held_out + problems, SPLIT_SEED, NUMBERS)
    examples = [_demonstrate(example, SIGNS[number % len(SIGNS)]) for number, example in enumerate(made)]
    return Task("word_calculator", train=examples[held_out:], eval=examples[:held_out], score=score)


def _demonstrate(example: Example, operation: str) -> Example:
    """Adds the call and the answer to a problem, and tells the tool, for templates that do not."""
    first, second = numbers_of(example.prompt)
    expression = f"{first}{operation}{second}"
    call = json.dumps({"name": "calc", "arguments": {"expression": expression}})
    turns = (
        ("assistant", f"<tool_call>{call}</tool_call>"),
        ("tool", compute(expression)),
        ("assistant", f"The answer is {example.answer}."),
    )
    return dataclasses.replace(example, messages=(("system", SYSTEM), *example.messages), demonstration=turns)
