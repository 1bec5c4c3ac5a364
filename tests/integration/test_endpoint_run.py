"""Runs whose agents ask their endpoint, which a signal leaves in the middle of a step; and a run that is served."""

import json
import os
import signal
import sys
import threading
import time
import urllib.request

import jax
import pytest

from tests.integration.command import records, run_here
from tests.integration.test_shipped_configs import CALCULATOR
from tests.train.data.test_tokenizer_folder import FOLDERS
from tests.train.rollouts.endpoint.test_source import AGENT
from train import serve
from train.rollouts.endpoint import listen
from train.rollouts.endpoint.generator import Generator
from train.rollouts.engine import TurnEngine


def options_of(folder, steps):
    """The options of a run in a folder, with its agent."""
    (folder / "mine.py").write_text(AGENT)
    source = f"rollout.source={{type: endpoint, agent: '{folder}/mine.py:play'}}"
    return (
        CALCULATOR[0],
        *CALCULATOR[1:3],
        "environment=null",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
        source,
        *CALCULATOR[4:],
        f"steps={steps}",
        "warm_start.steps=0",
        "report.rollouts=0",
        "data.max_completion_length=16",
        f"output={folder}",
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A run of 3 steps that was left in the middle of its second, and went on."""
    folder = tmp_path_factory.mktemp("endpoint")
    options = options_of(folder, 3)
    step = TurnEngine.step
    left = []

    def signalling(self):
        ended = step(self)
        if self._version == 1 and ended and not left:
            left.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        return ended

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TurnEngine, "step", signalling)
        stopped = run_here(*options)
    assert stopped.returncode == 130, stopped.stderr
    assert "interrupted after step 1 of 3; saved, continue with --resume" in stopped.stderr
    run_here(*options, "--resume").succeeded()
    return folder / "calculator"


@pytest.mark.slow
def test_step_that_is_left_runs_its_episodes_again(root):
    steps = records(root, "train")
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert all(record["episode_turns"] == 2 for record in steps)
    assert all(record["correct"] == 1 for record in records(root, "eval"))


@pytest.mark.slow
def test_run_on_two_devices_trains_what_it_served(tmp_path, monkeypatch):
    step = TurnEngine.step
    devices = set()

    def watched(self):
        ended = step(self)
        devices.update(len(array.sharding.device_set) for array in jax.tree.leaves(self._pool))
        return ended

    monkeypatch.setattr(TurnEngine, "step", watched)
    run_here(*options_of(tmp_path, 2), "mesh={data: 2}").succeeded()
    assert devices == {2}
    for record in records(tmp_path / "calculator", "train"):
        assert record["episode_turns"] == 2
        assert record["rollout_log_prob_error"] < 1e-5


@pytest.mark.slow
def test_run_is_served_until_a_signal(root, monkeypatch, capsys):
    answers = []
    urls = []
    open_socket = listen.Listener.__init__

    def opened(self, *arguments, **options):
        open_socket(self, *arguments, **options)
        urls.append(self.url)
        threading.Thread(target=ask).start()

    def ask():
        body = json.dumps({"prompt": "1+2", "max_tokens": 5, "return_token_ids": True}).encode()
        request = urllib.request.Request(f"{urls[0]}/v1/completions", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                answers.append(json.load(answer))
        finally:
            answers.append(None)

    advance = Generator.advance

    def advance_until_answered(self, engine, *, seconds):
        if None in answers:
            time.sleep(0.05)
            raise KeyboardInterrupt
        advance(self, engine, seconds=0.01)

    monkeypatch.setattr(listen.Listener, "__init__", opened)
    monkeypatch.setattr(Generator, "advance", advance_until_answered)
    assert serve.main([str(root), "--port", "0"]) == 130
    assert f"serving calculator after step 3 on {urls[0]}/v1, 40 tokens" in capsys.readouterr().out
    assert answers[0]["weight_version"] == 3
    assert 1 <= len(answers[0]["choices"][0]["token_ids"]) <= 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--host", "0.0.0.0"), "--host: got 0.0.0.0, which other machines reach; set --api-key-env or --api-key-file"),
        (("--api-key-env", "A", "--api-key-file", "b"), "--api-key-file: --api-key-env is set too; set only one"),
        (("--api-key-env", "NO_SUCH_KEY"), "--api-key-env: the environment has no variable 'NO_SUCH_KEY'"),
    ],
)
def test_server_that_is_open_to_others_is_refused(tmp_path, capsys, flags, message):
    assert serve.main([str(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err


def test_run_in_the_form_of_a_family_is_served_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "renderers", None)
    lines = (
        "name: family",
        "task: arithmetic",
        "steps: 1",
        f"model: {{path: {FOLDERS / 'chatml'}}}",
        "environment: {name: 'train.data.environments.calculator:Calculator', renderer: qwen3}",
    )
    (tmp_path / "family.yaml").write_text("\n".join(lines))
    assert serve.main([str(tmp_path / "family.yaml")]) == 2
    assert "environment.renderer: got 'qwen3', which needs a package" in capsys.readouterr().err
