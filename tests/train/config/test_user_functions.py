"""A task, a tokenizer and a source of the user, named in a config as a function in a module or a file."""

import json
from pathlib import Path

import pytest

from tests import tiny
from tests.train.config.built import problems
from train.config.data import task_lengths
from train.config.errors import UserError
from train.config.load import LoadedConfig
from train.data.tasks import load_task
from train.data.tokenizers import load_tokenizer
from train.rollouts.open import open_source
from train.run import run as run_module

USER = '''
import dataclasses
import numpy as np
from train.data.tasks import Example, Task
from train.data.tokenizers import ByteTokenizer
from train.rollouts.jax_source import JaxSource

def doubles(highest: int, held_out: int = 2):
    """Makes a task of doubling numbers."""
    examples = [Example(f"{n}*2=", str(2 * n), str(2 * n)) for n in range(highest)]
    def score(example, text, finished):
        return {"reward": float(text == example.answer), "correct": float(text == example.answer)}
    return Task("doubles", examples[held_out:], examples[:held_out], score)

class Upper(ByteTokenizer):
    def encode(self, text):
        return super().encode(text.upper())

def upper():
    return Upper()

class Counting:
    """Samples as the trainer does, and counts."""
    def __init__(self, context, name):
        self.inner, self.name, self.count = JaxSource(context), name, 0
    def update(self, policy, step):
        self.inner.update(policy, step)
    def sample(self, request):
        self.count += 1
        completions = self.inner.sample(request).completed()
        return dataclasses.replace(completions, metrics={**completions.metrics, self.name: float(self.count)})
    def close(self):
        self.inner.close()

def counting(context, name: str = "batches"):
    return Counting(context, name)

def empty():
    return Task("empty", [], [], None)

def fails(highest: int = 1):
    raise SystemExit(f"no {highest}")

def number():
    return 3

class Beyond(ByteTokenizer):
    eos_ids = (257, 264)

class Endless(ByteTokenizer):
    eos_ids = ()

def beyond():
    return Beyond()

def endless():
    return Endless()
'''


@pytest.fixture
def user(tmp_path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(USER)
    return path


def test_run_takes_user_task_tokenizer_and_source(user, tmp_path):
    config = tiny.config_of(
        f"task={user}:doubles",
        "data.arguments={highest: 40, held_out: 8}",
        f"data.tokenizer={user}:upper",
        f"rollout.source={{type: '{user}:counting', name: seen}}",
        *(
            "warm_start.steps=2",
            "steps=2",
            "eval={prompts: 8, batch_size: 8, greedy: false}",
            f"output={tmp_path / 'runs'}",
        ),
    )
    assert config.rollout.source.options() == {"name": "seen"}
    run_module.run(LoadedConfig(config, (), Path("config.yaml")))
    (metrics,) = (tmp_path / "runs").rglob("metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [record["seen"] for record in records if record["phase"] == "train"] == [1.0, 2.0]


def test_tokenizer_of_the_user_encodes_prompts(user):
    tokenizer = load_tokenizer(tiny.config_of(f"data.tokenizer={user}:upper"))
    assert tokenizer.encode("ab") == [ord("A"), ord("B")]


def test_user_task_has_the_default_lengths_of_records(user):
    lengths = task_lengths(f"{user}:doubles", {})
    assert lengths == {"max_prompt_length": 256, "max_completion_length": 256}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ("task=aritmetic",),
            "task: got 'aritmetic', expected one of arithmetic, gsm8k, math, countdown, word_problems, jsonl, "
            "recording, or module:function; did",
        ),
        (("task={user}:none",), "task: got '{user}:none', but {user} has no function 'none'"),
        (("task=no_module:load",), "task: got 'no_module:load', but "),
        (
            ("task={user}:doubles",),
            "data.arguments: {user}:doubles needs the argument 'highest'; set data.arguments={highest: ...}",
        ),
        (
            ("task={user}:doubles", "data.arguments={highest: 4, heldout: 2}"),
            "data.arguments: {user}:doubles has no argument 'heldout', expected some of held_out, highest; did",
        ),
        (("data.arguments={highest: 4}",), "data.arguments: task arithmetic does not read it, only module:function"),
        (
            ("task={user}:doubles", "data.arguments={highest: 4}", "data.train=a.jsonl"),
            "data.train: got 'a.jsonl', but task {user}:doubles reads data.arguments alone",
        ),
        (("data.tokenizer=upper",), "data.tokenizer: got 'upper', expected text of the form module:function"),
        (("data.tokenizer={user}:uper",), "data.tokenizer: got '{user}:uper', but {user} has no function 'uper'"),
        (
            ("data.tokenizer={user}:upper", "data.tokenizer_arguments={a: 1}"),
            "data.tokenizer_arguments: {user}:upper has no argument 'a', it takes no arguments",
        ),
        (("data.tokenizer_arguments={a: 1}",), "data.tokenizer_arguments: read by data.tokenizer alone, which is null"),
        (
            ("data.tokenizer={user}:upper", "data.system=Hello"),
            "data.system: not read, because data.tokenizer writes the prompts",
        ),
        (
            ("rollout.source={type: '{user}:counting', nme: a}",),
            "rollout.source.arguments: {user}:counting has no argument 'nme', expected some of name; did",
        ),
        (
            ("rollout.source={type: '{user}:counting'}", "rollout.ahead=1"),
            "rollout.ahead: got 1, but rollout.source.type custom does not use it; leave it at 0",
        ),
    ],
)
def test_mistake_is_found_before_the_function_is_imported(user, changes, message):
    changes = [change.replace("{user}", str(user)) for change in changes]
    (problem,) = problems(*changes)
    assert problem.startswith(message.replace("{user}", str(user)))


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (load_task, ("task={user}:empty",), r"task: .*:empty returned a task without examples in train"),
        (load_task, ("task={user}:fails",), r"task: .*:fails failed: SystemExit: no 1"),
        (load_task, ("task={user}:number",), r"task: .*:number returned 'int' without name, train, .*, expected name"),
        (
            load_tokenizer,
            ("data.tokenizer={user}:number",),
            r"data\.tokenizer: .*:number returned 'int' without bos_id",
        ),
        (
            load_tokenizer,
            ("data.tokenizer={user}:beyond",),
            r"data\.tokenizer: .*:beyond: eos_ids: got \(257, 264\), expected ids below vocab_size = 264",
        ),
        (
            load_tokenizer,
            ("data.tokenizer={user}:endless",),
            r"data\.tokenizer: .*:endless: eos_ids: got \(\), expected",
        ),
    ],
)
def test_unusable_result_is_named(user, make, changes, message):
    config = tiny.config_of(*(change.replace("{user}", str(user)) for change in changes))
    with pytest.raises(UserError, match=message):
        make(config)


def test_source_without_the_three_methods_is_named(user):
    user.write_text(f"{USER}\ndef source(context):\n    return object()\n")
    context = tiny.context_of(tiny.config_of(f"rollout.source={user}:source"))
    with pytest.raises(UserError, match=r"rollout\.source: .* returned 'object' without update, sample, close"):
        open_source(context)
