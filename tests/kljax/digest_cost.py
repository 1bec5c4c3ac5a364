"""Measures what digests add to a save and to a restore of float32 weights.

    python -m tests.kljax.digest_cost              100 MB, 9 rounds
    python -m tests.kljax.digest_cost 400 20       400 MB, 20 rounds

Each round saves and restores the weights with orbax and their digests. A ratio is the time of the whole to that without
the digests, in one round: the noise between two saves is larger than what digests add. The first digests of a process
compile a program, which the rounds do not count.
"""

import argparse
import functools
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from kljax.checkpoint import check_restored, read_metadata, restore, seal, tree_digests

FIRST = "first"


class Seconds(NamedTuple):
    """Seconds of one call."""

    cpu: float
    wall: float


def weights(megabytes: float) -> dict[str, jax.Array]:
    """Draws weights with the shapes of a decoder: twelve stacked layers, an embedding and norms."""
    width = int((megabytes * 1e6 / 4 / (12 * 12 + 8)) ** 0.5) // 8 * 8
    up, down = (12, width, 4 * width), (12, 4 * width, width)
    shapes = {"attention": up, "up": up, "down": down, "embedding": (8 * width, width), "norm": (12, width)}
    draw = np.random.default_rng(0)
    return {name: jnp.asarray(draw.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def timed(seconds: dict[str, list[Seconds]], name: str, program: Callable[[], Any]) -> Any:
    """Runs a program and appends its seconds; the CPU seconds are those of its threads too, which end after it."""
    cpu, began = time.process_time(), time.perf_counter()
    result = program()
    wall = time.perf_counter() - began
    time.sleep(0.3)
    seconds.setdefault(name, []).append(Seconds(time.process_time() - cpu, wall))
    return result


def save(path: Path, tree: Any, content: dict[str, Any]) -> None:
    """Saves a tree with orbax, with sealed values beside it."""
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.StandardSave(tree, custom_metadata=content))


def measure(megabytes: float, rounds: int) -> dict[str, list[Seconds]]:
    """Returns the seconds of each part in each round, and of the first digests of the process."""
    seconds: dict[str, list[Seconds]] = {}
    tree = weights(megabytes)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tree"
        timed(seconds, FIRST, lambda: tree_digests(tree))
        for _ in range(rounds):
            shutil.rmtree(path, ignore_errors=True)
            content = timed(seconds, "digests of a save", lambda: seal({"arrays": tree_digests(tree)}))
            timed(seconds, "save", functools.partial(save, path, tree, content))
            metadata = read_metadata(path)
            restored = timed(seconds, "restore", functools.partial(restore, metadata, abstract, verify=False))
            timed(seconds, "digests of a restore", functools.partial(check_restored, metadata, restored))
    return seconds


def report(seconds: dict[str, list[Seconds]]) -> Iterator[str]:
    """Yields a table of medians over the rounds."""
    yield "| | CPU s without digests | of its digests | CPU ratio | wall ratio |"
    yield "|---|--:|--:|--:|--:|"
    for part in ("save", "restore"):
        pairs = list(zip(seconds[f"digests of a {part}"], seconds[part], strict=True))
        cpu, wall = (median(1 + digests[i] / without[i] for digests, without in pairs) for i in range(2))
        digests, without = (median(pair[i].cpu for pair in pairs) for i in range(2))
        yield f"| {part} | {without:.3f} | {digests:.4f} | {cpu:.3f} | {wall:.3f} |"
    yield f"The first digests of the process, with the compilation: {seconds[FIRST][0].cpu:.3f} CPU s."


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    command = argparse.ArgumentParser(
        prog="python -m tests.kljax.digest_cost", description=str(__doc__).splitlines()[0]
    )
    command.add_argument("megabytes", type=float, nargs="?", default=100.0, help="size of the weights (%(default)s)")
    command.add_argument("rounds", type=int, nargs="?", default=9, help="saves and restores (%(default)s)")
    options = command.parse_args(arguments)
    logging.getLogger("absl").setLevel(logging.ERROR)
    for line in report(measure(options.megabytes, options.rounds)):
        print(line)


if __name__ == "__main__":
    main()
