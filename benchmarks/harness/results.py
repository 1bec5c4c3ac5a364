"""Measurements of contenders, and the targets that they are compared with."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.measure import Seconds

ALL = "all"
CLOCKS = {"wall": 0, "cpu": 1}


@dataclasses.dataclass
class ContenderResult:
    """Measurements of one contender.

    Attributes:
      problem: why it was not measured, or None.
      failed: whether the problem is an error; a missing environment is none.
      seconds: of each round, by part of the run.
      first: empty; version 0.2 recorded the seconds of first runs here.
      temp_bytes: temporary memory that JAX's compiler assigned.
      peak_bytes: bytes that a run adds to the memory of its process at the peak, by part.
      differences: from the baseline, by the name of the compared value.
      loss: of the first run.
    """

    name: str
    problem: str | None = None
    failed: bool = False
    seconds: dict[str, list[Seconds]] = dataclasses.field(default_factory=dict)
    first: dict[str, list[Seconds]] = dataclasses.field(default_factory=dict)
    temp_bytes: int | None = None
    peak_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    differences: dict[str, float] = dataclasses.field(default_factory=dict)
    loss: float | None = None

    def best(self, clock: str, part: str = ALL) -> float | None:
        """Returns the seconds of the fastest round, or None; "all" sums the parts of each round."""
        rounds = zip(*self.seconds.values(), strict=True) if part == ALL else ((s,) for s in self.seconds.get(part, []))
        return min((sum(seconds[CLOCKS[clock]] for seconds in parts) for parts in rounds), default=None)

    def value(self, measure: str, clock: str, part: str) -> float | None:
        """Returns the value of a target's measure; memory does not depend on the clock."""
        match measure:
            case "temporary":
                return self.temp_bytes
            case "peak":
                return self.peak_bytes.get(part)
        return self.best(clock, part)


@dataclasses.dataclass
class Measured:
    """The results of one size by contender, and the rates of the machine if they were measured."""

    size: Any
    results: dict[str, ContenderResult]
    rates: Any = None


@dataclasses.dataclass(frozen=True)
class Target:
    """A bound of one contender's measurement over that of another.

    Attributes:
      measure: "time", of the wall clock; "speed", the inverse quotient of CPU seconds, at least the limit; "temporary"
        and "peak" memory.
      large_limit: limit for a large vocabulary, where it differs.
    """

    measure: str
    name: str
    against: str
    limit: float
    large_limit: float | None = None
    part: str = ALL


@dataclasses.dataclass(frozen=True)
class Check:
    """A value and its bound.

    Attributes:
      value: None if it was not measured; other: the same by the other clock.
      at_least: whether the limit is a lower bound.
      unit: "MiB", "%", "1/" for the denominator of a small quotient, or "".
      missing: verdict where there is no value.
      digits: after the point.
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


def check(
    target: Target, title: str, results: Mapping[str, ContenderResult], *, large: bool = False, digits: int = 2
) -> Check:
    """Compares the results of two contenders with a target."""
    limit = target.large_limit if large and target.large_limit is not None else target.limit
    measure, missing = target.measure, "not measured"
    ours, theirs = results.get(target.name), results.get(target.against)
    value = other = None
    if ours is None or theirs is None:
        missing = "not measured: not among the contenders"
    elif ours.problem or theirs.problem:
        missing = "not measured, see above"
    else:
        pair = (theirs, ours) if measure == "speed" else (ours, theirs)
        clocks = ("wall", "cpu") if measure == "time" else ("cpu", "wall")
        value, other = (ratio(*(result.value(measure, clock, target.part) for result in pair)) for clock in clocks)
    return Check(
        title,
        limit,
        value,
        None if measure in ("temporary", "peak") else other,
        at_least=measure == "speed",
        unit="1/" if measure == "temporary" else "",
        missing=missing,
        digits=digits,
    )


def failures(results: Mapping[str, ContenderResult], tolerances: Mapping[str, float]) -> list[str]:
    """Lists the contenders that failed or differ from their baseline, a line each.

    Args:
      tolerances: largest difference, by the name of the compared value.
    """
    lines = [f"{result.name}: {result.problem}" for result in results.values() if result.failed]
    for result in results.values():
        for name, difference in result.differences.items() if not result.failed else ():
            # NaN is no agreement.
            if not difference <= tolerances[name]:
                lines.append(
                    f"{result.name}: got a difference of {difference:.1e} from the {name} of the baseline, "
                    f"expected at most {tolerances[name]:.0e}"
                )
    return lines
