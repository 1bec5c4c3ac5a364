"""The least time of a step on the CPU of this machine: a dense decoder's matrix products over measured rates."""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from train.config.plan import Plan
from train.models import Decoder
from train.plan.compiler.work import Work

SIZE = 2048
"""Rows and columns of the product that is timed."""
SUMMED = 2**26
"""Floats that are read, more than a cache has."""
TIMES = 3


class Rates(NamedTuple):
    """Operations and bytes per second of all cores together."""

    flops: float
    bandwidth: float

    def least_seconds(self, work: Work) -> float:
        """Computes the time of the resource that needs the longest."""
        return max(work.flops / self.flops, work.memory / self.bandwidth)


class StepTokens(NamedTuple):
    """Tokens of a step: of its prompts, each once; of all completions; and decode steps, each for all completions."""

    prompts: float
    completions: float
    decode_steps: float


def measure_rates() -> Rates:
    """Times a float32 product of matrices and a sum, each the fastest of three.

    A decode step reads weights and writes little. A copy would count the pages of its result, which are made anew.
    """
    square = jnp.ones((SIZE, SIZE))
    vector = jnp.ones(SUMMED)
    product = jax.jit(jnp.matmul)
    total = jax.jit(jnp.sum)
    return Rates(
        2 * SIZE**3 / _fastest(lambda: product(square, square)), vector.nbytes / _fastest(lambda: total(vector))
    )


def _fastest(run: Callable[[], jax.Array]) -> float:
    run().block_until_ready()
    seconds = []
    for _ in range(TIMES):
        start = time.perf_counter()
        run().block_until_ready()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def step_work(plan: Plan, model: Decoder, tokens: StepTokens) -> dict[str, Work]:
    """Counts the least work of a rollout, and of scoring and updating: products with the weights, without attention.

    A decode step reads all weights once. Logits are of completions alone. The gradient of a frozen base goes to the
    activations only, and recomputed activations do not count.
    """
    config = model.config
    dtype = jnp.dtype(model.config.param_dtype)
    head = config.vocab_size * config.width
    leaves = jax.tree_util.tree_leaves_with_path(model.structure().params)
    kernels = sum(leaf.size for path, leaf in leaves if path[-1].key == "kernel")
    layers = kernels - (0 if config.tie_embeddings else head)

    def forward(prompts: float, completions: float) -> float:
        return 2 * (layers * (prompts + completions) + head * completions)

    read = (layers + head) * dtype.itemsize
    # Forward, and once or twice the same backward.
    passes = plan.config.optim.epochs * (2 + int(config.lora is None)) + plan.reference + plan.scores_policy
    return {
        "rollout": Work(forward(tokens.prompts, tokens.completions), read * tokens.decode_steps),
        "update": Work(passes * forward(tokens.prompts, tokens.completions)),
    }
