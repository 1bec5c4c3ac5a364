"""Completions of a long tail of lengths: slots that are refilled, against batches that wait for their longest row.

    python -m benchmarks._speed.long_tail [--json PATH]

Both complete the same rows in the same number of slots, with the same program but for the queue, and have to draw the
same tokens. Lengths are forced (`limits`), so that they are a long tail whatever the weights.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from train.models import Decoder, DecoderConfig
from train.models.sharding import make_mesh
from train.rl.policy import init_params
from train.rollouts.sampler import Samples, Sampling, sample

TARGET = 1.5
Programs = dict[str, Callable[[], list[Samples]]]


@dataclasses.dataclass(frozen=True)
class Tail:
    """The rows: lognormal lengths with this median and spread, cut at `room`; `group` completions of each prompt."""

    rows: int = 64
    slots: int = 8
    group: int = 4
    width: int = 64
    room: int = 256
    median: float = 24.0
    sigma: float = 1.0
    vocab: int = 4096
    layers: int = 4

    def lengths(self) -> np.ndarray:
        """[rows] int32, the tokens of each completion."""
        drawn = self.median * np.exp(self.sigma * np.random.default_rng(0).normal(size=self.rows))
        return np.clip(np.rint(drawn), 1, self.room).astype(np.int32)

    def prompts(self) -> np.ndarray:
        """[rows / group, width] int32."""
        return np.random.default_rng(1).integers(0, self.vocab, (self.rows // self.group, self.width), dtype=np.int32)


def model_of(tail: Tail) -> Decoder:
    """A tiny Qwen 3."""
    return Decoder(
        DecoderConfig(
            vocab_size=tail.vocab,
            layers=tail.layers,
            width=256,
            heads=4,
            kv_heads=2,
            head_dim=64,
            mlp_width=768,
            tie_embeddings=True,
            qk_norm=True,
        )
    )


def programs_of(tail: Tail) -> Programs:
    """What is timed: `continuous` is one call for all rows, `static` one for as many rows as there are slots."""
    model, mesh = model_of(tail), make_mesh()
    policy = kljax.Policy(init_params(model, jax.random.key(0), mesh))
    lengths, prompts = tail.lengths(), tail.prompts()
    ids = np.repeat(np.arange(len(prompts), dtype=np.int32), tail.group)
    key = jax.random.key(2)

    @jax.jit
    def draw(policy: kljax.Policy, prompts: jax.Array, **rows: np.ndarray) -> Samples:
        return sample(
            model,
            policy,
            prompts,
            jnp.ones(prompts.shape, bool),
            key=key,
            max_new_tokens=tail.room,
            sampling=Sampling(1.0),
            eos_ids=(),
            slots=tail.slots,
            **rows,  # type: ignore[arg-type]
        )

    def complete(rows: slice) -> Samples:
        first, last = ids[rows][0], ids[rows][-1] + 1
        named = {"prompt_ids": ids[rows] - first, "row_ids": np.arange(tail.rows)[rows], "limits": lengths[rows]}
        return draw(policy, jnp.asarray(prompts[first:last]), **named)

    batches = [slice(begin, begin + tail.slots) for begin in range(0, tail.rows, tail.slots)]
    return {
        "continuous": lambda: [complete(slice(0, tail.rows))],
        "static": lambda: [complete(rows) for rows in batches],
    }


def measure(tail: Tail, rounds: int) -> dict[str, dict[str, float]]:
    """Tokens per second of each way, the best of `rounds` taken in turn; decode steps and occupancy.

    Raises:
      RuntimeError: they did not draw the same tokens.
    """
    programs = programs_of(tail)
    done = {name: jax.device_get(program()) for name, program in programs.items()}
    tokens = {name: np.concatenate([part.tokens for part in parts]) for name, parts in done.items()}
    if (tokens["continuous"] != tokens["static"]).any():
        raise RuntimeError("long tail: the tokens of both ways differ")
    best = {name: {"seconds": np.inf, "cpu_seconds": np.inf} for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(program())
            taken = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
            best[name] = {key: min(value, taken[key]) for key, value in best[name].items()}
    drawn = int(tail.lengths().sum())
    table: dict[str, dict[str, float]] = {}
    for name, parts in done.items():
        rounds_of = sum(int(part.steps) + 1 for part in parts)
        table[name] = {
            "tokens_per_second": drawn / best[name]["seconds"],
            "tokens_per_cpu_second": drawn / best[name]["cpu_seconds"],
            "steps": sum(int(part.steps) for part in parts),
            "occupancy": drawn / (rounds_of * tail.slots),
        }
    return table


def report(table: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The table with the gain of continuous batching, in wall-clock and in CPU seconds."""
    gains = {
        unit: table["continuous"][unit] / table["static"][unit]
        for unit in ("tokens_per_second", "tokens_per_cpu_second")
    }
    return {**table, "gain": gains, "target": TARGET}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser("python -m benchmarks._speed.long_tail", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(arguments)
    found = report(measure(Tail(), options.rounds))
    text = json.dumps(found, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
