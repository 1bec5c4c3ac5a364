"""What was measured, and the targets that it is held against."""

import dataclasses

from benchmarks._inputs import Size
from benchmarks._measure import Agreement
from benchmarks._rows import Row

LARGE_VOCAB = 131_072


@dataclasses.dataclass
class Result:
    """What is known of a row.

    Attributes:
      row: the contender.
      problem: why nothing more is known, or None.
      failed: whether that is an error, and not what was to be expected.
      wall: seconds of each round.
      cpu: CPU seconds of each round.
      temp_bytes: temporary memory that JAX's compiler assigned.
      peak_bytes: growth of the memory of a fresh process at its peak, less the gradients.
      agreement: with the baseline.
    """

    row: Row
    problem: str | None = None
    failed: bool = False
    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)
    temp_bytes: int | None = None
    peak_bytes: int | None = None
    agreement: Agreement | None = None

    @property
    def best_wall(self) -> float | None:
        """Seconds of the fastest round."""
        return min(self.wall, default=None)

    @property
    def best_cpu(self) -> float | None:
        """CPU seconds of the round that took the fewest."""
        return min(self.cpu, default=None)


@dataclasses.dataclass(frozen=True)
class Rates:
    """What the machine does when it does nothing else.

    Attributes:
      tile: tokens and vocabulary of kljax's tile, for which the matmuls were measured.
      matmuls: operations per second by shape.
      mixed: of the four matmuls of a tile, weighted as kljax needs them.
      reached: operations per second of kljax, recompute counted.
      copied: bytes per second, read and written.
      moved: bytes per second that kljax moves at least.
    """

    tile: tuple[int, int]
    matmuls: dict[str, float]
    mixed: float
    reached: float | None
    copied: float
    moved: float | None


@dataclasses.dataclass
class Measured:
    """All that is known of a size."""

    size: Size
    results: dict[str, Result]
    rates: Rates | None = None


@dataclasses.dataclass(frozen=True)
class Target:
    """A bound of the issue.

    Attributes:
      measure: "memory" or "time" of `row` over that of `against`, at most the limit; or "rate", at least.
      row: the contender that it is a target of.
      against: the other contender.
      limit: the bound.
      large_limit: the bound for a vocabulary of 131,072 and more, where it is another one.
    """

    measure: str
    row: str
    against: str
    limit: float
    large_limit: float | None = None

    def limit_for(self, size: Size) -> float:
        return self.limit if self.large_limit is None or size.vocab < LARGE_VOCAB else self.large_limit


TARGETS = (
    Target("memory", "tile", "naive", 1 / 16, 1 / 24),
    Target("memory", "tile", "tunix_full", 1 / 24, 1 / 40),
    Target("memory", "tile", "tunix_chunk", 1 / 3, 1 / 9),
    Target("time", "tile", "naive", 0.8),
    Target("time", "tile", "tunix_chunk", 0.8),
    Target("time", "tile", "trl", 0.9),
    Target("time", "tile", "trl_4096", 0.9),
    Target("time", "tile", "verl", 0.6),
    Target("time", "tile_half", "naive_half", 0.45),
    Target("time", "tile_frozen", "naive_frozen", 0.5),
    Target("time", "tile_kl", "tile", 1.5),
    Target("rate", "tile", "matmul", 0.85),
)
# On a GPU: the part of the matmul rate, and faster than Liger and than compiled chunks.
GPU_TARGETS = (
    Target("time", "tile", "liger", 1.0),
    Target("time", "tile", "torch_chunk", 1.0),
    Target("rate", "tile", "matmul", 0.65),
)


@dataclasses.dataclass(frozen=True)
class Check:
    """A target, what was found, and what that means: "met", "missed", or "not measured" and why.

    `cpu` is the same ratio in CPU seconds, which says more where other programs run; the verdict is that of `value`.
    """

    target: Target
    limit: float
    value: float | None
    cpu: float | None
    verdict: str


def check(measured: Measured, device: str) -> list[Check]:
    """Every target of the device at this size."""
    return [_check(target, measured) for target in (TARGETS if device == "cpu" else GPU_TARGETS)]


def _check(target: Target, measured: Measured) -> Check:
    limit = target.limit_for(measured.size)
    if target.measure == "rate":
        rates = measured.rates
        if rates is None or rates.reached is None:
            return Check(target, limit, None, None, "not measured")
        part = rates.reached / rates.mixed
        return Check(target, limit, part, None, "met" if part >= limit else "missed")
    ours, theirs = (measured.results.get(name) for name in (target.row, target.against))
    if ours is None or theirs is None:
        return Check(target, limit, None, None, "not measured: not among the contenders")
    if ours.problem or theirs.problem:
        return Check(target, limit, None, None, "not measured, as said above")
    if target.measure == "memory":
        value, cpu = ratio(ours.temp_bytes, theirs.temp_bytes), None
    else:
        value, cpu = ratio(ours.best_wall, theirs.best_wall), ratio(ours.best_cpu, theirs.best_cpu)
    if value is None:
        return Check(target, limit, None, None, "not measured")
    return Check(target, limit, value, cpu, "met" if value <= limit else "missed")


def ratio(value: float | None, other: float | None) -> float | None:
    """One over the other, if both are known."""
    return None if value is None or not other else value / other


def errors(measured: Measured, tolerance: float) -> list[str]:
    """What makes a table worthless: contenders that failed, or that compute something else than their baseline."""
    found = []
    for result in measured.results.values():
        name, agreement = f"{result.row.name}", result.agreement
        if result.failed:
            found.append(f"{name}: {result.problem}")
        elif agreement is not None:
            apart = max(agreement.loss_difference, agreement.gradient_difference)
            if not apart <= tolerance:
                found.append(f"{name}: differs from {result.row.baseline} by {apart:.1e}, more than {tolerance:.0e}")
    return found
