"""How far the results of CPUs differ: each operation under each instruction set, and with and without its threads.

`python -m benchmarks.instruction_sets` prints the numbers of `docs/numerics.md`. The instruction sets that a CPU lacks
are left out: XLA then uses the largest that it has.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import cli, instructions
from benchmarks.harness.process import start
from benchmarks.harness.report import Report, table

ODD = 997
"""No multiple of a vector: the last values of a row are computed by other instructions."""


def _gradient(weights: jax.Array, x: jax.Array) -> jax.Array:
    """The gradient of the log-probs of three residual blocks with norms and a softmax."""

    def loss(weights: jax.Array) -> jax.Array:
        hidden = x
        for kernel in weights:
            normed = hidden / jnp.sqrt(jnp.mean(hidden**2, axis=-1, keepdims=True) + 1e-6)
            scores = jax.nn.softmax(normed @ normed.T / 8)
            hidden = hidden + jax.nn.silu(scores @ normed @ kernel)
        return jax.nn.log_softmax(hidden)[:, 0].sum()

    return jax.grad(loss)(weights)


class Operations:
    """Computes every operation on the same numbers, in a process with flags of its own."""

    def save(self, path: str) -> None:
        """Writes the results by name."""
        rng = np.random.default_rng(0)
        values = rng.normal(size=(64, ODD)).astype(np.float32)
        left, right = (rng.normal(size=(ODD, ODD)).astype(np.float32) for _ in range(2))
        weights = (rng.normal(size=(3, 64, 64)) / 8).astype(np.float32)
        # Arguments, not constants: XLA computes constants while it compiles, by other code.
        operations: dict[str, tuple[Callable[..., jax.Array], tuple[np.ndarray, ...]]] = {
            "`exp`": (jnp.exp, (values,)),
            "`log` of 0.01 to 5": (jnp.log, (np.abs(values) + np.float32(0.01),)),
            "`tanh`": (jnp.tanh, (values,)),
            "`x * y + z`": (lambda x, y, z: x * y + z, (values, left[:64], right[:64])),
            "sum of 997 values": (lambda x: x.sum(axis=1), (values,)),
            "matrix product, sums of 997 terms": (lambda x, y: x @ y, (left, right)),
            "`log_softmax` of 997 values": (jax.nn.log_softmax, (values,)),
            "gradient of three blocks": (_gradient, (weights, values[:, :64])),
        }
        results = {name: np.asarray(jax.jit(operation)(*inputs)) for name, (operation, inputs) in operations.items()}
        np.savez(path, **results)  # type: ignore[arg-type]


def compute(flags: str) -> dict[str, np.ndarray]:
    """Computes the results with these flags of XLA."""
    with tempfile.TemporaryDirectory() as directory:
        settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        with start("benchmarks.instruction_sets", settings=settings) as remote:
            remote.ask(do="load")
            remote.ask(do="save", path=f"{directory}/results.npz")
        with np.load(f"{directory}/results.npz") as file:
            return dict(file)


def difference(actual: np.ndarray, expected: np.ndarray) -> str:
    """Describes the difference by norm, and of the value that differs most of its own size, in units of 2**-24."""
    if np.array_equal(actual, expected):
        return "0"
    got, exact = actual.astype(np.float64), expected.astype(np.float64)
    norm = np.linalg.norm(got - exact) / np.linalg.norm(exact) * 2**24
    single = (np.abs(got - exact) / np.maximum(np.abs(exact), 1e-30)).max() * 2**24
    return f"{norm:.2g} ({single:.0f})"


def _measure(_: argparse.Namespace) -> dict[str, Any]:
    results = {name: compute(f"--xla_cpu_max_isa={name}") for name in instructions.FLAGS}
    results["Eigen"] = compute("--xla_cpu_experimental_ynn_fusion_type= --xla_cpu_max_isa=AVX512")
    results["one thread"] = compute("--xla_cpu_multi_thread_eigen=false --xla_cpu_max_isa=AVX512")
    expected = results.pop("AVX512")
    rows = [[name, *(difference(of[name], array) for of in results.values())] for name, array in expected.items()]
    return {"columns": ["", *results], "rows": rows}


def report(fields: dict[str, Any]) -> Report:
    """Makes the table of the differences."""
    return Report([table([(name, "") for name in fields["columns"]], fields["rows"])])


load = Operations
main = cli.command("instruction_sets", __doc__, _measure, report)

if __name__ == "__main__":
    sys.exit(main())
