"""The price of a limit: the same completions under larger and larger limits, in windows of KV cache and in one.

    python -m benchmarks.rollout --limits 256,512,1024,2048 [--json PATH] [--markdown PATH]

Lengths are forced (`limits`), so that all contenders draw the same tokens, which is checked. "windows" is the sampler
of the trainer, "one window" the same loop over a KV cache that has all columns from the start.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from benchmarks.harness import cli
from benchmarks.harness.machine import describe, release
from benchmarks.harness.race import race_programs
from benchmarks.harness.report import join, table, where
from benchmarks.harness.results import Check, ratio
from benchmarks.suites.model.kljax import model_of
from benchmarks.suites.model.long_tail import draw_lengths, draw_prompts
from benchmarks.suites.model.problem import Work
from train.models.sharding import make_mesh
from train.rl.policy import init_params
from train.rollouts.sampler import Sampling, WindowedSampler

TIME_TARGET, MEMORY_TARGET = 1.15, 2.0
WAYS = {"windows": "windows", "whole": "one window"}
COLUMNS = (
    ("limit", ",d"),
    ("KV cache", ""),
    ("widest window", ",d"),
    ("KV cache MiB", ",.1f"),
    ("over the smallest limit", ".2f"),
    ("CPU s", ",.2f"),
    ("over the smallest limit", ".2f"),
    ("wall s", ",.2f"),
)


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Rows with lognormal lengths of this median and spread, at most `longest`; `group` of them per prompt."""

    rows: int = 8
    group: int = 4
    prompt_length: int = 64
    median: float = 105.0
    sigma: float = 0.5
    longest: int = 256
    vocab: int = 4096
    layers: int = 4

    def tokens(self) -> np.ndarray:
        """Returns `[rows]` int32, the tokens of each completion."""
        return draw_lengths(self.rows, self.median, self.sigma, self.longest)

    def prompts(self) -> np.ndarray:
        """Draws `[rows / group, prompt_length]` int32 ids."""
        return draw_prompts(self.rows // self.group, self.prompt_length, self.vocab)


class Problem:
    """The decoder, its weights and the arguments that all samplers get."""

    def __init__(self, lengths: Lengths) -> None:
        self.lengths, self.mesh = lengths, make_mesh()
        self.model = model_of(Work(vocab=lengths.vocab, layers=lengths.layers))
        policy = kljax.Policy(init_params(self.model, jax.random.key(0), self.mesh))
        prompts = jnp.asarray(lengths.prompts())
        rows = {"limits": jnp.asarray(lengths.tokens())}
        self.arguments = (policy, prompts, jnp.ones(prompts.shape, bool), jax.random.key(2), rows)

    def sampler(self, limit: int, way: str) -> WindowedSampler:
        """Makes a sampler of completions of at most `limit` tokens."""
        return WindowedSampler(
            self.model, self.mesh, name=f"{way}_{limit}", max_new_tokens=limit, sampling=Sampling(1.0), eos_ids=(),
            group=self.lengths.group, widths=(limit,) if way == "whole" else None,
        )  # fmt: skip

    def cache(self, limit: int, way: str) -> tuple[int, int]:
        """Returns the columns of the widest window that the rows need, and the bytes of the KV cache with it."""
        sampler = self.sampler(limit, way)
        cache = sampler.first.trace(*self.arguments).out_info[1]
        reached = next(width for width in sampler.widths if width >= self.lengths.tokens().max())
        narrow = sum(x.size * x.dtype.itemsize for layer in cache for x in jax.tree.leaves(layer.completions))
        prompts = sum(x.size * x.dtype.itemsize for layer in cache for x in jax.tree.leaves(layer.prompts))
        return reached, prompts + narrow * reached // sampler.widths[0]


def measure(lengths: Lengths, limits: Sequence[int], rounds: int) -> dict[str, Any]:
    """Measures the fastest of `rounds` interleaved rounds, and the KV cache, for each limit and each way.

    Raises:
      RuntimeError: if two of them draw different tokens.
    """
    problem = Problem(lengths)
    samplers = {(limit, way): problem.sampler(limit, way) for limit in limits for way in WAYS}
    programs = {f"{limit} {way}": lambda s=s: s(*problem.arguments) for (limit, way), s in samplers.items()}
    columns = slice(lengths.prompt_length, lengths.prompt_length + int(lengths.tokens().max()))
    drawn = [np.asarray(program().tokens)[:, columns] for program in programs.values()]
    masks = np.arange(drawn[0].shape[1]) < lengths.tokens()[:, None]
    if any((tokens != drawn[0])[masks].any() for tokens in drawn):
        raise RuntimeError("limits: the tokens differ between limits or windows")
    results = race_programs(programs, rounds)
    found: list[dict[str, Any]] = []
    for limit, way in samplers:
        best = {clock: results[f"{limit} {way}"].best(clock) or 0.0 for clock in ("cpu", "wall")}
        window, size = problem.cache(limit, way)
        found.append({"limit": limit, "way": way, "window": window, "cache_bytes": size, **best})
    for row in found:
        first = next(other for other in found if other["way"] == row["way"])
        row["time"], row["memory"] = (ratio(row[name], first[name]) for name in ("cpu", "cache_bytes"))
    return {"lengths": lengths.tokens().tolist(), "rounds": rounds, "rows": found}


def checks(rows: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Compares the largest limit with its targets."""
    row = [row for row in rows if row["way"] == "windows"][-1]
    smallest = rows[0]["limit"]
    what = f"a limit of {row['limit']:,} over one of {smallest:,}"
    return [
        Check(f"CPU time of {what}", TIME_TARGET, row["time"]),
        Check(f"KV cache of {what}", MEMORY_TARGET, row["memory"]),
    ]


def markdown(report: Mapping[str, Any]) -> str:
    """Returns the measurements as Markdown."""
    lengths = report["lengths"]
    rows = [
        [row["limit"], WAYS[row["way"]], row["window"], row["cache_bytes"] / 2**20, row["memory"], row["cpu"],
         row["time"], row["wall"]]
        for row in report["rows"]
    ]  # fmt: skip
    what = (
        f"{len(lengths)} rows of {min(lengths)} to {max(lengths)} tokens, {np.mean(lengths):.0f} on average, the same "
        f"for every limit; the fastest of {report['rounds']} interleaved rounds."
    )
    verdicts = [
        [check.title, f"at most {check.limit:g}", f"{check.value:.2f}", check.verdict]
        for check in checks(report["rows"])
    ]
    targets = table([(title, "") for title in ("target", "bound", "measured", "verdict")], verdicts)
    return join([where(report), what, table(COLUMNS, rows), targets])


def main(options: argparse.Namespace) -> int:
    """Runs the measurement of a command line."""
    cli.limit_threads(options.threads)
    report = measure(Lengths(), options.limits, options.rounds)
    machine, versions = describe(jax.devices()[0]), {"kljax": release(), "jax": jax.__version__}
    report = {"machine": machine, "versions": versions, **report}
    return cli.finish(options, markdown(report), report, [])
