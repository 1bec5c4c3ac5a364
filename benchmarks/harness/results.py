"""Measurements of contenders, and the targets that they are compared with."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.harness.measure import Seconds

ALL = "all"
CLOCKS = {"wall": 0, "cpu": 1}


@dataclasses.dataclass
class ContenderResult:
    """Measurements of one contender.

    Attributes:
      problem: why it was not measured, or None; failed: whether that is an error. A missing environment is none.
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


@dataclasses.dataclass
class Measured:
    """The results of one size by contender, and the rates of the machine if they were measured."""

    size: Any
    results: dict[str, ContenderResult]
    rates: Any = None

    @classmethod
    def read(cls, fields: Mapping[str, Any], size: Callable[..., Any], rates: Callable[..., Any] = dict) -> "Measured":
        """Reads a size of a JSON file."""
        results = {name: ContenderResult(**result) for name, result in fields["results"].items()}
        return cls(size(**fields["size"]), results, fields.get("rates") and rates(**fields["rates"]))

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
        elif self.measure == "time":
            value, other = (
                ratio(result.best(clock, self.part), other_result.best(clock, self.part)) for clock in CLOCKS
            )
        else:
            other, value = (
                ratio(other_result.best(clock, self.part), result.best(clock, self.part)) for clock in CLOCKS
            )
        unit = "1/" if self.measure == "temporary" else ""
        return Check(title, limit, value, other, at_least=self.measure == "speed", unit=unit, missing=missing)


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
