"""Countdown: reach a target with given numbers, each used exactly once. Problems are generated with a solution."""

import numpy as np

from train.data.answers import tagged_or_last_line
from train.data.tasks.arithmetic_text import NotArithmetic, evaluate
from train.data.tasks.task import SPLIT_SEED, Example, Task, correct_and_format, hold_out

INSTRUCTION = (
    "Using the numbers {numbers}, make an expression that equals {target}. Use each number exactly once, and only "
    "+, -, *, / and parentheses. Think first, then give the expression alone in <answer></answer>."
)


def score(example: Example, completion: str, finished: bool) -> dict[str, float]:
    """Returns named rewards: correct (the target, each number once), format (finished), reward (weighted sum).

    `answer` is the target and the numbers, as `46: 3 7 25`. A text that is no expression gets 0 for all three.
    """
    target, _, numbers = example.answer.partition(":")
    try:
        value, used = evaluate(tagged_or_last_line(completion))
    except NotArithmetic:
        return correct_and_format(0.0, 0.0)
    correct = float(value == int(target) and sorted(used) == sorted(int(number) for number in numbers.split()))
    return correct_and_format(correct, float(finished))


def _combine(left: tuple[int, str], right: tuple[int, str], operation: str) -> tuple[int, str] | None:
    """Joins two parts by an operation; None if the value is no integer."""
    (a, first), (b, second) = left, right
    if operation == "/" and (b == 0 or a % b):
        return None
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[operation]
    return value, f"({first}{operation}{second})"


def _random_solution(numbers: list[int], rng: np.random.Generator) -> tuple[int, str]:
    """Draws a random expression of all the numbers, and returns its value and text."""
    parts = [(number, str(number)) for number in numbers]
    while len(parts) > 1:
        first, second = (int(index) for index in rng.choice(len(parts), 2, replace=False))
        joined = _combine(parts[first], parts[second], str(rng.choice(list("+-*/"))))
        if joined is not None:
            parts = [part for index, part in enumerate(parts) if index not in (first, second)] + [joined]
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
    """Generates distinct solvable problems in a seeded order; the first `held_out` are the held-out set.

    Args:
      problems: number of training problems; fewer, with a logged warning, if there are not enough.
      numbers: numbers per problem, 2 to 6.
      max_number: the largest number; targets are 1 to `10 * max_number`.
      held_out: number of held-out problems.
      seed: seed of the problems.
    """
    rng = np.random.default_rng(seed)
    by_key: dict[tuple[tuple[int, ...], int], Example] = {}
    wanted = problems + held_out
    tries = 0
    # A small range has few distinct problems, so the number of tries is bounded.
    while len(by_key) < wanted and tries < 20 * wanted + 1000:
        tries += 1
        drawn = [int(number) for number in rng.integers(1, max_number + 1, numbers)]
        target, solution = _random_solution(drawn, rng)
        key = (tuple(sorted(drawn)), target)
        if 1 <= target <= 10 * max_number and key not in by_key:
            by_key[key] = _example(drawn, target, solution)
    examples = list(by_key.values())
    held_out = hold_out(examples, problems=problems, held_out=held_out, found="found")
    return Task(
        "countdown",
        train=examples[held_out:],
        eval=examples[:held_out],
        score=score,
        rewards=("correct", "format"),
    )
