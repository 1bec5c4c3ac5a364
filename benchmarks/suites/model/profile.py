"""CPU seconds of the parts of an update of kljax, as programs of their own.

    python -m benchmarks.suites.model.profile [--vocab 4096 --vocab 32768] [--rounds 10]

All programs run once a round; the fastest run of each counts. "Matmuls alone" is a lower bound: the seconds of the
multiplications and additions at the rate of a large matmul, which is measured in the same rounds.
"""

import argparse
import dataclasses
import pathlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from benchmarks.harness import cli
from benchmarks.harness.race import race_programs
from benchmarks.harness.report import Report, table
from benchmarks.suites.model import problem
from benchmarks.suites.model.kljax import KljaxContender, save_weights
from benchmarks.suites.model.problem import ModelWork
from benchmarks.suites.model.suite import VOCAB, works_of
from train.config.plan import Layout
from train.rl.policy import ScoredPolicy, Sequences, hidden_states
from train.rl.step import update_rows

SQUARE = 1024
COLUMNS = (("part", ""), ("CPU s", ".3f"), ("share", ".0%"), ("matmuls alone", ".3f"))


def programs(contender: KljaxContender) -> dict[str, Callable[[], Any]]:
    """Returns the timed programs by name."""
    learner, work = contender.new_learner(), contender.work
    tokens = problem.make_sequences(work)
    rewards = problem.rewards(tokens[:, work.prompt_length :])
    batch = contender.batch(tokens, np.zeros(tokens.shape, np.float32), rewards)
    ready = learner.programs.prepare(learner.score(batch), learner.state.controllers)[0]
    (rows,) = update_rows(learner.context.config, jax.random.key(0))
    sequences = Sequences(batch.tokens, batch.token_mask, layout=Layout(work.prompt_length, work.samples))

    def hidden(params: Any) -> jax.Array:
        return hidden_states(ScoredPolicy(contender.model, kljax.Policy(params)), sequences)

    params, optimizer = contender.reference.params, learner.context.optimizer
    forward = jax.jit(hidden)
    backward = jax.jit(lambda params, weight: jax.vjp(hidden, params)[1](weight)[0])
    weight = jnp.ones((work.rows, work.length, work.width)).at[:, : work.prompt_length - 1].set(0)
    moments, step = optimizer.init(params), jax.jit(optimizer.update)
    square, multiply = jnp.ones((SQUARE, SQUARE)), jax.jit(jnp.matmul)
    return {
        "score": lambda: learner.score(batch),
        "layers": lambda: forward(params),
        "update": lambda: learner.update_on(ready, rows),
        "layers, gradient": lambda: backward(params, weight),
        "AdamW": lambda: step(params, moments, params),
        "product": lambda: multiply(square, square),
    }


def operations(work: ModelWork) -> tuple[float, float]:
    """Counts multiplications and additions of a forward pass of the layers, with each prompt once, and of the head."""
    heads = work.heads * work.head_dim
    weights = work.width * (2 * heads + 2 * work.kv_heads * work.head_dim + 3 * work.mlp_width)
    completions = work.rows * work.completion_length
    tokens = work.prompts * work.prompt_length + completions
    attended = work.prompts * work.prompt_length**2 + completions * work.length
    return work.layers * 2 * (tokens * weights + 2 * attended * heads), 2 * completions * work.width * work.vocab


def rows(work: ModelWork, seconds: Mapping[str, float]) -> list[tuple[str, float, float | None, float]]:
    """Returns the parts of an update, which add up to it: CPU seconds, share, and seconds of the matmuls alone."""
    (layers, head), rate = operations(work), rate_of(seconds)
    gradients, update = seconds["layers, gradient"], seconds["update"]
    parts = {
        "reference: layers": (seconds["layers"], layers),
        "reference: head": (seconds["score"] - seconds["layers"], head),
        # Without the operations that attention recomputes.
        "policy: layers, forward and gradient": (gradients, 3 * layers),
        "policy: head, loss, forward and gradient": (update - gradients - seconds["AdamW"], 4 * head),
        "AdamW": (seconds["AdamW"], 0),
    }
    total, flops = (sum(column) for column in zip(*parts.values(), strict=True))
    table_rows = [(name, spent, spent / total, count / rate) for name, (spent, count) in parts.items()]
    return [*table_rows, ("all", total, None, flops / rate)]


def rate_of(seconds: Mapping[str, float]) -> float:
    """Returns the operations per CPU second of a large matmul."""
    return 2 * SQUARE**3 / seconds["product"]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures the profile of each model; returns the lines of its text as the field "profile"."""
    paragraphs = []
    for work in works_of(options):
        with tempfile.TemporaryDirectory() as directory:
            save_weights(work, pathlib.Path(directory))
            contender = KljaxContender(dataclasses.asdict(work), directory)
            results = race_programs(programs(contender), options.rounds)
        seconds = {name: result.best("cpu") or float("nan") for name, result in results.items()}
        rate = rate_of(seconds) / 1e9
        title = f"CPU seconds of kljax's update at V={work.vocab:,} (matmuls at {rate:.0f} GFLOP per CPU second):"
        paragraphs += [title, table(COLUMNS, rows(work, seconds))]
    return {"profile": "\n\n".join(paragraphs).splitlines()}


def report(fields: Mapping[str, Any]) -> Report:
    """Returns the profile alone."""
    return Report(["\n".join(fields["profile"])])


main = cli.command(
    "suites.model.profile",
    __doc__,
    measure,
    report,
    VOCAB,
    cli.rounds(10),
    cli.option("--quick", action="store_true", help="a tiny model, as a smoke test"),
)

if __name__ == "__main__":
    sys.exit(main())
