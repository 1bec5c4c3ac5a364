"""A resumed run has the data and the functions that it was started with."""

import os

import pytest

from tests import tiny
from train.config.errors import UserError
from train.run.directory import RunDirectory, resume_run, start_run

REWARD = "def rate(record, completion, finished):\n    return float(len(completion))\n"
LOSS = "import jax.numpy as jnp\ndef mean(log_probs, advantages, mask): return -log_probs * advantages\n"
ROW = '{"prompt": "1+1=", "answer": "2"}\n'


@pytest.fixture
def config(tmp_path):
    """The config of a run with data and functions in files."""
    for name, text in {"train.jsonl": ROW * 4, "eval.jsonl": ROW, "rate.py": REWARD, "loss.py": LOSS}.items():
        (tmp_path / name).write_text(text)
    return tiny.config_of(
        f"output={tmp_path / 'runs'}",
        "name=first",
        "task=jsonl",
        f"data={{train: {tmp_path}/train.jsonl, eval: {tmp_path}/eval.jsonl, reward: '{tmp_path}/rate.py:rate'}}",
        f"loss={tmp_path}/loss.py:mean",
    )


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("train.jsonl", "data.train"),
        ("eval.jsonl", "data.eval"),
        ("rate.py", "data.reward"),
        ("loss.py", "loss.type"),
    ],
)
def test_other_contents_are_refused_by_field(config, tmp_path, name, field):
    run = start_run(config)
    resume_run(config)
    with (tmp_path / name).open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match=f"^--resume: {field}: {tmp_path / name} changed since the start .*inputs.json"):
        resume_run(config)
    run.inputs.unlink()
    assert resume_run(config) == run
    assert resume_run(config) == run


def test_run_without_a_record_warns_once(config, capsys):
    run = start_run(config)
    run.inputs.unlink()
    resume_run(config)
    assert f"there is no {run.inputs}" in capsys.readouterr().err
    resume_run(config)
    assert capsys.readouterr().err == ""


def test_damaged_record_is_refused(config):
    run = start_run(config)
    run.inputs.write_text(run.inputs.read_text().replace("data.train", "data.eval"))
    with pytest.raises(UserError, match=r"inputs\.json is damaged.*delete it"):
        resume_run(config)


def test_metrics_without_any_checkpoint_are_refused(config):
    run = start_run(config)
    run.metrics.write_text('{"accuracy": 1.0, "phase": "eval", "step": 0}\n')
    resume_run(config)
    with run.metrics.open("a") as file:
        file.write('{"phase": "train", "reward": 1.0, "step": 2}\n')
    with pytest.raises(UserError, match=r"^--resume: .*checkpoints has no checkpoint, although .* has step 2"):
        resume_run(config)
    (run.checkpoints / "0").mkdir(parents=True)
    run.base.mkdir()
    assert resume_run(config) == RunDirectory.of(config)


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "inputs.json", "reference.json", "curves.png"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_pipe_or_directory_in_place_of_a_file_is_refused(config, name, make):
    run = start_run(config)
    (run.root / name).unlink(missing_ok=True)
    make(run.root / name)
    with pytest.raises(UserError, match=f"^--resume: {run.root / name} is no regular file; move it away"):
        resume_run(config)
