"""Finds the tile sizes of a device: times value and gradient over a grid, and prints a line for the library's table.

    python -m benchmarks.search_tiles --size 16384x4096x151936 --dtype bf16

All tiles are timed in the same rounds, against the present one of the table. The fastest wins; of two within 2 %, the
smaller. Temporary memory is shown beside the times. The line goes into `kljax/log_probs/_head.py`.
"""

import argparse
from collections.abc import Mapping
from typing import Any

import jax

from benchmarks.harness import cli
from benchmarks.harness.race import race
from benchmarks.harness.report import ContenderResult, Report, table
from benchmarks.suites.head.forms import DTYPE, HeadOptions, Size, make_inputs
from benchmarks.suites.head.jax_forms import JaxForms
from kljax.log_probs._head import default_tile

TOKENS, VOCAB = (256, 512, 1024, 2048, 4096, 8192), (1024, 2048, 4096, 8192)
COLUMNS = (("tokens", "d"), ("vocab", "d"), ("time / present", ".2f"), ("temporary MiB", "MiB"), ("", ""))
Pair = tuple[int, int]
# Two tiles are as fast as each other within this factor.
TIE = 1.02


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    """Times the grid."""
    jax.config.update("jax_platforms", "cuda" if options.device == "gpu" else options.device)
    kind, size = jax.devices()[0].device_kind, Size(*options.size)
    now = default_tile(kind)
    present = (now.tokens, now.vocab)
    tiles = {present, *((min(n, size.tokens), min(v, size.vocab)) for n in options.tokens for v in options.vocab)}
    inputs = make_inputs(size)
    tried = {tile: JaxForms(inputs, HeadOptions(options.device, options.dtype, tile=tile)) for tile in sorted(tiles)}
    results = {tile: ContenderResult("{}x{}".format(*tile)) for tile in tried}
    race(results, options.rounds, lambda tile: tried[tile].run("tile"))
    for result in results.values():
        if result.problem is not None:
            raise RuntimeError(f"tile {result.name}: {result.problem}")
    seconds = {tile: result.best("wall") or 0.0 for tile, result in results.items()}
    rows = [
        [*tile, took / seconds[present], tried[tile].temporary("tile"), "<- present" if tile == present else ""]
        for tile, took in sorted(seconds.items(), key=lambda item: item[1])
    ]
    line = '    "{}": Tile({}, {}),'.format(kind, *best(seconds))
    by_name = {results[tile].name: took for tile, took in seconds.items()}
    return {"device": kind, "seconds": by_name, "rows": rows, "line": line}


def best(seconds: Mapping[Pair, float]) -> Pair:
    """Returns the fastest tile; the smallest of equally fast ones."""
    limit = TIE * min(seconds.values())
    return min((tile for tile, took in seconds.items() if took <= limit), key=lambda tile: (tile[0] * tile[1], tile))


main = cli.command(
    "search_tiles",
    __doc__,
    _measure,
    lambda fields: Report([table(COLUMNS, fields["rows"]), fields["line"]]),
    cli.option("--size", type=cli.numbers("2048x1024x32768"), default=(2048, 1024, 32_768), metavar="NxDxV"),
    cli.option("--tokens", type=cli.positives, default=TOKENS, metavar="N,N", help="rows of a tile to try"),
    cli.option("--vocab", type=cli.positives, default=VOCAB, metavar="V,V", help="columns of a tile to try"),
    cli.option("--device", choices=("cpu", "gpu", "tpu"), default="cpu"),
    DTYPE,
    cli.rounds(5),
)

if __name__ == "__main__":
    raise SystemExit(main())
