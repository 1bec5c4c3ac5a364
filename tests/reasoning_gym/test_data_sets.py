"""Every data set of the installed reasoning-gym: its problems, its own solutions, and wrong answers."""

import inspect

import pytest

from train.config.errors import UserError
from train.data.tasks import reasoning_gym
from train.data.workers.reasoning_gym import FORMULAS, LISTS, Answers

factory = pytest.importorskip("reasoning_gym.factory", reason="make test-reasoning-gym has the package")
NAMES = sorted(factory.DATASETS.keys() - {"composite"})
WITHOUT_SOLUTION = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
ACCEPTS_ALL = {"game_of_life_halting"}


class HereVerifier:
    """The verifier in this process."""

    def __init__(self, name, settings):
        self.answers = Answers(name, settings)

    def score(self, index, answer):
        return self.answers({"index": index, "answer": answer})


@pytest.mark.parametrize("name", NAMES)
def test_solutions_are_right_and_wrong_answers_wrong(name, monkeypatch):
    monkeypatch.setattr(reasoning_gym, "ProblemVerifier", HereVerifier)
    task = reasoning_gym.load(name=name, arguments={}, problems=3, held_out=1)
    assert len(task.train) == 3
    assert (not task.train[0].answer) == (name in WITHOUT_SOLUTION)
    for example in task.train:
        if example.answer:
            assert task.score(example, f"<answer>{example.answer}</answer>", True)["correct"] == 1
        assert task.score(example, "<answer>banana</answer>", True)["correct"] == (name in ACCEPTS_ALL)


@pytest.mark.parametrize("settings", [{}, {"datasets": [{"name": "gcd", "weight": 1}]}])
def test_mixtures_are_refused(settings):
    with pytest.raises(UserError, match=r"data\.arguments: composite refuses"):
        reasoning_gym.load(name="composite", arguments=settings, problems=3, held_out=1)


def test_verifiers_that_evaluate_an_answer_are_known():
    calls = ("eval(answer)", "parse_expr(answer")
    sources = {name: inspect.getsource(made.score_answer) for name, (made, _) in factory.DATASETS.items()}
    evaluating = {name for name, source in sources.items() if any(call in source for call in calls)}
    assert evaluating == FORMULAS | LISTS
