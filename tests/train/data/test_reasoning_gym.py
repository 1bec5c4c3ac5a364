"""Generated problems, with a small package in place of reasoning-gym; `tests/reasoning_gym` has the real one."""

import sys

import pytest

from train.config.errors import UserError
from train.config.load import parse
from train.data.tasks import load_task, reasoning_gym
from train.data.workers.process import WorkerPool
from train.data.workers.reasoning_gym import is_harmless

PACKAGE = {
    "__init__.py": """
import time
from reasoning_gym.factory import DATASETS

def create_dataset(name, **settings):
    made, config = DATASETS[name]
    return made(config(**settings))
""",
    "factory.py": """
import dataclasses, random, time

@dataclasses.dataclass
class Settings:
    highest: int = 9
    seed: int = None
    size: int = 500
    def validate(self):
        assert self.highest >= 1, "highest must be at least 1"

class Doubles:
    def __init__(self, config):
        self.config = config
    def __getitem__(self, index):
        number = random.Random(self.config.seed + index).randint(1, self.config.highest)
        return {"question": f"Twice {number}?", "answer": str(2 * number), "metadata": {}}
    def score_answer(self, answer, entry):
        if answer == "forever":
            while True:
                pass
        if answer == "broken":
            raise ValueError(answer)
        return 1.0 if answer == entry["answer"] else 0.25 if entry["answer"] in answer else 0.01

DATASETS = {"doubles": (Doubles, Settings), "countdown": (Doubles, Settings)}
""",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The package, for this process and its workers."""
    (tmp_path / "reasoning_gym").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "reasoning_gym" / name).write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        del sys.modules[name]


def load(prompts=4, **data):
    fields = {"generator": "doubles", **data}
    config, _ = parse({"steps": 1, "task": "reasoning_gym", "data": fields, "eval": {"prompts": prompts}})
    return load_task(config)


def test_problems_differ_and_stay_the_same(package, caplog):
    task = load(problems=20, arguments={"highest": 50})
    assert (len(task.train), len(task.eval)) == (20, 4)
    assert len({example.prompt for example in (*task.train, *task.eval)}) == 24
    again = load(problems=20, arguments={"highest": 50})
    assert [example.prompt for example in again.train] == [example.prompt for example in task.train]
    assert task.eval[0].solution == f" {task.eval[0].answer}"
    assert task.eval[0].conversation()[0][1].startswith(task.eval[0].prompt.removesuffix("\nAnswer:"))
    assert not caplog.text
    assert len(load(problems=20).train) == 5
    assert "data.problems: doubles has 9 different problems, expected 20" in caplog.text


def test_answers_are_scored_by_the_verifier_of_the_data_set(package, monkeypatch, caplog):
    monkeypatch.setattr(reasoning_gym, "SECONDS", 0.5)
    monkeypatch.setattr(reasoning_gym, "WORKERS", 1)
    task = load(problems=4)
    example = task.train[0]

    def scored(completion, finished=True):
        rewards = task.score(example, completion, finished)
        return rewards["score"], rewards["correct"], rewards["format"], rewards["reward"]

    right = example.answer
    assert scored(f"<answer>1</answer></think>so <answer> {right} </answer>") == (1.0, 1.0, 1.0, 1.1)
    assert scored(f"so <answer>{right}</answer>", finished=False) == (1.0, 1.0, 0.0, 1.0)
    assert scored(f"it is\n{right}") == (1.0, 1.0, 0.0, 1.0)
    assert scored(f"it is {right}") == (0.25, 0.0, 0.0, 0.25)
    assert scored("") == (0.0, 0.0, 0.0, 0.0)
    assert scored("broken") == (0.0, 0.0, 0.0, 0.0)
    assert not caplog.text
    assert scored("forever") == (0.0, 0.0, 0.0, 0.0)
    assert "reasoning_gym: no answer within 0.5 s of CPU time for an answer, which counts as wrong" in caplog.text
    assert scored(right) == (1.0, 1.0, 0.0, 1.0)


HARMLESS = ("(3 + 4) * 6", "3*x**2/2 + sin(x)*exp(-x) + C", "abs(-3)*0.5")
CODE = (
    "exec(chr(49))",
    "__import__",
    "(1).real",
    "x .__class__",
    "S('1')",
    "[x for x in (1,)]",
    "(lambda: 1)()",
    "breakpoint()",
    "\uff45xec(1)",
)


def test_verifiers_that_evaluate_get_mathematics_alone(package):
    pool = WorkerPool("reasoning_gym", "countdown", '{"seed": 0, "size": 9}')
    scores = {answer: pool.ask({"index": 0, "answer": answer}) for answer in HARMLESS + CODE}
    assert [answer for answer in scores if scores[answer]] == list(HARMLESS)


@pytest.mark.parametrize(
    ("answer", "harmless"),
    [
        ("[['A', 'B'], ['C', 'D']]", True),
        ("A B C D", True),
        ("0 1\n1 0", True),
        ("[\uff45xec('1')]", False),
        ("[f'{1}']", False),
        ("[f\"{exec('1')}\"]", False),
        ("[exec]", True),
        ("open('x')", False),
        ("(lambda: 1)()", False),
    ],
)
def test_verifiers_that_expect_a_list_get_no_code(answer, harmless):
    assert is_harmless("spiral_matrix", answer) == harmless


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"generator": None}, r"data\.generator: missing; task reasoning_gym needs"),
        ({"generator": "double"}, r"data\.generator: got 'double', expected one of the 2 .*; did you mean 'doubles'"),
        ({"arguments": {"higest": 3}}, r"data\.arguments\.higest: not a setting of doubles.*; did you mean 'highest'"),
        ({"arguments": {"highest": 0}}, r"data\.arguments: doubles refuses .*: highest must be at least 1"),
        ({"arguments": {"seed": 1}}, r"data\.arguments\.seed: the number of problems is data\.problems"),
        ({"numbers": 4}, r"data\.numbers: task reasoning_gym does not read it, only countdown"),
        ({"train": "a.jsonl"}, r"data\.train: got 'a\.jsonl', but task reasoning_gym makes its own"),
    ],
)
def test_mistakes_are_named(package, data, message):
    with pytest.raises(UserError, match=message):
        load(**data)


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(UserError, match=r"task: reasoning_gym needs a package: pip install 'kljax\[reasoning-gym\]'"):
        load()
