"""Sampling with a whole model on a CPU: kljax against Tunix's sampler and `generate` of transformers.

    python -m benchmarks.rollout --make-envs ENVS      once; Tunix and transformers, in environments of their own
    python -m benchmarks.rollout --envs ENVS --json PATH --markdown PATH
    python -m benchmarks.rollout --limits 256,512,1024,2048

All have the same weights. Before anything is timed, their log-probs of the same sequences are compared; the command
fails if they differ. Then each contender, in a process of its own, completes the same prompts once a round while the
others wait. A missed target does not fail the command.

With `--limits`, only the price of a larger limit is measured: the same completions under larger and larger limits, in
windows of KV cache, as the sampler of the trainer, and in one window that has all columns from the start. Lengths are
forced, so that all draw the same tokens, which is checked.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from benchmarks.harness import cli, machine
from benchmarks.harness.race import race_programs
from benchmarks.harness.report import Check, Report, ratio, table
from benchmarks.suites.model import problem, suite
from benchmarks.suites.model.kljax import model_of
from benchmarks.suites.model.problem import ModelWork
from train.models.sharding import make_mesh
from train.rl.policy import init_params
from train.rollouts.sampler import Sampling, WindowedSampler

TIME_TARGET, MEMORY_TARGET = 1.15, 2.0
WAYS = {"windows": "windows", "whole": "one window"}
LIMITED = ModelWork(prompt_length=64, completion_length=256)
COLUMNS = (
    *(("limit", ",d"), ("KV cache", ""), ("widest window", ",d")),
    *(("KV cache MiB", ",.1f"), ("over the smallest limit", ".2f")),
    *(("CPU s", ",.2f"), ("over the smallest limit", ".2f"), ("wall s", ",.2f")),
)


def increasing(text: str) -> tuple[int, ...]:
    """Parses positive numbers that are separated by commas, the smallest first."""
    parsed = tuple(map(cli.positive, text.split(",")))
    if list(parsed) != sorted(set(parsed)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected increasing numbers such as 256,512")
    return parsed


def lengths_of(work: ModelWork) -> np.ndarray:
    """Draws `[rows]` int32, the tokens of each completion: lognormal, with a median of two fifths of the longest."""
    shares = np.random.default_rng(0).lognormal(np.log(105 / 256), 0.5, work.rows)
    return np.clip(np.rint(work.completion_length * shares), 1, work.completion_length).astype(np.int32)


def measure_limits(work: ModelWork, limits: Sequence[int], rounds: int) -> dict[str, Any]:
    """Measures the fastest of `rounds` interleaved rounds, and the KV cache, for each limit and each way."""
    model, mesh, lengths = model_of(work), make_mesh(1, 1, 1), lengths_of(work)
    params = init_params(model, jax.random.key(0), mesh)
    prompts, longest = jnp.asarray(problem.make_prompts(work)), int(lengths.max())
    forced = {"limits": jnp.asarray(lengths)}
    arguments = (kljax.Policy(params), prompts, jnp.ones(prompts.shape, bool), jax.random.key(2), forced)
    samplers = {
        (limit, way): WindowedSampler(
            model, mesh, name=f"{way}_{limit}", max_new_tokens=limit, sampling=Sampling(1.0), eos_ids=(),
            group=work.samples, widths=(limit,) if way == "whole" else None,
        )
        for limit in limits for way in WAYS
    }  # fmt: skip
    programs = {f"{limit} {way}": lambda s=s: s(*arguments) for (limit, way), s in samplers.items()}
    columns = slice(work.prompt_length, work.prompt_length + longest)
    expected, *others = (np.asarray(program().tokens)[:, columns] for program in programs.values())
    masks = np.arange(longest) < lengths[:, None]
    if any((tokens != expected)[masks].any() for tokens in others):
        raise RuntimeError("limits: the tokens differ between limits or windows")
    results = race_programs(programs, rounds)
    rows: list[dict[str, Any]] = []
    for (limit, way), sampler in samplers.items():
        best = {clock: results[f"{limit} {way}"].best(clock) or 0.0 for clock in ("cpu", "wall")}
        # The widest window that the longest row needs, and the bytes of the KV cache with it.
        window = next(width for width in sampler.widths if width >= longest)
        layers = [layer for stack in sampler.first.trace(*arguments).out_info[1].stacks for layer in stack]
        narrow, of_prompts = (
            sum(x.size * x.dtype.itemsize for layer in layers for x in jax.tree.leaves(getattr(layer, part)))
            for part in ("completions", "prompts")
        )
        size = of_prompts + narrow * window // sampler.widths[0]
        rows.append({"limit": limit, "way": way, "window": window, "cache_bytes": size, **best})
    for row in rows:
        first = next(other for other in rows if other["way"] == row["way"])
        row["time"], row["memory"] = (ratio(row[name], first[name]) for name in ("cpu", "cache_bytes"))
    return {"lengths": lengths.tolist(), "rounds": rounds, "rows": rows}


def report_limits(fields: Mapping[str, Any]) -> Report:
    """Compares all limits with the smallest, and the largest with its targets."""
    lengths, keys = fields["lengths"], ("memory", "cpu", "time", "wall")
    rows = [
        [row["limit"], WAYS[row["way"]], row["window"], row["cache_bytes"] / 2**20, *(row[key] for key in keys)]
        for row in fields["rows"]
    ]
    how = f"{len(lengths)} rows of {min(lengths)} to {max(lengths)} tokens, {np.mean(lengths):.0f} on average, the same"
    how += f" for every limit; the fastest of {fields['rounds']} interleaved rounds"
    last = [row for row in fields["rows"] if row["way"] == "windows"][-1]
    limits = f"a limit of {last['limit']:,} over one of {fields['rows'][0]['limit']:,}"
    checks = [Check(f"CPU time of {limits}", TIME_TARGET, last["time"])]
    checks.append(Check(f"KV cache of {limits}", MEMORY_TARGET, last["memory"]))
    return Report([table(COLUMNS, rows)], checks, fields=fields, how=[how])


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.limits is not None:
        cli.limit_threads(options.threads)
        return machine.conditions() | measure_limits(LIMITED, options.limits, options.rounds)
    return suite.measure(options, "rollout")


def report(fields: dict[str, Any]) -> Report:
    """Makes the report of a race, or of limits."""
    return report_limits(fields) if "lengths" in fields else suite.report(fields, "rollout")


main = cli.command(
    "rollout",
    __doc__,
    _measure,
    report,
    *suite.options_of(("kljax", "tunix", "transformers")),
    cli.option("--limits", type=increasing, metavar="N,N", help="race limits of completions, and nothing else"),
)

if __name__ == "__main__":
    sys.exit(main())
