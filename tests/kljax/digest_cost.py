"""Measures what digests add to a save and to a restore of float32 weights, in CPU seconds of interleaved rounds.

    python -m tests.kljax.digest_cost              100 MB, 9 rounds
    python -m tests.kljax.digest_cost 400 20       400 MB, 20 rounds

A round saves and restores the weights with orbax, without digests, and computes the digests of both. The program of
each shape is compiled before the first round, as it is by the first save of a run.
"""

import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from kljax.checkpoint import check_restored, read_metadata, restore, seal, tree_digests


def weights(megabytes: float) -> dict[str, jax.Array]:
    """Draws weights with the shapes of a decoder: twelve stacked layers, an embedding and norms."""
    width = int((megabytes * 1e6 / 4 / (12 * 12 + 8)) ** 0.5) // 8 * 8
    up, down = (12, width, 4 * width), (12, 4 * width, width)
    shapes = {"attention": up, "up": up, "down": down, "embedding": (8 * width, width), "norm": (12, width)}
    draw = np.random.default_rng(0)
    return {name: jnp.asarray(draw.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def programs_of(tree: Any, scratch: Path) -> dict[str, Callable[[], Any]]:
    """Returns a save to `scratch/copy` and a restore, both without digests, and the digests of each."""

    def save(path: Path, **content: Any) -> None:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            checkpointer.save(path, args=ocp.args.StandardSave(tree, **content))

    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    save(scratch / "saved", custom_metadata=seal({"arrays": tree_digests(tree)}))
    metadata = read_metadata(scratch / "saved")
    restored = restore(metadata, abstract)
    return {
        "save": lambda: save(scratch / "copy"),
        "digests of a save": lambda: seal({"arrays": tree_digests(tree)}),
        "restore": lambda: restore(read_metadata(scratch / "saved"), abstract, verify=False),
        "digests of a restore": lambda: check_restored(metadata, restored),
    }


def measure(megabytes: float, rounds: int) -> dict[str, float]:
    """Returns the median CPU seconds of each program."""
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        programs = programs_of(weights(megabytes), Path(directory))
        for _ in range(rounds):
            for name, program in programs.items():
                shutil.rmtree(Path(directory) / "copy", ignore_errors=True)
                # Until the threads of the program before are done.
                time.sleep(0.3)
                began = time.process_time()
                program()
                seconds.setdefault(name, []).append(time.process_time() - began)
    return {name: median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    logging.getLogger("absl").setLevel(logging.ERROR)
    sizes = [*sys.argv[1:], *("100", "9")[len(sys.argv) - 1 :]]
    measured = measure(float(sizes[0]), int(sizes[1]))
    for part in ("save", "restore"):
        whole, digests = measured[part], measured[f"digests of a {part}"]
        print(f"{part}: {whole:.3f} CPU s, digests {digests:.4f} s, {1 + digests / whole:.3f} x")
