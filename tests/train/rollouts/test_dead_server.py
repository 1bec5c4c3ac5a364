"""A server that dies in the middle of a run: the error says so, the state is saved, and the run goes on from there."""

import dataclasses
from contextlib import closing

import jax
import numpy as np
import pytest

import kljax
from tests import tiny
from tests.train.rollouts.conftest import FROZEN, OPTIONS
from tests.train.rollouts.fake_server import PROBES, Answer, Digits, serving
from train.config.errors import UserError
from train.config.plan import Plan
from train.config.schema import Checkpoint
from train.data.tokenizers import ByteTokenizer
from train.models.parameters import init_adapter, init_params
from train.process.interrupt import Interrupt
from train.rollouts.open import open_source, open_stream
from train.rollouts.source import SourceError
from train.run.guard import StepGuard
from train.run.loop import train
from train.weights.orbax import RunCheckpoints

EOS = ByteTokenizer().eos_id
REQUESTS = 4 * 8
"""Of each step: completions of its prompts."""


class Records:
    """Keeps the metrics of the steps; no step is evaluated."""

    def __init__(self) -> None:
        self.records: list[dict] = []

    def is_evaluated(self, step: int) -> bool:
        return False

    def write(self, phase: str, step: int, values: dict) -> None:
        if phase == "train":
            self.records.append({"step": step, **values})

    def timing(self, step: int, values: dict) -> None:
        assert values["rollout_tokens_per_second"] > 0


def go_on(steps, server: Digits, directory, count: int, *options: str, evaluates: bool = False):
    """Trains until `count` steps are done, from the last checkpoint if there is one; saves only where it has to."""
    source = "rollout.source={{type: openai, url: '{}', model: m, sync: none, retries: 0, timeout: 20.0}}"
    rare = ("temperature=1.0", "eval.every=1000", "checkpoint.every=1000", f"steps={count}")
    writer = Records()
    with serving(server) as url, jax.set_mesh(steps.context.mesh):
        config = tiny.config_of(*OPTIONS, *rare, source.format(url), *options)
        context = dataclasses.replace(steps.context, plan=Plan.of(config))
        checkpoints = RunCheckpoints(directory, config.checkpoint)
        first = steps.first(0)
        with closing(open_stream(context)) as answers, closing(checkpoints):
            state = train(
                context,
                steps.programs,
                answers,
                FROZEN,
                checkpoints.restore_last(first) or first,
                writer=writer,
                watch=StepGuard(config, checkpoints, directory.with_name("nonfinite")),
                interrupt=Interrupt(),
                advance=lambda note: None,
                evaluation=answers if evaluates else None,
            )
    return state, writer.records


def test_a_run_survives_the_death_of_its_server(steps, tmp_path, monkeypatch):
    monkeypatch.setattr("train.run.loop.write_evaluation", lambda *arguments: None)
    uninterrupted, records = go_on(steps, Digits(EOS), tmp_path / "whole", 3)
    assert [record["step"] for record in records] == [1, 2, 3]
    # It dies within the third step.
    with pytest.raises(SourceError) as caught:
        go_on(steps, Digits(EOS, lives=PROBES + 2 * REQUESTS + 1), tmp_path / "broken", 3)
    first, last = str(caught.value).split("\n")
    assert "/v1/completions failed once in 0 s" in first
    assert last == "The run is saved after step 2; continue it with --resume"
    assert RunCheckpoints(tmp_path / "broken", Checkpoint()).steps() == [2]
    continued, rest = go_on(steps, Digits(EOS), tmp_path / "broken", 3)
    assert rest == records[2:]
    jax.tree.map(np.testing.assert_array_equal, continued.trainable, uninterrupted.trainable)


def test_failed_evaluation_loses_no_step(steps, tmp_path, monkeypatch):
    evaluated = []

    def evaluate(context, stream, policy, writer, step):
        evaluated.append(step)
        if evaluated == [0, 2]:
            raise SourceError("rollout.source: no answer")

    monkeypatch.setattr("train.run.loop.write_evaluation", evaluate)
    every = ("eval.every=2",)
    with pytest.raises(SourceError, match=r"no answer\nThe run is saved after step 2; continue it with --resume"):
        go_on(steps, Digits(EOS), tmp_path, 3, *every, evaluates=True)
    assert RunCheckpoints(tmp_path, Checkpoint()).steps() == [2]
    _, rest = go_on(steps, Digits(EOS), tmp_path, 3, *every, evaluates=True)
    assert [record["step"] for record in rest] == [3]
    assert evaluated == [0, 2, 2, 3]


