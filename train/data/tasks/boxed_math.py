"""MATH-style problems: records of `problem` and `solution`, with the answer in the last `\\boxed{}` of the solution."""

from collections.abc import Callable
from pathlib import Path

from train.config.errors import UserError
from train.data.answers import THINK_END, last_boxed
from train.data.tasks.equality import shared_judge
from train.data.tasks.records import Record, read_records, text_of
from train.data.tasks.task import Example, Task, correct_and_format

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."


def score(example: Example, completion: str, finished: bool, *, equal: Callable[[str, str], bool]) -> dict[str, float]:
    """Returns named rewards: correct (equal to the answer), format (finished and boxed), reward (weighted sum).

    The answer is read after the last `</think>`, if there is one. `correct` accepts an answer without a box; only
    `format` requires it.
    """
    reply = completion.rpartition(THINK_END)[2]
    boxed = last_boxed(reply)
    correct = bool(reply.strip()) and (boxed == example.answer or equal(example.answer, reply))
    return correct_and_format(float(correct), float(finished and boxed is not None))


def _example(record: Record) -> Example:
    problem = text_of(record, "problem")
    solution = text_of(record, "solution")
    answer = text_of(record, "answer") if "answer" in record.fields else last_boxed(solution)
    if answer is None:
        raise UserError(f"{record.where}: field 'solution': expected a text with \\boxed{{}}, got {solution[-60:]!r}")
    return Example(
        prompt=f"Problem: {problem}\nSolution:",
        answer=answer,
        solution=f" {solution}",
        messages=(("user", f"{problem}\n\n{INSTRUCTION}"),),
    )


def read_examples(path: str | Path | None, field: str) -> list[Example]:
    """Reads examples as `gsm8k.read_examples`, from `problem` and `solution`; a field `answer` needs no box."""
    records = read_records(path, field, expected="'problem' and 'solution'")
    return [_example(record) for record in records]


def load(*, train: str | Path | None, held_out: str | Path | None) -> Task:
    """Loads the task from two sets of records, with math-verify as its verifier.

    Raises:
      UserError: a file is missing or malformed.
    """
    judge = shared_judge()

    def judged(example: Example, completion: str, finished: bool) -> dict[str, float]:
        return score(example, completion, finished, equal=judge.equal)

    return Task(
        "math",
        train=read_examples(train, "data.train"),
        eval=read_examples(held_out, "data.eval"),
        score=judged,
        rewards=("correct", "format"),
        workers=judge.workers,
    )
