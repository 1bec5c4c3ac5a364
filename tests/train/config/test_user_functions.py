"""A task, a tokenizer and a source of the user, named in a config as a function in a module or a file."""

import json
import os
from pathlib import Path

import pytest

from tests import tiny
from tests.train.config.built import problems
from train.config.data import task_lengths
from train.config.errors import UserError
from train.config.load import LoadedConfig, apply_overrides, with_absolute_paths
from train.config.schema import Config
from train.config.signatures import read_signature
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
            "task: got 'aritmetic', expected one of arithmetic, gsm8k, math, countdown, word_problems, reasoning_gym, "
            "jsonl, recording, or module:function; did",
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


LEAVING = """
import os, jax.numpy as jnp
from pathlib import Path
from train.data.tokenizers import ByteTokenizer

def bytes_elsewhere():
    os.chdir("elsewhere")
    return ByteTokenizer()

def loss(log_probs, advantages, mask):
    return -log_probs * advantages

def advantage(rewards):
    return rewards - rewards.mean()

def weights(log_probs, sampling_log_probs, mask):
    return jnp.exp(log_probs - sampling_log_probs)

def rate(record, completion, finished):
    return 1.0
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_run_keeps_its_functions_and_data_when_code_leaves_the_directory(tmp_path, monkeypatch, workers):
    """The folder that it goes to has a function of each name, which fails."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine.py").write_text(LEAVING)
    (tmp_path / "elsewhere/mine.py").write_text("raise SystemExit('another file')")
    rows = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n'
    (tmp_path / "train.jsonl").write_text(rows)
    monkeypatch.chdir(tmp_path)
    config = tiny.config_of(
        *("task=jsonl", "data.train=train.jsonl", "data.eval=train.jsonl", "data.reward=mine.py:rate"),
        *("data.tokenizer=mine.py:bytes_elsewhere", "loss=mine.py:loss", "advantage=mine.py:advantage"),
        *("correction=[{type: 'mine.py:weights'}]", f"rewards.workers={workers}", "output=runs"),
        *("warm_start.steps=0", "steps=1", "eval={prompts: 2, batch_size: 2, greedy: false}", "report.rollouts=0"),
    )
    run_module.run(LoadedConfig(config, (), Path("config.yaml")))
    assert Path.cwd() == tmp_path / "elsewhere"
    assert (tmp_path / "runs/run/summary.json").is_file()


@pytest.mark.parametrize(
    ("field", "given", "absolute"),
    [
        ("loss", "mine.py:loss", "{here}/mine.py:loss"),
        ("advantage", "./mine.py:advantage", "{here}/mine.py:advantage"),
        ("rollout.source", "../mine.py:counting", "{above}/mine.py:counting"),
        ("task", "mine.py:doubles", "{here}/mine.py:doubles"),
        ("data.tokenizer", "~/mine.py:upper", "{home}/mine.py:upper"),
        ("data.reward", "mine.py:rate", "{here}/mine.py:rate"),
        ("data.reward", "my.module:rate", "my.module:rate"),
        ("data.train", "a.jsonl", "{here}/a.jsonl"),
        ("data.train", "datasets:openai/gsm8k:main:train", "datasets:openai/gsm8k:main:train"),
        ("data.chat_template", "/a/b.jinja", "/a/b.jinja"),
        ("model.path", "folder", "{here}/folder"),
        ("lora.path", "adapter", "{here}/adapter"),
        ("warm_start.checkpoint", "base", "{here}/base"),
        ("output", "runs", "{here}/runs"),
        ("rollout.record", "rows", "{here}/rows"),
    ],
)
def test_paths_are_absolute_from_the_start(tmp_path, monkeypatch, field, given, absolute):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    raw = {}
    apply_overrides(raw, ["steps=1", f"{field}={given}"])
    made = with_absolute_paths(Config.model_validate(raw)).model_dump(mode="json")
    for name in field.split("."):
        made = made[name]
    got = made["function"] if isinstance(made, dict) else made
    expected = absolute.format(here=tmp_path / "here", above=tmp_path, home=tmp_path / "home")
    assert os.path.normpath(got) == expected
    assert os.path.isabs(got) == os.path.isabs(expected)


def test_signature_is_of_the_file_in_the_directory_of_now(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"def loss({name}): ...")
        monkeypatch.chdir(tmp_path / name)
        assert name in read_signature("mine.py:loss")
