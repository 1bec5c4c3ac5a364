"""The word problems: exact answers, no overlap of the splits, and replies that are right, wrong or do not end."""

import logging
import re
from collections import Counter

import pytest

from train.data.tasks import Example
from train.data.tasks.word_problems import load, score


def solved(problem: str) -> int:
    """Solves a problem from its words alone."""
    numbers = [int(text) for text in re.findall(r"\d+", problem)]
    assert len(numbers) == 2, problem
    if "gets" in problem:
        return sum(numbers)
    if "gives away" in problem:
        return numbers[0] - numbers[1]
    assert "in each" in problem, problem
    return numbers[0] * numbers[1]


def kind_and_numbers(example: Example) -> tuple[str, ...]:
    words = ("gets", "gives away", "in each")
    return (next(word for word in words if word in example.prompt), *re.findall(r"\d+", example.prompt))


def test_answers_are_exact_and_splits_apart():
    task = load(held_out=48)
    assert (len(task.train), len(task.eval)) == (152, 48)
    problems = [*task.eval, *task.train]
    assert all(int(example.answer) == solved(example.prompt) >= 0 for example in problems)
    assert len({kind_and_numbers(example) for example in problems}) == 200
    assert set(Counter(kind_and_numbers(example)[0] for example in task.eval).values()) == {16}
    assert load(held_out=48).eval == task.eval
    assert load(held_out=20).eval == task.eval[:20]
    assert max(len(example.prompt) for example in problems) < 128


def test_at_most_half_are_held_out(caplog):
    with caplog.at_level(logging.WARNING):
        task = load(held_out=150)
    assert len(task.eval) == 100
    assert "eval.prompts: got 150" in caplog.text


@pytest.mark.parametrize(
    ("reply", "correct", "anywhere"),
    [
        ("12", 1, 1),
        ("The baker has 5 + 7 = 12 eggs.", 1, 1),
        ("12.0 eggs, which is $12.00.", 1, 1),
        ("There are 12 eggs, of which 7 are new.", 0, 1),
        ("There are 5-7 eggs, so 1,2.", 0, 0),
        ("It has 112 eggs", 0, 0),
        ("-12", 0, 0),
        ("twelve", 0, 0),
        ("", 0, 0),
        ("5 + 7 = 12\n", 1, 1),
        ("9" * 10_000, 0, 0),
    ],
)
def test_last_number_of_a_finished_reply_counts(reply, correct, anywhere):
    example = Example("", answer="12", solution="")
    rewards = score(example, reply, True)
    assert (rewards["correct"], rewards["anywhere"], rewards["ended"]) == (correct, anywhere, 1)
    assert rewards["reward"] == rewards["correct"]
    unfinished = score(example, reply, False)
    assert (unfinished["reward"], unfinished["anywhere"], unfinished["ended"]) == (0, anywhere, 0)
