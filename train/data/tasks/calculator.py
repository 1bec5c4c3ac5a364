"""`a times b plus c` for an episode with a calculator, and demonstrations of a teacher that often does without it."""

import random

from train.data.environments.calculator import compute
from train.data.tasks.arithmetic import score
from train.data.tasks.demonstrations import demonstrate, miscopy
from train.data.tasks.task import Example, Task

LEAST = 2
MOST = 99
COUNT = MOST - LEAST + 1


def task(problems: int, held_out: int, wrong: float) -> Task:
    """Makes the task for a model of bytes.

    Args:
      problems: number of training problems.
      held_out: number of held-out problems, none of them a training problem.
      wrong: share of demonstrations that guess the answer; half as many calls leave a number out, and half as many
        answers are copied wrongly.
    """
    rng = random.Random(0)
    # Numbers of problems: a list of all would be long.
    chosen = rng.sample(range(COUNT**3), problems + held_out)
    examples = [_example(_numbers(problem), rng, wrong) for problem in chosen]
    return Task("calculator", train=examples[held_out:], eval=examples[:held_out], score=score)


def _numbers(problem: int) -> tuple[int, int, int]:
    """Returns the three numbers of a problem, all of which are counted, those with equal first numbers together."""
    first, others = divmod(problem, COUNT**2)
    second, third = divmod(others, COUNT)
    return LEAST + first, LEAST + second, LEAST + third


def _example(numbers: tuple[int, int, int], rng: random.Random, wrong: float) -> Example:
    first, second, third = numbers
    answer = str(first * second + third)
    turns = list[tuple[str, str]]()
    if rng.random() < wrong:
        last = "".join(rng.choice("0123456789") for _ in answer)
    else:
        expression = f"{first}*{second}" if rng.random() < wrong / 2 else f"{first}*{second}+{third}"
        last = compute(expression)
        turns.append((f"calc {expression}", f"{last}\n"))
        if rng.random() < wrong / 2:
            last = miscopy(last, rng)
    return demonstrate(f"{first} times {second} plus {third}?\n", answer, [*turns, (last, "")])
