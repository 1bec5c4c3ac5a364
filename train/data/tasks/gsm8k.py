"""GSM8K-style word problems: records of `question` and `answer`, which ends in "#### number"."""

import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

from train.config.errors import UserError
from train.data.tasks.equality import shared_judge
from train.data.tasks.records import Record, read_records, text_of
from train.data.tasks.task import Example, Task, correct_and_format

INSTRUCTION = "Reason step by step, then end with '#### ' and the number alone."
MARK = "####"

# Stricter than `Decimal`, which also reads "nan", "1_000" and digits of other scripts.
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)")


def parse_number(text: str) -> Decimal | None:
    """Parses a number, ignoring commas, "$" and trailing periods; returns None for any other text."""
    plain = text.strip().replace(",", "").replace("$", "").rstrip(".")
    return Decimal(plain) if _NUMBER.fullmatch(plain) else None


def final_number(text: str) -> Decimal | None:
    """Parses the first word after the last "####"; returns None if it is no number."""
    words = text.rpartition(MARK)[2].split() if MARK in text else []
    return parse_number(words[0]) if words else None


def well_formed(completion: str) -> bool:
    """Checks that `completion` has one "####", followed by a number and nothing else."""
    return completion.count(MARK) == 1 and parse_number(completion.rpartition(MARK)[2]) is not None


def _rewards(correct: bool, completion: str, finished: bool) -> dict[str, float]:
    return correct_and_format(float(correct), float(finished and well_formed(completion)))


def score(example: Example, completion: str, finished: bool) -> dict[str, float]:
    """Returns named rewards: correct (final number), format (finished, well formed), reward (weighted sum)."""
    number = final_number(completion)
    return _rewards(number is not None and number == Decimal(example.answer), completion, finished)


def judged_text(completion: str) -> str:
    """Returns the text after the last "####", or the whole completion without one."""
    return completion.rpartition(MARK)[2] if MARK in completion else completion


def score_mathematically(
    example: Example, completion: str, finished: bool, *, equal: Callable[[str, str], bool]
) -> dict[str, float]:
    """Scores as `score`, but `correct` needs no "####" and accepts `42/1`, `\\boxed{42}` and `42 apples`.

    A plain number after "####" is compared as a decimal by both judges. A text without a digit has no answer.
    """
    number = final_number(completion)
    if number is not None:
        return score(example, completion, finished)
    text = judged_text(completion)
    correct = any(character.isdecimal() for character in text) and equal(example.answer, text)
    return _rewards(correct, completion, finished)


def _example(record: Record) -> Example:
    question = text_of(record, "question")
    answer = text_of(record, "answer")
    number = final_number(answer)
    if number is None:
        got = f"got {answer[-60:]!r}"
        raise UserError(f"{record.where}: field 'answer': expected a text that ends in '{MARK} number', {got}")
    return Example(
        prompt=f"Question: {question}\nAnswer:",
        answer=str(number),
        solution=f" {answer}",
        messages=(("user", f"{question}\n\n{INSTRUCTION}"),),
    )


def read_examples(path: str | Path | None, field: str) -> list[Example]:
    """Reads the examples of a JSON-lines file (skipping blank lines) or of a dataset, in order.

    Args:
      path: the file, or `datasets:NAME:CONFIG:SPLIT`; None: no examples.
      field: config field of the path, for error messages.

    Raises:
      UserError: the file is unreadable or empty, or a line is malformed (names file, line and field).
    """
    records = read_records(path, field, expected="'question' and 'answer'")
    return [_example(record) for record in records]


def load(*, train: str | Path | None, held_out: str | Path | None, judge: str = "strict") -> Task:
    """Loads the task from two sets of records, both in file order.

    Args:
      train: path of the training records.
      held_out: path of the held-out records.
      judge: "strict" or "math_verify".

    Raises:
      UserError: a file is missing or malformed (see `read_examples`).
    """
    to_train = read_examples(train, "data.train")
    to_eval = read_examples(held_out, "data.eval")
    names = ("correct", "format")
    if judge == "strict":
        return Task("gsm8k", to_train, to_eval, score, rewards=names)
    verifier = shared_judge()

    def mathematical(example: Example, completion: str, finished: bool) -> dict[str, float]:
        return score_mathematically(example, completion, finished, equal=verifier.equal)

    return Task("gsm8k", to_train, to_eval, mathematical, rewards=names, workers=verifier.workers)
