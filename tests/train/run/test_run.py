"""Traces of a run in its process, and mistakes that it finds before it writes anything to disk."""

import json
import logging
from pathlib import Path

import pytest

from tests import tiny
from train.config.errors import UserError
from train.config.load import LoadedConfig, load
from train.process.console import run_command
from train.run import run as run_module
from train.run.directory import RunDirectory

LOGGERS = ("absl", "asyncio")


@pytest.mark.parametrize("by_command", [True, False])
def test_command_quiets_orbax_and_restores_the_loggers(monkeypatch, by_command):
    during = {}

    def run():
        return run_module.run(load("configs/smoke.yaml"))

    def context(config):
        during.update({name: logging.getLogger(name).getEffectiveLevel() for name in LOGGERS})
        raise UserError("stopped")

    before = {name: logging.getLogger(name).level for name in LOGGERS}
    monkeypatch.setattr(run_module, "make_context", context)
    levels = {name: logging.getLogger(name).getEffectiveLevel() for name in LOGGERS}
    if by_command:
        assert run_command(run) == 2
    else:
        with pytest.raises(UserError, match="stopped"):
            run()
    assert during == (levels | {"absl": logging.ERROR} if by_command else levels)
    assert {name: logging.getLogger(name).level for name in LOGGERS} == before


def test_skipped_updates_are_counted_over_all_steps(tmp_path):
    config, directory = tiny.config_of("optim={epochs: 2, updates_per_batch: 2}"), RunDirectory(tmp_path)
    steps = ({"step": 1, "skipped_updates": 0.5}, {"step": 2}, {"step": 3, "skipped_updates": 0.25})
    directory.metrics.write_text("".join(json.dumps({"phase": "train", **step}) + "\n" for step in steps))
    assert run_module._skipped_updates(config, directory) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("data.reward=json:loads",),
            r"data\.reward: the function json:loads\(s, .*\) does not take \(record, completion, finished\)",
        ),
        (("data.reward=builtins:print",), r"data\.reward: builtins:print .*: returned 'reward': None, expected names"),
        (("data.reward=builtins:dict",), r"data\.reward: builtins:dict .*: TypeError: "),
        (("rewards.weights={form: 1.0}",), r"rewards\.weights: got 'form', expected some of correct, reward"),
        ((), r"warm_start\.steps: a warm start trains on solutions, but there is none for '1\+1='"),
        (("data.solution_field=long",), r"data\.max_completion_length: got 4, but none of the 5 solutions fit"),
    ],
)
def test_example_mistakes_are_found_before_the_directory(tmp_path, options, message):
    lines = [{"prompt": f"{i}+1=", "answer": str(i + 1), "long": "123456"} for i in range(1, 6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "judge.py").write_text("def one(record, completion, finished):\n    return 1.0\n")
    rows = tmp_path / "rows.jsonl"
    arguments = ("task=jsonl", f"data.train={rows}", f"data.eval={rows}", f"data.reward={tmp_path}/judge.py:one")
    config = tiny.config_of(*arguments, f"output={tmp_path / 'runs'}", *options)
    with pytest.raises(UserError, match=f"^{message}"):
        run_module.run(LoadedConfig(config, (), Path("config.yaml")))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "noted"),
    [
        ((), True),
        (("kl.loss.coef=0.1",), False),
        (("reference.monitor=true",), False),
        (("kl.reward.coef=0.1",), False),
    ],
)
def test_run_without_a_kl_names_the_monitor(capsys, options, noted):
    run_module._prepare(tiny.context_of(tiny.config_of(*options)), None)
    printed = capsys.readouterr().err
    assert ("note: kl: no term has a coefficient, so this run measures no KL" in printed) == noted
    assert ("reference.monitor=true" in printed) == noted
