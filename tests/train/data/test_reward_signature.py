"""Reward functions that other trainers call: refused with a function to write, which works as it is pasted."""

import re

import pytest

from train.config.errors import UserError
from train.config.signatures import forget_signatures
from train.data.reward_signature import RecordFields
from train.data.tasks.reward_function import Verifier
from train.data.tasks.task import Example
from train.data.tasks.user_score import RewardError

RECORD = {"prompt": "3+4=", "answer": "7", "solution": "7", "level": "easy"}
FIELDS = RecordFields("prompt", "answer", tuple(RECORD))
EXAMPLE = Example("3+4=", "7", "7", record=RECORD)
RIGHT = "float({} == '7')"

FOREIGN = {
    "verl": """
def f(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source is None and extra_info is None
    return float(solution_str == ground_truth)""",
    "verl, a mapping": """
def f(data_source, solution_str, ground_truth, extra_info=None, method="strict", **kwargs):
    return {"score": float(solution_str == ground_truth), "acc": True}""",
    "verl, a batch": """
def f(data_sources, solution_strs, ground_truths, extra_infos):
    assert len(data_sources) == len(extra_infos) == 1
    return [float(a == b) for a, b in zip(solution_strs, ground_truths)]""",
    "OpenRLHF": """
def f(queries, prompts, labels):
    texts = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    return {"rewards": [float(a == b) for a, b in zip(texts, labels)], "scores": [], "extra_logs": {}}""",
    "OpenRLHF, a list": """
def f(queries, prompts, labels, **kwargs):
    return [float(query == prompt + label) for query, prompt, label in zip(queries, prompts, labels)]""",
    "TRL": """
def f(prompts, completions, **kwargs):
    assert kwargs["level"] == ["easy"] and "prompt" not in kwargs
    return [float(a == b) for a, b in zip(completions, kwargs["answer"])]""",
    "TRL with a column": """
def f(completions, solution, **kwargs):
    return [float(a == b) for a, b in zip(completions, solution)]""",
    "TRL, three arguments": """
def f(prompts, completions, answer):
    return [float(a == b) for a, b in zip(completions, answer)]""",
    "TRL, async": """
async def f(prompts, completions, completion_ids, trainer_state=None, **kwargs):
    return [float(a == b) for a, b in zip(completions, kwargs["answer"])]""",
    "TRL, an object": """
class F:
    def __call__(self, completions, solution, **kwargs):
        return [float(a == b) for a, b in zip(completions, solution)]
f = F()""",
    "slime": """
async def f(args, sample, **kwargs):
    assert sample.prompt == "3+4=" and sample.metadata["level"] == "easy"
    return float(sample.response == sample.label)""",
    "slime, a batch": """
async def f(args, samples, **kwargs):
    return [float(sample.response == sample.label) for sample in samples]""",
    "verifiers": """
def f(completion, answer, **kwargs):
    return float(completion == answer)""",
    "verifiers, three arguments": """
def f(completion, answer, state):
    return float(completion == answer)""",
    "verifiers, async": """
async def f(prompt, completion, answer, state, info) -> float:
    return float(completion == answer)""",
    "verifiers with a parser": """
def f(parser, completion, answer, **kwargs):
    return float(completion == answer)""",
    "Trinity-RFT": """
class F:
    def __call__(self, response, prompt=None, truth=None):
        return float(response == truth)
f = F()""",
    "AReaL": """
def f(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
    return float(completions == answer)""",
    "nobody's": """
def f(prompt, response, label):
    return float(response == label)""",
    "two arguments": """
def f(completion, answer):
    return float(completion == answer)""",
    "an async function of three arguments": """
async def f(record, completion, finished):
    return float(completion == record["answer"] and finished)""",
    "positional alone": """
def f(ground_truth, response, /):
    return float(response == ground_truth)""",
    "a keyword without a default": """
def f(record, completion, finished, *, level):
    return float(completion == record["answer"] and level == "easy")""",
}
TAKEN = {
    "in their places": "def f(record, completion, finished): return {}".format(RIGHT.format("completion")),
    "under other names": "def f(r, c, done): return {}".format(RIGHT.format("c")),
    "as of a task": "def f(example, text, ended, scale=1.0): return scale * {}".format(RIGHT.format("text")),
    "in another order": "def f(finished, completion, record): return {}".format(RIGHT.format("completion")),
    "two of them": "def f(completion, record): return float(completion == record['answer'])",
    "one of them": "def f(completion): return {}".format(RIGHT.format("completion")),
    "an option in the third place": "def f(record, completion, scale=1.0): return scale * {}".format(
        RIGHT.format("completion")
    ),
    "by name": "def f(*, completion, **others): return float(completion == others['record']['answer'])",
    "any number": "def f(*values): return {}".format(RIGHT.format("values[1]")),
    "by a decorator": """
import functools
def adapted(function):
    @functools.wraps(function)
    def reward(record, completion, finished):
        return function(None, completion, record["answer"])
    return reward
@adapted
def f(data_source, solution_str, ground_truth):
    return float(solution_str == ground_truth)""",
    "a partial function": """
import functools
def g(right, record, completion, finished): return float(completion == right)
f = functools.partial(g, "7")""",
    "a method": """
class F:
    def score(self, record, completion, finished): return float(completion == record["answer"])
f = F().score""",
}


