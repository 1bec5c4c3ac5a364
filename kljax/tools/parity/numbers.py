"""The numbers of every stage that follow from the arrays: coefficients, clips, caps, epsilons, discounts, factors."""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kljax.systems._call import parameters, steps
from kljax.tools.parity.causes import Cause
from kljax.tools.parity.comparison import Residual
from kljax.tools.parity.positions import apply_rule
from kljax.tools.parity.recipe import MaskRule, Recipe
from kljax.tools.parity.replay import Replay, scalar_parameters

# Values between which an argument of a call is looked for, by its name; a clip is a distance from 1.
SMALL = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8)
GRIDS: dict[str, tuple[float, ...]] = {
    "clip_low": (*SMALL, 0.9999),
    "clip_high": (*SMALL, 1.0, 2.0, 4.0, 8.0, 30.0, 1000.0),
    "dual_clip": (1.0001, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 30.0, 1000.0),
    "eps": (0.0, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0),
    "gamma": (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0),
    "lam": (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99, 1.0),
    "upper": (1e-2, 0.1, 0.5, 0.8, 0.9, 1.0, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 1e3, 1e6),
    "lower": (0.0, 1e-3, 1e-2, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.1),
    "value_clip": (1e-2, 0.1, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0),
}
GRIDS["max_ratio"] = GRIDS["max_weight"] = GRIDS["upper"]
GRIDS["log_ratio_clip"] = GRIDS["max_log_ratio"] = GRIDS["value_clip"]
MULTIPLES = (1e-3, 1e-2, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.33, 2.0, 4.0, 10.0, 100.0, 1000.0)
KL_COEFFICIENTS = (-1.0, -0.1, 0.0, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.2, 0.5, 1.0, 3.0)
TEMPERATURES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
# Halvings of an interval, and the digits that a number may have.
HALVINGS = 32
DIGITS = (1, 2, 3, 4, 5, 6)
# The share of the differing results that an interval may miss, as those at a kink.
MISSED = 0.1
ResidualOf = Callable[[Recipe], Residual | None]
"""The residual of some fields under a recipe; None if the library refuses its settings."""
Evaluate = Callable[[float], Residual | None]
"""The residual at a value of a number; None if the library refuses the value."""


@dataclasses.dataclass(frozen=True)
class UnknownNumber:
    """A number of a stage that the arrays determine."""

    stage: str
    setting: str  # of the stage, or an argument of its call
    declared: float | None  # by the header; None if it has none
    grid: tuple[float, ...] = ()  # increasing values between which it lies; empty if the results are linear in it
    argument: bool = False  # of the call
    settings: tuple[tuple[str, Any], ...] = ()  # further ones of the stage that go with it
    shared: str = ""  # a stage that has the number, too

    def cause(self, recipe: Recipe, value: float, note: str = "") -> Cause:
        """Returns the cause that the number has a value."""
        own: tuple[Any, ...] = (("arguments", ((self.setting, value),)) if self.argument else (self.setting, value),)
        header = "has none" if self.declared is None else f"says {self.declared:g}"
        beside = "".join(f" with {name} {word}" for name, word in self.settings)
        text = f"{self.stage}.{self.setting}: the header {header}, the arrays say {value:.6g}{beside}{note}"
        changes: list[tuple[str, Any]] = [(self.stage, (*own, *self.settings))]
        if self.shared and getattr(recipe, self.shared) is not None:
            before, other = (getattr(getattr(recipe, stage), self.setting) for stage in (self.stage, self.shared))
            changes.append((self.shared, ((self.setting, other * value / before if before and other else value),)))
        return Cause(self.stage, f"{self.setting} {value:.6g}", text, tuple(changes), number=value)

    def value_in(self, recipe: Recipe) -> float | None:
        """Returns its value in a recipe; None if it has none."""
        step = getattr(recipe, self.stage)
        value = dict(step.arguments).get(self.setting, self.declared) if self.argument else getattr(step, self.setting)
        return None if value is None else float(value)


