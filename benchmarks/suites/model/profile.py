"""CPU seconds of the parts of an update of kljax, as programs of their own.

    python -m benchmarks.suites.model.profile [--vocab 4096 --vocab 32768] [--rounds 10]

All programs run once a round; the fastest run of each counts. "Matmuls alone" is a lower bound: the seconds of the
multiplications and additions at the rate of a large matmul, which is measured in the same rounds.
"""

import dataclasses
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from benchmarks.harness import cli
from benchmarks.harness.measure import Clock, Seconds
from benchmarks.harness.race import race
from benchmarks.harness.report import table
from benchmarks.harness.results import Result
from benchmarks.suites.model import problem
from benchmarks.suites.model.kljax import KljaxContender, load
from benchmarks.suites.model.problem import QUICK, Work
from train.rl.algorithms import make_optimizer
from train.rl.layout import Layout
from train.rl.objective import coefficients
from train.rl.policy import hidden_states
from train.rl.step import update_rows

SQUARE = 1024


def programs(contender: KljaxContender) -> dict[str, Callable[[], Any]]:
    """Returns the timed programs by name."""
    trainer, work = contender.programs(), contender.work
    tokens = problem.make_sequences(work)
    batch = contender.batch(
        tokens, np.zeros(tokens.shape, np.float32), problem.rewards(tokens[:, work.prompt_length :])
    )

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
            contender.model, policy, batch.tokens, batch.token_mask, layout=Layout(work.prompt_length, work.samples)
        )

    params = contender.reference.params
    forward = jax.jit(hidden)
    backward = jax.jit(lambda params, weight: jax.vjp(hidden, params)[1](weight)[0])
    weight = jnp.ones((work.rows, work.length, work.width)).at[:, : work.prompt_length - 1].set(0)
    optimizer = make_optimizer(trainer.config.optim)
    moments, step = optimizer.init(params), jax.jit(optimizer.update)
    square = jnp.ones((SQUARE, SQUARE))
    multiply = jax.jit(jnp.matmul)
    return {
        "score": score,
        "layers": lambda: forward(params),
        "update": update,
        "layers, gradient": lambda: backward(params, weight),
        "AdamW": lambda: step(params, moments, params),
        "product": lambda: multiply(square, square),
    }


def fastest(programs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Returns the CPU seconds of each program in its fastest round."""
    results = {name: Result(name) for name in programs}

    def run(name: str) -> dict[str, Seconds]:
        clock = Clock()
        with clock.part("run"):
            jax.block_until_ready(programs[name]())
        return clock.parts

    race(results, rounds, run)
    return {name: result.best("cpu") or float("nan") for name, result in results.items()}


def operations(work: Work) -> tuple[float, float]:
    """Counts multiplications and additions of a forward pass of the layers, with each prompt once, and of the head."""
    heads = work.heads * work.head_dim
    weights = work.width * (2 * heads + 2 * work.kv_heads * work.head_dim + 3 * work.mlp_width)
    completions = work.rows * work.completion_length
    tokens = work.prompts * work.prompt_length + completions
    attended = work.prompts * work.prompt_length**2 + completions * work.length
    return work.layers * 2 * (tokens * weights + 2 * attended * heads), 2 * completions * work.width * work.vocab


def rows(work: Work, seconds: dict[str, float]) -> list[list[str]]:
    """Returns the parts of an update; they add up to it."""
    layers, head = operations(work)
    rate = 2 * SQUARE**3 / seconds["product"]
    parts = {
        "reference: layers": (seconds["layers"], layers),
        "reference: head": (seconds["score"] - seconds["layers"], head),
        # Without the operations that attention recomputes.
        "policy: layers, forward and gradient": (seconds["layers, gradient"], 3 * layers),
        "policy: head, loss, forward and gradient": (
            seconds["update"] - seconds["layers, gradient"] - seconds["AdamW"],
            4 * head,
        ),
        "AdamW": (seconds["AdamW"], 0),
    }
    total = sum(spent for spent, _ in parts.values())
    found = [
        [name, f"{spent:.3f}", f"{spent / total:.0%}", f"{flops / rate:.3f}"] for name, (spent, flops) in parts.items()
    ]
    alone = sum(flops for _, flops in parts.values()) / rate
    return [*found, ["all", f"{total:.3f}", "", f"{alone:.3f}"]]


def lines(work: Work, rounds: int) -> list[str]:
    """Measures the profile of one model, as Markdown."""
    with tempfile.TemporaryDirectory() as directory:
        problem.save_weights(work, pathlib.Path(directory))
        seconds = fastest(programs(load(dataclasses.asdict(work), directory, 0)), rounds)
    rate = 2 * SQUARE**3 / seconds["product"] / 1e9
    title = f"CPU seconds of kljax's update at V={work.vocab:,} (matmuls at {rate:.0f} GFLOP per CPU second):"
    return ["", title, "", *table(["part", "CPU s", "share", "matmuls alone"], rows(work, seconds))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = cli.make_parser("suites.model.profile", __doc__)
    parser.add_argument("--vocab", type=cli.positive, action="append", help="repeatable; 4096 and 32768")
    parser.add_argument("--rounds", type=cli.positive, default=10)
    parser.add_argument("--quick", action="store_true", help="a tiny model, as a smoke test")
    options = parser.parse_args(arguments)
    for work in [QUICK] if options.quick else [Work(vocab=vocab) for vocab in options.vocab or (4096, 32768)]:
        print("\n".join(lines(work, options.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
