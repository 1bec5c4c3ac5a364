"""How far the results of CPUs differ: each operation under each instruction set, and with and without its threads.

`python -m benchmarks.instruction_sets` prints the table of `docs/numerics.md`. The instruction sets that a CPU lacks
are left out: XLA then uses the largest that it has.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import instructions

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


def results() -> dict[str, np.ndarray]:
    """Computes every operation on the same numbers."""
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
    return {name: np.asarray(jax.jit(operation)(*inputs)) for name, (operation, inputs) in operations.items()}


def measure(flags: str) -> dict[str, np.ndarray]:
    """Computes the results in a process of its own, with these flags of XLA."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "results.npz"
        settings = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        subprocess.run([sys.executable, "-m", "benchmarks.instruction_sets", path], env=settings, check=True)
        with np.load(path) as found:
            return dict(found)


def difference(actual: np.ndarray, expected: np.ndarray) -> str:
    """Describes the difference by norm, and of the value that differs most of its own size, in units of 2**-24."""
    if np.array_equal(actual, expected):
        return "0"
    got, exact = actual.astype(np.float64), expected.astype(np.float64)
    norm = np.linalg.norm(got - exact) / np.linalg.norm(exact) * 2**24
    single = (np.abs(got - exact) / np.maximum(np.abs(exact), 1e-30)).max() * 2**24
    return f"{norm:.2g} ({single:.0f})"


def main() -> None:
    """Prints the table, or writes the results of this process if a path is given."""
    if len(sys.argv) > 1:
        np.savez(sys.argv[1], **results())  # type: ignore[arg-type]
        return
    found = {name: measure(f"--xla_cpu_max_isa={name}") for name in instructions.FLAGS}
    found["Eigen"] = measure("--xla_cpu_experimental_ynn_fusion_type= --xla_cpu_max_isa=AVX512")
    found["one thread"] = measure("--xla_cpu_multi_thread_eigen=false --xla_cpu_max_isa=AVX512")
    columns = [name for name in found if name != "AVX512"]
    print(f"| | {' | '.join(columns)} |")
    print("|---|" + "---|" * len(columns))
    for operation, expected in found["AVX512"].items():
        print(f"| {operation} | {' | '.join(difference(found[name][operation], expected) for name in columns)} |")


if __name__ == "__main__":
    main()