def numbers_of(replay: Replay, recipe: Recipe) -> Iterator[UnknownNumber]:
    """Yields the numbers of a dump, in the order of the data."""
    for stage, side in (("log_probs", ""), ("reference", "ref_")):
        if f"{side}logits" in replay.dump or f"{side}hidden" in replay.dump:
            base = getattr(recipe, stage)
            yield UnknownNumber(stage, "temperature", base.temperature, TEMPERATURES)
            caps = tuple((base.softcap or 10.0) * factor for factor in (0.1, 0.2, *MULTIPLES[3:13]))
            yield UnknownNumber(stage, "softcap", base.softcap, caps)
    yield from _of_call(replay, recipe, "correction")
    kl = recipe.kl
    if kl.place:
        # Of the loss alone, a factor of the estimate is one of the coefficient.
        if "kl" in replay.arrays:
            yield UnknownNumber("kl", "scale", kl.scale)
        for name in ("value_clip", "log_ratio_clip", *(("max_ratio",) if kl.corrected else ())):
            yield UnknownNumber("kl", name, getattr(kl, name), GRIDS[name])
        around = sorted((abs(kl.coef) or 0.01) * factor for factor in MULTIPLES)
        grid = (*(-x for x in reversed(around)), 0.0, *around)
        yield UnknownNumber("kl", "coef", float(kl.coef), () if kl.place == "loss" else grid)
    yield from _of_advantage(replay, recipe)
    yield from _of_call(replay, recipe, "loss")
    # Of the loss alone, the factor is that of the reduction.
    if "loss" in recipe.calls and ("token_loss" in replay.arrays or kl.place):
        yield UnknownNumber("loss", "scale", 1.0)
    base = recipe.reduction
    shared = "" if recipe.kl_reduction is None else "kl_reduction"
    yield UnknownNumber("reduction", "scale", base.scale, shared=shared)
    shared = shared if recipe.kl_reduction == base else ""
    if base.mode == "seq_mean_token_sum_norm":
        length = float(base.max_length or replay.shape[1])
        grid = tuple(length * factor for factor in MULTIPLES[2:13])
        yield UnknownNumber("reduction", "max_length", length, grid, shared=shared)
    eps = "eps_row" if base.mode == "seq_mean_token_mean" else "eps_batch"
    if base.mode in ("token_mean", "seq_mean_token_mean"):
        yield UnknownNumber("reduction", eps, float(getattr(base, eps)), (*GRIDS["eps"], 2.0, 10.0), shared=shared)
    if "entropy" in replay.arrays:
        yield UnknownNumber("entropy", "coef", float(recipe.entropy.coef))
    yield UnknownNumber("gradient", "scale", recipe.gradient.scale)


def _of_advantage(replay: Replay, recipe: Recipe) -> Iterator[UnknownNumber]:
    # The coefficient of a KL that the call subtracts is that of the KL.
    arguments = [number for number in _of_call(replay, recipe, "advantage") if number.setting != "coef"]
    if "advantage" not in recipe.calls:
        return
    yield from arguments
    yield UnknownNumber("advantage", "scale", 1.0)
    yield UnknownNumber("advantage", "clip", None, (1e-3, 1e-2, 0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0))
    yield UnknownNumber("advantage", "reward_scale", 1.0, MULTIPLES)
    if "gamma" not in {number.setting for number in arguments}:
        yield UnknownNumber("advantage", "discount", None, GRIDS["gamma"][1:])
    if "ref_log_probs" in replay.arrays and recipe.kl.place in ("", "loss"):
        for estimator in ("k1", "k2", "k3", "abs"):
            settings = (("kl_estimator", estimator),)
            yield UnknownNumber("advantage", "kl_coef", 0.0, KL_COEFFICIENTS, settings=settings)


def _of_call(replay: Replay, recipe: Recipe, stage: str) -> Iterator[UnknownNumber]:
    """Yields the real arguments of the call of a stage and of the calls inside it, each name once."""
    seen: set[str] = set()
    for step, _ in steps(replay.call(stage, recipe)) if stage in recipe.calls else ():
        scalars = scalar_parameters(step)
        for parameter in parameters(step):
            name = parameter.name
            value = step.arguments.get(parameter.name, parameter.default)
            if name not in scalars or name in seen or value is inspect.Parameter.empty:
                continue
            grid = GRIDS.get(name, ())
            if step.function == "cispo_loss" and name == "clip_low":
                grid = (*grid, 1.0)
            elif step.function == "cispo_loss" and name == "clip_high":
                grid = (*sorted(-x for x in GRIDS["clip_low"]), 0.0, *grid)
            elif not grid and isinstance(value, (int, float)) and value > 0:
                grid = tuple(value * factor for factor in MULTIPLES)
            if grid:
                seen.add(name)
                yield UnknownNumber(stage, name, None if value is None else float(value), grid, argument=True)