def test_unusable_answer_leaves_a_resumable_run(steps, tmp_path, monkeypatch):
    """Its log-probs would be trained on; the run stops before, with its state saved."""
    monkeypatch.setattr("train.run.loop.write_evaluation", lambda *arguments: None)

    class Broken(Digits):
        """Its log-probs become NaN in the third step."""

        def _choice(self, body: dict) -> dict:
            choice = super()._choice(body)
            broken = len(self.bodies) > PROBES + 2 * REQUESTS
            return choice | ({"logprobs": {"token_logprobs": [float("nan")] * 2}} if broken else {})

    with pytest.raises(SourceError) as caught:
        go_on(steps, Broken(EOS), tmp_path, 3)
    first, last = str(caught.value).split("\n")
    assert first.startswith("rollout.source: logprobs.token_logprobs of the answer: got nan, expected numbers that are")
    assert last == "The run is saved after step 2; continue it with --resume"
    assert RunCheckpoints(tmp_path, Checkpoint()).steps() == [2]
    _, rest = go_on(steps, Digits(EOS), tmp_path, 3)
    assert [record["step"] for record in rest] == [3]


def test_requests_to_a_server_have_these_fields(steps, tmp_path, monkeypatch):
    """Ids and not text, every sampling field, and a seed for each completion."""
    monkeypatch.setattr("train.run.loop.write_evaluation", lambda *arguments: None)
    server = Digits(EOS)
    go_on(steps, server, tmp_path, 1)
    bodies = server.bodies[PROBES:]
    prompts = [steps.context.tokenizer.prompt_ids(example) for example in steps.context.prompts.batch(0)]
    assert sorted(body["prompt"] for body in bodies) == sorted(list(ids) for ids in prompts for _ in range(8))
    assert len({body["seed"] for body in bodies}) == REQUESTS
    requests = {"model": "m", "n": 1, "max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    requests |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": False}
    for body in bodies:
        assert requests.items() <= body.items()
        assert body["stop_token_ids"] == [EOS]
        assert body["return_token_ids"] is True
        assert body["logprobs"] == 0
        assert "stop" not in body


class Loads(Digits):
    """Also takes adapters and weights."""

    def __call__(self, path: str, body: dict) -> Answer:
        return super().__call__(path, body) if path.startswith("/v1/completions") or path == "/v1/models" else (200, "")


@pytest.mark.parametrize("kind", ["lora", "weights"])
@pytest.mark.parametrize("when", ["before", "later"])
def test_unwritable_folder_is_an_error_of_its_field(tmp_path, kind, when):
    """Found before a run starts; a disk that fills later stops the run like a server that is gone."""
    folder = tmp_path / "shared"
    source = "rollout.source={{type: openai, url: '{}', model: m, sync: {}, retries: 0, folder: {}}}"
    lora = ("lora={rank: 2, targets: [q_proj]}",) if kind == "lora" else ("model.tie_embeddings=false",)
    if when == "before":
        folder.write_text("a file")
    with serving(Loads(EOS)) as url:
        context = tiny.context_of(tiny.config_of(*lora, source.format(url, kind, folder)))
        if when == "before":
            with pytest.raises(UserError, match=rf"^rollout\.source\.folder: cannot write to {folder}: "):
                open_source(context)
            return
        with closing(open_source(context)) as answers:
            assert not list(folder.iterdir())
            folder.rmdir()
            folder.write_text("a file")
            params = init_params(context.model, jax.random.key(0), context.mesh)
            adapter = init_adapter(context.model, jax.random.key(1), context.mesh) if kind == "lora" else None
            with pytest.raises(SourceError, match=rf"^rollout\.source\.folder: cannot write {folder}/run-0-"):
                answers.update(kljax.Policy(params, adapter), 0)


def test_unwritable_recording_leaves_a_resumable_run(steps, tmp_path, monkeypatch):
    monkeypatch.setattr("train.run.loop.write_evaluation", lambda *arguments: None)
    record = tmp_path / "recorded"

    class Full(Digits):
        """The disk fills while it answers."""

        def __call__(self, path: str, body: dict) -> Answer:
            # Where the file of the second step is written first.
            (record / "00000001.jsonl.partial").mkdir(exist_ok=True)
            return super().__call__(path, body)

    with pytest.raises(SourceError) as caught:
        go_on(steps, Full(EOS), tmp_path / "run", 3, f"rollout.record={record}")
    first, last = str(caught.value).split("\n")
    assert first == f"rollout.record: cannot write {record / '00000001.jsonl'}: Is a directory"
    assert last == "The run is saved after step 1; continue it with --resume"
    assert RunCheckpoints(tmp_path / "run", Checkpoint()).steps() == [1]
