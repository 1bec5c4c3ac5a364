"""Plays episodes of several turns on two vLLM engines, and holds every sampled token to the trainer's newest weights.

    .venv/bin/python -m tests.goldens.vllm.episodes --vllm ENVIRONMENT/bin/vllm

The environment is that of `record.py`. The engines have to take the ids before a turn from their prefix caches, and
must not keep what earlier weights computed.
"""

import contextlib
import dataclasses
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx
import jax
import numpy as np

from tests.goldens.vllm import tiny
from tests.goldens.vllm.record import ALLOWED, log_prob_error
from tests.goldens.vllm.server import make_parser, serving
from tests.train.rollouts.fake_environment import environment_of
from train.context import RunContext
from train.data.tasks import Task
from train.rollouts.collect import collect
from train.rollouts.open import open_source
from train.rollouts.source import Source
from train.rollouts.stream import Stream

TURNS = 4
TURN_TOKENS = 12
REPLY = "Well, and what then?"
BLOCK = 32
OPTIONS = ("--max-model-len", "256", "--enable-prefix-caching", "--block-size", str(BLOCK))


def context_of(urls: Sequence[str], environment: str) -> RunContext:
    """The context of episodes on servers."""
    config = tiny.config_of(
        "http://unused",
        "model.tie_embeddings=false",
        f"environment={{name: '{environment}', max_turns: {TURNS}, turn_tokens: {TURN_TOKENS}}}",
        "data.max_completion_length=160",
        f"rollout={{prompts_per_step: {len(tiny.PROMPTS)}, samples_per_prompt: {tiny.SAMPLES}}}",
        f"rollout.source={{type: openai, model: {tiny.NAME}, retries: 2, timeout: 60.0, urls: [{', '.join(urls)}]}}",
    )
    context = tiny.context_of(config)
    task = Task("talk", context.prompts.batch(0), [], lambda example, text, _: {"reward": 0.0, "correct": 0.0})
    return dataclasses.replace(context, task=task)


def cached_tokens(urls: Sequence[str]) -> int:
    """Tokens that the engines took from their prefix caches since their start."""
    pages = [httpx.get(f"{url}/metrics", timeout=10).text for url in urls]
    counts = [re.findall(r"^vllm:prefix_cache_hits_total\S* (\S+)$", page, re.M) for page in pages]
    return sum(int(float(count)) for page in counts for count in page)


def check_step(context: RunContext, stream: Stream, source: Source, urls: Sequence[str], step: int) -> None:
    """One step: all sampled tokens have the log-probs of its policy, and the engines computed no prefix twice."""
    newest, last = (tiny.policy_of(context, of) for of in (step, step - 1))
    source.update(newest, step)
    before = cached_tokens(urls)
    completions = collect(context, stream, step).completions
    cached = cached_tokens(urls) - before
    error, other = (log_prob_error(context, completions, policy) for policy in (newest, last))
    # At the end of a turn all tokens but its last one have keys and values, of which whole blocks stay.
    sampled = np.asarray(completions.completion_mask)
    ends = sampled & ~np.pad(sampled, ((0, 0), (0, 1)))[:, 1:]
    expected = sum(int(at) // BLOCK * BLOCK for row in ends for at in np.flatnonzero(row)[:-1])
    turns = completions.metrics["episode_turns"]
    print(
        f"step {step}: {turns:.1f} turns, error {error:.1e}, against the weights before {other:.1e}, "
        f"{cached} tokens from prefix caches of {expected}",
        flush=True,
    )
    if not error < ALLOWED < other or not cached >= expected > 0 or turns <= 2:
        raise SystemExit(f"expected errors below {ALLOWED} and above it, more than two turns, and cached prefixes")


def main() -> int:
    """The command."""
    options = make_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch) / "model"
        folder.mkdir()
        mine = Path(scratch) / "mine.py"
        mine.write_text(environment_of(REPLY, reward=0.25, steps=TURNS))
        context = tiny.context_of(tiny.config_of("http://unused", "model.tie_embeddings=false"))
        tiny.write_model(folder, context)
        urls = [
            stack.enter_context(serving(options.vllm, folder, tiny.NAME, options.log, *OPTIONS))[0] for _ in range(2)
        ]
        context = context_of(urls, f"{mine}:Steps")
        with contextlib.closing(open_source(context)) as source, jax.set_mesh(context.mesh):
            stream = Stream(context, source)
            for step in range(1, 4):
                check_step(context, stream, source, urls, step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
