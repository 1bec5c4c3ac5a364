"""The stream of samples: several steps ahead, parts of requests, groups of two versions, and sources of the user."""

import dataclasses
import json
import threading
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest

import kljax
from tests import tiny
from tests.goldens.vllm.tiny import drawn
from tests.train.rollouts.conftest import EOS, OPTIONS, REQUESTS, SECONDS, SOURCE, VersionedServer, Versions
from tests.train.rollouts.fake_engines import FakeEngine
from tests.train.rollouts.fake_server import PROBES, Answer, serving
from tests.train.rollouts.test_ahead import assert_equal
from tests.train.rollouts.test_user_source import CONTEXT, ROWS, Changed, right_rows, shifted
from train.config.errors import UserError
from train.config.plan import Plan
from train.config.schema import Checkpoint
from train.config.signatures import forget_signatures
from train.data.tasks.user_score import RewardError
from train.models.parameters import abstract_adapter, abstract_params
from train.models.shard_rows import shard_rows
from train.rollouts.collect import collect
from train.rollouts.lag import token_lags
from train.rollouts.open import open_evaluation, open_stream
from train.rollouts.server.engines import Engines
from train.rollouts.source import Completions, FinishedSamples, Request, SourceError
from train.rollouts.stream import Stream
from train.rollouts.user_source import UserSource, make_user_source
from train.run.evaluate import evaluate
from train.sequences.sample import Failure
from train.sequences.token_fields import VERSIONS
from train.weights.orbax import RunCheckpoints


def versions_of(directory: Path, step: int) -> set[int]:
    """The versions in the recording of a step."""
    rows = [json.loads(line) for line in (directory / f"{step:08d}.jsonl").read_text().splitlines()]
    return {version for row in rows for version in row["token_versions"]}


@pytest.mark.parametrize("ahead", [2, 3])
def test_batches_are_requested_so_many_steps_ahead(go_on, tmp_path, ahead):
    server = VersionedServer(EOS)
    options = (f"rollout.ahead={ahead}", f"rollout.record={tmp_path / 'rows'}")
    _, records = go_on("run", server, 6, *options)
    # One batch, those of the window behind it with the same weights, and one more with the weights of each later step.
    assert sorted(server.bodies_by_version) == list(range(6))
    expected = {0: 1 + ahead, **dict.fromkeys(range(1, 6), 1)}
    assert {version: count / REQUESTS for version, count in server.bodies_by_version.items()} == expected
    lags = [min(step, ahead) for step in range(6)]
    assert [record["rollout_lag"] for record in records] == lags
    assert [record["rollout_lag_max"] for record in records] == lags
    assert [versions_of(tmp_path / "rows", step) for step in range(6)] == [{step - lags[step]} for step in range(6)]


@pytest.mark.parametrize("ahead", [2, 3])
@pytest.mark.parametrize("way", ["more steps", "interrupted"])
def test_continued_run_equals_an_uninterrupted_run(go_on, way, ahead):
    """A checkpoint has every batch in flight: the server has their versions no more, and they are trained once."""
    options = (f"rollout.ahead={ahead}", "checkpoint.every=1000")
    uninterrupted, records = go_on("whole", VersionedServer(EOS), 6, *options)
    first, stop = (3, None) if way == "more steps" else (6, 3)
    _, begun = go_on("parts", VersionedServer(EOS), first, *options, stop_after=stop)
    server = VersionedServer(EOS)
    continued, rest = go_on("parts", server, 6, *options)
    assert begun + rest == records
    assert_equal(continued, uninterrupted)
    # Nothing of the window is requested again.
    assert {version: count / REQUESTS for version, count in server.bodies_by_version.items()} == {3: 1, 4: 1, 5: 1}


def test_failing_reward_function_leaves_the_window(steps, go_on):
    calls = []

    def score(example, text, finished):
        calls.append(text)
        if len(calls) == 2 * REQUESTS + 3:
            raise RewardError("data.reward: no answer")
        return steps.context.task.score(example, text, finished)

    judges = {"task": dataclasses.replace(steps.context.task, score=score)}
    options = ("rollout.ahead=2", "checkpoint.every=1000")
    uninterrupted, records = go_on("whole", VersionedServer(EOS), 4, *options)
    with pytest.raises(RewardError, match=r"The run is saved after step 2; continue it with --resume"):
        go_on("parts", VersionedServer(EOS), 4, *options, changes=judges.items())
    server = VersionedServer(EOS)
    continued, rest = go_on("parts", server, 4, *options)
    assert rest == records[2:]
    assert_equal(continued, uninterrupted)
    assert server.bodies_by_version == {3: REQUESTS}


