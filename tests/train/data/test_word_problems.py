"""The word problems: exact answers, no overlap of the splits, and replies that are right, wrong or do not end."""

import logging
import re
from collections import Counter

import pytest

from train.data.environments.word_calculator import WordCalculator, compute
from train.data.tasks import Example, word_calculator
from train.data.tasks.word_problems import load, score
from train.data.tokenizers.calls import parse_calls


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


def test_larger_numbers_are_held_out_and_demonstrated():
    task = word_calculator.task(problems=90, held_out=30)
    assert (len(task.train), len(task.eval)) == (90, 30)
    examples = [*task.eval, *task.train]
    assert len({kind_and_numbers(example) for example in examples}) == 120
    assert set(Counter(kind_and_numbers(example)[0] for example in task.eval).values()) == {10}
    for example in examples:
        assert int(example.answer) == solved(example.prompt)
        assert example.messages[-1] == ("user", example.prompt)
        environment = WordCalculator()
        environment.reset(example.prompt, example.answer)
        (_, call), (_, result), (_, last) = example.demonstration
        (parsed,) = parse_calls(call, ["calc"])
        assert environment.calc(**parsed.arguments) == result == example.answer
        assert environment.reward(last, finished=True)["reward"] == 1.2


def test_tool_is_told_to_the_model_as_it_is_called():
    (parsed,) = parse_calls(word_calculator.SYSTEM, ["calc"])
    assert (parsed.name, parsed.problem) == ("calc", None)
    assert WordCalculator().calc.__code__.co_varnames[1] in parsed.arguments


@pytest.mark.parametrize(
    ("expressions", "text", "finished", "expected"),
    [
        (["12*34"], "The answer is 408.", True, 1.2),
        (["12*34", "12*34"], "The answer is 408.", True, 1.2),
        (["12*34"], "The answer is 407.", True, 0.2),
        (["12*34"], "The answer is 408.", False, 0.2),
        (["12*35"], "The answer is 408.", True, 1.0),
        ([], "The answer is 408.", True, 1.0),
        ([], "", False, 0.0),
    ],
)
def test_call_and_answer_are_rewarded_once(expressions, text, finished, expected):
    environment = WordCalculator()
    environment.reset("How many?", "408")
    for expression in expressions:
        environment.calc(expression)
    rewards = environment.reward(text, finished)
    assert rewards["reward"] == expected
    assert rewards["correct"] == (expected >= 1)
    assert rewards["computed"] == ("12*34" in expressions)


@pytest.mark.parametrize(
    "expression", ["", "12", "12/3", "1+2+3", "-1+2", "1.5*2", "1234567*2", "12**3", "\u0661+1", "a"]
)
def test_other_expressions_are_an_error(expression):
    assert compute(expression) == "error"
