"""Measures what digests add to a save and a restore: each with and without them, in turns, in one process.

    python -m benchmarks.checkpoint                      100 MB of weights
    python -m benchmarks.checkpoint --megabytes 400 --pairs 20

`added` is the time of the digests alone over that of a save or a restore without them. Each is the fastest of all,
which a busy machine disturbs least. The digests of a save are computed before it returns, so training waits for them.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from kljax import _orbax
from kljax.digests import check_digests, seal, tree_digests

LAYERS = 12


def weights(megabytes: int) -> dict[str, Any]:
    """Draws float32 weights of a decoder: stacked kernels, an embedding and norms."""
    width = int((megabytes * 1e6 / 4 / (LAYERS * 12 + 8)) ** 0.5) // 8 * 8
    shapes = {
        "attention": (LAYERS, width, 4 * width),
        "up": (LAYERS, width, 4 * width),
        "down": (LAYERS, 4 * width, width),
        "embedding": (8 * width, width),
        "norm": (LAYERS, width),
    }
    draw = np.random.default_rng(0)
    return {name: jnp.asarray(draw.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def seconds(call: Callable[[], Any]) -> float:
    """Measures one call to its end."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def save(path: Path, tree: Any, content: dict[str, Any] | None) -> None:
    """Saves weights as the trainer does, with digests that are computed already."""
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.StandardSave(tree, custom_metadata=content))


def measure(tree: Any, pairs: int) -> dict[str, list[float]]:
    """Measures saves and restores without digests, and the digests of each."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    times: dict[str, list[float]] = {"save": [], "digests of a save": [], "restore": [], "digests of a restore": []}
    for _ in range(pairs):
        for name, value in _measure_once(tree, abstract).items():
            times[name].append(value)
    return times


def _measure_once(tree: Any, abstract: Any) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as scratch:
        plain, sealed = Path(scratch) / "plain", Path(scratch) / "sealed"
        found = {"save": seconds(lambda: save(plain, tree, None))}
        content: dict[str, Any] = {}
        found["digests of a save"] = seconds(lambda: content.update(seal({"arrays": tree_digests(tree)})))
        save(sealed, tree, content)
        found["restore"] = seconds(lambda: _orbax.restore(_orbax.read_metadata(plain), abstract))
        restored, saved = _orbax.restore(_orbax.read_metadata(plain), abstract), _orbax.read_metadata(sealed).content
        assert saved is not None
        found["digests of a restore"] = seconds(lambda: check_digests("", restored, saved["arrays"]))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; prints one row per part."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--megabytes", type=int, default=100, help="size of the weights")
    parser.add_argument("--pairs", type=int, default=10, help="repetitions")
    options = parser.parse_args(arguments)
    logging.getLogger("absl").setLevel(logging.ERROR)
    tree = weights(options.megabytes)
    times = measure(tree, options.pairs)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / 1e6
    print(f"{size:.0f} MB on {jax.devices()[0].device_kind}, fastest of {options.pairs}\n")
    print("| part | seconds | digests | added |\n|---|--:|--:|--:|")
    for part in ("save", "restore"):
        plain, digests = min(times[part]), min(times[f"digests of a {part}"])
        print(f"| {part} | {plain:.3f} | {digests:.4f} | {digests / plain:.1%} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
