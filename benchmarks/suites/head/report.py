"""The targets of the head, and its results as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.report import conditions, mebibytes, number, problems, table, targets
from benchmarks.harness.results import Check, Result, Target, check, ratio
from benchmarks.suites.head.forms import FORMS, GROUPS, TITLES, Form
from benchmarks.suites.head.problem import SIZES
from benchmarks.suites.head.rates import MATMULS, Rates
from benchmarks.suites.head.suite import SizeResults

LARGE_VOCAB = 131_072
TARGETS = {
    "cpu": (
        Target("temporary", "tile", "naive", 1 / 16, 1 / 24),
        Target("temporary", "tile", "tunix_full", 1 / 24, 1 / 40),
        Target("temporary", "tile", "tunix_chunk", 1 / 3, 1 / 9),
        Target("time", "tile", "naive", 0.8),
        Target("time", "tile", "tunix_chunk", 0.8),
        Target("time", "tile", "trl", 0.9),
        Target("time", "tile", "trl_4096", 0.9),
        Target("time", "tile", "verl", 0.6),
        Target("time", "tile_half", "naive_half", 0.45),
        Target("time", "tile_frozen", "naive_frozen", 0.5),
        Target("time", "tile_kl", "tile", 1.5),
    ),
    "gpu": (Target("time", "tile", "liger", 1.0), Target("time", "tile", "torch_chunk", 1.0)),
}
# Part of the machine's matmul rate, at least.
RATE = {"cpu": 0.85, "gpu": 0.65}
RATE_TITLE = "kljax, part of the matmul rate, recomputed matmuls included"
COLUMNS = "contender|wall s|of naive|CPU s|of naive|temporary MiB|peak MiB|GFLOP/s|loss differs by|gradients differ by"


def markdown(report: Mapping[str, Any], sizes: Sequence[SizeResults], device: str) -> str:
    """Returns the conditions, and for each size its forms, problems, rates and targets."""
    options, rounds = report["options"], report["rounds"]
    how = [f"{options['dtype']} hidden states and head"]
    how += [f"{options['threads'] or 'all'} threads"] if device == "cpu" else []
    how += [f"the fastest of {rounds} interleaved rounds" if rounds else "memory and agreement only"]
    lines = conditions(report, how)
    for one in sizes:
        lines += ["", f"### N={one.size.tokens:,} D={one.size.width:,} V={one.size.vocab:,}"]
        if one.size not in SIZES:
            lines += ["", f"The targets below are meant for {' and '.join(map(str, SIZES))}."]
        for group, title in GROUPS.items():
            forms = [form for form in FORMS if form.group == group and form.name in one.results]
            if forms:
                rows = [_row(form, one) for form in forms]
                lines += ["", f"{title[0].upper()}{title[1:]}:", "", *table(COLUMNS.split("|"), rows)]
        lines += problems(one.results.values(), TITLES)
        if one.rates is not None:
            lines += ["", _rates(one.rates)]
        lines += ["", *targets(checks(one, device), "in CPU seconds")]
    return "\n".join(lines) + "\n"


def checks(measured: SizeResults, device: str) -> list[Check]:
    """Compares the results of a size with the targets of a device."""
    large = measured.size.vocab >= LARGE_VOCAB
    found = [check(target, title(target), measured.results, large=large) for target in TARGETS[device]]
    part = None if measured.rates is None else ratio(measured.rates.reached, measured.rates.mixed)
    return [*found, Check(RATE_TITLE, RATE[device], part, at_least=True, unit="%")]


def title(target: Target) -> str:
    """Describes a target."""
    kinds = {"half": "half masked, ", "frozen": "frozen head, ", "kl": "exact KL, "}
    kind = kinds.get(target.name.partition("_")[2], "")
    against = "kljax without it" if target.against == "tile" else TITLES[target.against]
    return f"{'memory' if target.measure == 'temporary' else target.measure}: kljax, {kind}over {against}"


def _row(form: Form, measured: SizeResults) -> list[str]:
    result: Result = measured.results[form.name]
    if result.problem is not None:
        return [form.title, "not measured", *[""] * 8]
    naive = measured.results[form.baseline]
    wall, cpu = result.best("wall"), result.best("cpu")
    return [
        form.title,
        number(wall, ".3g"),
        number(ratio(wall, naive.best("wall")), ".2f"),
        number(cpu, ".3g"),
        number(ratio(cpu, naive.best("cpu")), ".2f"),
        mebibytes(result.temp_bytes),
        mebibytes(result.peak_bytes.get("run")),
        number(ratio(form.matmuls * measured.size.flops / 1e9, wall), ",.0f"),
        *(number(result.differences.get(name), ".0e") for name in ("loss", "gradients")),
    ]


def _rates(rates: Rates) -> str:
    shapes = ", ".join(f"{MATMULS[name]} {rate / 1e9:,.0f}" for name, rate in rates.matmuls.items())
    text = (
        f"Matmuls of a tile of {rates.tile[0]:,} tokens and {rates.tile[1]:,} columns alone, GFLOP/s: {shapes}; as "
        f"kljax needs them {rates.mixed / 1e9:,.0f}."
    )
    if rates.reached is not None:
        best = max(rates.matmuls.values())
        text += (
            f" kljax, recomputed matmuls included: {rates.reached / 1e9:,.0f}, {rates.reached / rates.mixed:.0%} of "
            f"that and {rates.reached / best:.0%} of the fastest shape."
        )
    text += f" A copy reads and writes {rates.copied / 1e9:,.1f} GB/s"
    if rates.moved is not None:
        text += f"; kljax moves at least {rates.moved / 1e9:,.1f}, {rates.moved / rates.copied:.0%} of that"
    return f"{text}."
