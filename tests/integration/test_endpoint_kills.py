"""A run whose episodes come from a program outside, killed in the middle of an episode and continued."""

import collections
import concurrent.futures
import json
import signal
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

from tests.integration.command import TIMEOUT, finish, recorded_rows, records, start, state_arrays, wait_for
from tests.integration.test_shipped_configs import CALCULATOR

STEPS = 3
PROMPTS = 2
SAMPLES = 2
EPISODES = PROMPTS * SAMPLES
TURNS = 2
KEY = "sk-rewards"
Recorded = collections.namedtuple("Recorded", "prompt sampled")


class Outside:
    """A program that takes episodes and plays two turns of each; `kill` is called after the first ones of a step.

    Attributes:
      taken: ids of episodes, in order.
      rows: of these, the problems.
      turns: of these, what the endpoint answered: the sampled ids of each turn.
      ended: ids of those whose reward was accepted.
      refused: statuses of answers that were errors.
    """

    def __init__(self, port: int) -> None:
        self.taken: list[str] = []
        self.rows: dict[str, dict] = {}
        self.turns: dict[str, list[list[int]]] = {}
        self.ended: list[str] = []
        self.refused: list[int] = []
        self.over = threading.Event()
        self.killed = threading.Event()
        self._url = f"http://127.0.0.1:{port}/v1"
        self._lock = threading.Lock()
        self._pool = concurrent.futures.ThreadPoolExecutor(EPISODES)

    def post(self, path: str, key: str, body: dict) -> dict | None:
        """Posts; None if there is no answer, or an error."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        try:
            request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            self.refused.append(error.code)
        except (OSError, ValueError):  # nobody listens, or the process is gone
            time.sleep(0.05)
        return None

    def work(self, kill) -> list[concurrent.futures.Future]:
        """Plays episodes until the run is over; the first episode of step 2 ends, the next is killed between turns."""
        return [self._pool.submit(self._work, kill) for _ in range(EPISODES)]

    def _work(self, kill) -> None:
        while not self.over.is_set():
            taken = self.post("/episodes", KEY, {})
            if taken is not None:
                with self._lock:
                    number = len(self.taken)
                    self.taken.append(taken["id"])
                    self.rows[taken["id"]] = taken["row"]
                    self.turns[taken["id"]] = []
                self._play(taken, number, kill)

    def _play(self, taken: dict, number: int, kill) -> None:
        name = taken["id"]
        messages = [{"role": "user", "content": taken["row"]["prompt"]}]
        doomed = EPISODES <= number < 2 * EPISODES
        for turn in range(TURNS):
            if doomed and turn and number > EPISODES:
                # All but one episode of the step are between their turns when the process dies.
                self.killed.wait(TIMEOUT)
            body = {"messages": messages, "max_tokens": 3, "return_token_ids": True}
            answer = self.post("/chat/completions", taken["api_key"], body)
            if answer is None:
                return
            (choice,) = answer["choices"]
            self.turns[name].append(choice["token_ids"])
            messages += [choice["message"], {"role": "user", "content": "+1"}]
        if self.post(f"/episodes/{name}/reward", KEY, {"reward": float(len(self.turns[name][0]))}) is not None:
            with self._lock:
                self.ended.append(name)
        if number == EPISODES:
            kill(self)


def read_recorded(directory, step: int) -> list[Recorded]:
    """Reads the rows of a recorded step: the prompt, and the ids that were sampled."""
    read = []
    for row in recorded_rows(directory, step):
        ids = zip(row["ids"], row["trained"], strict=True)
        read.append(Recorded(row["prompt"], tuple(token for token, trained in ids if trained)))
    return read


@pytest.mark.slow
def test_kill_in_an_episode_loses_and_repeats_none(env, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    recipe = (
        *CALCULATOR[:3],
        "environment=null",
        f"rollout.prompts_per_step={PROMPTS}",
        f"rollout.samples_per_prompt={SAMPLES}",
        f"rollout.record={tmp_path / 'recorded'}",
        f"rollout.source={{type: endpoint, port: {port}, reward_key_env: REWARD_KEY}}",
        *CALCULATOR[5:],
        f"steps={STEPS}",
        "eval=null",
        "warm_start.steps=0",
        "report.rollouts=0",
        "data.max_completion_length=16",
        f"output={tmp_path}",
    )
    env = {**env, "REWARD_KEY": KEY}
    root = tmp_path / "calculator"
    outside = Outside(port)
    process = start(env, *recipe)

    def kill(outside: Outside) -> None:
        wait_for(
            process,
            lambda: (
                len(outside.taken) == 2 * EPISODES
                and all(outside.turns[name] for name in outside.taken)
                and (root / "checkpoints/1/commit_success.txt").exists()
            ),
        )
        process.send_signal(signal.SIGKILL)
        process.wait()
        outside.killed.set()

    workers = outside.work(kill)
    try:
        assert finish(process).returncode == -signal.SIGKILL
        before = records(root, "train")
        state = state_arrays(root, 1)
        finish(start(env, *recipe, "--resume")).succeeded()
    finally:
        outside.over.set()
        outside.killed.set()
    for worker in workers:
        worker.result(TIMEOUT)
    train = records(root, "train")
    assert [record["step"] for record in before] == [1]
    assert [record["step"] for record in train] == [1, 2, 3]
    assert train[0] == before[0]
    assert all((state_arrays(root, 1)[name] == value).all() for name, value in state.items())
    # Four episodes of the first step, four that died with theirs, one of which had its reward, and these again.
    taken = [outside.taken[first : first + EPISODES] for first in range(0, (STEPS + 1) * EPISODES, EPISODES)]
    assert len(outside.taken) == (STEPS + 1) * EPISODES
    assert [len(outside.turns[name]) for name in taken[1]] == [2, 1, 1, 1]
    assert sorted(outside.ended) == sorted([*taken[0], taken[1][0], *taken[2], *taken[3]])
    prompts = [[outside.rows[name]["prompt"] for name in names] for names in taken]
    assert sorted(prompts[1]) == sorted(prompts[2])
    assert len({prompt for step in (0, 2, 3) for prompt in prompts[step]}) == STEPS * PROMPTS
    for step, names in zip((1, 2, 3), (taken[0], taken[2], taken[3]), strict=True):
        played = [
            Recorded(outside.rows[name]["prompt"], tuple(token for turn in outside.turns[name] for token in turn))
            for name in names
        ]
        assert sorted(read_recorded(tmp_path / "recorded", step)) == sorted(played)
