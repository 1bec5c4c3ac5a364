"""Batches of episodes that agent programs run: the tokens of the engine, forks, failures, and one advantage each."""

import pickle
import threading
import time
from contextlib import closing

import jax
import numpy as np
import pytest

import kljax
from tests import tiny
from tests.train.rollouts.fake_environment import environment_of
from train.data.tasks import Example, Task
from train.models.sharding import make_mesh
from train.process.interrupt import StepLeftError
from train.rl.algorithms import make_estimator
from train.rollouts.collect import collect as collect_batch
from train.rollouts.collect import draw
from train.rollouts.endpoint import source as endpoint_source
from train.rollouts.endpoint.agents import Agents
from train.rollouts.endpoint.sessions import OpenEpisodes, SequenceLengths
from train.rollouts.endpoint.source import EndpointSource
from train.rollouts.episodes import EpisodeSource
from train.rollouts.episodes.failures import FailureWatch
from train.rollouts.source import SourceError
from train.rollouts.stream import Stream
from train.sequences.sample import Failure

AGENT = """
import json
import urllib.request

def post(base_url, api_key, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + api_key}
    request = urllib.request.Request(base_url + "/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]

def play(row, base_url, api_key, model, turns=2, forks=2, failing=(), forking=(), silent=(), slow=(), unreached=()):
    if row["prompt"] in failing:
        raise ConnectionError("no answer")
    if row["prompt"] in silent:
        return 0.0
    if row["prompt"] in unreached:
        raise TimeoutError("the connection timed out")
    if row["prompt"] in slow:
        import time
        time.sleep(60)
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(turns):
        said = post(base_url, api_key, {"messages": messages, "max_tokens": 3})
        messages += [said, {"role": "user", "content": "+1"}]
    if row["prompt"] in forking:
        anew = [[*messages[:-2], {"role": "user", "content": "!"}], [{"role": "user", "content": "anew"}]]
        for said in anew[:forks]:
            post(base_url, api_key, {"messages": said, "max_tokens": 3})
    return {"reward": float(len(row["prompt"])), "correct": 1.0}
"""
EXAMPLES = [Example("1+2", "3", "3"), Example("12+2", "14", "14")]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    (folder / "mine.py").write_text(AGENT)
    (folder / "steps.py").write_text(environment_of("+1", reward=1.0, steps=2))
    return folder


def context_of(*options, **changes):
    config = tiny.config_of(
        "rollout={prompts_per_step: 2, samples_per_prompt: 4}", "data.max_completion_length=16", *options
    )
    task = Task("sums", EXAMPLES, [], lambda example, text, _: {"reward": 0.0})
    return tiny.context_of(config, task=task, **changes)


@pytest.fixture(scope="module")
def source(files):
    """A source whose agent's arguments a test changes."""
    context = context_of(
        f"rollout.source={{type: endpoint, agent: '{files}/mine.py:play', max_failures: 0.5}}",
        "rollout.fork_rows=1",
        "optim.share_prompts=false",
    )
    source = EndpointSource(context, context.config.rollout.source)
    with jax.set_mesh(context.mesh):
        source.update(
            kljax.Policy(tiny.placed(kljax.Policy(tiny.host_params()), context.model, context.mesh).params), 5
        )
    yield source
    source.close()


@pytest.fixture
def collected(source):
    """Collects the batch of a step, judged, with other arguments of the agent."""

    def collect(**arguments):
        assert source._agents is not None
        source._agents.close()
        section = source._section.model_copy(update={"arguments": arguments})
        source._agents._section = section
        source._section = section
        context = source._context
        stream = Stream(context, source)
        return collect_batch(context, stream, 3)

    return collect


def texts_of(batch):
    masks = zip(np.asarray(batch.tokens), np.asarray(batch.token_mask), strict=True)
    return [tiny.ByteTokenizer().decode_all(tokens[mask].tolist()) for tokens, mask in masks]


def test_fork_has_a_row_of_its_group(collected):
    rollout = collected(forking=["12+2"], forks=1)
    batch = rollout.batch
    # The first episode of the second prompt takes the row; the others have none for their forks.
    assert rollout.completions.metrics["episodes_failed_forks"] == 2
    assert rollout.completions.metrics["episode_forks"] == 1 / 4
    assert np.asarray(batch.group_ids).tolist() == [0, 0, 0, -1, 1, -1, -1, -1]
    assert np.asarray(batch.episode_rows).tolist() == [0, 1, 2, -1, 4, -1, -1, 4]
    texts = texts_of(batch)
    first, sampled = (np.asarray(x)[4:8:3] for x in (batch.tokens, batch.completion_mask))
    assert texts[7].startswith("<bos>12+2")
    assert "+1!" in texts[7]
    assert sampled.sum(1).tolist()[1] == len(rollout.completions.sampled[7][0].ids)
    assert first.shape == sampled.shape
    assert np.asarray(batch.rewards).tolist()[4::3] == [4, 4]
    assert rollout.completions.metrics["reward"] == (3 * 3 + 4) / 4


