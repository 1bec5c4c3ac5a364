"""Finds the causes of the differences of a dump: the smallest set of choices and numbers under which all agrees."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kljax.parity.causes import Cause, rounding_causes
from kljax.parity.choices import causes_of
from kljax.parity.comparison import Finding, ParityReport, compare_field, differing, residual_of
from kljax.parity.fields import ORDER
from kljax.parity.fit import (
    DIGITS,
    Residual,
    agreeing_interval,
    is_simple,
    simplest,
    solve_between,
    solve_linear,
    solve_two,
)
from kljax.parity.numbers import UnknownNumber, note_on_factor, numbers_of
from kljax.parity.ranking import preferred
from kljax.parity.recipe import Recipe
from kljax.parity.replay import Replay
from kljax.parity.rounding import narrowest_dtype
from kljax.parity.shape import describe
from kljax.parity.stages import comparable, reason_not_compared, recorded

# Causes of one report, groups of equally good candidates that are followed at a field, ties that are kept.
MAX_CAUSES, GROUPS, TIES = 4, 3, 12
# Candidates of a search for pairs, and the choices that are paired first.
CANDIDATES, PROMISING = 2_000, 24
# Results by which one number is looked for while another may be wrong as well.
PEELED = 3
# Different numbers that a field needs for its grid to tell a dtype.
DISTINCT = 4
# The fields that would decide where a cause is unknown or tied.
DECIDING = {
    "mask": ("tokens",),
    "log_probs": ("hidden and head of one row",),
    "ref_log_probs": ("ref_hidden and ref_head of one row",),
    "advantages": ("kl", "rewards"),
    "token_loss": ("ratio", "weights", "advantages"),
    "loss": ("token_loss", "kl", "weights", "grad_log_probs"),
    "grad_log_probs": ("token_loss", "kl", "loss"),
    "kl": ("ref_logits or ref_hidden and ref_head of one row",),
}
Causes = tuple[Cause, ...]
Skipped = frozenset[str]


class Search:
    """Finds the smallest set of causes under which every field agrees."""

    def __init__(self, replay: Replay, *, candidates: int = CANDIDATES) -> None:
        self.replay = replay
        self.fields = comparable(replay)
        self.causes = causes_of(replay)
        self.numbers = numbers_of(replay)
        self.limit = candidates
        self.tried = 0
        self.left = 0
        self._memo: dict[Any, list[Causes]] = {}

    def run(self) -> ParityReport:
        """Compares every field and explains the differing ones.

        Returns:
          The `ParityReport`, with a note if the search for pairs of causes reached its limit.
        """
        recipe = self.replay.plan.recipe
        differences = tuple(compare_field(self.replay, name, recipe) for name in self.fields)
        findings = self._explain(recipe)
        missing = [name for name in recorded(self.replay) if name not in self.fields]
        reasons = tuple((name, reason_not_compared(self.replay, name) or "") for name in missing)
        notes = list(self.replay.notes)
        if any(not finding.explanations for finding in findings):
            notes.append(
                f"tried: {len(self.causes)} choices, {len(self.numbers)} numbers and {self.tried} pairs of them"
            )
        if self.left:
            notes.append(f"the search stopped at its limit of {self.limit} candidates; {self.left} pairs were left")
        return ParityReport(differences, tuple(findings), reasons, self.replay.dtype, tuple(notes))

    def agrees(self, name: str, recipe: Recipe) -> bool:
        """Tells whether a field agrees under a recipe; settings that a function of the library refuses do not.

        Returns:
          True if every compared number is within its rounding bound.

        Raises:
          ValueError: if the library refuses the settings of the header.
          TypeError: the same.
        """
        try:
            return residual_of(self.replay, (name,), recipe).agrees
        except (ValueError, TypeError):
            if recipe == self.replay.plan.recipe:
                raise
            return False

    def _explain(self, recipe: Recipe) -> list[Finding]:
        """Returns the smallest explanation of everything, or else of each field in turn as far as it goes."""
        complete = self._solve(recipe, MAX_CAUSES)
        if complete is not None:
            return complete
        findings: list[Finding] = []
        skipped: Skipped = frozenset()
        while (first := self._first(recipe, skipped)) is not None:
            difference = compare_field(self.replay, first, recipe)
            source = next((name for name in skipped if _follows(first, name)), "")
            candidates = [] if source else self._candidates(first, recipe, skipped)
            if candidates:
                ties = self._ranked(candidates, recipe, skipped)[0]
                advice = self._advice(first, tied=True) if len(ties) > 1 else ""
                findings.append(Finding(difference, tuple(ties), advice))
                recipe = _applied(ties[0], recipe)
                continue
            skipped |= {first}
            advice = "" if source else self._advice(first)
            shape = "" if source else describe(self.replay, first, recipe)
            findings.append(Finding(difference, advice=advice, follows=source, shape=shape))
            if first == "ratio":
                recipe = recipe.changed("ratio", recorded=True)
        return findings

    def _solve(self, recipe: Recipe, budget: int) -> list[Finding] | None:
        """Returns findings under which every field agrees, of at most so many causes, or None."""
        none: Skipped = frozenset()
        first = self._first(recipe, none)
        if first is None:
            return []
        difference = compare_field(self.replay, first, recipe)
        singles = (self._singles(first, recipe, none)) if budget >= 1 else []
        for ties in self._ranked(singles, recipe, none)[:GROUPS]:
            rest = self._solve(_applied(ties[0], recipe), budget - 1)
            if rest is not None:
                advice = self._advice(first, tied=True) if len(ties) > 1 else ""
                return [Finding(difference, tuple(ties), advice), *rest]
        # One number may be mended by chance; an array is not, so that what mends it holds.
        if budget < 2 or (singles and self.replay.arrays[first].size > 1):
            return None
        for ties in self._ranked(self._pairs(first, recipe, none), recipe, none)[:GROUPS]:
            rest = self._solve(_applied(ties[0], recipe), budget - 2)
            if rest is not None:
                advice = self._advice(first, tied=True) if len(ties) > 1 else ""
                return [Finding(difference, tuple(ties), advice), *rest]
        return None

    def _first(self, recipe: Recipe, skipped: Skipped) -> str | None:
        """Returns the first field that does not agree."""
        return next((name for name in self._open(skipped) if not self.agrees(name, recipe)), None)

    def _open(self, skipped: Skipped) -> list[str]:
        return [name for name in self.fields if name not in skipped]

    def _after(self, name: str, skipped: Skipped) -> list[str]:
        """Lists the fields after one, without metrics."""
        order = list(ORDER)
        position = order.index(name) if name in ORDER else len(order)
        return [field for field in self._open(skipped) if field in ORDER and order.index(field) > position]

    def _candidates(self, name: str, recipe: Recipe, skipped: Skipped) -> list[Causes]:
        """Returns the sets of causes that mend a field for certain, though other fields remain unexplained."""
        candidates = (
            self._singles(name, recipe, skipped) or self._roundings(name, recipe) or self._pairs(name, recipe, skipped)
        )
        if self.replay.arrays[name].size > 1:
            return candidates
        # One number may be mended by chance: an array that depends on it has to agree as well.
        later = [field for field in self._after(name, skipped) if self.replay.arrays[field].size > 1]
        return [causes for causes in candidates if all(self.agrees(x, _applied(causes, recipe)) for x in later)]

    def _ranked(self, candidates: Sequence[Causes], recipe: Recipe, skipped: Skipped) -> list[list[Causes]]:
        """Groups candidates by how many fields agree with them, the most first; choices come before numbers."""
        groups: dict[int, list[Causes]] = {}
        for candidate in candidates:
            changed = _applied(candidate, recipe)
            score = sum(self.agrees(name, changed) for name in self._open(skipped))
            groups.setdefault(score, []).append(candidate)
        return [preferred(groups[score])[:TIES] for score in sorted(groups, reverse=True)]

    def _mends(self, causes: Causes, name: str, recipe: Recipe, skipped: Skipped) -> bool:
        """Whether a field and all before it agree once the causes are applied."""
        changed = _applied(causes, recipe)
        if changed == recipe or not self.agrees(name, changed) or self._drops(name, recipe, changed):
            return False
        before = self.fields[: self.fields.index(name)]
        return all(self.agrees(field, changed) for field in before if field not in skipped)

    def _drops(self, name: str, recipe: Recipe, changed: Recipe) -> bool:
        """Whether a change takes numbers that differ, and that no mask set to 0, out of the comparison."""
        before, after = (self.replay.predict(name, each).at for each in (recipe, changed))
        if np.array_equal(before, after):
            return False
        wrong = differing(self.replay, name, recipe)
        dropped = wrong & ~after & (self.replay.arrays[name] != 0)
        return bool(dropped.any() and 2 * dropped.sum() >= wrong.sum())

    def _singles(self, name: str, recipe: Recipe, skipped: Skipped) -> list[Causes]:
        """Returns the choices that mend a field, or else a coarser dtype that it was rounded to, or else numbers."""
        return self._remember(("single", name, recipe, skipped), lambda: self._search_singles(name, recipe, skipped))

    def _search_singles(self, name: str, recipe: Recipe, skipped: Skipped) -> Iterator[Causes]:
        choices = [(cause,) for cause in self._relevant(name) if self._mends((cause,), name, recipe, skipped)]
        roundings = self._roundings(name, recipe)
        yield from choices or roundings
        if roundings and not choices:
            return
        for number in self._relevant_numbers(name):
            solved = self._solved(number, name, recipe, skipped)
            if solved is not None and self._mends((solved,), name, recipe, skipped):
                yield (solved,)

    def _solved(
        self, number: UnknownNumber, name: str, recipe: Recipe, skipped: Skipped, *, element: int | None = None
    ) -> Cause | None:
        """Solves a number from a field, and from the fields after it if the field is one number.

        Args:
          element: solve it from one number of the field alone, without proof.
        """
        for targets in self._targets(number, name, skipped):

            def evaluate(value: float, targets: Sequence[str] = targets) -> Residual | None:
                return self._evaluate(number, value, targets, recipe, element)

            start = _value_of(number, recipe)
            if number.grid:
                value = self._solved_between(evaluate, number, targets, recipe, element)
            else:
                value = solve_linear(evaluate, start or 0.0, 2 * start if start else 1.0)
            if value is None:
                continue
            value = simplest(evaluate, value)
            if value == start or (element is None and not self._is_proved(evaluate, value, targets, recipe)):
                continue
            note, limits = note_on_factor(self.replay, number, value), None
            if number.grid and element is None:
                limits = agreeing_interval(evaluate, value, number.grid)
                note = note if limits is None else f" (all from {limits[0]:.4g} to {limits[1]:.4g} agree)"
            return dataclasses.replace(number.cause(recipe, value, note), limits=limits)
        return None

    def _solved_between(
        self,
        evaluate: Callable[[float], Residual | None],
        number: UnknownNumber,
        targets: Sequence[str],
        recipe: Recipe,
        element: int | None,
    ) -> float | None:
        """Solves a number from all results, or else from a few of them in turn, where all then agree."""
        start = _value_of(number, recipe)
        grid = sorted({*number.grid, *(() if start is None else (start,))})
        value = solve_between(evaluate, grid)
        before = residual_of(self.replay, targets, recipe)
        if value is not None or element is not None or before.difference.size < 2:
            return value
        for position in np.argsort(-np.abs(before.units), kind="stable")[:PEELED]:

            def alone(value: float, position: int = int(position)) -> Residual | None:
                return self._evaluate(number, value, targets, recipe, position)

            candidate = solve_between(alone, grid)
            residual = None if candidate is None else evaluate(candidate)
            if residual is not None and residual.agrees:
                return candidate
        return None

    def _targets(self, number: UnknownNumber, name: str, skipped: Skipped) -> list[tuple[str, ...]]:
        if self.replay.arrays[name].size > 1 or name not in ORDER:
            return [(name,)]
        joint = (name, *(field for field in self._after(name, skipped) if number.stage in ORDER[field]))
        return [joint, (name,)] if len(joint) > 1 else [(name,)]

    def _evaluate(
        self, number: UnknownNumber, value: float, targets: Sequence[str], recipe: Recipe, element: int | None
    ) -> Residual | None:
        try:
            residual = residual_of(self.replay, targets, number.cause(recipe, value).apply(recipe))
        except (ValueError, TypeError):
            return None
        if element is None:
            return residual
        part = slice(element, element + 1)
        return Residual(residual.difference[part], residual.bound[part])

    def _is_proved(
        self, evaluate: Callable[[float], Residual | None], value: float, targets: Sequence[str], recipe: Recipe
    ) -> bool:
        """Tells whether more results than one show the number, or whether it is too simple for chance."""
        before = residual_of(self.replay, targets, recipe)
        if int((np.abs(before.difference) > before.bound).sum()) > 1:
            return True
        near, there = evaluate(value * (1 + 1e-3) if value else 1e-3), evaluate(value)
        if near is None or there is None:
            return False
        # How far the number that this result alone shows lies from the simple one.
        slope = np.abs(near.difference - there.difference) / 1e-3
        element = int(np.argmax(slope / np.maximum(there.bound, 1e-300)))
        return slope[element] > 0 and is_simple(value, float(abs(there.difference[element]) / slope[element]))

    def _pairs(self, name: str, recipe: Recipe, skipped: Skipped) -> list[Causes]:
        return self._remember(("pair", name, recipe, skipped), lambda: self._search_pairs(name, recipe, skipped))

    def _search_pairs(self, name: str, recipe: Recipe, skipped: Skipped) -> Iterator[Causes]:
        """Yields pairs that mend a field: promising choices, choices with numbers, numbers, then all choices."""
        choices = self._by_promise(name, recipe, skipped)
        numbers = self._relevant_numbers(name)
        pairs = list(itertools.combinations(choices, 2))
        pairs.sort(key=lambda pair: choices.index(pair[0]) + choices.index(pair[1]))
        for stage in (
            self._choice_pairs(pairs[: PROMISING**2], name, recipe, skipped),
            self._peeled(numbers, name, recipe, skipped),
            self._linear_pairs(numbers, name, recipe, skipped),
            self._with_numbers(choices, numbers, name, recipe, skipped),
            self._choice_pairs(pairs[PROMISING**2 :], name, recipe, skipped),
        ):
            results = list(stage)
            if results:
                yield from results
                return

    def _by_promise(self, name: str, recipe: Recipe, skipped: Skipped) -> list[Cause]:
        """Sorts the choices by how much each alone lessens the differences of a field and of the fields after it."""
        targets = [name, *(self._after(name, skipped) if self.replay.arrays[name].size == 1 else ())]

        def size(cause: Cause) -> float:
            try:
                residual = residual_of(self.replay, targets, cause.apply(recipe))
            except (ValueError, TypeError):
                return np.inf
            return float(np.log1p(np.minimum(np.abs(residual.units), 1e15)).mean())

        return sorted((cause for cause in self._relevant(name) if not cause.alone), key=size)

    def _choice_pairs(self, pairs: Sequence[Causes], name: str, recipe: Recipe, skipped: Skipped) -> Iterator[Causes]:
        for position, pair in enumerate(pairs):
            if not self._count(len(pairs) - position):
                return
            if not pair[0].conflicts(pair[1]) and self._mends(pair, name, recipe, skipped):
                yield pair

    def _with_numbers(
        self, choices: Sequence[Cause], numbers: Sequence[UnknownNumber], name: str, recipe: Recipe, skipped: Skipped
    ) -> Iterator[Causes]:
        for position, cause in enumerate(choices):
            changed = cause.apply(recipe)
            for number in numbers:
                if not self._count((len(choices) - position) * len(numbers)):
                    return
                try:
                    solved = self._solved(number, name, changed, skipped)
                except (ValueError, TypeError):
                    continue
                if solved is None or cause.conflicts(solved):
                    continue
                if self._mends((cause, solved), name, recipe, skipped):
                    yield cause, solved

    def _peeled(
        self, numbers: Sequence[UnknownNumber], name: str, recipe: Recipe, skipped: Skipped
    ) -> Iterator[Causes]:
        """Yields numbers that a few results show, with what mends the rest."""
        residual = residual_of(self.replay, (name,), recipe)
        wrong = np.abs(residual.units) > 1
        ordered = np.argsort(-np.abs(residual.units), kind="stable")[: wrong.sum()]
        elements = [int(ordered[int(q * (len(ordered) - 1))]) for q in np.linspace(0, 1, PEELED)]
        seen: set[str] = set()
        for number in numbers:
            for element in dict.fromkeys(elements):
                if residual.difference.size == 1 or not self._count(0):
                    return
                first = self._solved(number, name, recipe, skipped, element=element)
                if first is None or first.key in seen:
                    continue
                seen.add(first.key)
                changed = first.apply(recipe)
                after = residual_of(self.replay, (name,), changed)
                if (
                    after.agrees
                    or after.units.shape != wrong.shape
                    or (np.abs(after.units) > 1).sum() > 0.9 * wrong.sum() - 1
                ):
                    continue
                for rest in self._singles(name, changed, skipped):
                    if not rest[0].conflicts(first):
                        yield (first, *rest)

    def _linear_pairs(
        self, numbers: Sequence[UnknownNumber], name: str, recipe: Recipe, skipped: Skipped
    ) -> Iterator[Causes]:
        """Yields two numbers at once that the results are linear in, each of them or their product."""
        for first, second in itertools.combinations([number for number in numbers if not number.grid], 2):
            targets = self._targets(first, name, skipped)[0]

            def evaluate(values: Sequence[float], pair: Any = (first, second), targets: Any = targets) -> Residual:
                changed = recipe
                for number, value in zip(pair, values, strict=True):
                    changed = number.cause(changed, value).apply(changed)
                return residual_of(self.replay, targets, changed)

            starts = [_value_of(number, recipe) or 0.0 for number in (first, second)]
            if not self._count(0) or (values := solve_two(evaluate, starts)) is None:
                continue
            for digits in DIGITS:
                value = float(f"{values[0]:.{digits}g}")
                cause = first.cause(recipe, value, note_on_factor(self.replay, first, value))
                rest = self._solved(second, name, cause.apply(recipe), skipped)
                if rest is not None and self._mends((cause, rest), name, recipe, skipped):
                    yield cause, rest
                    break

    def _count(self, remaining: int) -> bool:
        """Counts a candidate; False at the limit, with the number of candidates that are left."""
        if self.tried >= self.limit:
            self.left = max(self.left, remaining)
            return False
        self.tried += 1
        return True

    def _remember(self, key: Any, make: Callable[[], Iterator[Causes]]) -> list[Causes]:
        if key not in self._memo:
            self._memo[key] = list(make())
        return self._memo[key]

    def _roundings(self, name: str, recipe: Recipe) -> list[Causes]:
        """Returns the coarser dtype that a field was rounded to: its grid holds all the numbers of the field."""
        values = self.replay.arrays[name]
        if len(np.unique(values)) < DISTINCT:
            return []
        kind = narrowest_dtype(values)
        causes = [cause for cause in rounding_causes(self.replay, name) if cause.name == kind]
        return [(cause,) for cause in causes if self.agrees(name, cause.apply(recipe))]

    def _relevant(self, name: str) -> list[Cause]:
        """Lists the choices that can move a field: choices of its own stages."""
        stages = ORDER.get(name, ORDER["loss"])
        return [cause for cause in self.causes if cause.stage in stages]

    def _relevant_numbers(self, name: str) -> list[UnknownNumber]:
        stages = ORDER.get(name, ORDER["loss"])
        return [number for number in self.numbers if number.stage in stages]

    def _advice(self, name: str, *, tied: bool = False) -> str:
        """Names the field that would decide."""
        missing = [field for field in DECIDING.get(name, ("token_loss", "kl")) if field not in self.replay.arrays]
        if not missing:
            return "" if tied else "record logits, or hidden and head, of the row where it is largest"
        return f"record {', '.join(missing)}"


def _value_of(number: UnknownNumber, recipe: Recipe) -> float | None:
    """Returns the value of a number in a recipe."""
    step = getattr(recipe, number.stage)
    if not number.argument:
        value = getattr(step, number.setting)
        return None if value is None else float(value)
    changed = dict(step.arguments)
    return changed.get(number.setting, number.declared)


def _applied(causes: Causes, recipe: Recipe) -> Recipe:
    for cause in causes:
        recipe = cause.apply(recipe)
    return recipe


def _follows(name: str, earlier: str) -> bool:
    """Whether a field is recomputed from functions whose own result differs for an unknown reason."""
    return name == "grad_log_probs" and earlier in ("kl", "token_loss", "loss")
