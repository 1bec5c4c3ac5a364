"""MATH-style problems from records of `problem` and `solution`, the answer in the last `\\boxed{}` of the solution."""

from collections.abc import Callable
from pathlib import Path

from train.config.errors import UserError
from train.data.tasks.equality import shared_judge
from train.data.tasks.records import Record, read_records, text_of
from train.data.tasks.task import Example, Task

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."
BOX = "\\boxed"
CORRECT_WEIGHT = 1.0
FORMAT_WEIGHT = 0.1
THOUGHT_ENDS = "</think>"


def last_boxed(text: str) -> str | None:
    """What the last `\\boxed{...}` of `text` holds, with its braces matched; None if there is none that is closed.

    Example:
      >>> last_boxed(r"so \\boxed{1}, or rather $\\boxed{\\frac{1}{2}}$.")
      '\\\\frac{1}{2}'
    """
    start = text.rfind(BOX + "{")
    if start < 0:
        return None
    start += len(BOX) + 1
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place]
    return None


def score(example: Example, completion: str, finished: bool, *, equal: Callable[[str, str], bool]) -> dict[str, float]:
    """Named rewards: correct (the answer is the right one), format (ended, and boxed), reward (weighted sum).

    The answer is read after the thought, if there is one. An answer that is not boxed counts as well: `format` is what
    asks for the box.
    """
    said = completion.rpartition(THOUGHT_ENDS)[2]
    boxed = last_boxed(said)
    correct = bool(said.strip()) and (boxed == example.answer or equal(example.answer, said))
    format_ = float(finished and boxed is not None)
    return {"reward": CORRECT_WEIGHT * correct + FORMAT_WEIGHT * format_, "correct": float(correct), "format": format_}


def _example(record: Record) -> Example:
    problem, solution = text_of(record, "problem"), text_of(record, "solution")
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
    """As `gsm8k.read_examples`, of `problem` and `solution`; `answer`, where it is given, need not be boxed."""
    records = read_records(path, field, task="math", expected="'problem' and 'solution'")
    return [_example(record) for record in records]


def load(*, train: str | Path | None, held_out: str | Path | None) -> Task:
    """The task of two sets of records, judged by math-verify.

    Raises:
      UserError: a file cannot be used.
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
