"""Counts what a restore makes of a bit that flipped in the arrays of a checkpoint, by orbax alone and with our digests.

    python -m tests.kljax.flipped_bits [COUNT]

`silent` are restores with other numbers and no error. The digests are there for as long as orbax has some.
"""

import argparse
import functools
import logging
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from kljax.checkpoint import read_metadata, restore, seal, tree_digests


def count_outcomes(folder: Path, flips: int) -> dict[str, Counter[str]]:
    """Saves random weights in `folder`, and restores them after each of some flips in turn, which are taken back."""
    rng = np.random.default_rng(0)
    tree = {f"w{i}": jax.numpy.asarray(rng.normal(0, 0.02, (64, 64)).astype(np.float32)) for i in range(6)}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    path = folder / "tree"
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        sealed = seal({"arrays": tree_digests(tree)})
        checkpointer.save(path, args=ocp.args.StandardSave(tree, custom_metadata=sealed))
    data = sorted(file for file in path.rglob("*") if file.parent.name == "d")
    largest = max(data, key=lambda file: file.stat().st_size)
    outcomes: dict[str, Counter[str]] = {"orbax": Counter(), "digests": Counter()}
    for seed in range(flips):
        before = largest.read_bytes()
        changed = bytearray(before)
        bit = random.Random(seed).randrange(8 * len(changed))
        changed[bit // 8] ^= 1 << bit % 8
        largest.write_bytes(changed)
        for name, verify in (("orbax", False), ("digests", True)):
            read = functools.partial(restore, read_metadata(path), abstract, verify=verify)
            outcomes[name][_outcome(read, tree)] += 1
        largest.write_bytes(before)
    return outcomes


def _outcome(read: Callable[[], Any], tree: dict[str, jax.Array]) -> str:
    try:
        restored = read()
    except ValueError:
        return "refused"
    return "equal" if all(np.array_equal(restored[name], tree[name]) for name in tree) else "silent"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.kljax.flipped_bits")
    parser.add_argument("count", nargs="?", type=int, default=100)
    logging.disable()
    with tempfile.TemporaryDirectory() as directory:
        for name, outcomes in count_outcomes(Path(directory), parser.parse_args().count).items():
            print(f"{name}: {', '.join(f'{count} {outcome}' for outcome, count in outcomes.most_common())}")
