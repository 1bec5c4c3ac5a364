"""The report of a comparison: what differs and why, as text, JSON and a page of HTML."""

import dataclasses
import html
import math
import textwrap
from collections.abc import Iterator
from typing import Any

from kljax.tools.parity.causes import Cause

WIDTH = 120
HEADINGS = ("field", "numbers", "largest absolute", "largest relative", "at (row, token)", "bound there", "verdict")
# The stages that the verdict counts: the fields of which one is compared, and the section of the header that claims it.
COUNTED: dict[str, tuple[tuple[str, ...], str]] = {
    "mask": (("mask",), "mask"),
    "log-probs": (("log_probs",), "log_probs"),
    "old log-probs": (("old_log_probs",), ""),
    "sampler": (("rollout_log_probs",), ""),
    "reference": (("ref_log_probs",), "reference"),
    "correction": (("weights",), "correction"),
    "advantages": (("advantages",), "advantage"),
    # Its derivative shows the loss.
    "loss": (("loss", "token_loss", "grad_log_probs"), "loss"),
    "gradient": (("grad_log_probs",), "gradient"),
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far a recorded result lies from the recomputed one."""

    field: str
    absolute: float = 0.0  # the largest; infinite where one side is not finite
    relative: float = 0.0  # the largest, over the magnitude of the recorded number
    at: tuple[int, ...] = ()  # row and token of the number that exceeds its bound most; empty for a scalar
    recorded: float = 0.0  # the number there
    expected: float = 0.0  # the recomputed number there
    bound: float = 0.0  # the rounding bound there
    excess: float = 0.0  # the largest ratio of difference and bound; at most 1 agrees
    compared: int = 0  # how many numbers were compared
    rows: tuple[int, ...] = ()  # that differ
    # Whether some recorded numbers are clearly larger than their bounds. Equal rewards, for one, have advantages of 0,
    # which a whitening turns into noise of size 1. One number alone may be 0 by cancellation, and numbers that are all
    # exactly 0 show it: both are determined.
    determined: bool = True

    @property
    def agrees(self) -> bool:
        """Whether every number is within its bound."""
        return self.excess <= 1

    def joined(self, other: "Difference") -> "Difference":
        """Returns the difference of the rows of both."""
        if not self.compared or not other.compared:
            return self if self.compared else other
        worst = max(self, other, key=lambda difference: difference.excess)
        return dataclasses.replace(
            worst,
            absolute=max(self.absolute, other.absolute),
            relative=max(self.relative, other.relative),
            compared=self.compared + other.compared,
            rows=self.rows + other.rows,
            determined=self.determined or other.determined,
        )


@dataclasses.dataclass(frozen=True)
class Finding:
    """A field that differs, with its explanation."""

    difference: Difference  # under the causes of earlier fields
    explanations: tuple[Cause, ...] = ()  # each brings it within the bound; several are ties, and none is unknown
    advice: str = ""  # the field that would decide, if the cause is unknown or tied
    follows: str = ""  # an earlier field of unknown cause that this one is computed from
    shape: str = ""  # the pattern of a difference of unknown cause


@dataclasses.dataclass(frozen=True)
class Invariant:
    """A statement about the arrays that needs no settings, and whether it is as in a right update."""

    text: str
    holds: bool | None = None  # None for a number that only a reader can judge


@dataclasses.dataclass(frozen=True)
class StageCount:
    """The stages that apply to a dump."""

    compared: tuple[str, ...]  # recomputed, or judged by an invariant
    missing: tuple[tuple[str, str], ...]  # the others, each with the reason
    claimed: tuple[str, ...]  # missing ones that the header has a section for


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """The result of a comparison."""

    differences: tuple[Difference, ...]  # of every compared field as recorded, before any cause is applied
    findings: tuple[Finding, ...]  # the fields that differ, in the order of the data
    not_compared: tuple[tuple[str, str], ...]  # results that could not be recomputed, with the reason
    dtype: str  # whose rounding is allowed
    stages: StageCount
    invariants: tuple[Invariant, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def broken(self) -> int:
        """The number of broken invariants."""
        return sum(invariant.holds is False for invariant in self.invariants)

    @property
    def agrees(self) -> bool:
        """Whether all compared fields agree, and no invariant is broken."""
        return not self.findings and not self.broken

    @property
    def compared(self) -> bool:
        """Whether any number was compared."""
        return any(difference.compared for difference in self.differences)

    @property
    def passes(self) -> bool:
        """Whether all agrees, something was compared, and so was every stage that the header claims."""
        return self.agrees and self.compared and not self.stages.claimed

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The first explanation of each finding."""
        return tuple(finding.explanations[0] for finding in self.findings if finding.explanations)


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
                "causes": [
                    [{"stage": cause.stage, "name": cause.name, "text": cause.text, "number": cause.number}]
                    for cause in finding.explanations
                ],
                "unknown": not finding.explanations and not finding.follows,
                "follows": finding.follows or None,
                "remaining": _difference_as_json(finding.difference),
                "advice": finding.advice or None,
                "shape": finding.shape or None,
            }
            for finding in report.findings
        ],
        "not_compared": dict(report.not_compared),
        "invariants": [dataclasses.asdict(invariant) for invariant in report.invariants],
        "stages": dataclasses.asdict(report.stages) | {"missing": dict(report.stages.missing)},
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
    stages = report.stages
    if not report.compared:
        yield "Nothing was compared: the dump records no result that follows from its inputs."
    elif report.agrees:
        yield f"The compared fields agree within the rounding of {report.dtype}."
    else:
        yield f"Fields that differ: {len(report.findings)}; broken invariants: {report.broken}."
    if stages.claimed:
        yield f"The header claims {', '.join(stages.claimed)}, which the dump does not show."
    count = f"{len(stages.compared)} of {len(stages.compared) + len(stages.missing)} stages compared"
    missing = ", ".join(stage for stage, _ in stages.missing)
    yield f"{count}; not: {missing}" if missing else f"{count}: {', '.join(stages.compared)}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False)


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


def _difference_as_json(difference: Difference) -> dict[str, Any]:
    numbers = ("absolute", "relative", "recorded", "expected", "bound", "excess")
    values = {name: getattr(difference, name) for name in numbers}
    return {
        "field": difference.field,
        "agrees": difference.agrees,
        "numbers": difference.compared,
        "at": list(difference.at),
        **{name: value if math.isfinite(value) else str(value) for name, value in values.items()},
    }
