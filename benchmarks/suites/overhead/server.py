"""Steps with a server whose answer takes as long as an update: it waits for the trainer, or works one step ahead."""

import contextlib
import dataclasses
import json
import statistics
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax
import jax.numpy as jnp

from benchmarks.harness.learner import Learner
from benchmarks.harness.race import log
from benchmarks.suites.overhead.problem import StepSizes, config_of, learner_of
from train.config.schema import Config
from train.rollouts import open_source
from train.run.loop import rl_step

CONTENDERS = ("ahead: 0", "ahead: 1")
PARTS = ("step", "answer", "update")
BLOCK = 3
"""Steps of a contender in a round; the first does not count, as a batch may lie ready."""


class Answers:
    """Answers requests for completions after some seconds; what is sampled does not matter."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, path: str, body: dict) -> dict:
        """Returns the answer to a request."""
        if path == "/v1/models":
            return {"data": [{"id": "m"}]}
        time.sleep(self.seconds)
        tokens = [ord("0") + (body["seed"] + index) % 10 for index in range(body["max_tokens"])]
        fields = {"token_ids": tokens, "finish_reason": "length", "logprobs": {"token_logprobs": [-5.5] * len(tokens)}}
        return {"choices": [{"index": index, **fields} for index in range(body["n"])]}


@contextlib.contextmanager
def serving(answers: Answers) -> Iterator[str]:
    """Yields the address of a server in a thread of this process."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            content = json.dumps(answers(self.path, json.loads(body) if body else {})).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST

        def log_message(self, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Leaves out the traceback of a request that the trainer ends."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class ServerSteps:
    """One contender: a source, and the state of its own run."""

    def __init__(self, learner: Learner, config: Config, stack: contextlib.ExitStack) -> None:
        self._learner, self._state, self._step = learner, jax.tree.map(jnp.copy, learner.state), 0
        self._context = dataclasses.replace(learner.context, config=config)
        self._source = stack.enter_context(contextlib.closing(open_source(self._context)))

    def block(self) -> dict[str, float]:
        """Runs some steps; returns the mean seconds of a step, of waiting for its answer, and of the rest."""
        seconds = [self._timed_step() for _ in range(BLOCK)][1:]
        return {part: statistics.mean(one[part] for one in seconds) for part in PARTS}

    def _timed_step(self) -> dict[str, float]:
        learner, began = self._learner, time.perf_counter()
        self._state, _, parts = rl_step(
            self._context, learner.programs, self._source, learner.frozen, self._state, step=self._step
        )
        self._step += 1
        step = time.perf_counter() - began
        return {"step": step, "answer": parts["rollout"], "update": step - parts["rollout"]}


def measure(work: StepSizes, rounds: int) -> list[dict[str, dict[str, float]]]:
    """Times steps in interleaved rounds, in which an answer takes as long as the updates of the round before.

    Returns:
      The seconds of each round, by contender and part.
    """
    answers, results = Answers(), list[dict[str, dict[str, float]]]()
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving(answers))
        source = {"type": "openai", "url": url, "model": "m", "sync": "none"}
        configs = {name: config_of(work, source=source, ahead=ahead) for ahead, name in enumerate(CONTENDERS)}
        learner = learner_of(configs[CONTENDERS[0]])
        stack.enter_context(jax.set_mesh(learner.context.mesh))
        contenders = {name: ServerSteps(learner, config, stack) for name, config in configs.items()}
        # The first round compiles.
        for number in range(rounds + 1):
            seconds = {name: contender.block() for name, contender in contenders.items()}
            answers.seconds = seconds[CONTENDERS[0]]["update"]
            results += [seconds] if number else []
            log(f"round {number} of {rounds}")
    return results
