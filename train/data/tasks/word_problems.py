"""200 short word problems of one step each: joining, leaving and equal groups. The last number of a reply counts.

They are for a small instruct model on a laptop, whose replies are right some of the time and often do not end.
"""

import itertools
import logging
import re
from collections.abc import Callable, Iterator
from decimal import Decimal

import numpy as np

from train.data.tasks.gsm8k import parse_number
from train.data.tasks.task import SPLIT_SEED, Example, Task

_LOG = logging.getLogger(__name__)
PROBLEMS = 200
# At most this share is held out, so that there is something to train on.
MOST_HELD_OUT = 100
_NUMBER = re.compile(r"(?<![\d.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_PEOPLE = ("farmer", "baker", "teacher", "gardener", "sailor", "painter", "child", "nurse")
_THINGS = ("apples", "eggs", "books", "coins", "shells", "pencils", "stamps", "flowers", "buttons", "cups")
_CONTAINERS = ("box", "basket", "room", "shelf", "bag", "table")
_PLURALS = {"box": "boxes", "shelf": "shelves"}


def _joining(first: int, second: int, person: str, thing: str, container: str) -> str:
    return f"A {person} has {first} {thing} and gets {second} more. How many {thing} does the {person} have now?"


def _leaving(first: int, second: int, person: str, thing: str, container: str) -> str:
    return f"A {person} has {first + second} {thing} and gives away {second} of them. How many {thing} are left?"


def _grouping(first: int, second: int, person: str, thing: str, container: str) -> str:
    containers = _PLURALS.get(container, f"{container}s")
    return f"There are {first} {containers} with {second} {thing} in each {container}. How many {thing} are there?"


# Text, answer, and the range of each number.
_KINDS: tuple[tuple[Callable[..., str], Callable[[int, int], int], range, range], ...] = (
    (_joining, lambda first, second: first + second, range(3, 15), range(2, 10)),
    (_leaving, lambda first, second: first, range(3, 15), range(2, 10)),
    (_grouping, lambda first, second: first * second, range(2, 10), range(2, 11)),
)


def _of_kind(kind: int, rng: np.random.Generator, numbers: range | None) -> Iterator[Example]:
    """Yields problems of a kind; no two have the same numbers."""
    text, answer, *ranges = _KINDS[kind]
    pairs = list(itertools.product(*ranges if numbers is None else (numbers, numbers)))
    for index in rng.permutation(len(pairs)):
        first, second = pairs[index]
        words = [str(rng.choice(choices)) for choices in (_PEOPLE, _THINGS, _CONTAINERS)]
        problem = text(first, second, *words)
        right = str(answer(first, second))
        yield Example(problem, answer=right, solution=f" The answer is {right}.", messages=(("user", problem),))


def make_problems(count: int, seed: int, numbers: range | None = None) -> list[Example]:
    """Generates problems in a seeded order, the three kinds by turns; no two of a kind have the same numbers.

    Args:
      count: number of problems.
      seed: seed of the problems.
      numbers: range of both numbers; None: small ones, by kind.
    """
    rng = np.random.default_rng(seed)
    kinds = [_of_kind(kind, rng, numbers) for kind in range(len(_KINDS))]
    return [next(kinds[number % len(kinds)]) for number in range(count)]


def numbers_of(completion: str) -> list[Decimal]:
    """Lists the numbers in a text.

    Example:
        >>> [str(number) for number in numbers_of("1,200 + 10-3 = 1,207.0.")]
        ['1200', '10', '3', '1207.0']
    """
    numbers = (parse_number(text) for text in _NUMBER.findall(completion))
    return [number for number in numbers if number is not None]


def score(example: Example, completion: str, finished: bool) -> dict[str, float]:
    """Returns named rewards: correct (the reply ends, and its last number is the answer) and the same as reward.

    `anywhere` is the flawed verifier: the answer is one of the numbers, whatever else the reply says.
    """
    numbers = numbers_of(completion)
    answer = Decimal(example.answer)
    correct = float(finished and numbers[-1:] == [answer])
    return {"reward": correct, "correct": correct, "anywhere": float(answer in numbers), "ended": float(finished)}


def load(*, held_out: int, seed: int = SPLIT_SEED) -> Task:
    """Generates the problems; the first `held_out` are the held-out set.

    Args:
      held_out: number of held-out problems; at most 100, with a logged warning.
      seed: seed of the problems.
    """
    problems = make_problems(PROBLEMS, seed)
    if held_out > MOST_HELD_OUT:
        _LOG.warning("eval.prompts: got %d, but of %d problems %d are held out", held_out, PROBLEMS, MOST_HELD_OUT)
    count = min(held_out, MOST_HELD_OUT)
    return Task(
        "word_problems",
        train=problems[count:],
        eval=problems[:count],
        score=score,
        rewards=("correct", "anywhere", "ended"),
    )
