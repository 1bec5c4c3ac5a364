"""A task of the user: its examples and its score, whatever their code does, are errors that name it."""

import re
import time

import numpy as np
import pytest

from tests import tiny
from train.config.errors import UserError
from train.config.signatures import forget_signatures
from train.data.tasks import Example, load_task
from train.data.tasks.rewards import judge
from train.data.tasks.user_score import RewardError, TaskScore
from train.process import waiting
from train.run.setup import check_examples

HEAD = """
import os, sys
from train.data.tasks import Example, Task
EXAMPLES = [Example(f"{n}+1=", answer=str(n + 1), solution=str(n + 1)) for n in range(4)]
"""


def config_of(tmp_path, score: str = "return 1.0", *changes: str, train: str = "EXAMPLES", options: str = ""):
    """The tiny config with a task whose score has this body, for a command of its own."""
    forget_signatures()
    (tmp_path / "mine.py").write_text(
        f"{HEAD}\ndef score(example, completion, finished):\n    {score}\n"
        f"def make():\n    return Task('mine', {train}, EXAMPLES, score{options})\n"
    )
    return tiny.config_of(f"task={tmp_path / 'mine.py'}:make", *changes)


def scored(config, completion: str = "x"):
    task = load_task(config)
    return judge(task, task.train[:1], [completion], np.array([True]))


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ("sys.exit(0)", "SystemExit: 0"),
        ("raise SystemExit", "SystemExit: "),
        ("raise KeyError('a')", "KeyError: 'a'"),
        ("raise GeneratorExit", "GeneratorExit: "),
        ("raise MemoryError", "MemoryError: "),
        ("return None", r"returned 'reward': None, expected names and finite numbers"),
        ("return [1.0]", r"returned 'reward': \[1.0\], expected names and finite numbers"),
        ("return {'reward': {'a': 1}}", r"returned 'reward': {'a': 1}, expected names and finite numbers"),
        ("return {'reward': float('nan')}", r"returned 'reward': nan, expected names and finite numbers"),
        ("return {1: 1.0}", "returned 1: 1.0, expected names"),
        ("return {}", "returned no rewards, expected a number, or numbers by name"),
        ("return {'reward': 1, 'correct': 7.0}", "returned 'correct': 7, expected 0 to 1: accuracy is its mean"),
        ("return {'reward': 1, 'correct': -1}", "returned 'correct': -1, expected 0 to 1"),
    ],
)
def test_failing_score_names_task_prompt_and_completion(tmp_path, score, message):
    head = r"^task: .*mine\.py:make: score for the prompt '0\+1=' and the completion 'x': "
    with pytest.raises(RewardError, match=head + message):
        scored(config_of(tmp_path, score))


def test_traceback_of_the_user_follows_the_line(tmp_path):
    with pytest.raises(RewardError) as caught:
        scored(config_of(tmp_path, "return example.nothing"))
    first, *lines = str(caught.value).splitlines()
    assert first.endswith("AttributeError: 'Example' object has no attribute 'nothing'")
    assert re.fullmatch(r'  File ".*mine\.py", line 7, in score', lines[0])
    assert lines[1] == "    return example.nothing"
    assert not any("user_score" in line or "reward_call" in line for line in lines)


def test_long_traceback_is_cut_in_the_middle(tmp_path):
    with pytest.raises(RewardError, match=r"\n  \.\.\. \d+ more\n") as caught:
        scored(config_of(tmp_path, "return score(example, completion, finished)"))
    assert len(str(caught.value).splitlines()) < 30


def test_number_is_the_reward_and_decides_correct(tmp_path):
    assert {name: values.tolist() for name, values in scored(config_of(tmp_path)).items()} == {
        "reward": [1],
        "correct": [1],
    }
    assert scored(config_of(tmp_path, "return {'reward': 0.5}"))["correct"] == 0
    assert scored(config_of(tmp_path, "return {'reward': 2, 'correct': 0.5}"))["correct"] == 0.5


def test_other_names_than_before_are_an_error(tmp_path):
    task = load_task(config_of(tmp_path, "return {'reward': 1, completion: 0}"))
    task.score(task.train[0], "a", True)
    with pytest.raises(RewardError, match="returned the rewards b, reward, but a, reward before"):
        task.score(task.train[0], "b", True)


