"""Times sequences that share rows and prefixes against the same sequences in rows of their own, on a CPU.

    python -m benchmarks.forests
    python -m benchmarks.forests --rounds 10 --json PATH --markdown PATH

A program computes the log-probs of the scored tokens of all sequences, and the gradients of their weighted sum, with a
decoder of two layers of width 512. Rows and forests go through one form of attention, and have the same sum. "Tokens"
are the slots over the tokens of the sequences; "pairs" are queries and keys that attend, likewise.

Contenders take turns, and the fastest round counts, by the CPU time of all threads. A missed target does not fail the
command.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from benchmarks.harness import cli, machine
from benchmarks.harness.race import race_programs
from benchmarks.harness.report import Check, Measured, Report, Target, ratio, table
from train.models import Decoder, DecoderConfig
from train.models.parameters import init_params
from train.models.sharding import make_mesh
from train.process.allocator import keep_freed_memory
from train.rl.policy import ScoredPolicy, Sequences, token_stats
from train.sequences.forest import Forest
from train.sequences.write_forest import Placed, write_forest

OVER_TOKENS = 1.15
"""The most CPU time of a forest over that of its rows, over its tokens over theirs."""
DIFFERENCE = 1e-4
"""Of the sums, whose terms have both signs."""
COLUMNS = (("sequences in", ""), ("ms", ".1f"), ("CPU ms", ".1f"), ("over rows", ".3f"), ("tokens", ".3f"),
           ("pairs", ".3f"), ("temporary MiB", "MiB"))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TreeSizes:
    """Equal trees: the tokens of a run at each depth, and the children of each run above.

    Attributes:
      runs: tokens of a run, by depth.
      children: of each run, by depth; one fewer than `runs`.
      trees: in all.
      row: trees of a row.
      scored_from: the first scored token of a sequence.
    """

    runs: tuple[int, ...]
    children: tuple[int, ...] = ()
    trees: int = 1
    row: int = 1
    scored_from: int = 1
    layers: int = 2
    width: int = 512
    vocab_size: int = 4096

    def __str__(self) -> str:
        """Returns the sizes in words."""
        shape = " + ".join(
            f"{count} x {run}" if count > 1 else f"{run}" for count, run in zip(self.counts, self.runs, strict=True)
        )
        return f"{self.trees} x ({shape}) tokens, {self.row} in a row of {self.row * self.slots}"

    @property
    def counts(self) -> np.ndarray:
        """Runs of a tree at each depth."""
        return np.cumprod((1, *self.children))

    @property
    def leaves(self) -> int:
        """Sequences of a tree."""
        return int(self.counts[-1])

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return sum(self.runs)

    @property
    def slots(self) -> int:
        """Tokens of a tree."""
        return int(np.dot(self.counts, self.runs))

    @property
    def pairs(self) -> int:
        """Queries and keys of a tree that attend."""
        ends = itertools.accumulate(self.runs)
        pairs = [_triangle(end) - _triangle(end - run) for end, run in zip(ends, self.runs, strict=True)]
        return int(np.dot(self.counts, pairs))

    def tokens(self) -> np.ndarray:
        """Draws the tokens of all sequences, [B, T], those of a tree one after another."""
        random = np.random.default_rng(0)
        columns = []
        for length, count in zip(self.runs, self.counts, strict=True):
            run = random.integers(1, self.vocab_size, (self.trees * count, length))
            columns.append(np.repeat(run, self.leaves // count, axis=0))
        return np.concatenate(columns, axis=1).astype(np.int32)

    def forest(self) -> Forest:
        """Writes the forest of all sequences."""
        placed = []
        leaves = self.leaves // self.counts
        for number in range(self.trees * self.leaves):
            # A sequence shares the runs that the one before it has too.
            same = number // leaves == (number - 1) // leaves
            placed.append(Placed(number, self.length, self.scored_from, int(np.dot(same, self.runs))))
        of_row = self.row * self.leaves
        rows = [placed[first : first + of_row] for first in range(0, len(placed), of_row)]
        width = self.row * self.slots
        written = write_forest([rows], rows=len(rows), width=width, sequences=len(placed), columns=self.length)
        return jax.tree.map(jnp.asarray, written)


def _triangle(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


SIZES = (
    TreeSizes((256,), trees=16, row=4, scored_from=128),
    TreeSizes((256, 256), (8,), trees=2, scored_from=256),
    TreeSizes((512, 384, 128), (4, 4)),
    TreeSizes((768, 256), (4,)),
)
QUICK = (TreeSizes((6, 4, 3), (2, 2), trees=2, row=2, layers=1, width=64, vocab_size=32),)


def programs(size: TreeSizes) -> dict[str, Any]:
    """Returns the programs of both contenders with their arguments: the weighted sum of log-probs, and gradients."""
    config = DecoderConfig(
        vocab_size=size.vocab_size,
        layers=size.layers,
        width=size.width,
        heads=size.width // 64,
        kv_heads=max(1, size.width // 256),
        head_dim=64,
        mlp_width=3 * size.width,
        remat="dots",
    )
    model = Decoder(config)
    tokens = jnp.asarray(size.tokens())
    mask = jnp.ones(tokens.shape, bool)
    scored = jnp.broadcast_to(jnp.arange(size.length) >= size.scored_from, tokens.shape)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=tokens.shape), jnp.float32)
    rows = Sequences.rows(tokens, mask, scored)
    arguments = {"rows": rows, "forest": dataclasses.replace(rows, forest=size.forest())}
    params = init_params(model, jax.random.key(0), make_mesh())

    def loss(params: Any, sequences: Sequences) -> jax.Array:
        stats, _ = token_stats(ScoredPolicy(model, kljax.Policy(params)), sequences, temperature=1.0)
        return jnp.sum(stats.log_prob * weights) / weights.size

    return {name: (jax.value_and_grad(loss), (params, sequences)) for name, sequences in arguments.items()}


def measure_size(size: TreeSizes, rounds: int) -> Measured:
    """Times both contenders of a size, and compares their sums."""
    results, compiled = race_programs(programs(size), rounds)
    sums = {name: float(run()[0]) for name, run in compiled.items()}
    if len(sums) == len(results):
        results["forest"].differences["sum"] = abs(sums["forest"] / sums["rows"] - 1)
    return Measured(size, results)


def report(fields: Mapping[str, Any]) -> Report:
    """Makes a table of each size, and compares with the targets."""
    parts = list[str | Report]()
    checks = list[Check]()
    failures = list[str]()
    for entry in fields["sizes"]:
        measured = Measured.read(entry, TreeSizes)
        size = measured.size
        tokens = size.slots / size.leaves / size.length
        parts += [f"**{size}**", table(COLUMNS, _rows(measured, tokens))]
        checks.append(
            Target("cpu", "forest", "rows", OVER_TOKENS * tokens).check(f"{size}, over rows", measured.results)
        )
        failures += measured.failures({"sum": DIFFERENCE})
    how = [f"float32, {fields['rounds']} interleaved rounds"]
    return Report(parts, checks, "wall time", fields, how, failures)


def _rows(measured: Measured, tokens: float) -> list[list[Any]]:
    size = measured.size
    pairs = size.pairs / size.leaves / _triangle(size.length)
    rows = list[list[Any]]()
    for name, shares in {"rows": (1.0, 1.0), "forest": (tokens, pairs)}.items():
        result = measured.results[name]
        over = ratio(result.best("cpu"), measured.results["rows"].best("cpu"))
        rows.append([name, *result.milliseconds(), over, *shares, result.temp_bytes])
    return rows


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    keep_freed_memory()  # as a run does
    fields = machine.conditions("cpu") | {"rounds": options.rounds}
    sizes = [measure_size(size, options.rounds) for size in (QUICK if options.quick else SIZES)]
    return fields | {"sizes": [dataclasses.asdict(entry) for entry in sizes]}


main = cli.command(
    "forests",
    __doc__,
    _measure,
    report,
    cli.option("--rounds", type=cli.positive, default=10, help="interleaved rounds; 10"),
    cli.option("--quick", action="store_true", help="a smoke test: a few tokens"),
)

if __name__ == "__main__":
    sys.exit(main())
