"""Times episodes of several turns on a CPU: the engine of turns against one call of the batch sampler.

    python -m benchmarks.turns
    python -m benchmarks.turns --sessions 16 --rounds 5 --json PATH

An episode has 4 turns of 16 to 64 tokens, and observations of 24 between them. The batch sampler draws as many tokens
for each episode in one call, as one completion, and prefills the observations by themselves; rounds are interleaved,
and CPU time counts, of one thread with XLA_FLAGS=--xla_cpu_multi_thread_eigen=false. A missed target does not fail
the command.
"""

import argparse
import collections
import json
import pathlib
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from benchmarks.harness import machine
from train.models import Decoder, DecoderConfig
from train.models.parameters import bind, init_params
from train.models.sharding import make_mesh
from train.rollouts.engine import EngineSizes, Turn, TurnEngine
from train.rollouts.engine.schedule import session_keys
from train.rollouts.sampler import Sampling, WindowedSampler

TARGETS = {16: 0.75, 64: 0.85}
"""Tokens per CPU second of the engine over those of the batch sampler, by the number of sessions."""
MODEL = Decoder(DecoderConfig(vocab_size=32000, layers=4, width=256, heads=8, kv_heads=4, head_dim=32, mlp_width=1024))
PROMPT, OBSERVATION, TURNS, SHORTEST, LONGEST = 64, 24, 4, 16, 64
COLUMNS = PROMPT + TURNS * LONGEST + (TURNS - 1) * OBSERVATION


class Episodes:
    """The same episodes for both contenders."""

    def __init__(self, sessions: int) -> None:
        """Draws prompts, observations and lengths."""
        rng = np.random.default_rng(0)
        size = MODEL.config.vocab_size
        self.prompts = rng.integers(0, size, (sessions, PROMPT))
        self.observations = rng.integers(0, size, (TURNS, sessions, OBSERVATION))
        self.lengths = rng.integers(SHORTEST, LONGEST + 1, (TURNS, sessions))
        self.keys = session_keys(jax.random.key(0), sessions)
        self.policy = kljax.Policy(init_params(MODEL, jax.random.key(0), make_mesh()))

    def by_engine(self, engine: TurnEngine) -> None:
        """Runs all episodes turn by turn."""
        engine.forget()
        sessions = len(self.prompts)
        number = [0] * sessions
        for session in range(sessions):
            length = int(self.lengths[0, session])
            engine.submit(Turn(self.prompts[session].tolist(), length, self.keys[session], session=session))
        while not engine.is_idle():
            for turn in engine.step():
                session = int(turn.session)  # type: ignore[call-overload]
                number[session] += 1
                if number[session] < TURNS:
                    ids = turn.all_ids() + self.observations[number[session], session].tolist()
                    length = int(self.lengths[number[session], session])
                    first = turn.first + len(turn.tokens)
                    engine.submit(Turn(ids, length, self.keys[session], first, session))

    def by_sampler(self, sampler: WindowedSampler, prefill: Callable[..., Any]) -> None:
        """Draws as many tokens of each episode in one call, and prefills the observations."""
        limits = jnp.asarray(self.lengths.sum(0), jnp.int32)
        mask = jnp.ones(self.prompts.shape, bool)
        drawn = sampler(self.policy, jnp.asarray(self.prompts, jnp.int32), mask, jax.random.key(1), {"limits": limits})
        jax.block_until_ready(drawn.tokens)
        for number in range(1, TURNS):
            jax.block_until_ready(prefill(self.policy, jnp.asarray(self.observations[number], jnp.int32)))


def measure(sessions: int, rounds: int) -> dict[str, Any]:
    """Times both contenders in turns; returns CPU seconds of each round, and what the engine counted."""
    episodes = Episodes(sessions)
    began = time.process_time()
    engine = TurnEngine(MODEL, EngineSizes.of(sessions, COLUMNS), sampling=Sampling(), eos_ids=())
    engine.update(episodes.policy, 0)
    compiled = time.process_time() - began
    never = (MODEL.config.vocab_size,)
    options: Any = {"max_new_tokens": TURNS * LONGEST, "sampling": Sampling(), "eos_ids": never}
    sampler = WindowedSampler(MODEL, make_mesh(), name="batch", **options)

    def run_prompts(policy: kljax.Policy, tokens: jax.Array) -> jax.Array:
        return bind(MODEL, policy).prefill(tokens, jnp.ones(tokens.shape, bool))[0][:, -1]

    prefill = jax.jit(run_prompts)
    contenders: dict[str, Callable[[], None]] = {
        "engine": lambda: episodes.by_engine(engine),
        "sampler": lambda: episodes.by_sampler(sampler, prefill),
    }
    for run in contenders.values():
        run()
    engine.count = collections.Counter()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            began = time.process_time()
            run()
            seconds[name].append(time.process_time() - began)
    ratio = median(b / a for a, b in zip(seconds["engine"], seconds["sampler"], strict=True))
    unique = sessions * (PROMPT + (TURNS - 1) * OBSERVATION)
    return {
        "sessions": sessions,
        "ratio": ratio,
        "target": TARGETS.get(sessions),
        "tokens_per_second": int(episodes.lengths.sum()) / median(seconds["engine"]),
        "prefilled_over_unique": engine.count["prefilled"] / rounds / unique,
        "programs": len(engine.programs.compiled),
        "compile_seconds": compiled,
        "seconds": seconds,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measures each number of sessions, and prints a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.turns", description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, nargs="+", default=list(TARGETS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    chosen = parser.parse_args(arguments)
    report: dict[str, Any] = {**machine.conditions(), "results": []}
    print("| sessions | engine / sampler | target | tokens / CPU s | programs |\n|--:|--:|--:|--:|--:|")
    for sessions in chosen.sessions:
        result = measure(sessions, chosen.rounds)
        report["results"].append(result)
        numbers = f"{result['ratio']:.2f} | {result['target']} | {result['tokens_per_second']:.0f}"
        print(f"| {sessions} | {numbers} | {result['programs']} |", flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
