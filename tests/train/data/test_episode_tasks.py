"""Tasks for episodes: demonstrations have what the environments answer, and the best play is rewarded."""

import math

import pytest

from tests import tiny
from train.data.environments.calculator import Calculator
from train.data.environments.guessing import Guessing
from train.data.environments.sqlite import Shop
from train.data.tasks import calculator, guessing, sqlite

SIZES = {"problems": 90, "held_out": 30, "wrong": 0.5}


def tools(environment):
    """Answers turns as the source of episodes does for a model without a template."""
    environment.reset()

    def answer(text):
        name, _, argument = text.partition(" ")
        tool = getattr(environment, name, None) if name in ("calc", "query") else None
        return None if tool is None else f"{tool(argument)}\n"

    return answer


def steps(environment, number):
    environment.reset(number)

    def answer(text):
        reply, _, is_over = environment.step(text)
        return None if is_over else reply

    return answer


TASKS = [
    (calculator.task(**SIZES), lambda example: tools(Calculator())),
    (guessing.task(most=14, turns=4, **SIZES), lambda example: steps(Guessing(14), example.answer)),
    (sqlite.task(seed=2, names=50, **SIZES), lambda example: tools(Shop(2, 50))),
]


def split(example):
    """Splits a demonstration into its turns and the observations after them."""
    tokenizer = tiny.ByteTokenizer()
    said = [[]]
    observed = [[]]
    for id_, is_sampled in zip(example.solution_ids.tolist(), example.solution_mask.tolist(), strict=True):
        if is_sampled and (observed[-1] or (said[-1] and said[-1][-1] == tokenizer.eos_id)):
            said.append([])
            observed.append([])
        (said if is_sampled else observed)[-1].append(id_)
    assert all(ids[-1] == tokenizer.eos_id for ids in said)
    return [tokenizer.decode(ids[:-1]) for ids in said], [tokenizer.decode(ids) for ids in observed]


@pytest.mark.parametrize(("task", "answers"), TASKS, ids=["calculator", "guessing", "sqlite"])
def test_demonstrations_have_what_the_environment_answers(task, answers):
    assert (len(task.train), len(task.eval)) == (90, 30)
    right = 0
    for example in [*task.train, *task.eval]:
        answer = answers(example)
        said, observed = split(example)
        assert [answer(text) for text in said[:-1]] == observed[:-1]
        assert observed[-1] == ""
        right += task.score(example, said[-1], True)["correct"]
    # Imperfect, and better than nothing.
    assert 0.2 < right / 120 < 0.8


@pytest.mark.parametrize("number", range(15))
def test_halving_finds_every_number_in_four_guesses(number):
    environment = Guessing(14)
    environment.reset(str(number))
    low = 0
    high = 14
    replies = {"higher\n": 1, "lower\n": -1}
    scores = []
    for _ in range(4):
        guess = (low + high) // 2
        reply, reward, is_over = environment.step(str(guess))
        scores.append(environment.turn_score())
        if is_over:
            break
        assert reward == 0
        if replies[reply] > 0:
            low = guess + 1
        else:
            high = guess - 1
    assert is_over
    assert (guess, reward) == (number, 1)
    assert scores[:-1] == [-math.log2(left) for left in (7, 3, 1)][: len(scores) - 1]
    assert scores[-1] == 0


@pytest.mark.parametrize("text", ["", "fifteen", "-1", "15", "007", "1 ", "\u0661", "9" * 10_000])
def test_guess_that_is_no_number_is_told(text):
    environment = Guessing(14)
    environment.reset("7")
    assert environment.step(text) == ("0 to 14\n", 0.0, False)
    assert environment.turn_score() == -math.log2(15)


def test_held_out_numbers_are_equally_frequent():
    answers = [example.answer for example in guessing.task(14, 4, 10, 30, 0.5).eval]
    assert sorted(answers) == sorted([str(n) for n in range(15)] * 2)
