"""Runs two vLLM engines and vLLM's router, and holds every completion to the trainer's newest weights.

    .venv/bin/python -m tests.goldens.vllm.pool --vllm ENVIRONMENT/bin/vllm

The environment is that of `record.py`, with `vllm-router==0.1.17`.
"""

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from tests.goldens.vllm import tiny
from tests.goldens.vllm.record import ALLOWED, log_prob_error
from tests.goldens.vllm.server import free_port, make_parser, serving
from tests.tiny import sampled
from train.config.errors import UserError
from train.context import RunContext
from train.rollouts.server import ServerSource

FIRST_KEY = 20


@contextlib.contextmanager
def routing(program: Path, urls: Sequence[str], log: Path) -> Iterator[str]:
    """The address of a router that sends each request to the next server."""
    port = free_port()
    command = [str(program), "--worker-urls", *urls, "--policy", "round_robin", "--port", str(port)]
    with log.open("a") as output:
        process = subprocess.Popen(
            [*command, "--prometheus-port", str(free_port())], stdout=output, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(60):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", timeout=2).is_success:
                    break
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def opened(addresses: str) -> tuple[RunContext, ServerSource]:
    """A source on these addresses."""
    source = f"rollout.source={{type: openai, model: {tiny.NAME}, retries: 2, timeout: 60.0, {addresses}}}"
    context = tiny.context_of(tiny.config_of("http://unused", source, "model.tie_embeddings=false"))
    return context, ServerSource(context, context.config.rollout.source)


def check_step(context: RunContext, source: ServerSource, step: int, killed: subprocess.Popen | None = None) -> None:
    """One step: the log-probs of all completions are those of its policy, and not of the one before."""
    source.update(tiny.policy_of(context, step), step)
    if killed is not None:
        threading.Timer(0.05, killed.kill).start()
    completions = sampled(context, source, tiny.request_of(context, step, FIRST_KEY + step))
    policies = {of: tiny.policy_of(context, of) for of in (step, step - 1)}
    error, other = (log_prob_error(context, completions, policies[of]) for of in policies)
    engines = completions.metrics["rollout_engines"]
    print(f"step {step}, {engines:.0f} engines: error {error:.1e}, against the weights before {other:.1e}", flush=True)
    if not error < ALLOWED < other or engines != (1 if killed else 2):
        raise SystemExit(f"expected errors below {ALLOWED} and above it")


def main() -> int:
    """The command."""
    options = make_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        context = tiny.context_of(tiny.config_of("http://unused", "model.tie_embeddings=false"))
        tiny.write_model(folder, context)
        started = [stack.enter_context(serving(options.vllm, folder, tiny.NAME, options.log)) for _ in range(2)]
        urls = [url for url, _ in started]
        listed = f"urls: [{', '.join(urls)}], on_engine_failure: drop"
        with routing(options.vllm.with_name("vllm-router"), urls, options.log) as router:
            try:
                opened(f"url: '{router}'")
            except UserError as error:
                print(f"refused as expected: {error}", flush=True)
            else:
                raise SystemExit("expected that a router is refused as `url`")
            context, source = opened(f"{listed}, router: '{router}'")
            with contextlib.closing(source):
                for step in range(1, 4):
                    check_step(context, source, step)
        context, source = opened(listed)
        with contextlib.closing(source):
            check_step(context, source, 4)
            check_step(context, source, 5, started[1][1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
