"""A server one step ahead: what it is asked and when, from which weights, and how a run with it is continued.

More steps are in `test_stream`.
"""

import dataclasses
import json
import threading
from contextlib import suppress

import jax
import numpy as np
import pytest

from tests.train.rollouts.conftest import EOS, REQUESTS, SECONDS, VersionedServer
from tests.train.rollouts.fake_server import PROBES, Answer
from train.config.errors import UserError
from train.config.schema import Checkpoint
from train.data.tasks.user_score import RewardError
from train.rollouts.source import SourceError
from train.weights.orbax import RunCheckpoints


def assert_equal(state, other) -> None:
    jax.tree.map(np.testing.assert_array_equal, state.trainable, other.trainable)


def test_next_batch_is_requested_before_the_update(steps, go_on, tmp_path):
    """Each update waits for the next request, whose answer waits for the update: neither comes first by chance."""
    requests, updated = [threading.Semaphore(0) for _ in range(2)]

    class Slow(VersionedServer):
        def __call__(self, path: str, body: dict) -> Answer:
            if len(self.bodies) >= PROBES + REQUESTS and path == "/v1/completions":
                requests.release()
                assert updated.acquire(timeout=SECONDS)
            return super().__call__(path, body)

    def update(*arguments, **options):
        for _ in range(REQUESTS):
            assert requests.acquire(timeout=SECONDS), "the next batch was not requested before the update"
        updated.release(REQUESTS)
        return steps.programs.update(*arguments, **options)

    server, programs = Slow(EOS), dataclasses.replace(steps.programs, update=update)
    _, records = go_on("run", server, 3, f"rollout.record={tmp_path / 'rows'}", programs=programs)
    # The last step requests a batch too, for a run that is continued.
    assert server.versions == ["v0", "v0", "v1", "v2"]
    assert [record["rollout_lag"] for record in records] == [0, 1, 1]
    rows = [json.loads(line) for line in (tmp_path / "rows" / "00000001.jsonl").read_text().splitlines()]
    # The batch of step 2 has the weights before the first update.
    assert {version for row in rows for version in row["token_versions"]} == {0}


@pytest.mark.parametrize("way", ["more steps", "interrupted"])
def test_continued_run_equals_an_uninterrupted_run(go_on, way):
    uninterrupted, records = go_on("whole", VersionedServer(EOS), 4, "checkpoint.every=1000")
    first, steps = (2, None) if way == "more steps" else (4, 2)
    _, begun = go_on("parts", VersionedServer(EOS), first, "checkpoint.every=1000", stop_after=steps)
    server = VersionedServer(EOS)
    continued, rest = go_on("parts", server, 4, "checkpoint.every=1000")
    assert begun + rest == records
    assert_equal(continued, uninterrupted)
    # The batch of step 3 came from the checkpoint: the server has no version v1 any more.
    assert server.versions == ["v2", "v3"]


def test_failing_reward_function_leaves_its_batch(steps, go_on):
    calls = []

    def score(example, text, finished):
        calls.append(text)
        if len(calls) == 2 * REQUESTS + 3:
            raise RewardError("data.reward: no answer")
        return steps.context.task.score(example, text, finished)

    judges = {"task": dataclasses.replace(steps.context.task, score=score)}
    uninterrupted, records = go_on("whole", VersionedServer(EOS), 3)
    with pytest.raises(RewardError, match=r"The run is saved after step 2; continue it with --resume"):
        go_on("parts", VersionedServer(EOS), 3, "checkpoint.every=1000", changes=judges.items())
    continued, rest = go_on("parts", VersionedServer(EOS), 3)
    assert rest == records[2:]
    assert_equal(continued, uninterrupted)


@pytest.mark.parametrize("every", [1, 1000])
def test_dead_server_ahead_ends_the_next_step(go_on, tmp_path, capsys, every):
    """Whether the loss is noticed by the step or by the checkpoint before it, the state of the last step is saved."""
    with pytest.raises(SourceError) as caught:
        go_on("run", VersionedServer(EOS, lives=PROBES + 2 * REQUESTS + 1), 4, f"checkpoint.every={every}")
    first, last = str(caught.value).split("\n")
    assert first.startswith("rollout.source.url: POST http://127.0.0.1:")
    assert last == "The run is saved after step 2; continue it with --resume"
    assert ("the batch that was requested ahead is lost: rollout.source" in capsys.readouterr().err) == (every == 1)
    assert RunCheckpoints(tmp_path / "run", Checkpoint()).steps()[-1] == 2
    # Its batch was never answered: it is requested again, from the weights of its own step.
    server = VersionedServer(EOS)
    _, rest = go_on("run", server, 3)
    assert [record["rollout_lag"] for record in rest] == [0]
    assert server.versions == ["v2", "v2"]


def test_dead_server_after_the_last_step_is_harmless(go_on, tmp_path):
    state, _ = go_on("run", VersionedServer(EOS, lives=PROBES + 2 * REQUESTS), 2)
    assert int(state.step) == 2
    assert not (tmp_path / "run" / "2" / "batch").exists()


def test_interrupt_ends_the_pending_request(steps, go_on):
    """Its threads end with the run, although the server never answers."""
    over = threading.Event()

    class Hangs(VersionedServer):
        def __call__(self, path: str, body: dict) -> Answer:
            if len(self.bodies) >= PROBES + REQUESTS:
                over.wait(SECONDS)
                return None
            return super().__call__(path, body)

    def update(*_, **__):
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        go_on("run", Hangs(EOS), 3, programs=dataclasses.replace(steps.programs, update=update))
    assert not [thread for thread in threading.enumerate() if thread.name == "requests"]
    over.set()


def test_a_saved_batch_of_other_prompts_is_refused(steps, go_on):
    go_on("run", VersionedServer(EOS), 1)
    other = dataclasses.replace(steps.context.prompts.examples[0], prompt_ids=np.array([50], np.int32))

    class Others:
        def batch(self, step: int) -> list:
            return [other] * 4

    message = r"^rollout\.ahead: the batch that was saved with step 1 has other prompts than the data has"
    with pytest.raises(UserError, match=message):
        go_on("run", VersionedServer(EOS), 2, changes={"prompts": Others()}.items())
