"""Reports, and their tables in Markdown."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Union

from benchmarks.harness.results import Check

MIB = 2**20
# The title of a column and the format of its values; "MiB" is the format of bytes.
Column = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Report:
    """The Markdown of a measurement, which is made from the fields of its JSON file alone.

    Attributes:
      parts: paragraphs, tables and reports of parts.
      checks: the targets, a table at the end; other: title of their values by the other clock.
      fields: "machine", "versions" and "load", where there are some, are the beginning.
      how: the conditions, as parts of a sentence.
      failures: a line for each contender that failed.
    """

    parts: Sequence[Union[str, "Report"]]
    checks: Sequence[Check] = ()
    other: str = ""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    how: Sequence[str] = ()
    failures: Sequence[str] = ()

    @property
    def text(self) -> str:
        """Returns the text of a file."""
        return "\n\n".join(self.paragraphs()) + "\n"

    def paragraphs(self) -> list[str]:
        """Returns conditions, parts and targets."""
        paragraphs, how = list[str](), list(self.how)
        if machine := self.fields.get("machine"):
            details = ", ".join(str(value) for name, value in machine.items() if value and name != "date")
            versions = ", ".join(f"{name} {version}" for name, version in self.fields["versions"].items())
            paragraphs.append(f"{machine['date']} on {details}; {versions}.")
        if "load" in self.fields:
            how.append("load of the machine before and after {} and {}".format(*self.fields["load"]))
        paragraphs += [f"{', '.join(how)}."] if how else []
        for part in self.parts:
            paragraphs += [part] if isinstance(part, str) else part.paragraphs()
        return [*paragraphs, *([targets(self.checks, self.other)] if self.checks else [])]


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
