"""Countdown: reach a target with given numbers, each used exactly once. Problems are made, each with a solution."""

import logging
import re

import numpy as np

from train.data.tasks.arithmetic_text import NotArithmetic, evaluate
from train.data.tasks.task import Example, Task

_LOG = logging.getLogger(__name__)

INSTRUCTION = (
    "Using the numbers {numbers}, make an expression that equals {target}. Use each number exactly once, and only "
    "+, -, *, / and parentheses. Think first, then give the expression alone in <answer></answer>."
)
CORRECT_WEIGHT = 1.0
FORMAT_WEIGHT = 0.1
# As of arithmetic: accuracies of runs with different seeds are on the same problems.
SPLIT_SEED = 0
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def expression_of(completion: str) -> str:
    """What the last `<answer>` holds, or else the last line that is not blank."""
    answers = _ANSWER.findall(completion)
    if answers:
        return str(answers[-1])
    lines = [line for line in completion.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def score(example: Example, completion: str, finished: bool) -> dict[str, float]:
    """Named rewards: correct (the target, each number once), format (ended, and an expression), reward (weighted sum).

    `answer` is the target and the numbers, as `46: 3 7 25`. The expression is parsed, never run.
    """
    target, _, numbers = example.answer.partition(":")
    try:
        value, used = evaluate(expression_of(completion))
    except NotArithmetic:
        return {"reward": 0.0, "correct": 0.0, "format": 0.0}
    correct = float(value == int(target) and sorted(used) == sorted(int(number) for number in numbers.split()))
    format_ = float(finished)
    return {"reward": CORRECT_WEIGHT * correct + FORMAT_WEIGHT * format_, "correct": correct, "format": format_}


def _combine(left: tuple[int, str], right: tuple[int, str], operation: str) -> tuple[int, str] | None:
    """Both joined by an operation, if that is a whole number."""
    (a, first), (b, second) = left, right
    if operation == "/" and (b == 0 or a % b):
        return None
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[operation]
    return value, f"({first}{operation}{second})"


def _solved(numbers: list[int], draw: np.random.Generator) -> tuple[int, str]:
    """A random expression of all the numbers, and what it is."""
    parts = [(number, str(number)) for number in numbers]
    while len(parts) > 1:
        one, other = (int(place) for place in draw.choice(len(parts), 2, replace=False))
        joined = _combine(parts[one], parts[other], str(draw.choice(list("+-*/"))))
        if joined is not None:
            parts = [part for place, part in enumerate(parts) if place not in (one, other)] + [joined]
    value, text = parts[0]
    return value, text[1:-1]


def _example(numbers: list[int], target: int, solution: str) -> Example:
    shown = " ".join(map(str, numbers))
    return Example(
        prompt=f"Numbers: {shown}. Target: {target}.\nExpression:",
        answer=f"{target}: {shown}",
        solution=f" {solution}",
        messages=(("user", INSTRUCTION.format(numbers=numbers, target=target)),),
    )


def load(*, problems: int, numbers: int, max_number: int, held_out: int, seed: int = SPLIT_SEED) -> Task:
    """Different solvable problems in a seeded order; the first `held_out` are the eval split.

    Args:
      problems: how many to train on; fewer, with a logged warning, where there are not as many.
      numbers: numbers of a problem, 2 to 6.
      max_number: the largest of them; targets are 1 to 10 times that.
      held_out: how many are held out.
      seed: seed of the problems.
    """
    draw = np.random.default_rng(seed)
    found: dict[tuple[tuple[int, ...], int], Example] = {}
    wanted, tries = problems + held_out, 0
    # A small range has few problems: the draw ends once it finds hardly any that are new.
    while len(found) < wanted and tries < 20 * wanted + 1000:
        tries += 1
        drawn = [int(number) for number in draw.integers(1, max_number + 1, numbers)]
        target, solution = _solved(drawn, draw)
        key = (tuple(sorted(drawn)), target)
        if 1 <= target <= 10 * max_number and key not in found:
            found[key] = _example(drawn, target, solution)
    examples = list(found.values())
    if len(examples) < wanted:
        held_out = min(held_out, len(examples) // 2)
        _LOG.warning(
            "data.problems: %d different problems were found, expected %d and those held out; %d are held out",
            len(examples),
            problems,
            held_out,
        )
    return Task(
        "countdown",
        train=examples[held_out:],
        eval=examples[:held_out],
        score=score,
        rewards=("correct", "format"),
    )
