"""GSM8K-style word problems from JSON lines of `question` and `answer`, the answer ending in "#### number"."""

import json
import re
from decimal import Decimal
from pathlib import Path

from train.errors import UserError
from train.tasks.task import Example, Task

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


def score(example: Example, completion: str, finished: bool) -> dict[str, float]:
    """Named rewards: correct (the final number is the answer), format (ended, well formed), reward (weighted sum)."""
    number = final_number(completion)
    correct = float(number is not None and number == Decimal(example.answer))
    format_ = float(finished and well_formed(completion))
    return {"reward": CORRECT_WEIGHT * correct + FORMAT_WEIGHT * format_, "correct": correct, "format": format_}


def _field(record: dict[str, object], name: str, where: str) -> str:
    if name not in record:
        raise UserError(f"{where}: field {name!r} is missing, got {', '.join(sorted(record)) or 'no fields'}")
    value = record[name]
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: field {name!r}: got {value!r}, expected a non-empty string")
    return value


def _parse_line(line: str, where: str) -> Example:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg}, column {error.colno})") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: got {type(record).__name__}, expected an object with 'question' and 'answer'")
    question, answer = _field(record, "question", where), _field(record, "answer", where)
    number = final_number(answer)
    if number is None:
        raise UserError(f"{where}: field 'answer': expected a text that ends in '{MARK} number', got {answer[-60:]!r}")
    return Example(prompt=f"Question: {question}\nAnswer:", answer=str(number), solution=f" {answer}")


def read_examples(path: str | Path | None, field: str) -> list[Example]:
    """The examples of a JSON-lines file, blank lines skipped.

    Args:
        path: the file.
        field: the setting that named it, for the error messages.

    Raises:
        UserError: `path` is None or unreadable, no line is there, or one is malformed (names file, line and field).
    """
    if path is None:
        raise UserError(f"{field}: task gsm8k needs the path of a JSON-lines file")
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{field}: cannot read {path}: {error.strerror}") from error
    examples = []
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from error
        if text.strip():
            examples.append(_parse_line(text, where))
    if not examples:
        raise UserError(f"{field}: {path} holds no examples")
    return examples


def load(*, train: str | Path | None, held_out: str | Path | None) -> Task:
    """The task of two JSON-lines files, both in the order of the file.

    Raises:
        UserError: a file cannot be used (see `read_examples`).
    """
    return Task(
        "gsm8k", train=read_examples(train, "data.train"), eval=read_examples(held_out, "data.eval"), score=score
    )
