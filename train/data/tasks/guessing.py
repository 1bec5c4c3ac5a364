"""A number to guess. The demonstrations bisect the range, but often guess at random."""

import random

from train.data.environments.guessing import compare
from train.data.tasks.arithmetic import score
from train.data.tasks.demonstrations import demonstrate
from train.data.tasks.task import Example, Task


def task(most: int, turns: int, problems: int, held_out: int, wrong: float) -> Task:
    """Makes the task for a model of bytes.

    All episodes have one prompt, and their number is hidden: held-out ones have each number equally often.

    Args:
      most: the largest number; the least is 0.
      turns: of a demonstration, at most.
      problems: number of demonstrations.
      held_out: number of held-out episodes.
      wrong: share of the teacher's guesses that are any number.
    """
    rng = random.Random(0)
    train = [_example(rng.randint(0, most), most, turns, wrong, rng) for _ in range(problems)]
    held = [_example(number % (most + 1), most, turns, wrong, rng) for number in range(held_out)]
    return Task("guessing", train=train, eval=held, score=score)


def _example(number: int, most: int, turns: int, wrong: float, rng: random.Random) -> Example:
    low = 0
    high = most
    said = list[tuple[str, str]]()
    for _ in range(turns):
        guess = rng.randint(0, most) if rng.random() < wrong else (low + high) // 2
        said.append((str(guess), compare(str(guess), number, most)))
        if guess == number:
            break
        if guess < number:
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
    said[-1] = said[-1][0], ""
    return demonstrate(f"0 to {most}?\n", str(number), said)