def test_dead_server_loses_what_it_did_not_answer(go_on, capsys):
    with pytest.raises(SourceError, match=r"The run is saved after step \d; continue it with --resume"):
        go_on("run", VersionedServer(EOS, lives=PROBES + 3 * REQUESTS + 1), 6, "rollout.ahead=2", "checkpoint.every=1")
    server = VersionedServer(EOS)
    state, rest = go_on("run", server, 6, "rollout.ahead=2")
    assert int(state.step) == 6
    assert [record["step"] for record in rest] == list(range(7 - len(rest), 7)), "no step is trained twice or left out"
    assert max(record["rollout_lag_max"] for record in rest) <= 2


def test_smaller_window_trains_what_is_in_flight_first(go_on):
    go_on("run", VersionedServer(EOS), 3, "rollout.ahead=3")
    _, rest = go_on("run", VersionedServer(EOS), 7, "rollout.ahead=1")
    assert [record["rollout_lag"] for record in rest] == [3, 3, 3, 1]


# Weights that change while requests are in flight.


class Held(FakeEngine):
    """Answers as many completions as it is let."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.turns, self.begun = threading.Semaphore(turns), threading.Semaphore(0)
        self.asked: list[str] = []

    def __call__(self, path: str, body: dict) -> Answer:
        if path == "/v1/completions" and not body["ignore_eos"]:
            self.asked.append(body["model"])
            self.begun.release()
            assert self.turns.acquire(timeout=SECONDS)
        return super().__call__(path, body)

    def wait_for(self, count: int) -> None:
        """Waits until so many more completions are asked for."""
        for _ in range(count):
            assert self.begun.acquire(timeout=SECONDS)


UNDER_WAY = 3
KINDS = {"lora": "lora={rank: 2, alpha: 4.0, targets: [q_proj]}", "weights": "model.tie_embeddings=false"}


@pytest.mark.parametrize("kind", KINDS)
def test_group_may_have_two_versions(kind, tmp_path, monkeypatch):
    """Requests behind others get the weights of the moment when they are sent, and each token says which."""
    server = Held(turns=REQUESTS)
    hold_back = Engines._hold_back

    async def finish_and_hold_back(engines):
        """Completions that are under way end when no other may begin."""
        engines._may_go_on.clear()
        if engines.label is not None:
            server.turns.release(10**6)
        await hold_back(engines)

    monkeypatch.setattr(Engines, "_hold_back", finish_and_hold_back)
    with serving(server) as url:
        about = f"retries: 0, timeout: 20.0, concurrency: {UNDER_WAY}, folder: '{tmp_path / 'served'}'"
        source = f"rollout.source={{type: openai, model: m, url: '{url}', {about}}}"
        config = tiny.config_of(*OPTIONS, source, "temperature=1.0", "rollout.ahead=2", KINDS[kind])
        context = tiny.context_of(config)
        params = drawn(abstract_params(context.model, context.mesh), 0)
        policy = kljax.Policy(
            params, drawn(abstract_adapter(context.model, context.mesh), 0) if kind == "lora" else None
        )
        with jax.set_mesh(context.mesh), closing(open_stream(context)) as stream:
            stream.update(policy, 0)
            stream.batch(0)
            # The first requests of the next batch are under way, and the others wait behind them.
            server.wait_for(REQUESTS + UNDER_WAY)
            stream.update(policy, 1)
            stream.start([])
            of_old = sum("-0-" in name for name in server.adapters)
            server.turns.release(10**6)
            completions = stream.batch(1)
            later = stream.batch(2)
    mask = completions.completion_mask
    versions = completions.fields[VERSIONS]
    np.testing.assert_array_equal(versions[~mask], -1)
    # One group of eight has both.
    rows = np.where(np.arange(REQUESTS) < UNDER_WAY, 0, 1)
    np.testing.assert_array_equal(versions[mask], np.broadcast_to(rows[:, None], mask.shape)[mask])
    assert set(later.fields[VERSIONS][later.completion_mask].tolist()) == {1}
    # Each request names the weights that its tokens count as, and an adapter stays as long as one names it.
    assert sum("-0-" in name for name in server.asked) == (REQUESTS + UNDER_WAY) * (kind == "lora")
    assert of_old == (kind == "lora")
    assert not server.adapters


# Sources of the user.


class RowByRow:
    """A stream that draws ahead and answers row by row, the last first, of all its requests in turn."""

    def __init__(self, **changes) -> None:
        self.started, self.updates, self.rows = [], [], []
        self.changes = changes

    def update(self, policy, version) -> None:
        self.updates.append(version)

    def start(self, requests) -> None:
        self.started += requests
        self.rows += [(request, row) for request in requests for row in request.rows.own.tolist()]

    def take(self) -> FinishedSamples:
        request, row = self.rows.pop()
        whole = right_rows(request)
        part = dataclasses.replace(
            whole,
            **{name: getattr(whole, name)[row : row + 1] for name in ("tokens", "token_mask", "completion_mask")},
            fields={name: x[row : row + 1] * (row + 1) for name, x in whole.fields.items()},
            examples=whole.examples[row : row + 1],
            texts=[f"text {row}"],
            finished=whole.finished[row : row + 1],
            metrics={"turns": float(row)},
        )
        return self.changes.get("change", lambda finished: finished)(FinishedSamples(request, part, np.array([row])))

    def close(self) -> None:
        pass


SECTION = CONTEXT.config.rollout.model_copy(update={"ahead": 2})
AHEAD = dataclasses.replace(CONTEXT, plan=Plan.of(CONTEXT.config.model_copy(update={"rollout": SECTION})))


def test_parts_are_joined_in_the_order_of_the_rows():
    source = RowByRow()
    stream = Stream(AHEAD, UserSource(AHEAD, "mine.py:make", source))
    for step in range(3):
        stream.update(None, step)
        completions = stream.batch(step)
        request = Request.of(AHEAD, step)
        expected = right_rows(request)
        for name in ("tokens", "token_mask", "completion_mask"):
            np.testing.assert_array_equal(getattr(completions, name), getattr(expected, name))
        scale = np.arange(1, ROWS + 1)[:, None]
        np.testing.assert_array_equal(
            completions.fields["rollout_log_probs"], expected.fields["rollout_log_probs"] * scale
        )
        assert completions.texts == [f"text {row}" for row in range(ROWS)]
        assert completions.failures is None
        assert completions.metrics == {"turns": 1.5}
        lags = token_lags(completions.fields[VERSIONS], completions.completion_mask, step)
        assert set(lags[expected.completion_mask].tolist()) == {min(step, 2)}
    assert source.updates == [0, 1, 2]
    assert [request.step for request in source.started] == [0, 1, 2, 3, 4]


WRONG_PARTS = {
    "other rows": (
        lambda part: dataclasses.replace(part, rows=np.array([9])),
        r"rows: got \[9\], expected an array of",
    ),
    "a list": (lambda part: dataclasses.replace(part, rows=[0]), r"rows: got \[0\], expected an array of"),
    "other request": (
        lambda part: dataclasses.replace(part, request=dataclasses.replace(part.request)),
        "take returned samples of a request that was not started",
    ),
    "completions": (lambda part: part.completions, "take returned Completions, expected FinishedSamples"),
    "text": (
        lambda part: with_completions(part, texts=[]),
        "texts: got 0, expected 1, one for each row",
    ),
    "forks": (
        lambda part: with_completions(part, episode_rows=part.rows.astype(np.int32)),
        "episode_rows: got some rows of a request, expected all with them",
    ),
    "whole request of forks": (
        lambda part: FinishedSamples(part.request, dataclasses.replace(right_rows(part.request), episode_rows=OWN)),
        "episode_rows: expected None with rollout.ahead",
    ),
    "rewards of some": (
        lambda part: with_completions(part, rewards={"reward": np.ones(1)} if part.rows[0] else None),
        "samples of one request have different rewards",
    ),
    "rewards of other names": (
        lambda part: with_completions(part, rewards={f"reward{part.rows[0]}": np.ones(1)}),
        "samples of one request have different rewards",
    ),
    "no tokens": (
        lambda part: with_completions(part, completion_mask=np.zeros_like(part.completions.completion_mask)),
        "completion_mask: got no completion token in 4 rows",
    ),
    "rest as a whole": (
        lambda part: part if part.rows[0] > 1 else FinishedSamples(part.request, right_rows(part.request)),
        "got a whole request after some of its rows",
    ),
}
OWN = np.arange(ROWS, dtype=np.int32)


def with_completions(part: FinishedSamples, **changes) -> FinishedSamples:
    return dataclasses.replace(part, completions=dataclasses.replace(part.completions, **changes))


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_wrong_parts_are_named(name):
    change, message = WRONG_PARTS[name]
    stream = Stream(AHEAD, UserSource(AHEAD, "mine.py:make", RowByRow(change=change)))
    stream.update(None, 0)
    with pytest.raises(SourceError, match=message):
        stream.batch(0)


def test_part_may_have_no_token_and_a_failure():
    lost = Failure("world", "lost", "no answer")

    def change(part: FinishedSamples) -> FinishedSamples:
        if part.rows[0] != 2:
            return part
        return with_completions(part, completion_mask=np.zeros_like(part.completions.completion_mask), failures=[lost])

    stream = Stream(AHEAD, UserSource(AHEAD, "mine.py:make", RowByRow(change=change)))
    stream.update(None, 0)
    completions = stream.batch(0)
    assert completions.completion_mask.any(1).tolist() == [True, True, False, True]
    assert completions.failures == [None, None, lost, None]


def test_rows_that_come_twice_are_named():
    stream = Stream(AHEAD, RowByRow(change=lambda part: dataclasses.replace(part, rows=np.array([0]))))
    stream.update(None, 0)
    with pytest.raises(SourceError, match=r"take: got the rows \[0, 0, 0, 0\] of a request, expected \[0, 1, 2, 3\]"):
        stream.batch(0)


def test_old_source_goes_on_working_and_has_versions():
    """`update`, `sample`, `close`: its samples have the version that it was given last, unless they bring their own."""
    calls = []

    def sample(request):
        calls.append(("sample", request.step))
        return right_rows(request)

    source = Changed(update=lambda policy, step: calls.append(("update", step)), sample=sample)
    stream = Stream(CONTEXT, UserSource(CONTEXT, "mine.py:make", source))
    for step in range(2):
        stream.update(None, step)
        completions = stream.batch(step)
        np.testing.assert_array_equal(completions.fields[VERSIONS], np.where(completions.completion_mask, step, -1))
    assert calls == [("update", 0), ("sample", 0), ("update", 1), ("sample", 1)]

    def with_own(rows: Completions) -> Completions:
        versions = np.where(rows.completion_mask, 7, -1).astype(np.int32)
        return dataclasses.replace(rows, fields={**rows.fields, VERSIONS: versions})

    stream = Stream(CONTEXT, UserSource(CONTEXT, "mine.py:make", Changed(with_own)))
    stream.update(None, 8)
    assert set(stream.batch(8).fields[VERSIONS].reshape(-1).tolist()) == {-1, 7}


def made(tmp_path: Path, body: str, *options: str):
    (tmp_path / "mine.py").write_text(body)
    forget_signatures()
    config = tiny.config_of(f"rollout.source={tmp_path / 'mine.py'}:make", *options)
    return make_user_source(tiny.context_of(config), config.rollout.source)


def test_source_without_a_stream_is_not_ahead(tmp_path):
    body = "class S:\n    update = sample = close = None\ndef make(context):\n    return S()\n"
    made(tmp_path, body)
    with pytest.raises(UserError, match=r"rollout\.ahead: got 2, but .*:make returned 'S' with sample alone, "):
        made(tmp_path, body, "rollout.ahead=2")
    with pytest.raises(UserError, match=r"rollout\.source: .*:make returned 'S' without start, expected update, start"):
        made(tmp_path, body.replace("sample", "take"))
    with pytest.raises(UserError, match=r"without update, sample, close, expected update, sample, close"):
        made(tmp_path, "def make(context):\n    return 3\n")


# Evaluation.


def test_held_out_prompts_go_to_the_source_of_the_rollouts(tmp_path):
    """Beside requests in flight, with the weights of the step, and greedily with the fields of a greedy request."""
    server = VersionedServer(EOS)
    with serving(server) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.rollouts.server.source.make_sync", lambda *_: Versions())
        options = ("rollout.ahead=2", "temperature=1.0", "eval={source: rollout, batch_size: 3, prompts: 5}")
        config = tiny.config_of(*OPTIONS, SOURCE.format(url), *options)
        context = tiny.context_of(config)
        context = dataclasses.replace(context, held_out=list(context.prompts.examples[:5]))
        with jax.set_mesh(context.mesh), closing(open_stream(context)) as stream:
            assert open_evaluation(context, stream) is stream
            stream.update(None, 0)
            stream.batch(0)
            first = evaluate(context, stream, None, jax.random.key(0), step=1)
            again = evaluate(context, stream, None, jax.random.key(0), step=1)
            greedy = evaluate(context, stream, None, jax.random.key(0), step=1, greedy=True)
            stream.update(None, 1)
            batch = stream.batch(1)
    assert first.metrics == again.metrics
    assert first.metrics.keys() == greedy.metrics.keys() >= {"accuracy", "correct"}
    assert len(first.samples) == 5
    bodies = [body for body in server.bodies[PROBES:] if body.get("model") == "v1"]
    assert [body["temperature"] for body in bodies].count(0.0) == 5
    assert sum(body["temperature"] == 1.0 for body in bodies) >= 10
    assert set(batch.fields[VERSIONS][batch.completion_mask].tolist()) == {0}


# What earlier runs wrote.


def test_batch_that_an_earlier_release_saved_is_trained(tmp_path):
    """One batch, with the lag of each row in place of versions."""
    rows = right_rows(Request.of(AHEAD, 3))
    arrays = {name: getattr(rows, name) for name in ("tokens", "token_mask", "completion_mask", "finished")}
    arrays |= {"log_probs": rows.fields["rollout_log_probs"], "lags": np.array([1, 1, 0, 1], np.int32)}
    with jax.set_mesh(AHEAD.mesh), closing(RunCheckpoints(tmp_path, Checkpoint())) as checkpoints:
        checkpoints.batch_of = lambda step: shard_rows(arrays, AHEAD.mesh)
        checkpoints.save(tiny.state_of(AHEAD.config, AHEAD.optimizer), 3)
        checkpoints.wait()
        stream = Stream(AHEAD, UserSource(AHEAD, "mine.py:make", RowByRow()))
        stream.attach(checkpoints, 3)
        stream.update(None, 3)
        completions = stream.batch(3)
    lags = token_lags(completions.fields[VERSIONS], completions.completion_mask, 3)
    assert [set(row[mask]) for row, mask in zip(lags, rows.completion_mask, strict=True)] == [{1}, {1}, {0}, {1}]
    np.testing.assert_array_equal(completions.fields["rollout_log_probs"], rows.fields["rollout_log_probs"])
    assert len(completions.texts) == ROWS


def test_saved_rows_padded_on_the_left_are_moved(tmp_path):
    """As releases before saved them, with prompts of any length."""
    data = CONTEXT.config.data.model_copy(update={"max_prompt_length": 8})
    config = AHEAD.config.model_copy(update={"data": data})
    context = dataclasses.replace(AHEAD, plan=Plan.of(config))
    rows = right_rows(Request.of(context, 3))
    padded = shifted(rows, 8 - tiny.PROMPT, config.data.row_length())
    arrays = {name: getattr(padded, name) for name in ("tokens", "token_mask", "completion_mask", "finished")}
    arrays["fields"] = dict(padded.fields)
    with jax.set_mesh(context.mesh), closing(RunCheckpoints(tmp_path, Checkpoint())) as checkpoints:
        checkpoints.batch_of = lambda step: shard_rows({"3": arrays}, context.mesh)
        checkpoints.save(tiny.state_of(config, context.optimizer), 3)
        checkpoints.wait()
        stream = Stream(context, UserSource(context, "mine.py:make", RowByRow()))
        stream.attach(checkpoints, 3)
        stream.update(None, 3)
        restored = stream.batch(3)
    np.testing.assert_array_equal(restored.tokens[:, : tiny.LENGTH][rows.token_mask], rows.tokens[rows.token_mask])
    np.testing.assert_array_equal(restored.token_mask[:, : tiny.LENGTH], rows.token_mask)
    np.testing.assert_array_equal(
        restored.fields["rollout_log_probs"][:, : tiny.LENGTH], rows.fields["rollout_log_probs"]
    )
    assert restored.prompt_lengths.tolist() == [tiny.PROMPT] * ROWS


@pytest.mark.parametrize("shuffle", ["true", "false"])
@pytest.mark.parametrize("versions", [True, False])
def test_lag_of_a_recording_is_that_of_its_order(tmp_path, shuffle, versions):
    path = tmp_path / "rows.jsonl"
    rows = []
    for number in range(8):
        row = {
            "prompt": f"{number // 2}+1=",
            "completion_ids": [50, 257],
            "log_probs": [-1.0, -1.0],
            "reward": number % 2,
        }
        # The second batch was drawn with the weights before its own; a version of one token is not known.
        rows.append(row | ({"token_versions": [0, None if number == 7 else 0]} if versions else {}))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"rollout.source={{type: file, path: '{path}', shuffle: {shuffle}}}"
    shape = ("rollout={prompts_per_step: 2, samples_per_prompt: 2}", "task=arithmetic")
    context = tiny.context_of(tiny.config_of(*shape, source))
    stream = open_stream(context)
    first, second = (collect(context, stream, step).completions.metrics for step in range(2))
    assert "rollout_lag" not in first
    assert second.get("rollout_lag") == (1.0 if versions and shuffle == "false" else None)
    if shuffle == "false" and not versions:
        context = tiny.context_of(tiny.config_of(*shape, source, "correction={type: max_lag, max_lag: 1}"))
        with pytest.raises(UserError, match=r"rollout\.source\.path: .* has no token_versions, the policy versions"):
            open_stream(context)