def test_examples_may_come_from_a_generator(tmp_path):
    assert len(load_task(config_of(tmp_path, train="(e for e in EXAMPLES)")).train) == 4


@pytest.mark.parametrize(
    ("train", "options", "message"),
    [
        ("None", "", r"make: train: got NoneType, expected a list of Example"),
        ("[1]", "", r"make: train\[0\]: got int, expected Example"),
        ("[Example(None, '', '')]", "", r"make: train\[0\]\.prompt: got None, expected text"),
        ("[*EXAMPLES, Example('a', '', 3)]", "", r"make: train\[4\]\.solution: got 3, expected text"),
        ("[Example('a', '', '', messages=(('user', None),))]", "", r"train\[0\]\.messages: got \('user', None\), exp"),
        ("(1 / 0 for _ in range(3))", "", r"make: train: ZeroDivisionError: division by zero\n  File "),
        ("(sys.exit(0) for _ in range(3))", "", r"make: train: SystemExit: 0\n  File "),
        ("EXAMPLES", ", workers=0", r"make: workers: got 0, expected an integer >= 1"),
    ],
)
def test_wrong_examples_are_named(tmp_path, train, options, message):
    with pytest.raises(UserError, match=r"^task: .*" + message):
        load_task(config_of(tmp_path, train=train, options=options))


def test_score_without_a_function_is_named(tmp_path):
    config = config_of(tmp_path, "pass\nscore = None")
    with pytest.raises(
        UserError, match=r"make: score: got None, expected a function of \(example, completion, finished"
    ):
        load_task(config)


def test_long_score_is_told_while_it_runs(monkeypatch, capsys):
    """After a minute, and whenever the wait has doubled; a quick call is never told."""
    monkeypatch.setattr(waiting, "FIRST_SECONDS", 0.2)
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(waiting, "_WAITS", waiting._Waits())
    example = Example("the prompt", "", "")
    TaskScore("t.py:make", lambda e, c, f: time.sleep(0.7) or 1.0)(example, "x", True)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 3
    assert lines[0].startswith("warning: still waiting for task: t.py:make: score for the prompt 'the prompt', 0 s by")
    TaskScore("t.py:make", lambda e, c, f: 1.0)(example, "x", True)
    time.sleep(0.3)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("returned", "weights", "line"),
    [
        (
            {"match": 1, "upper": 0, "ended": 1, "correct": 1},
            "{correct: 1.0, ended: 0.2}",
            "rewards.weights: rewards match, upper have no weight and count 0; set rewards.weights={correct: 1, "
            "ended: 0.2, match: ..., upper: ...}, or null for the function's own total, 'reward'",
        ),
        ({"reward": 1}, "{correct: 1.0}", "rewards.weights: reward reward has no weight and counts 0; set "),
        ({"match": 1, "correct": 1}, "{match: 1}", "rewards.weights: reward correct has no weight and counts 0; set "),
        ({"match": 1}, "{match: 1}", ""),
        ({"match": 1}, "{match: 0}", ""),
        ({"reward": 1, "match": 1}, "null", ""),
    ],
)
def test_reward_without_a_weight_is_told_at_start(tmp_path, capsys, returned, weights, line):
    config = config_of(tmp_path, f"return {returned!r}", f"rewards.weights={weights}", "warm_start.steps=0")
    context = tiny.context_of(config, task=load_task(config))
    check_examples(context, before_warm_start=False)
    printed = capsys.readouterr().err
    assert printed.startswith(f"warning: {line}") if line else not printed


def test_missing_total_error_says_both_ways(tmp_path):
    config = config_of(tmp_path, "return {'match': 1, 'upper': 0}")
    context = tiny.context_of(config, task=load_task(config))
    with pytest.raises(
        UserError,
        match=r"the task has no total, only correct, match, upper; return the total as "
        r"'reward', or set rewards\.weights=\{correct: 1, match: 1, upper: 1\}",
    ):
        check_examples(context, before_warm_start=False)