def test_episode_with_too_many_forks_is_left_out(collected):
    rollout = collected(forking=["12+2"])
    assert rollout.completions.metrics["episodes_failed_forks"] == 3
    assert np.asarray(rollout.batch.group_ids).tolist() == [0, 0, 0, -1, -1, -1, -1, -1]


def test_batch_has_what_was_sampled(collected, source):
    rollout = collected()
    batch = rollout.batch
    assert np.asarray(batch.group_ids).tolist() == [0, 0, 0, -1, 1, 1, 1, -1]
    assert np.asarray(batch.rewards).tolist() == [3, 3, 3, 0, 4, 4, 4, 0]
    assert np.asarray(batch.completion_mask).sum(1).tolist()[3::4] == [0, 0]
    for text, prompt in zip(texts_of(batch), ["1+2"] * 4 + ["12+2"] * 4, strict=True):
        assert text.startswith(f"<bos>{prompt}")
    assert rollout.completions.metrics["episode_turns"] == 2
    assert rollout.completions.metrics["reward"] == 3.5
    assert (np.asarray(rollout.completions.fields["token_versions"]).max(1) == [5, 5, 5, -1] * 2).all()


def test_failures_of_the_world_leave_the_group(collected):
    rollout = collected(silent=["12+2"])
    assert np.asarray(rollout.batch.group_ids).tolist() == [0, 0, 0, -1, -1, -1, -1, -1]
    assert rollout.completions.metrics["episodes_failed_exception"] == 3
    assert rollout.completions.metrics["reward"] == 3
    silent = Failure("world", "exception", "the agent program asked for no completion")
    assert rollout.completions.failures[3:] == [None, silent, silent, silent, None]
    with pytest.raises(
        SourceError, match=r"^rollout.source.max_failures: got 0.5, but 6 of 6 .*6 exception.*no answer"
    ):
        collected(failing=["1+2", "12+2"])


def test_step_without_an_episode_ends_the_run(collected, source, monkeypatch):
    monkeypatch.setattr(source, "_failures", FailureWatch(1.0, "rollout.source.max_failures"))
    with pytest.raises(
        SourceError, match=r"^rollout.source.max_failures: got 1, but nothing is left to train on: 6 of"
    ):
        collected(failing=["1+2", "12+2"])


def test_time_out_of_an_agent_is_its_exception(collected):
    rollout = collected(unreached=["12+2"])
    assert rollout.completions.metrics["episodes_failed_exception"] == 3
    assert rollout.completions.metrics["episodes_failed_episode_seconds"] == 0


def test_episode_over_its_time_fails(collected, source):
    section = source._section
    source._section = section.model_copy(update={"episode_seconds": 4.0})
    began = time.monotonic()
    rollout = collected(slow=["12+2"])
    assert time.monotonic() - began < 30
    assert rollout.completions.metrics["episodes_failed_episode_seconds"] == 3
    source._section = section


def test_step_that_is_left_ends_its_episodes(collected, source, monkeypatch):
    def leave(*, together):
        if source._generator.served:
            raise StepLeftError("left")

    source._generator.served = 0
    monkeypatch.setattr(endpoint_source, "leave_if_stopping", leave)
    with pytest.raises(StepLeftError):
        collected()
    assert source._generator.open == 0
    assert is_freed(source._engine)
    monkeypatch.undo()
    assert collected().completions.metrics["episode_turns"] == 2


def is_freed(engine) -> bool:
    """Whether nothing but the compiled programs stays until the next step."""
    return engine._pool is None and not engine._weights and engine.is_idle()


