"""Tables in Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.harness.results import Check, Result


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def number(value: float | None, form: str) -> str:
    """Formats a number; None is an empty cell."""
    return "" if value is None else format(value, form)


def mebibytes(size: int | None) -> str:
    """Formats bytes as MiB."""
    if size is None:
        return ""
    return f"{size / 2**20:,.0f}" if size >= 10 * 2**20 else f"{size / 2**20:.2g}"


def conditions(report: Mapping[str, Any], how: Sequence[str]) -> list[str]:
    """Says when and where something was measured, with which versions, and how."""
    machine = report["machine"]
    where = ", ".join(str(value) for name, value in machine.items() if value and name != "date")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    before, after = report["load"]
    load = f"load of the machine before and after {before} and {after}"
    return [f"{machine['date']} on {where}; {versions}.", "", f"{', '.join((*how, load))}."]


def problems(results: Iterable[Result], titles: Mapping[str, str]) -> list[str]:
    """Says why rows are empty, once for each reason."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result.problem is not None:
            reasons.setdefault(result.problem, []).append(titles[result.name])
    return [line for why, names in reasons.items() for line in ("", f"Not measured: {', '.join(names)}: {why}.")]


def targets(checks: Iterable[Check], other: str = "") -> list[str]:
    """Returns the table of targets; `other` is the title of the values by the other clock."""
    head = ["target", "bound", "measured", *([other] if other else []), "verdict"]
    return table(
        head,
        [
            [
                check.title,
                f"{'at least' if check.at_least else 'at most'} {_value(check, check.limit)}",
                "" if check.value is None else _value(check, check.value),
                *([] if not other else ["" if check.other is None else _value(check, check.other)]),
                check.verdict,
            ]
            for check in checks
        ],
    )


def _value(check: Check, value: float) -> str:
    match check.unit:
        case "1/":
            return f"1/{1 / value:.3g}" if value else "0"
        case "%":
            return f"{value:.0%}"
        case "":
            return f"{value:.{check.digits}f}"
    return f"{value:,.4g} {check.unit}"
