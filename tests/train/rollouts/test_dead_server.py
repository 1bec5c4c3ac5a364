"""A server that dies in the middle of a run: the error says so, the state is saved, and the run goes on from there."""

import dataclasses
from contextlib import closing

import jax
import numpy as np
import pytest

from tests import tiny
from tests.train.rollouts.conftest import OPTIONS
from tests.train.rollouts.fake_server import Digits, serving
from train.checkpoint import Checkpoints
from train.config.schema import Checkpoint
from train.interrupt import Interrupt
from train.loop import train
from train.rollouts import SourceError, open_source
from train.tokenizer import ByteTokenizer

EOS = ByteTokenizer().eos_id


class Records:
    """Keeps the metrics of the steps."""

    def __init__(self) -> None:
        self.records: list[dict] = []

    def write(self, phase: str, step: int, values: dict) -> None:
        if phase == "train":
            self.records.append({"step": step, **values})

    def timing(self, step: int, values: dict) -> None:
        assert values["rollout_tokens_per_second"] > 0


def go_on(steps, server: Digits, directory, count: int):
    """Trains until `count` steps are done, from the last checkpoint if there is one; saves only where it has to."""
    source = "rollout.source={{type: openai, url: '{}', model: m, sync: none, retries: 0, timeout: 20.0}}"
    rare = ("temperature=1.0", "eval.every=1000", "checkpoint.every=1000", f"steps={count}")
    writer = Records()
    with serving(server) as url, jax.set_mesh(steps.setting.mesh):
        config = tiny.config_of(*OPTIONS, *rare, source.format(url))
        setting = dataclasses.replace(steps.setting, config=config)
        checkpoints = Checkpoints(directory, config.checkpoint)
        first = steps.first(0)
        with closing(open_source(setting)) as answers, closing(checkpoints):
            state = train(
                setting,
                steps.programs,
                answers,
                checkpoints.restore_last(first) or first,
                writer=writer,
                checkpoints=checkpoints,
                interrupt=Interrupt(),
                advance=lambda note: None,
            )
    return state, writer.records


def test_a_run_survives_the_death_of_its_server(steps, tmp_path, monkeypatch):
    monkeypatch.setattr("train.loop.write_evaluation", lambda *arguments: None)
    whole, records = go_on(steps, Digits(EOS), tmp_path / "whole", 3)
    assert [record["step"] for record in records] == [1, 2, 3]
    # One request to look at the server, four prompts a step: it dies within the third step.
    with pytest.raises(SourceError) as caught:
        go_on(steps, Digits(EOS, lives=1 + 2 * 4 + 1), tmp_path / "broken", 3)
    first, last = str(caught.value).split("\n")
    assert "/v1/completions failed once in 0 s" in first
    assert last == "The run is saved after step 2; continue it with --resume"
    assert Checkpoints(tmp_path / "broken", Checkpoint()).steps() == [2]
    continued, rest = go_on(steps, Digits(EOS), tmp_path / "broken", 3)
    assert rest == records[2:]
    jax.tree.map(np.testing.assert_array_equal, continued.trainable, whole.trainable)


def test_what_is_asked_of_a_server(steps, tmp_path, monkeypatch):
    """Ids and not text, the seed and temperature of the run, and the rows in the order of their prompts."""
    monkeypatch.setattr("train.loop.write_evaluation", lambda *arguments: None)
    server = Digits(EOS)
    go_on(steps, server, tmp_path, 1)
    bodies = server.bodies[1:]
    prompts = [steps.setting.tokenizer.prompt_ids(example) for example in steps.setting.prompts.batch(0)]
    assert sorted(body["prompt"] for body in bodies) == sorted(list(ids) for ids in prompts)
    assert len({body["seed"] for body in bodies}) == 4
    asked = {"model": "m", "n": 8, "max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    for body in bodies:
        assert asked.items() <= body.items()
        assert body["stop_token_ids"] == [EOS]
        assert body["return_token_ids"] is True
        assert body["logprobs"] == 0
        assert "stop" not in body
