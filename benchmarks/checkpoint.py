"""Measures what digests add to a save and a restore: each with and without them, in turns, in one process.

    python -m benchmarks.checkpoint                      100 MB of weights
    python -m benchmarks.checkpoint --megabytes 400 --rounds 20

`added` is the time of the digests alone over that of a save or a restore without them. Each is the fastest of all,
which a busy machine disturbs least. The digests of a save are computed before it returns, so training waits for them.
"""

import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from benchmarks.harness import cli
from benchmarks.harness.measure import Seconds
from benchmarks.harness.race import race, timed
from benchmarks.harness.report import join, table
from benchmarks.harness.results import Result, failures, ratio
from kljax import _orbax
from kljax.digests import check_digests, seal, tree_digests

COLUMNS = (("part", ""), ("seconds", ".3f"), ("digests", ".4f"), ("added", ".1%"))


def weights(megabytes: int) -> dict[str, jax.Array]:
    """Draws float32 weights with the shapes of a decoder: twelve stacked layers, an embedding and norms."""
    width = int((megabytes * 1e6 / 4 / (12 * 12 + 8)) ** 0.5) // 8 * 8
    up, down = (12, width, 4 * width), (12, 4 * width, width)
    shapes = {"attention": up, "up": up, "down": down, "embedding": (8 * width, width), "norm": (12, width)}
    draw = np.random.default_rng(0)
    return {name: jnp.asarray(draw.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def programs_of(tree: Any, scratch: Path) -> dict[str, Callable[[], Any]]:
    """Returns a save to `scratch/copy` and a restore, both without digests, and the digests of each."""

    def save(path: Path) -> None:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            checkpointer.save(path, args=ocp.args.StandardSave(tree))

    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    save(scratch / "saved")
    restored, digests = _orbax.restore(_orbax.read_metadata(scratch / "saved"), abstract), tree_digests(tree)
    return {
        "save": lambda: save(scratch / "copy"),
        "digests of a save": lambda: seal({"arrays": tree_digests(tree)}),
        "restore": lambda: _orbax.restore(_orbax.read_metadata(scratch / "saved"), abstract),
        "digests of a restore": lambda: check_digests("", restored, digests),
    }


def measure(tree: Any, rounds: int) -> dict[str, Result]:
    """Times the programs in interleaved rounds; a copy of the round before is deleted while no clock runs."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        programs = programs_of(tree, scratch)
        results = {name: Result(name) for name in programs}

        def run(name: str) -> dict[str, Seconds]:
            shutil.rmtree(scratch / "copy", ignore_errors=True)
            return timed(programs[name])

        race(results, rounds, run)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; prints one row per part."""
    parser = cli.make_parser("checkpoint", __doc__)
    parser.add_argument("--megabytes", type=cli.positive, default=100, help="size of the weights")
    parser.add_argument("--rounds", type=cli.positive, default=10, help="the fastest counts")
    cli.add_outputs(parser)
    options = parser.parse_args(arguments)
    logging.getLogger("absl").setLevel(logging.ERROR)
    tree = weights(options.megabytes)
    results = measure(tree, options.rounds)
    seconds = {name: result.best("wall") for name, result in results.items()}
    digests = {part: seconds[f"digests of a {part}"] for part in ("save", "restore")}
    rows = [[part, seconds[part], spent, ratio(spent, seconds[part])] for part, spent in digests.items()]
    size = sum(leaf.nbytes for leaf in tree.values()) / 1e6
    head = f"{size:.0f} MB on {jax.devices()[0].device_kind}, the fastest of {options.rounds} interleaved rounds"
    report = {"megabytes": size, "seconds": seconds}
    return cli.finish(options, join([head, table(COLUMNS, rows)]), report, failures(results, {}))


if __name__ == "__main__":
    sys.exit(main())
