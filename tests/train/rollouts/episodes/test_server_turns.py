"""Episodes whose turns servers draw: ids in and ids out, one server an episode, limits of time, and failures."""

import json
import threading
from contextlib import closing, contextmanager

import jax
import numpy as np
import pytest

import kljax
from tests import tiny
from tests.train.rollouts.fake_engines import FakeEngine, serving_all
from tests.train.rollouts.fake_environment import environment_of
from train.config.errors import ConfigError, UserError
from train.data.tasks import Example, Task
from train.data.tokenizers import ByteTokenizer
from train.rollouts.collect import collect
from train.rollouts.open import open_source
from train.rollouts.source import SourceError
from train.rollouts.stream import Stream
from train.run.evaluate import evaluate

TOKENIZER = ByteTokenizer()
EXAMPLES = [Example("1+2=", "3", "3"), Example("22=", "22", "22")]


class Talking(FakeEngine):
    """Answers with the number of the turn; the log-prob of token n is -0.25 (n + 1).

    Attributes:
      prompts: texts of the prompts after the probes.
      slow: a text of prompts that are answered when `over` is set.
      floors: turns to come whose second token has no log-prob.
    """

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[str] = []
        self.slow = "none"
        self.floors = 0

    def _choice(self, body: dict) -> dict:
        if body["ignore_eos"]:
            return super()._choice(body)
        prompt = TOKENIZER.decode_all(body["prompt"])
        self.prompts.append(prompt)
        if self.slow in prompt:
            self.over.wait(30)
        ids = [*f"t{prompt.count('<eos>')}".encode(), TOKENIZER.eos_id][: body["max_tokens"]]
        self.floors, has_floor = max(self.floors - 1, 0), self.floors > 0
        log_probs = [None if n == 1 and has_floor else -0.25 * (n + 1) for n in range(len(ids))]
        ends = ids[-1] == TOKENIZER.eos_id
        return {
            "index": 0,
            "token_ids": ids,
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": log_probs},
            "finish_reason": "stop" if ends else "length",
        }


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    file = tmp_path_factory.mktemp("environment") / "mine.py"
    file.write_text(environment_of("{text}+", reward=0.25, steps=3))
    return f"{file}:Steps"


@contextmanager
def opened(environment, engines, *options, mesh=None, **changes):
    """The context of a run, the source of its episodes, and the policy of step 3, which its servers have."""
    with serving_all(engines) as urls:
        config = tiny.config_of(
            f"environment={{name: '{environment}', max_turns: 3, max_failures: 0.5}}",
            "rollout={prompts_per_step: 2, samples_per_prompt: 2}",
            f"rollout.source={{type: openai, model: m, retries: 0, timeout: 20.0, urls: [{', '.join(urls)}]}}",
            "model.tie_embeddings=false",
            "data.max_completion_length=24",
            *options,
        )
        task = Task("sums", EXAMPLES, [], lambda example, text, _: {"reward": 0.0, "correct": 0.0})
        context = tiny.context_of(config, task=task, mesh=mesh, **changes)
        with closing(open_source(context)) as source, jax.set_mesh(context.mesh):
            policy = tiny.placed(
                kljax.Policy(tiny.drawn(context.model, jax.random.key(0))), context.model, context.mesh
            )
            source.update(policy, 3)
            yield context, source, policy


