"""Measurements of contenders, the targets that they are compared with, and reports in Markdown."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Union

from benchmarks.harness.measure import Seconds

ALL = "all"
CLOCKS = {"wall": 0, "cpu": 1}
MIB = 2**20
# The title of a column and the format of its values; "MiB" is the format of bytes.
Column = tuple[str, str]


@dataclasses.dataclass
class ContenderResult:
    """Measurements of one contender, of each round by part of the run.

    Attributes:
      problem: why it was not measured, or None; failed: whether that is an error. A missing environment is none.
      temp_bytes: temporary memory that JAX's compiler assigned; peak_bytes: what a part adds to its process.
      differences: from the baseline, by the name of the compared value.
    """

    name: str
    problem: str | None = None
    failed: bool = False
    seconds: dict[str, list[Seconds]] = dataclasses.field(default_factory=dict)
    temp_bytes: int | None = None
    peak_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    differences: dict[str, float] = dataclasses.field(default_factory=dict)
    loss: float | None = None

    def best(self, clock: str, part: str = ALL) -> float | None:
        """Returns the seconds of the fastest round, or None; "all" sums the parts of each round."""
        rounds = zip(*self.seconds.values(), strict=True) if part == ALL else ((s,) for s in self.seconds.get(part, []))
        return min((sum(seconds[CLOCKS[clock]] for seconds in parts) for parts in rounds), default=None)

    def milliseconds(self) -> list[float | None]:
        """Returns the milliseconds of the fastest round by each clock, None without one."""
        return [None if (seconds := self.best(clock)) is None else seconds * 1e3 for clock in CLOCKS]


@dataclasses.dataclass
class Measured:
    """The results of one size by contender."""

    size: Any
    results: dict[str, ContenderResult]

    @classmethod
    def read(cls, fields: Mapping[str, Any], size: Callable[..., Any]) -> "Measured":
        """Reads a size of a JSON file."""
        results = {name: ContenderResult(**result) for name, result in fields["results"].items()}
        return cls(size(**fields["size"]), results)

    def as_json(self, checks: Iterable["Check"]) -> dict[str, Any]:
        """Returns all fields and the targets."""
        return {**dataclasses.asdict(self), "targets": [check.as_json() for check in checks]}

    def failures(self, tolerances: Mapping[str, float]) -> list[str]:
        """Lists the contenders that failed or differ by more from their baseline, a line each."""
        lines = [f"{result.name}: {result.problem}" for result in self.results.values() if result.failed]
        for result in self.results.values():
            for name, difference in result.differences.items() if not result.failed else ():
                # NaN is no agreement.
                if not difference <= tolerances[name]:
                    lines.append(
                        f"{result.name}: got a difference of {difference:.1e} from the {name} of the baseline, "
                        f"expected at most {tolerances[name]:.0e}"
                    )
        return [f"{self.size} {line}" for line in lines]

    def problems(self, titles: Mapping[str, str]) -> list[str]:
        """Says why rows are empty, once for each reason."""
        reasons: dict[str, list[str]] = {}
        for result in self.results.values():
            if result.problem is not None:
                reasons.setdefault(result.problem, []).append(titles[result.name])
        return [f"Not measured: {', '.join(names)}: {why}." for why, names in reasons.items()]


@dataclasses.dataclass(frozen=True)
class Target:
    """A bound of one contender's measurement over that of another, perhaps another one for a large vocabulary.

    The measure is "time", of the wall clock; "cpu", of all threads; "speed", the inverse quotient of CPU seconds, at
    least the limit; "temporary" or "peak" memory.
    """

    measure: str
    name: str
    against: str
    limit: float
    large_limit: float | None = None
    part: str = ALL

    def check(self, title: str, results: Mapping[str, ContenderResult], *, large: bool = False) -> "Check":
        """Compares the results of the two contenders."""
        limit = self.large_limit if large and self.large_limit is not None else self.limit
        result, other_result = results.get(self.name), results.get(self.against)
        missing, value, other = "not measured", None, None
        if result is None or other_result is None:
            missing = "not measured: not among the contenders"
        elif result.problem or other_result.problem:
            missing = "not measured, see above"
        elif self.measure == "temporary":
            value = ratio(result.temp_bytes, other_result.temp_bytes)
        elif self.measure == "peak":
            value = ratio(result.peak_bytes.get(self.part), other_result.peak_bytes.get(self.part))
        else:
            pair = (other_result, result) if self.measure == "speed" else (result, other_result)
            wall, cpu = (ratio(*(timed.best(clock, self.part) for timed in pair)) for clock in CLOCKS)
            value, other = (wall, cpu) if self.measure == "time" else (cpu, wall)
        unit = "1/" if self.measure == "temporary" else ""
        return Check(title, limit, value, other, at_least=self.measure == "speed", unit=unit, missing=missing)


@dataclasses.dataclass(frozen=True)
class Check:
    """A value, or None, and its bound; `other` is the value by the other clock, `missing` the verdict without one.

    The unit is "MiB", "1/" for the denominator of a small quotient, or "" for a number with so many digits.
    """

    title: str
    limit: float
    value: float | None
    other: float | None = None
    at_least: bool = False
    unit: str = ""
    missing: str = "not measured"
    digits: int = 2

    @property
    def verdict(self) -> str:
        """Returns "met", "missed", or why there is no value."""
        if self.value is None:
            return self.missing
        return "met" if (self.value >= self.limit if self.at_least else self.value <= self.limit) else "missed"

    def as_json(self) -> dict[str, Any]:
        """Returns all fields and the verdict."""
        return {**dataclasses.asdict(self), "verdict": self.verdict}


def ratio(value: float | None, other: float | None) -> float | None:
    """Returns the quotient of two numbers, or None if one is unknown or the divisor is 0."""
    return None if value is None or not other else value / other


@dataclasses.dataclass(frozen=True)
class Report:
    """The Markdown of a measurement, which is made from the fields of its JSON file alone.

    Attributes:
      parts: paragraphs, tables and reports of parts, behind the machine and a sentence of conditions (`how`).
      checks: the targets, a table at the end; other: title of their values by the other clock.
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
        paragraphs = list[str]()
        how = list(self.how)
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
        case "":
            return f"{value:.{check.digits}f}"
    return f"{value:,.4g} {check.unit}"
