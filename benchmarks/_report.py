"""The table as Markdown, and everything that was measured as JSON."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import _rates
from benchmarks._inputs import SIZES
from benchmarks._results import Check, Measured, Rates, Result, check, ratio
from benchmarks._rows import GROUPS, ROWS

TITLES = {row.name: row.title for row in ROWS}


def markdown(report: dict[str, Any], sizes: Sequence[Measured], device: str) -> str:
    """All that a reader needs: where, how, the rows of each size, its targets and the rates of the machine."""
    lines = _conditions(report, device)
    for measured in sizes:
        lines += ["", f"### N={measured.size.tokens:,} D={measured.size.width:,} V={measured.size.vocab:,}"]
        if measured.size not in SIZES:
            lines += ["", f"The targets below are meant for {' and '.join(map(str, SIZES))}."]
        for group, title in GROUPS.items():
            results = [result for result in measured.results.values() if result.row.group == group]
            if results:
                lines += ["", f"{title[0].upper()}{title[1:]}:", "", *_rows(results, measured)]
        lines += _problems(measured.results.values())
        if measured.rates is not None:
            lines += ["", *_rate_lines(measured.rates)]
        lines += ["", *_targets(check(measured, device))]
    return "\n".join(lines) + "\n"


def as_json(report: dict[str, Any], sizes: Sequence[Measured], device: str) -> dict[str, Any]:
    """The same and the single rounds, as plain data."""
    return {
        **report,
        "sizes": [
            {
                "size": measured.size._asdict(),
                "rows": [dataclasses.asdict(result) for result in measured.results.values()],
                "rates": None if measured.rates is None else dataclasses.asdict(measured.rates),
                "targets": [dataclasses.asdict(one) for one in check(measured, device)],
            }
            for measured in sizes
        ],
    }


def _conditions(report: dict[str, Any], device: str) -> list[str]:
    """When, where and how."""
    machine, options, load = report["machine"], report["options"], report["load"]
    where = [str(value) for name, value in machine.items() if value and name != "date"]
    versions = [f"{name} {version}" for name, version in report["versions"].items()]
    how = [f"{options['dtype']} hidden states and head"]
    if device == "cpu":
        how.append(f"{options['threads'] or 'all'} threads")
    if report["rounds"]:
        how.append(f"{report['rounds']} interleaved rounds, of which the fastest counts")
    else:
        how.append("memory and agreement only")
    how.append(f"load of the machine before and after {load[0]} and {load[1]}")
    return [f"{machine['date']} on {', '.join(where)}; {', '.join(versions)}.", f"{', '.join(how)}."]


def _rows(results: Iterable[Result], measured: Measured) -> list[str]:
    head = "contender|wall s|of naive|CPU s|of naive|temporary MiB|peak MiB|GFLOP/s|loss differs|gradients differ"
    return _table(head.split("|"), [_row(result, measured) for result in results])


def _row(result: Result, measured: Measured) -> list[str]:
    if result.problem is not None:
        return [result.row.title, "not measured", *[""] * 8]
    naive = measured.results[result.row.baseline]
    flops, wall, agreement = result.row.matmuls * measured.size.flops, result.best_wall, result.agreement
    return [
        result.row.title,
        _number(wall, ".3g"),
        _number(ratio(wall, naive.best_wall), ".2f"),
        _number(result.best_cpu, ".3g"),
        _number(ratio(result.best_cpu, naive.best_cpu), ".2f"),
        _mebibytes(result.temp_bytes),
        _mebibytes(result.peak_bytes),
        _number(ratio(flops / 1e9, wall), ",.0f"),
        _number(None if agreement is None else agreement.loss_difference, ".0e"),
        _number(None if agreement is None else agreement.gradient_difference, ".0e"),
    ]


def _problems(results: Iterable[Result]) -> list[str]:
    """Why rows are empty, once for each reason."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result.problem is not None:
            reasons.setdefault(result.problem, []).append(result.row.title)
    return [line for why, titles in reasons.items() for line in ("", f"Not measured: {', '.join(titles)}: {why}.")]


def _rate_lines(rates: Rates) -> list[str]:
    shapes = ", ".join(f"{_rates.MATMULS[name]} {rate / 1e9:,.0f}" for name, rate in rates.matmuls.items())
    text = (
        f"Matmuls of a tile of {rates.tile[0]:,} tokens and {rates.tile[1]:,} columns alone, GFLOP/s: {shapes}; as "
        f"kljax needs them {rates.mixed / 1e9:,.0f}."
    )
    if rates.reached is not None:
        best = max(rates.matmuls.values())
        text += (
            f" kljax, recompute counted: {rates.reached / 1e9:,.0f}, {rates.reached / rates.mixed:.0%} of that and "
            f"{rates.reached / best:.0%} of the fastest shape."
        )
    text += f" A copy reads and writes {rates.copied / 1e9:,.1f} GB/s"
    if rates.moved is not None:
        text += f"; kljax moves at least {rates.moved / 1e9:,.1f}, {rates.moved / rates.copied:.0%} of that"
    return [f"{text}."]


def _targets(checks: Iterable[Check]) -> list[str]:
    rows = [[_describe(one), _limit(one), _value(one, one.value), _value(one, one.cpu), one.verdict] for one in checks]
    return _table(["target", "bound", "found", "in CPU seconds", ""], rows)


def _describe(one: Check) -> str:
    target = one.target
    if target.measure == "rate":
        return "kljax, part of the matmul rate with recompute counted"
    kinds = {"half": "half masked, ", "frozen": "frozen head, ", "kl": "exact KL, "}
    kind = kinds.get(target.row.partition("_")[2], "")
    against = "kljax without it" if target.against == "tile" else TITLES[target.against]
    return f"{target.measure}: kljax, {kind}over {against}"


def _limit(one: Check) -> str:
    if one.target.measure == "memory":
        return f"at most 1/{1 / one.limit:.0f}"
    return f"at least {one.limit:.0%}" if one.target.measure == "rate" else f"at most {one.limit:.2f}"


def _value(one: Check, value: float | None) -> str:
    if value is None:
        return ""
    if one.target.measure == "memory":
        return f"1/{1 / value:.1f}" if value else "0"
    return f"{value:.0%}" if one.target.measure == "rate" else f"{value:.2f}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _mebibytes(size: int | None) -> str:
    if size is None:
        return ""
    mebibytes = size / 2**20
    return f"{mebibytes:,.0f}" if mebibytes >= 10 else f"{mebibytes:.2g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
