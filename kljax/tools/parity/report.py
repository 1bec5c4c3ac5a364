"""The report of a comparison: text, JSON and a page of HTML."""

import html
import math
import textwrap
from collections.abc import Iterator
from typing import Any

from kljax.tools.parity.causes import Cause
from kljax.tools.parity.comparison import Difference, Finding, ParityReport
from kljax.tools.parity.stages import COUNTED

WIDTH = 120
HEADINGS = ("field", "numbers", "largest absolute", "largest relative", "at (row, token)", "bound there", "verdict")


def as_text(report: ParityReport) -> str:
    """Writes the report for a terminal."""
    rows = [HEADINGS, *(_cells(difference) for difference in report.differences)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["", *_verdict(report)]
    return "\n".join(lines)


def as_json(report: ParityReport) -> dict[str, Any]:
    """Returns the report as plain data; numbers that JSON lacks are strings."""
    return {
        "agrees": report.agrees,
        "dtype": report.dtype,
        "fields": [_difference_as_json(difference) for difference in report.differences],
        "findings": [
            {
                "field": finding.difference.field,
                "causes": [[_cause_as_json(cause)] for cause in finding.explanations],
                "unknown": not finding.explanations and not finding.follows,
                "follows": finding.follows or None,
                "remaining": _difference_as_json(finding.difference),
                "advice": finding.advice or None,
                "shape": finding.shape or None,
            }
            for finding in report.findings
        ],
        "not_compared": dict(report.not_compared),
        "invariants": [{"text": invariant.text, "holds": invariant.holds} for invariant in report.invariants],
        "stages": {
            "compared": list(report.stages.compared),
            "missing": dict(report.stages.missing),
            "claimed": list(report.stages.claimed),
        },
        "notes": list(report.notes),
    }


def as_html(report: ParityReport, title: str) -> str:
    """Writes the report as a page that needs no other file."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in HEADINGS)
    body = ""
    for difference in report.differences:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(difference))
        body += f'<tr class="{"good" if difference.agrees else "bad"}">{cells}</tr>\n'
    text = html.escape("\n".join(_verdict(report)))
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        "<style>body{font:15px system-ui;margin:2rem;max-width:70rem}table{border-collapse:collapse}"
        "td,th{padding:.3rem .8rem;border-bottom:1px solid #ccc;text-align:left}.good td:last-child{color:#17652b}"
        ".bad td:last-child{color:#a11919}pre{background:#f5f5f5;padding:1rem;white-space:pre-wrap}</style>\n"
        f"<h1>{html.escape(title)}</h1>\n<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>\n"
        f"<pre>{text}</pre>\n</html>\n"
    )


def _cells(difference: Difference) -> tuple[str, ...]:
    if not difference.compared:
        return (difference.field, "0", "", "", "", "", "nothing to compare")
    position = f"({', '.join(map(str, difference.at))})" if difference.at else ""
    return (
        difference.field,
        str(difference.compared),
        f"{difference.absolute:.2e}",
        f"{difference.relative:.2e}",
        position,
        f"{difference.bound:.2e}",
        "agrees" if difference.agrees else "differs",
    )


def _verdict(report: ParityReport) -> Iterator[str]:
    recorded = dict(report.not_compared)
    absent = {stage: reason for stage, reason in report.stages.missing if not {*COUNTED[stage][0]} & set(recorded)}
    for name, reason in {**recorded, **absent}.items():
        yield f"{name}: not compared, {reason}"
    for invariant in report.invariants:
        yield from _wrapped(f"{'broken' if invariant.holds is False else 'invariant'}: {invariant.text}")
    for note in report.notes:
        yield from _wrapped(f"note: {note}")
    for finding in report.findings:
        yield from _finding_lines(finding)
    yield from _last_lines(report)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def _last_lines(report: ParityReport) -> Iterator[str]:
    """Yields what agrees or differs, and how many stages of the update were compared."""
    stages = report.stages
    if not any(difference.compared for difference in report.differences):
        yield "Nothing was compared: the dump records no result that follows from its inputs."
    elif report.agrees:
        yield f"The compared fields agree within the rounding of {report.dtype}."
    else:
        broken = sum(invariant.holds is False for invariant in report.invariants)
        yield f"Fields that differ: {len(report.findings)}; broken invariants: {broken}."
    if stages.claimed:
        yield f"The header claims {', '.join(stages.claimed)}, which the dump does not show."
    count = f"{len(stages.compared)} of {len(stages.compared) + len(stages.missing)} stages compared"
    missing = ", ".join(stage for stage, _ in stages.missing)
    yield f"{count}; not: {missing}" if missing else f"{count}: {', '.join(stages.compared)}"


def _finding_lines(finding: Finding) -> Iterator[str]:
    difference = finding.difference
    field = difference.field
    if finding.follows:
        yield f"{field}: not judged; it is computed with {finding.follows}, whose cause is unknown"
        return
    position = f" at (row, token) ({', '.join(map(str, difference.at))})" if difference.at else ""
    numbers = f"recorded {difference.recorded:.9g}, expected {difference.expected:.9g}{position}"
    if not finding.explanations:
        yield f"{field}: cause unknown; {numbers}, bound {difference.bound:.1e}"
        if finding.shape:
            yield f"    {finding.shape}"
    elif len(finding.explanations) == 1:
        (cause,) = finding.explanations
        yield f"{field}: {cause.text}"
        yield f"    [{cause.key}]; {numbers}"
    else:
        yield f"{field}: {len(finding.explanations)} causes fit equally well; {numbers}"
        yield from (f"    {cause.text}  [{cause.key}]" for cause in finding.explanations)
    if finding.advice:
        yield f"    to decide: {finding.advice}"


def _cause_as_json(cause: Cause) -> dict[str, Any]:
    return {"stage": cause.stage, "name": cause.name, "text": cause.text, "number": cause.number}


def _difference_as_json(difference: Difference) -> dict[str, Any]:
    numbers = ("absolute", "relative", "recorded", "expected", "bound", "excess")
    values = {name: _number(getattr(difference, name)) for name in numbers}
    return {
        "field": difference.field,
        "agrees": difference.agrees,
        "numbers": difference.compared,
        "at": list(difference.at),
        **values,
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
