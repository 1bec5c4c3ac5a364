"""Addition and subtraction of small integers, each problem either trained on or held out."""

import operator
from dataclasses import replace

import numpy as np

from train.data.tasks.task import SPLIT_SEED, Example, Task

OPERATIONS = {"+": operator.add, "-": operator.sub}
# Errors of the wrong solutions: a slip in the last digit, or a carry too few or too many.
SLIPS = (-10, -1, 1, 10)


def _example(left: int, operation: str, right: int, slip: int) -> Example:
    answer = OPERATIONS[operation](left, right)
    return Example(prompt=f"{left}{operation}{right}=", answer=str(answer), solution=str(answer + slip))


def _problems(max_operand: int, operations: str, error_rate: float, seed: int) -> list[Example]:
    operands = max_operand + 1
    rng = np.random.default_rng(seed)
    shape = (operands, len(operations), operands)
    order = rng.permutation(operands * len(operations) * operands)
    columns = (axis.tolist() for axis in np.unravel_index(order, shape))
    problems = zip(*columns, _slips(len(order), error_rate, rng), strict=True)
    return [_example(left, operations[which], right, slip) for left, which, right, slip in problems]


def _slips(count: int, error_rate: float, rng: np.random.Generator) -> list[int]:
    return np.where(rng.random(count) < error_rate, rng.choice(SLIPS, count), 0).tolist()


def _more_solutions(examples: list[Example], count: int, error_rate: float, seed: int) -> list[Example]:
    # A separate random stream, so that the first solutions do not depend on `count`.
    rng = np.random.default_rng((seed, 1))
    return [
        replace(example, solution=str(int(example.answer) + slip))
        for _ in range(count)
        for example, slip in zip(examples, _slips(len(examples), error_rate, rng), strict=True)
    ]


def score(example: Example, completion: str, finished: bool) -> dict[str, float]:
    """Returns reward 1 for exactly the answer followed by EOS, else 0."""
    correct = float(finished and completion == example.answer)
    return {"reward": correct, "correct": correct}


def load(
    *,
    max_operand: int,
    operations: str,
    held_out: int,
    error_rate: float = 0.0,
    solutions: int = 1,
    seed: int = SPLIT_SEED,
) -> Task:
    """Lists all problems `a op b` with operands 0..max_operand in a seeded order; holds out the first `held_out`.

    Args:
      max_operand: largest operand.
      operations: "+" or "+-"; differences may be negative.
      held_out: number of held-out problems.
      error_rate: share of wrong solutions, as in a corpus of uneven quality; answers are always right.
      solutions: examples per training problem, each with one solution; errors are drawn independently.
      seed: seed of the order and of the errors.
    """
    problems = _problems(max_operand, operations, error_rate, seed)
    train = problems[held_out:]
    train += _more_solutions(train, solutions - 1, error_rate, seed)
    return Task("arithmetic", train=train, eval=problems[:held_out], score=score, rewards=("correct",))