def test_agent_draws_the_tokens_of_episodes_on_a_mesh(collected, source, files, monkeypatch):
    rollout = collected()
    environment = f"environment={{name: '{files}/steps.py:Steps', turn_tokens: 3, max_turns: 2}}"
    context = context_of(environment, "mesh={data: 2, fsdp: 2}", mesh=make_mesh(2, 2))
    with closing(EpisodeSource(context)) as episodes, jax.set_mesh(context.mesh):
        episodes.update(tiny.placed(kljax.Policy(tiny.host_params()), context.model, context.mesh), 5)
        drawn = draw(context, Stream(context, episodes), 3)
        assert is_freed(episodes._engine)
        monkeypatch.setattr(episodes._environments, "answer", _fail_on_steps(episodes._environments.answer))
        with pytest.raises(SourceError, match=r"^environment: gone$"):
            draw(context, Stream(context, episodes), 4)
        assert is_freed(episodes._engine)
    # The groups have 3 episodes there and 4 here; a key belongs to the number of an episode.
    ours = [text for row, text in enumerate(texts_of(rollout.batch)) if row % 4 < 3]
    theirs = texts_of(drawn.batch)
    assert ours[:3] == theirs[:3]


def _fail_on_steps(answer):
    """Answers until the first turn is over: others are under way then."""

    def failing(questions):
        if any(question["do"] == "step" for question in questions):
            raise SourceError("environment: gone")
        return answer(questions)

    return failing


def test_agent_has_no_key_in_its_environment(files, monkeypatch):
    (files / "curious.py").write_text(
        "import os\ndef play(**given): return float('A_KEY' in os.environ) + 2.0 * ('A_WORD' in os.environ)"
    )
    for name in ("A_KEY", "A_WORD"):
        monkeypatch.setenv(name, "secret")
    source = f"rollout.source={{type: endpoint, agent: '{files}/curious.py:play', reward_key_env: A_KEY}}"
    ended = threading.Event()
    episodes = OpenEpisodes(ended.set)
    opened = episodes.open([{}], [np.zeros(2, np.uint32)], SequenceLengths(4, 4))
    with closing(Agents(tiny.config_of(source).rollout.source)) as agents:
        agents.play(episodes, opened, base_url="http://none", model="m", key="none")
        assert ended.wait(30)
    assert opened[0].rewards == {"reward": 2.0}


def test_error_of_a_thread_fails_its_episodes(files, monkeypatch):
    """The second process does not start; the first one gets a row that cannot be pickled."""
    started = []

    class FailingWorker:
        def __init__(self, *arguments, **options):
            started.append(self)
            if len(started) > 1:
                raise OSError("no process is left")

        def ask(self, question, *, seconds):
            return pickle.dumps(question) if question else {}

        def close(self):
            pass

    monkeypatch.setattr("train.rollouts.endpoint.agents.WorkerProcess", FailingWorker)
    ended = threading.Event()
    episodes = OpenEpisodes(lambda: ended.set() if all(x.over for x in opened) else None)
    opened = episodes.open([{"f": lambda: 0}] * 2, [np.zeros(2, np.uint32)] * 2, SequenceLengths(4, 4))
    source = f"rollout.source={{type: endpoint, agent: '{files}/mine.py:play', processes: 2}}"
    with closing(Agents(tiny.config_of(source).rollout.source)) as agents:
        agents.play(episodes, opened, base_url="http://none", model="m", key="none")
        assert ended.wait(5)
    (first, text), (second, other) = [episode.failure for episode in opened]
    assert (first, second) == ("exception", "exception")
    assert "pickle" in text
    assert other.startswith("OSError: no process is left")


def test_advantage_of_a_fork_is_that_of_its_episode():
    context = context_of(
        "rollout.source={type: endpoint, reward_key_env: KEY, port: 9}",
        "rollout.fork_rows=1",
        "optim.share_prompts=false",
    )
    batch = tiny.rollout_batch()
    ids = np.array([0, 0, -1, -1, 1, 1, 1, -1], np.int32)
    rows = np.array([0, 1, 0, -1, 4, 5, 6, 5], np.int32)
    batch = jax.tree.map(np.asarray, batch)
    changed = {"group_ids": ids, "episode_rows": rows, "rewards": np.array([1, 0, 9, 9, 2, 0, 4, 9], np.float32)}
    mask = np.ones_like(batch.completion_mask)
    batch = type(batch)(**{**vars(batch), **changed, "completion_mask": mask})
    advantages, _ = make_estimator(context.plan)(batch)
    first = np.asarray(advantages)[:, 0]
    assert first[2] == first[0] != 0
    assert first[7] == first[5] != 0
    assert first[3] == 0
    expected = kljax.grpo_advantages(changed["rewards"], ids, num_groups=2)
    np.testing.assert_array_equal(first[[0, 1, 4, 5, 6]], np.asarray(expected)[[0, 1, 4, 5, 6]])
