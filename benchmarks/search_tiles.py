"""Finds the tile sizes of a device: times value and gradient over a grid, and prints a row for the library's table.

    python -m benchmarks.search_tiles --size 16384x4096x151936 --dtype bf16

All tiles are timed in the same rounds, against the one that the table has now. The fastest wins, and the smaller one of
two within 2 % of each other; what it needs in temporary memory is shown beside it. The row goes into
`kljax/log_probs/_tiles.py`.
"""

import argparse
import os
from collections.abc import Mapping, Sequence

from benchmarks._inputs import Options, Size, make_inputs, parse_numbers

TOKENS, VOCAB = (256, 512, 1024, 2048, 4096, 8192), (1024, 2048, 4096, 8192)
Pair = tuple[int, int]
# Two tiles this close are as fast as each other.
TIE = 1.02


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.search_tiles",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--size", type=_size, default=Size(2048, 1024, 32_768), metavar="NxDxV")
    found.add_argument("--tokens", type=_sizes, default=TOKENS, metavar="N,N", help="rows of a tile to try")
    found.add_argument("--vocab", type=_sizes, default=VOCAB, metavar="V,V", help="columns of a tile to try")
    found.add_argument("--rounds", type=int, default=5)
    found.add_argument("--device", choices=("cpu", "gpu", "tpu"), default="cpu")
    found.add_argument("--dtype", choices=("float32", "bf16"), default="float32", help="of hidden states and head")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Times the grid and prints it, then the row."""
    options = parser().parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cuda" if options.device == "gpu" else options.device)
    # Only now: JAX reads the environment when it starts.
    import jax

    from benchmarks._jax_contenders import Contenders
    from benchmarks._measure import timed
    from kljax.log_probs._tiles import default_tile

    kind, size = jax.devices()[0].device_kind, options.size
    now = default_tile(kind)
    tiles = {(now.tokens, now.vocab)}
    tiles |= {(min(n, size.tokens), min(v, size.vocab)) for n in options.tokens for v in options.vocab}
    inputs = make_inputs(size)
    tried = {
        tile: Contenders(inputs, Options(device=options.device, dtype=options.dtype, tile=tile))
        for tile in sorted(tiles)
    }
    seconds = dict.fromkeys(tried, float("inf"))
    for contenders in tried.values():
        contenders.run("tile")
    for _ in range(options.rounds):
        for tile, contenders in tried.items():
            seconds[tile] = min(seconds[tile], timed(contenders, "tile")[0])
    memory = {tile: contenders.temp_bytes("tile") for tile, contenders in tried.items()}
    print(table(seconds, memory, (now.tokens, now.vocab)))
    tokens, vocab = best(seconds)
    print(f'\n    "{kind}": Tile({tokens}, {vocab}),')
    return 0


def table(seconds: Mapping[Pair, float], memory: Mapping[Pair, int], now: Pair) -> str:
    """The grid as text, fastest first, each time as a ratio to that of the present tile."""
    lines = [f"{'tokens':>8} {'vocab':>8} {'time, of the present':>22} {'temporary MiB':>14}"]
    for tile in sorted(seconds, key=lambda tile: seconds[tile]):
        ratio, mark = seconds[tile] / seconds[now], "  <- present" if tile == now else ""
        lines.append(f"{tile[0]:>8} {tile[1]:>8} {ratio:>22.2f} {memory[tile] / 2**20:>14.1f}{mark}")
    return "\n".join(lines)


def best(seconds: Mapping[Pair, float]) -> Pair:
    """The fastest tile; of those that are as fast, the smallest."""
    limit = TIE * min(seconds.values())
    return min((tile for tile, took in seconds.items() if took <= limit), key=lambda tile: (tile[0] * tile[1], tile))


def _size(text: str) -> Size:
    return Size(*_numbers(text, 3))


def _numbers(text: str, count: int) -> tuple[int, ...]:
    try:
        return parse_numbers(text, count)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_numbers(part, 1)[0] for part in text.split(","))


if __name__ == "__main__":
    raise SystemExit(main())