def fit(
    number: UnknownNumber, replay: Replay, recipe: Recipe, residual_of: ResidualOf, before: Residual
) -> Cause | None:
    """Solves a number from the residual of some fields under a recipe, which is `before` without a cause."""

    def evaluate(value: float) -> Residual | None:
        return residual_of(number.cause(recipe, value).apply(recipe))

    start = number.value_in(recipe)
    if number.grid:
        value = solve_between(evaluate, sorted({*number.grid, *(() if start is None else (start,))}))
    else:
        value = solve_linear(evaluate, start or 0.0, 2 * start if start else 1.0)
    if value is None or (value := simplest(evaluate, value)) == start or not _is_proved(evaluate, value, before):
        return None
    limits = agreeing_interval(evaluate, value, number.grid) if number.grid else None
    note = _note_on_factor(replay.batch, number, value)
    note = note if limits is None else f" (all from {limits[0]:.4g} to {limits[1]:.4g} agree)"
    return dataclasses.replace(number.cause(recipe, value, note), limits=limits)


def _note_on_factor(batch: Replay, number: UnknownNumber, value: float) -> str:
    """Says what a factor of the loss or of its gradient may come from."""
    if (number.stage, number.setting) not in (("reduction", "scale"), ("gradient", "scale")) or not value:
        return ""
    factor = value / (number.declared or 1.0)
    # A solved factor has the digits of its dtype.
    inverse = round(1 / factor, 9)
    if factor > 1 and factor == round(factor):
        return f": a sum over {factor:g} ranks or micro-batches, not their mean"
    if inverse > 1 and inverse == round(inverse):
        return f": divided by {inverse:g} ranks or micro-batches once more"
    tokens = int(batch.arrays["mask"].sum())
    divisor = round(tokens / factor)
    of_tokens = number.stage == "reduction" and batch.recipe.reduction.mode == "token_mean"
    if not of_tokens or divisor < 1 or divisor == tokens or abs(tokens / factor - divisor) > 1e-3:
        return ""
    return f": divided by {divisor}, not by the {tokens} tokens of the batch{tokens_of(batch, divisor)}"


def tokens_of(batch: Replay, count: int) -> str:
    """Says which tokens of a batch there are so many of."""
    rules = {
        "with the rows that are cut at the limit": MaskRule(truncated=True),
        "without the rows that are cut at the limit": MaskRule(truncated=False),
        "with the answers of tools": MaskRule(tools=True),
        "with padding": MaskRule(pad=True),
        "with the prompts": MaskRule(prompt=True),
        "with prompts and padding": MaskRule(prompt=True, left=True, pad=True),
        "without the last token of each row": MaskRule(last="none"),
        "without the first token of each row": MaskRule(first=False),
    }
    mask = batch.arrays["mask"]
    names = [name for name, rule in rules.items() if apply_rule(mask, rule, batch.layout).sum() == count]
    return f", as many as {' or '.join(names)}" if names and count != mask.sum() else ""


def _agrees(evaluate: Evaluate, value: float) -> bool:
    residual = evaluate(value)
    return residual is not None and residual.agrees


def _is_proved(evaluate: Evaluate, value: float, before: Residual) -> bool:
    """Tells whether more results than one show the number, or whether it is too simple for chance."""
    if (np.abs(before.units) > 1).sum() > 1:
        return True
    near = evaluate(value * (1 + 1e-3) if value else 1e-3)
    there = evaluate(value)
    if near is None or there is None:
        return False
    # How far the number that this result alone shows lies from the simple one.
    slope = np.abs(near.difference - there.difference) / 1e-3
    element = int(np.argmax(slope / np.maximum(there.bound, 1e-300)))
    return slope[element] > 0 and is_simple(value, float(abs(there.difference[element]) / slope[element]))


def solve_linear(evaluate: Evaluate, start: float, other: float) -> float | None:
    """Solves a number that the results are linear in, by least squares in units of the bounds."""
    # From far away the slope is a small difference of large numbers: the second time it is that at the solution.
    for _ in range(2):
        first = evaluate(start)
        second = evaluate(other)
        if first is None or second is None:
            return None
        slope = (first.difference - second.difference) / (other - start)
        width = np.maximum(np.maximum(first.bound, second.bound), 1e-300)
        used = np.isfinite(slope) & (slope != 0)
        if not used.any() or not np.isfinite(first.difference).all():
            return None
        weights = slope[used] / width[used]
        scale = np.abs(weights).max()
        value = start + np.sum(weights / scale * first.difference[used] / width[used]) / np.sum(weights**2 / scale)
        if not np.isfinite(value):
            return None
        if _agrees(evaluate, float(value)):
            return float(value)
        start = float(value)
        other = 2 * float(value) if value else 1.0
    return None


