"""Solves one number of a recipe from the differences it leaves: by one equation, or by a search between two values."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Residual(NamedTuple):
    """How recorded numbers differ from recomputed ones, `[N]`, and the rounding bound of each, `[N]`."""

    difference: np.ndarray
    bound: np.ndarray

    @property
    def agrees(self) -> bool:
        """Whether every difference is within its bound."""
        return bool((np.abs(self.difference) <= self.bound).all())

    @property
    def units(self) -> np.ndarray:
        """The differences in units of their bounds."""
        return np.clip(self.difference / np.maximum(self.bound, 1e-300), -1e300, 1e300)


Evaluate = Callable[[float], Residual | None]
"""The residual at a value of the number; None if the library refuses the value."""
STEPS = 32
# Shares of a declared number that a coefficient is often off by.
DIGITS = (1, 2, 3, 4, 5, 6)


def solve_linear(evaluate: Evaluate, start: float, other: float) -> float | None:
    """Solves a number that the results are linear in, by least squares in units of the bounds.

    Args:
      start: a value of the number.
      other: another value.

    Returns:
      The value under which all results agree, or None.
    """
    # From far away the slope is a small difference of large numbers: the second time it is that at the solution.
    for _ in range(2):
        first, second = evaluate(start), evaluate(other)
        if first is None or second is None:
            return None
        slope = (first.difference - second.difference) / (other - start)
        width = np.maximum(np.maximum(first.bound, second.bound), 1e-300)
        used = np.isfinite(slope) & np.isfinite(first.difference) & (slope != 0)
        if not used.any() or not np.isfinite(first.difference).all():
            return None
        weights = slope[used] / width[used]
        scale = np.abs(weights).max()
        value = start + np.sum(weights / scale * first.difference[used] / width[used]) / np.sum(weights**2 / scale)
        if not np.isfinite(value):
            return None
        residual = evaluate(float(value))
        if residual is not None and residual.agrees:
            return float(value)
        start, other = float(value), 2 * float(value) if value else 1.0
    return None


def solve_two(evaluate: Callable[[Sequence[float]], Residual], start: Sequence[float]) -> list[float] | None:
    """Solves two numbers at once by Gauss-Newton, for results that are linear in each of them or in their product.

    Args:
      evaluate: the residual at two values.
      start: two values to begin with.

    Returns:
      The values under which all results agree, or None; also where the results determine one of them alone.
    """
    values = [float(value) for value in start]
    for _ in range(8):
        residual = evaluate(values)
        if residual.agrees:
            return values
        if not np.isfinite(residual.difference).all():
            return None
        slopes = []
        for index in range(2):
            step = 1e-4 * (abs(values[index]) or 1.0)
            moved = [value + step * (position == index) for position, value in enumerate(values)]
            slopes.append((residual.difference - evaluate(moved).difference) / step)
        matrix = np.stack(slopes, 1) / np.maximum(residual.bound, 1e-300)[:, None]
        target = residual.units
        if not np.isfinite(matrix).all():
            return None
        change, _, rank, _ = np.linalg.lstsq(matrix, target, rcond=1e-12)
        if rank < 2:
            return None
        values = [float(value + move) for value, move in zip(values, change, strict=True)]
    return None


def solve_between(evaluate: Evaluate, grid: Sequence[float]) -> float | None:
    """Solves a number that each result rises or falls with, on an interval of a grid.

    Args:
      grid: increasing values; the number lies between the first and the last.

    Returns:
      A value under which all results agree, or None.
    """
    points = [(value, residual) for value in grid if (residual := evaluate(value)) is not None]
    for value, residual in points:
        if residual.agrees:
            return value
    intervals = []
    for (low, first), (high, second) in itertools.pairwise(points):
        if not (np.isfinite(first.difference).all() or np.isfinite(second.difference).all()):
            continue
        # The number lies between them only if each result is passed on the way.
        a, b = first.units, second.units
        missed = (np.sign(a) == np.sign(b)) & (np.abs(a) > 1) & (np.abs(b) > 1)
        if missed.mean() <= 0.1:
            intervals.append((missed.mean(), low, high, first, second))
    for _, low, high, first, second in sorted(intervals, key=lambda interval: interval[0])[:2]:
        solution = _bisect(evaluate, low, high, first.units, second.units)
        if solution is not None:
            return solution
    return None


def _bisect(evaluate: Evaluate, low: float, high: float, first: np.ndarray, second: np.ndarray) -> float | None:
    """Narrows an interval, by the line through the result that differs most at both ends, or by halves."""
    for step in range(STEPS):
        opposite = np.sign(first) != np.sign(second)
        size = np.where(opposite, np.minimum(np.abs(first), np.abs(second)), 0)
        element = int(np.argmax(size))
        value = (low + high) / 2
        if step % 3 != 2 and size[element] > 0 and max(abs(first[element]), abs(second[element])) < 1e290:
            value = low + (high - low) * first[element] / (first[element] - second[element])
        if not low < value < high:
            value = (low + high) / 2
        residual = evaluate(value)
        if residual is None:
            return None
        if residual.agrees:
            return value
        units = residual.units
        # The result that shows the number is there, and another one differs.
        if abs(units[element]) <= 1 and step and size[element] > 0 and len(units) < 2:
            return None
        worst = int(np.argmax(np.where(opposite, np.abs(units), 0)))
        if np.sign(units[worst]) == np.sign(first[worst]):
            low, first = value, units
        else:
            high, second = value, units
        if high - low <= 1e-14 * max(abs(low), abs(high)):
            return None
    return None


def agreeing_interval(evaluate: Evaluate, value: float, grid: Sequence[float]) -> tuple[float, float] | None:
    """Returns the interval of values that agree, such as the thresholds between two ratios.

    Args:
      value: a value under which all results agree.
      grid: its ends are the ends of the search.

    Returns:
      The ends, or None if the interval is no wider than 2 % of the value.
    """

    def agrees(at: float) -> bool:
        residual = evaluate(at)
        return residual is not None and residual.agrees

    if not value or not (agrees(0.99 * value) or agrees(1.01 * value)):
        return None
    ends = []
    for outside in (min(grid), max(grid)):
        # Steps of doubled size find a value outside, near enough for halves to find the end.
        inside, step = value, 0.01 * abs(value) * np.sign(outside - value)
        while inside != outside and agrees(limit := _nearer(value + step, outside, value)):
            inside, step = limit, 2 * step
        for _ in range(12 if inside != outside else 0):
            middle = (inside + limit) / 2
            inside, limit = (middle, limit) if agrees(middle) else (inside, middle)
        ends.append(inside)
    return min(ends), max(ends)


def _nearer(first: float, second: float, value: float) -> float:
    return first if abs(first - value) < abs(second - value) else second


def simplest(evaluate: Evaluate, value: float) -> float:
    """Returns the value with the fewest digits, or the fraction 1/n, that agrees as well.

    Args:
      value: a value under which all results agree.
    """
    for digits in DIGITS:
        candidates = [float(f"{value:.{digits}g}")]
        if value and abs(value) < 1 and abs(1 / value) < 4096.5 and digits >= 2:
            candidates.append(1 / round(1 / value))
        for candidate in candidates:
            if abs(candidate - value) <= 0.2 * abs(value):
                residual = evaluate(candidate)
                if residual is not None and residual.agrees:
                    return candidate
    return value


def is_simple(value: float, precision: float) -> bool:
    """Tells whether a number that one result alone determines is too simple to be a coincidence.

    Args:
      precision: how far the number that the result shows lies from it, relative to it.

    Returns:
      True if it has at most three digits, or is 1/n, and chance would hit such a number in less than one of 300 cases.
    """
    if value == 0 or not np.isfinite(value):
        return value == 0
    precision = max(precision, 1e-7)
    for digits in (1, 2, 3):
        if float(f"{value:.{digits}g}") == value:
            return 2 * precision * 10**digits < 1 / 300
    ratio = 1 / value
    return abs(ratio) < 4096.5 and ratio == round(ratio) and 2 * precision * abs(ratio) < 1 / 300
