"""Reports, and their tables in Markdown."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.harness.results import Check, ContenderResult

MIB = 2**20
# The title of a column and the format of its values; "MiB" is the format of bytes.
Column = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Report:
    """The end of a command: fields for JSON, a text in Markdown, and a line for each contender that failed."""

    fields: Mapping[str, Any]
    text: str
    failures: Sequence[str] = ()


def table(columns: Iterable[Column], rows: Iterable[Sequence[Any]]) -> str:
    """Formats a table; a value of None is an empty cell, and text needs no format."""
    titles, forms = zip(*columns, strict=True)
    lines = [titles, ["---"] * len(titles)]
    lines += [[_cell(value, form) for value, form in zip(row, forms, strict=True)] for row in rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _cell(value: Any, form: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if form == "MiB":
        return f"{value / MIB:,.0f}" if value >= 10 * MIB else f"{value / MIB:.2g}"
    return format(value, form)


def join(paragraphs: Iterable[str]) -> str:
    """Returns the text of a file."""
    return "\n\n".join(paragraphs) + "\n"


def where(report: Mapping[str, Any]) -> str:
    """Says when and where something was measured, and with which versions."""
    machine = report["machine"]
    place = ", ".join(str(value) for name, value in machine.items() if value and name != "date")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"{machine['date']} on {place}; {versions}."


def conditions(report: Mapping[str, Any], how: Sequence[str]) -> list[str]:
    """Says when and where something was measured, and how."""
    load = "load of the machine before and after {} and {}".format(*report["load"])
    return [where(report), f"{', '.join((*how, load))}."]


def problems(results: Iterable[ContenderResult], titles: Mapping[str, str]) -> list[str]:
    """Says why rows are empty, once for each reason."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result.problem is not None:
            reasons.setdefault(result.problem, []).append(titles[result.name])
    return [f"Not measured: {', '.join(names)}: {why}." for why, names in reasons.items()]


def targets(checks: Iterable[Check], other: str = "") -> str:
    """Formats the table of targets; `other` is the title of the values by the other clock."""
    rows = []
    for check in checks:
        bound = f"{'at least' if check.at_least else 'at most'} {_value(check, check.limit)}"
        values = [_value(check, value) for value in ((check.value, check.other) if other else (check.value,))]
        rows.append([check.title, bound, *values, check.verdict])
    titles = ("target", "bound", "measured", *([other] if other else []), "verdict")
    return table([(title, "") for title in titles], rows)


def _value(check: Check, value: float | None) -> str | None:
    if value is None:
        return None
    match check.unit:
        case "1/":
            return f"1/{1 / value:.3g}" if value else "0"
        case "%":
            return f"{value:.0%}"
        case "":
            return f"{value:.{check.digits}f}"
    return f"{value:,.4g} {check.unit}"
