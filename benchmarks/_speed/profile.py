"""Where the CPU seconds of an update of kljax go: its parts as programs of their own.

    python -m benchmarks._speed.profile [--vocab 4096 --vocab 32768] [--rounds 10]

All programs run once in each round, and the fastest of each counts. "products alone" is what their multiplications and
additions take at the rate of a large product of matrices, measured in the same rounds: no program can be faster.
"""

import argparse
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from benchmarks._report import _table as table
from benchmarks._speed import work as works
from benchmarks._speed.kljax_side import Side
from benchmarks._speed.work import QUICK, Work
from train.rl.objective import coefficients
from train.rl.policy import hidden_states
from train.rl.step import make_optimizer, update_rows
from train.rl.tracing import forget_traces

SQUARE = 1024


def programs(side: Side) -> dict[str, Callable[[], Any]]:
    """By name; each returns what it computes."""
    trainer, work = side.programs(), side.work
    tokens = works.make_sequences(work)
    batch = side.batch(tokens, np.zeros(tokens.shape, np.float32), works.rewards(tokens[:, work.prompt_length :]))

    def score() -> Any:
        return trainer.score(trainer.state.trainable, None, trainer.reference, batch)

    ready = trainer.prepare(score(), trainer.state.controller)[0]
    (rows,) = update_rows(trainer.config, jax.random.key(0))

    def update() -> Any:
        trainer.state, metrics = trainer.run(trainer.state, None, ready, rows, coefficients(trainer.config))
        return trainer.state, metrics

    def hidden(params: Any) -> jax.Array:
        policy = kljax.Policy(params)
        return hidden_states(
            side.model, policy, batch.tokens, batch.token_mask, prompt=work.prompt_length, group=work.samples
        )

    params = side.reference.params
    forward = jax.jit(hidden)
    pull = jax.jit(lambda params, weight: jax.vjp(hidden, params)[1](weight)[0])
    weight = jnp.ones((work.rows, work.length, work.width)).at[:, : work.prompt_length - 1].set(0)
    optimizer = make_optimizer(trainer.config.optim)
    moments, step = optimizer.init(params), jax.jit(optimizer.update)
    square = jnp.ones((SQUARE, SQUARE))
    multiply = jax.jit(jnp.matmul)
    return {
        "score": score,
        "layers": lambda: forward(params),
        "update": update,
        "layers, gradient": lambda: pull(params, weight),
        "AdamW": lambda: step(params, moments, params),
        "product": lambda: multiply(square, square),
    }


def fastest(found: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """CPU seconds of each program; the first run, which compiles, is left out."""
    seconds = dict.fromkeys(found, float("inf"))
    for round_ in range(rounds + 1):
        for name, run in found.items():
            start = time.process_time()
            jax.block_until_ready(run())
            if round_:
                seconds[name] = min(seconds[name], time.process_time() - start)
    return seconds


def operations(work: Work) -> tuple[float, float]:
    """Multiplications and additions of one pass through the layers, each prompt once, and of one through the head."""
    heads = work.heads * work.head_dim
    weights = work.width * (2 * heads + 2 * work.kv_heads * work.head_dim + 3 * work.mlp_width)
    completions = work.rows * work.completion_length
    tokens = work.prompts * work.prompt_length + completions
    seen = work.prompts * work.prompt_length**2 + completions * work.length
    return work.layers * 2 * (tokens * weights + 2 * seen * heads), 2 * completions * work.width * work.vocab


def rows(work: Work, seconds: dict[str, float]) -> list[list[str]]:
    """The parts of an update, which add up to it."""
    layers, head = operations(work)
    rate = 2 * SQUARE**3 / seconds["product"]
    parts = {
        "reference: layers": (seconds["layers"], layers),
        "reference: head": (seconds["score"] - seconds["layers"], head),
        # What attention computes again is left out: with it there would be a little more to do.
        "policy: layers, forward and gradient": (seconds["layers, gradient"], 3 * layers),
        "policy: head, loss, forward and gradient": (
            seconds["update"] - seconds["layers, gradient"] - seconds["AdamW"],
            4 * head,
        ),
        "AdamW": (seconds["AdamW"], 0),
    }
    whole = sum(spent for spent, _ in parts.values())
    found = [
        [name, f"{spent:.3f}", f"{spent / whole:.0%}", f"{todo / rate:.3f}"] for name, (spent, todo) in parts.items()
    ]
    alone = sum(todo for _, todo in parts.values()) / rate
    return [*found, ["all", f"{whole:.3f}", "", f"{alone:.3f}"]]


def lines(work: Work, rounds: int) -> list[str]:
    """The profile of one size as Markdown."""
    forget_traces()
    with tempfile.TemporaryDirectory() as directory:
        works.save(work, pathlib.Path(directory))
        seconds = fastest(programs(Side(work, pathlib.Path(directory))), rounds)
    rate = 2 * SQUARE**3 / seconds["product"] / 1e9
    title = (
        f"Where the CPU seconds of kljax's update go at V={work.vocab:,} (products at {rate:.0f} GFLOP per CPU second):"
    )
    return ["", title, "", *table(["part", "CPU s", "share", "products alone"], rows(work, seconds))]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    assert __doc__ is not None
    found = argparse.ArgumentParser(
        prog="python -m benchmarks._speed.profile", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    found.add_argument("--vocab", type=int, action="append", help="by default 4096 and 32768")
    found.add_argument("--rounds", type=int, default=10)
    found.add_argument("--quick", action="store_true", help="a tiny model: whether it works")
    options = found.parse_args(arguments)
    sizes = [QUICK] if options.quick else [Work(vocab=vocab) for vocab in options.vocab or (4096, 32768)]
    for work in sizes:
        print("\n".join(lines(work, options.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