def verifier(path, *, workers: int = 0, function: str = "f", fields: RecordFields = FIELDS) -> Verifier:
    return Verifier(f"{path}:{function}", workers=workers, timeout=20, fields=fields)


def pasted(path, error: UserError) -> Verifier:
    """Appends the code of an error to the file, and makes the verifier that the error names, as a new command would."""
    told, _, code = str(error).partition("\n\n")
    file, function = re.search(r"set data\.reward=(.*):(\w+)$", told).groups()
    assert file == str(path)
    path.write_text(f"{path.read_text()}\n\n{code}")
    forget_signatures()
    return verifier(path, function=function)


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_function_is_refused_with_its_call(tmp_path, name):
    path = tmp_path / "mine.py"
    path.write_text(FOREIGN[name].lstrip())
    with pytest.raises(UserError, match=r"^data\.reward: the (async )?function .*:f\(.*does not take \(record, c") as e:
        verifier(path)
    system = name.partition(",")[0].partition(" with")[0]
    if system in ("verl", "OpenRLHF", "TRL", "slime", "verifiers", "Trinity-RFT", "AReaL"):
        assert f", which {system} calls," in str(e.value)
    score = pasted(path, e.value)
    assert [score(EXAMPLE, text, True)["reward"] for text in ("7", "8")] == [1, 0]


@pytest.mark.parametrize("name", TAKEN)
def test_arguments_are_taken_by_place_or_name(tmp_path, name):
    path = tmp_path / "mine.py"
    path.write_text(TAKEN[name].lstrip())
    score = verifier(path)
    assert [score(EXAMPLE, text, True)["reward"] for text in ("7", "8", "True")] == [1, 0, 0]


@pytest.mark.parametrize("name", ["verl", "TRL, three arguments"])
def test_worker_process_refuses_the_same_functions(tmp_path, name):
    path = tmp_path / "mine.py"
    path.write_text(FOREIGN[name].lstrip())
    errors = []
    for workers in (0, 1):
        with pytest.raises(UserError, match="does not take") as caught:
            verifier(path, workers=workers)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_worker_process_calls_by_name(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(TAKEN["in another order"])
    assert verifier(path, workers=1)(EXAMPLE, "7", True)["reward"] == 1


@pytest.mark.parametrize(
    ("fields", "expression"),
    [
        (RecordFields("prompt", "answer", ("prompt", "answer")), 'record["answer"]'),
        (RecordFields("prompt", "answer", ("prompt", "ground_truth", "answer")), 'record["ground_truth"]'),
        (RecordFields("q", "a", ("q", "a")), 'record["a"]'),
        (RecordFields("prompt", "answer", ("prompt", "reward_model")), 'record["reward_model"]["ground_truth"]'),
        (RecordFields(), 'record["answer"]'),
    ],
)
def test_written_call_reads_fields_of_the_records(tmp_path, fields, expression):
    path = tmp_path / "mine.py"
    path.write_text(FOREIGN["verl"].lstrip())
    with pytest.raises(UserError, match=re.escape(f"ground_truth={expression},")):
        verifier(path, fields=fields)


def test_wrapper_imports_a_function_of_a_module(tmp_path, monkeypatch):
    (tmp_path / "their_rewards.py").write_text(FOREIGN["verl"].lstrip())
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"Add to rewards\.py, and set data\.reward=rewards\.py:reward\n\n") as caught:
        Verifier("their_rewards:f", workers=0, timeout=5, fields=FIELDS)
    (tmp_path / "rewards.py").write_text(str(caught.value).partition("\n\n")[2])
    assert verifier(tmp_path / "rewards.py", function="reward")(EXAMPLE, "7", True)["reward"] == 1


def test_wrapper_has_another_name_than_its_function(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FOREIGN["two arguments"].lstrip().replace("def f", "def reward"))
    with pytest.raises(UserError) as caught:
        verifier(path, function="reward")
    assert pasted(path, caught.value)(EXAMPLE, "7", True)["reward"] == 1


def test_class_is_refused(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FOREIGN["TRL, an object"].lstrip())
    with pytest.raises(UserError, match=r"got the class .*mine\.py:F, expected a function, .*: write `reward = F\(\)`"):
        verifier(path, function="F")


def test_function_without_a_signature_fails_at_its_call():
    with pytest.raises(RewardError, match="TypeError"):
        Verifier("builtins:dict", workers=0, timeout=5)(EXAMPLE, "7", True)
