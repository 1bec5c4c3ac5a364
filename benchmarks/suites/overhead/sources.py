"""Steps with completions from elsewhere: recorded ones after their first epoch, and a server's."""

import contextlib
import dataclasses
import json
import pathlib
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax
import jax.numpy as jnp

from benchmarks.harness.learner import Learner
from benchmarks.harness.measure import Seconds
from benchmarks.suites.overhead.problem import StepSizes, config_of, interleaved, learner_of
from train.config.plan import Plan
from train.config.schema import Config
from train.rollouts.open import open_source
from train.run.loop import Programs, rl_step

RECORDED = {
    f"{updates} update{'s' if updates > 1 else ''} on a batch, {scored}": (updates, mib)
    for updates in (1, 2)
    for scored, mib in {"scored once": 1024, "scored in every epoch": 0}.items()
}
"""Updates on a batch, as the policy is scored before the first of several; and MiB for the log-probs of the reference,
which are kept where it scores a row once."""
EPOCH = 2
"""Batches of the recording."""
AHEAD = {"ahead: 0": 0, "ahead: 1": 1}
BLOCK = 3
"""Steps of a contender with a server in a round; the first does not count, as a batch may lie ready."""


class SourceSteps:
    """A run of its own on the source of a config."""

    def __init__(self, learner: Learner, config: Config, stack: contextlib.ExitStack) -> None:
        self.frozen, self.state, self.number = learner.frozen, jax.tree.map(jnp.copy, learner.state), 0
        self.context = dataclasses.replace(learner.context, plan=Plan.of(config))
        self.source = stack.enter_context(contextlib.closing(open_source(self.context)))
        self.programs = Programs.of(self.context, self.state, self.source)

    def step(self) -> Mapping[str, float]:
        """Does a step; returns the seconds of its parts."""
        run = (self.context, self.programs, self.source, self.frozen, self.state)
        self.state, _, parts = rl_step(*run, step=self.number)
        self.number += 1
        return parts

    def epoch(self) -> Seconds:
        """Returns the mean seconds of a step of an epoch of the recording."""
        began = time.perf_counter(), time.process_time()
        for _ in range(EPOCH):
            self.step()
        jax.block_until_ready(self.state)
        return (time.perf_counter() - began[0]) / EPOCH, (time.process_time() - began[1]) / EPOCH

    def block(self) -> dict[str, float]:
        """Returns the mean seconds of a step, of waiting for its answer, and of the rest."""
        steps = list[dict[str, float]]()
        for _ in range(BLOCK):
            began = time.perf_counter()
            answer = self.step()["rollout"]
            step = time.perf_counter() - began
            steps.append({"step": step, "answer": answer, "update": step - answer})
        return {part: statistics.mean(step[part] for step in steps[1:]) for part in steps[0]}


def measure_recorded(work: StepSizes, rounds: int) -> list[dict[str, Seconds]]:
    """Times epochs in interleaved rounds; returns the seconds of a step of each round, by contender."""
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        path = pathlib.Path(directory) / "rows.jsonl"
        with path.open("w") as file:
            for row in range(EPOCH * work.rows):
                ids, group = [ord("0") + draw.randrange(10) for _ in range(work.completion_length)], row // work.samples
                fields = {"prompt_ids": [1, group % 10], "completion_ids": ids, "group": group, "reward": draw.random()}
                file.write(json.dumps(fields) + "\n")
        contenders = {}
        for name, (updates, mib) in RECORDED.items():
            source = {"type": "file", "path": str(path), "max_reference_mib": mib}
            config = config_of(work, rollout={"source": source}, optim={"epochs": updates})
            contenders[name] = SourceSteps(learner_of(config), config, stack)
        stack.enter_context(jax.set_mesh(contenders[name].context.mesh))
        # The round that compiles is the first epoch.
        return list(interleaved({name: steps.epoch for name, steps in contenders.items()}, rounds))[1:]


class SlowServer(ThreadingHTTPServer):
    """Answers requests for completions after some seconds; what is sampled does not matter."""

    seconds = 0.0

    def handle_error(self, request: object, client_address: object) -> None:
        """Leaves out the traceback of a request that the trainer ends."""


class SlowAnswer(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: SlowServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        answer: dict[str, list] = {"data": [{"id": "m"}]}
        if self.path != "/v1/models":
            time.sleep(self.server.seconds)
            ids = [ord("0") + (body["seed"] + index) % 10 for index in range(body["max_tokens"])]
            fields = {"token_ids": ids, "finish_reason": "length", "logprobs": {"token_logprobs": [-5.5] * len(ids)}}
            answer = {"choices": [{"index": index, **fields} for index in range(body["n"])]}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def serving() -> Iterator[SlowServer]:
    """Runs a server in a thread of this process."""
    server = SlowServer(("127.0.0.1", 0), SlowAnswer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def measure_server(work: StepSizes, rounds: int) -> list[dict[str, dict[str, float]]]:
    """Times steps in interleaved rounds, in which an answer takes as long as the updates of the round before.

    Returns the seconds of each round, by contender and part.
    """
    results = list[dict[str, dict[str, float]]]()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving())
        url = f"http://127.0.0.1:{server.server_port}"
        source = {"type": "openai", "url": url, "model": "m", "sync": "none"}
        configs = {name: config_of(work, rollout={"source": source, "ahead": steps}) for name, steps in AHEAD.items()}
        learner = learner_of(configs["ahead: 0"])
        stack.enter_context(jax.set_mesh(learner.context.mesh))
        blocks = {name: SourceSteps(learner, config, stack).block for name, config in configs.items()}
        for seconds in interleaved(blocks, rounds):
            server.seconds = seconds["ahead: 0"]["update"]
            results.append(seconds)
    return results[1:]
