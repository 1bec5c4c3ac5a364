"""GSM8K-style word problems from JSON lines of `question` and `answer`, the answer ending in "#### number"."""

import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

from train.config.errors import UserError
from train.data.tasks.equality import shared_judge
from train.data.tasks.records import Record, read_records, text_of
from train.data.tasks.task import Example, Task

INSTRUCTION = "Reason step by step, then end with '#### ' and the number alone."
MARK = "####"
CORRECT_WEIGHT = 1.0
FORMAT_WEIGHT = 0.1

# Stricter than `Decimal`, which also reads "nan", "1_000" and digits of other scripts.
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)")


def parse_number(text: str) -> Decimal | None:
    """The number that `text` is, without commas, "$" and trailing periods; None if it is not one."""
    plain = text.strip().replace(",", "").replace("$", "").rstrip(".")
    return Decimal(plain) if _NUMBER.fullmatch(plain) else None


def final_number(text: str) -> Decimal | None:
    """The number in the first word after the last "####" of `text`, or None."""
    words = text.rpartition(MARK)[2].split() if MARK in text else []
    return parse_number(words[0]) if words else None


def well_formed(completion: str) -> bool:
    """Whether `completion` has one "####", followed by a number and by nothing else."""
    return completion.count(MARK) == 1 and parse_number(completion.rpartition(MARK)[2]) is not None


def _rewards(correct: bool, completion: str, finished: bool) -> dict[str, float]:
    format_ = float(finished and well_formed(completion))
    return {"reward": CORRECT_WEIGHT * correct + FORMAT_WEIGHT * format_, "correct": float(correct), "format": format_}


def score(example: Example, completion: str, finished: bool) -> dict[str, float]:
    """Named rewards: correct (the final number is the answer), format (ended, well formed), reward (weighted sum)."""
    number = final_number(completion)
    return _rewards(number is not None and number == Decimal(example.answer), completion, finished)


def judged_text(completion: str) -> str:
    """What holds the answer: what is after the last "####", or all that was written."""
    return completion.rpartition(MARK)[2] if MARK in completion else completion


def score_mathematically(
    example: Example, completion: str, finished: bool, *, equal: Callable[[str, str], bool]
) -> dict[str, float]:
    """As `score`, but `correct` needs no "####" and knows `42/1`, `\\boxed{42}` and `42 apples`; `format` is as strict.

    Where a plain number stands after "####", both judges compare decimals; a text without a digit has no answer.
    """
    number = final_number(completion)
    if number is not None:
        return score(example, completion, finished)
    text = judged_text(completion)
    found = any(character.isdecimal() for character in text) and equal(example.answer, text)
    return _rewards(found, completion, finished)


def _example(record: Record) -> Example:
    question, answer = text_of(record, "question"), text_of(record, "answer")
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
    """The examples of a JSON-lines file (blank lines skipped) or of a data set, in its order.

    Args:
      path: the file, or `datasets:NAME:CONFIG:SPLIT`.
      field: the setting that named it, for the error messages.

    Raises:
      UserError: `path` is None or unreadable, no line is there, or one is malformed (names file, line and field).
    """
    records = read_records(path, field, task="gsm8k", expected="'question' and 'answer'")
    return [_example(record) for record in records]


def load(*, train: str | Path | None, held_out: str | Path | None, judge: str = "strict") -> Task:
    """The task of two sets of records, both in their order.

    Args:
      train: what is trained on; held_out: what is held out.
      judge: "strict" or "math_verify".

    Raises:
      UserError: a file cannot be used (see `read_examples`).
    """
    to_train, to_eval = read_examples(train, "data.train"), read_examples(held_out, "data.eval")
    names = ("correct", "format")
    if judge == "strict":
        return Task("gsm8k", to_train, to_eval, score, rewards=names)
    verifier = shared_judge()

    def mathematical(example: Example, completion: str, finished: bool) -> dict[str, float]:
        return score_mathematically(example, completion, finished, equal=verifier.equal)

    return Task("gsm8k", to_train, to_eval, mathematical, rewards=names, workers=verifier.workers)
