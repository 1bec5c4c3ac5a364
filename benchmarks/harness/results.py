"""Measurements of contenders, and the targets that they are compared with."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.measure import Seconds

ALL = "all"
CLOCKS = {"wall": 0, "cpu": 1}


@dataclasses.dataclass
class Result:
    """Measurements of one contender.

    Attributes:
      name: of the contender.
      problem: why it was not measured, or None.
      failed: whether the problem is an error; a missing environment is none.
      seconds: of each round, by part of the run.
      first: seconds of the first run in fresh processes, by part; it compiles.
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

    def best_first(self, clock: str, part: str) -> float | None:
        """Returns the seconds of the fastest first run, or None."""
        return min((seconds[CLOCKS[clock]] for seconds in self.first.get(part, [])), default=None)


@dataclasses.dataclass(frozen=True)
class Target:
    """A bound of one contender's measurement over that of another.

    Attributes:
      measure: "time", of the wall clock; "speed", the inverse quotient of CPU seconds, at least the limit; "temporary"
        and "peak" memory; "compile", CPU seconds of a first run.
      name, against: of the two contenders.
      limit: the bound; large_limit: the one for a large vocabulary, where it differs.
      part: of the run.
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
      title: of the target.
      limit: the bound; value: None if it was not measured; other: the same by the other clock.
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


def check(target: Target, title: str, results: Mapping[str, Result], *, large: bool, digits: int = 2) -> Check:
    """Compares the results of two contenders with a target."""
    limit = target.large_limit if large and target.large_limit is not None else target.limit
    speed, part = target.measure == "speed", target.part
    unit = "1/" if target.measure == "temporary" else ""
    ours, theirs = results.get(target.name), results.get(target.against)
    if ours is None or theirs is None:
        missing = "not measured: not among the contenders"
    elif ours.problem or theirs.problem:
        missing = "not measured, see above"
    else:
        missing = "not measured"
    value = other = None
    if missing == "not measured":
        assert ours is not None
        assert theirs is not None
        match target.measure:
            case "time":
                value, other = (ratio(ours.best(clock, part), theirs.best(clock, part)) for clock in ("wall", "cpu"))
            case "speed":
                value, other = (ratio(theirs.best(clock, part), ours.best(clock, part)) for clock in ("cpu", "wall"))
            case "compile":
                value, other = (
                    ratio(ours.best_first(clock, part), theirs.best_first(clock, part)) for clock in ("cpu", "wall")
                )
            case "temporary":
                value = ratio(ours.temp_bytes, theirs.temp_bytes)
            case "peak":
                value = ratio(ours.peak_bytes.get(part), theirs.peak_bytes.get(part))
    return Check(title, limit, value, other, at_least=speed, unit=unit, missing=missing, digits=digits)


def failures(results: Mapping[str, Result], tolerances: Mapping[str, float]) -> list[str]:
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
