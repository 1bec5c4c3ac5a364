"""Tunix's GRPO learner with its own loss and with that of kljax: split into micro-batches, memory, time.

    make .venv-tunix/.ready
    .venv-tunix/bin/python -m benchmarks.tunix

Runs in the environment of `make test-tunix`, on a CPU. Recorded completions take the place of sampling; everything else
of an update is done by the learner. CPU seconds are of one update with the pass of the reference, after the
first. The two learners take turns.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.rl import function_registry
from tunix.rl.grpo import grpo_learner

from benchmarks.harness import cli, machine
from benchmarks.harness.report import Report, table
from kljax.integrations import tunix
from tests.integrations.tunix.recorded import TunixWork, configs, learner_of, update

COLUMNS = (("", ""), ("Tunix", ""), ("kljax in Tunix", ""))


def split_difference(work: TunixWork, config: grpo_learner.GRPOConfig) -> float:
    """Returns the relative distance of the gradient of two micro-batches from that of one."""
    (single, _), (split, _) = (update(work, config, micro=work.prompts // parts) for parts in (1, 2))
    return float(np.linalg.norm(split - single) / np.linalg.norm(single))


def temporary_bytes(work: TunixWork, config: grpo_learner.GRPOConfig) -> int:
    """Returns the temporary memory of the compiled gradient of a whole batch, without running it."""
    rows = work.prompts * work.samples
    array = lambda length, dtype=jnp.float32: jax.ShapeDtypeStruct((rows, *length), dtype)  # noqa: E731
    prompt, completion = (work.prompt_length,), (work.completion_length,)
    example = tunix.WeightedTrainExample(
        prompt_ids=array(prompt, jnp.int32), prompt_mask=array(prompt, bool),
        completion_ids=array(completion, jnp.int32), completion_mask=array(completion, bool),
        advantages=array(()), ref_per_token_logps=array(completion), old_per_token_logps=array(completion),
        token_weights=array(completion),
    )  # fmt: skip
    config.temperature = 0.9
    graph, state = nnx.split(nnx.eval_shape(lambda: work.model(0)))
    loss = function_registry.get_policy_loss_fn(config.policy_loss_fn)

    def loss_of(state: Any, example: Any) -> Any:
        return loss(nnx.merge(graph, state), example, algo_config=config, pad_id=0, eos_id=2)[0]

    analysis = jax.jit(jax.grad(loss_of)).lower(state, example).compile().memory_analysis()
    assert analysis is not None  # a CPU has one
    return analysis.temp_size_in_bytes


def cpu_seconds(work: TunixWork, config: grpo_learner.GRPOConfig, updates: int) -> Iterator[float]:
    """Yields the CPU seconds of each update after the first."""
    marks: list[float] = []
    learner = learner_of(work, config, micro=work.prompts, optimizer=optax.adamw(1e-5), marks=marks)
    learner.train([{"prompts": np.arange(work.prompts).astype(str)}] * (updates + 2))
    yield from np.diff(marks)[1:]


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    small = TunixWork(vocab=512, layers=2, width=64)
    large = TunixWork(vocab=options.vocab)
    both = configs(small.samples)
    by_tokens = configs(small.samples, loss_agg_mode="token-mean")
    fields = machine.conditions("cpu") | {
        "vocab": options.vocab,
        "tokens": [split_difference(small, config) for config in by_tokens.values()],
        "rows": [split_difference(small, config) for config in both.values()],
        "bytes": [temporary_bytes(large, config) for config in both.values()],
    }
    seconds: dict[str, list[float]] = {name: [] for name in both}
    for _ in range(2):
        for name, config in both.items():
            seconds[name] += cpu_seconds(large, config, options.updates)
    return fields | {"seconds": [statistics.median(times) for times in seconds.values()]}


def report(fields: Mapping[str, Any]) -> Report:
    """Makes the table of both learners."""
    base, _ = fields["seconds"]
    rows = {
        "gradient of two micro-batches against one, mean over tokens": [f"{x:.1e}" for x in fields["tokens"]],
        "the same, mean over rows": [f"{x:.1e}" for x in fields["rows"]],
        f"temporary memory of the gradient, V={fields['vocab']:,}": [f"{x / 2**20:.0f} MiB" for x in fields["bytes"]],
        f"CPU seconds of an update, as a share of Tunix's {base:.1f}": [f"{x / base:.2f}" for x in fields["seconds"]],
    }
    return Report([table(COLUMNS, [[name, *values] for name, values in rows.items()])], fields=fields)


main = cli.command(
    "tunix",
    __doc__,
    _measure,
    report,
    cli.option("--vocab", type=cli.positive, default=32768, help="of memory and time"),
    cli.option("--updates", type=cli.positive, default=4, help="that are timed, of each learner in each of two turns"),
)

if __name__ == "__main__":
    sys.exit(main())