def test_servers_draw_the_turns_of_episodes(environment):
    engines = [Talking(), Talking()]
    with opened(environment, engines, "mesh.data=2", mesh=tiny.mesh_of(2)) as (context, source, _):
        rollout = collect(context, Stream(context, source), 3)
        batch = rollout.batch
        texts = [
            TOKENIZER.decode_all(np.asarray(ids)[np.asarray(mask)].tolist())
            for ids, mask in zip(batch.tokens, batch.token_mask, strict=True)
        ]
        turns = "t0<eos>t0+t1<eos>t1+t2<eos>"
        assert texts == [f"<bos>{example.prompt}{turns}" for example in EXAMPLES for _ in range(2)]
        sampled = np.asarray(batch.completion_mask)
        assert sampled.sum(1).tolist() == [9] * 4
        assert np.asarray(batch.rollout_log_probs)[sampled].tolist() == [-0.25, -0.5, -0.75] * 12
        assert np.asarray(rollout.completions.fields["token_versions"])[sampled].tolist() == [3] * 36
        assert np.asarray(batch.rewards).tolist() == [0.75] * 4
        assert rollout.completions.metrics["episode_turns"] == 3
        assert rollout.completions.metrics["rollout_engines"] == 2
    # An episode of each prompt is on each server, with all of its turns: the ids before a turn are cached there.
    for engine in engines:
        turns = sorted((prompt.count("<eos>"), prompt.partition("=")[0]) for prompt in engine.prompts)
        assert turns == [(n, f"<bos>{prompt}") for n in range(3) for prompt in ("1+2", "22")]
    bodies = [body for engine in engines for body in engine.bodies if not body["ignore_eos"]]
    assert len({body["seed"] for body in bodies}) == len(bodies) == 12


def test_evaluation_of_servers_is_greedy_on_request(environment):
    engine = Talking()
    with opened(environment, [engine], held_out=EXAMPLES) as (context, source, policy):
        stream = Stream(context, source)
        metrics, _ = evaluate(context, stream, policy, jax.random.key(0), step=3, greedy=True)
    assert metrics["episode_turns"] == 3
    bodies = [body for body in engine.bodies if not body["ignore_eos"]]
    assert {body["temperature"] for body in bodies} == {0.0}


def test_token_without_a_log_prob_is_not_trained(environment):
    engine = Talking()
    engine.floors = 1
    with opened(environment, [engine]) as (context, source, _):
        batch = collect(context, Stream(context, source), 3).batch
    sampled = np.asarray(batch.completion_mask)
    assert sorted(sampled.sum(1).tolist()) == [8, 9, 9, 9]


def test_log_probs_that_are_not_recorded_are_no_field(environment):
    with opened(environment, [Talking()], "rollout.record_log_probs=false", "correction=[]") as (context, source, _):
        rollout = collect(context, Stream(context, source), 3)
    assert "rollout_log_probs" not in rollout.completions.fields
    assert rollout.batch.rollout_log_probs is None


def test_turn_of_a_server_over_its_time_fails(environment):
    engine = Talking()
    engine.slow = "22=t0<eos>t0+t1"
    with opened(environment, [engine], "environment.turn_seconds=1.5") as (context, source, _):
        rollout = collect(context, Stream(context, source), 3)
        assert rollout.completions.metrics["episodes_failed_turn_seconds"] == 2
        assert np.asarray(rollout.batch.group_ids).tolist() == [0, 0, -1, -1]
        assert source._engine.is_idle()


def test_server_that_fails_ends_the_step(environment):
    engine = Talking()
    with opened(environment, [engine]) as (context, source, _):
        engine.down = True
        with pytest.raises(SourceError, match=r"/v1/completions failed once"):
            collect(context, Stream(context, source), 3)
        assert source._engine.is_idle()


def test_server_that_lacks_the_model_ends_the_environment(environment, monkeypatch):
    engine = Talking()
    monkeypatch.setattr(Talking, "__call__", lambda *_: (200, json.dumps({"data": []})))
    before = threading.active_count()
    with pytest.raises(UserError, match=r"^rollout.source.model: got 'm'"), opened(environment, [engine]):
        pass
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("environment.rows=2",), "environment.rows: got 2, but there is an environment, and servers have a cache"),
        (
            ("rollout.mesh={data: 1, tensor: 1}",),
            "rollout.mesh: got .* an environment, and servers have weights of",
        ),
        (("rollout.ahead=1",), "rollout.ahead: got 1, but there is an environment, and the episodes of a step run"),
        (("rollout.source={type: file, path: /tmp}",), "environment: got one, but rollout.source.type file draws no"),
    ],
)
def test_options_that_episodes_of_servers_ignore_are_refused(environment, options, message):
    with pytest.raises(ConfigError, match=message), opened(environment, [Talking()], *options):
        pass