def solve_between(evaluate: Evaluate, grid: Sequence[float]) -> float | None:
    """Solves a number that each result rises or falls with, on an interval of a grid."""
    points = [(value, residual) for value in grid if (residual := evaluate(value)) is not None]
    for value, residual in points:
        if residual.agrees:
            return value
    intervals = []
    for (low, first), (high, second) in itertools.pairwise(points):
        if np.isfinite(first.difference).all() or np.isfinite(second.difference).all():
            intervals.append((_missed(first.units, second.units), low, high, first.units, second.units))
    for missed, low, high, below, above in sorted(intervals, key=lambda interval: interval[0])[:2]:
        solution = _bisect(evaluate, low, high, below, above) if missed <= MISSED else None
        if solution is not None:
            return solution
    return None


def _missed(first: np.ndarray, second: np.ndarray) -> float:
    """Returns the share of differing results that are not passed between two values of a number."""
    wrong = (np.abs(first) > 1) | (np.abs(second) > 1)
    missed = (np.sign(first) == np.sign(second)) & (np.abs(first) > 1) & (np.abs(second) > 1)
    return float(missed.sum() / max(wrong.sum(), 1))


def _bisect(evaluate: Evaluate, low: float, high: float, first: np.ndarray, second: np.ndarray) -> float | None:
    """Narrows an interval, by the line through the result that differs most at both ends, or by halves."""
    for step in range(HALVINGS):
        opposite = np.sign(first) != np.sign(second)
        size = np.where(opposite, np.minimum(np.abs(first), np.abs(second)), 0)
        element = int(np.argmax(size))
        value = (low + high) / 2
        if step % 3 != 2 and size[element] > 0 and max(abs(first[element]), abs(second[element])) < 1e290:
            value = low + (high - low) * first[element] / (first[element] - second[element])
        if not low < value < high:
            value = (low + high) / 2
        residual = evaluate(value)
        if residual is None or residual.agrees:
            return None if residual is None else value
        units = residual.units
        worst = int(np.argmax(np.where(opposite, np.abs(units), 0)))
        if np.sign(units[worst]) == np.sign(first[worst]):
            low = value
            first = units
        else:
            high = value
            second = units
        if _missed(first, second) > MISSED or high - low <= 1e-14 * max(abs(low), abs(high)):
            return None
    return None


def agreeing_interval(evaluate: Evaluate, value: float, grid: Sequence[float]) -> tuple[float, float] | None:
    """Returns the interval of values that agree, such as the thresholds between two ratios."""
    if not value or not (_agrees(evaluate, 0.99 * value) or _agrees(evaluate, 1.01 * value)):
        return None
    ends = []
    for outside in (min(grid), max(grid)):
        inside = value
        limit = outside
        if _agrees(evaluate, outside):
            inside = limit
        for _ in range(20 if inside != limit else 0):
            middle = (inside + limit) / 2
            inside, limit = (middle, limit) if _agrees(evaluate, middle) else (inside, middle)
        ends.append(inside)
    return min(ends), max(ends)


def simplest(evaluate: Evaluate, value: float) -> float:
    """Returns the value with the fewest digits, or the fraction 1/n, that agrees as well."""
    for digits in DIGITS:
        candidates = [float(f"{value:.{digits}g}")]
        if value and abs(value) < 1 and abs(1 / value) < 4096.5 and digits >= 2:
            candidates.append(1 / round(1 / value))
        for candidate in candidates:
            if abs(candidate - value) <= 0.2 * abs(value) and _agrees(evaluate, candidate):
                return candidate
    return value


def is_simple(value: float, precision: float) -> bool:
    """Tells whether a number that one result alone determines is too simple to be a coincidence."""
    if value == 0 or not np.isfinite(value):
        return value == 0
    precision = max(precision, 1e-7)
    for digits in (1, 2, 3):
        if float(f"{value:.{digits}g}") == value:
            return 2 * precision * 10**digits < 1 / 300
    ratio = 1 / value
    return abs(ratio) < 4096.5 and ratio == round(ratio) and 2 * precision * abs(ratio) < 1 / 300
