"""The sets of causes that mend a field: choices, dtypes, fitted numbers, and pairs of them."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kljax.tools.parity.causes import Cause, rounding_causes
from kljax.tools.parity.choices import causes_of
from kljax.tools.parity.comparison import differing, is_determined, residual_of
from kljax.tools.parity.fields import ORDER
from kljax.tools.parity.fitting import PEELED, fields_of, fit_number, value_of
from kljax.tools.parity.numbers import UnknownNumber, note_on_factor, numbers_of
from kljax.tools.parity.recipe import Recipe
from kljax.tools.parity.replay import Replay
from kljax.tools.parity.rounding import narrowest_dtype, round_to
from kljax.tools.parity.solvers import DIGITS, Residual, solve_two
from kljax.tools.parity.stages import comparable

# Choices that are paired first.
PROMISING = 24
# Numbers that show a dtype by their grid, or other rows and positions by their agreement.
DISTINCT = 4
# The stages of the recipe that are masks.
MASKS = ("mask_rule", "mask", "kl_mask")
Causes = tuple[Cause, ...]
Skipped = frozenset[str]


class Candidates:
    """Finds the sets of causes that mend a field of a dump.

    Attributes:
      replay: the recorded arrays.
      fields: the fields that are compared, in the order of the data.
      causes: the choices.
      numbers: the numbers that can be fitted.
      limit: of the pairs that are tried.
      tried: the pairs that were tried.
      left: the pairs that were left at the limit.
    """

    def __init__(self, replay: Replay, limit: int) -> None:
        self.replay, self.limit = replay, limit
        self.fields = comparable(replay)
        self.causes = causes_of(replay)
        self.numbers = numbers_of(replay)
        self.tried = self.left = 0
        self._memo: dict[Any, list[Causes]] = {}

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

    def open(self, skipped: Skipped) -> list[str]:
        """Lists the compared fields that are not skipped, in the order of the data."""
        return [name for name in self.fields if name not in skipped]

    def after(self, name: str, skipped: Skipped) -> list[str]:
        """Lists the fields after one, without metrics."""
        order = list(ORDER)
        position = order.index(name) if name in ORDER else len(order)
        return [field for field in self.open(skipped) if field in ORDER and order.index(field) > position]

    def notes(self, unknown: bool) -> Iterator[str]:
        """Yields remarks on the search.

        Args:
          unknown: whether a cause was not found.
        """
        if unknown:
            yield f"tried: {len(self.causes)} choices, {len(self.numbers)} numbers and {self.tried} pairs of them"
        if self.left:
            yield f"the search stopped at its limit of {self.limit} candidates; {self.left} pairs were left"

    def mending(self, name: str, recipe: Recipe, skipped: Skipped) -> list[Causes]:
        """Returns the sets of causes that mend a field for certain, though other fields remain unexplained."""
        candidates = (
            self.singles(name, recipe, skipped) or self.roundings(name, recipe) or self.pairs(name, recipe, skipped)
        )
        if self.replay.arrays[name].size > 1:
            return candidates
        # One number may be mended by chance: an array that depends on it has to agree as well.
        later = [field for field in self.after(name, skipped) if self.replay.arrays[field].size > 1]
        return [causes for causes in candidates if all(self.agrees(x, applied(causes, recipe)) for x in later)]

    def _mends(self, causes: Causes, name: str, recipe: Recipe, skipped: Skipped) -> bool:
        """Whether a field and all before it agree once the causes are applied."""
        changed = applied(causes, recipe)
        if changed == recipe or not self.agrees(name, changed) or self._drops(name, recipe, changed):
            return False
        if not is_determined(self.replay, name, changed):
            return False
        before = self.fields[: self.fields.index(name)]
        return all(self.agrees(field, changed) for field in before if field not in skipped)

    def _drops(self, name: str, recipe: Recipe, changed: Recipe) -> bool:
        """Whether a change takes numbers that differ, and that no mask set to 0, out of the comparison."""
        before, after = (self.replay.predict(name, each).at for each in (recipe, changed))
        if np.array_equal(before, after):
            return False
        wrong, nonzero = differing(self.replay, name, recipe), self.replay.arrays[name] != 0
        if all(getattr(recipe, stage) == getattr(changed, stage) for stage in MASKS):
            # Rows or positions are moved, some of them to where nothing is recorded: the others show it, or those that
            # could not be compared before.
            gained = len(np.unique(self.replay.arrays[name][after & ~before]))
            return max(int((wrong & after).sum()), gained) < DISTINCT
        # A mask that is in the record sets all that it takes out to 0.
        if (wrong & ~after & ~nonzero).any() and (before & ~after & nonzero).any():
            return True
        dropped = wrong & ~after & nonzero
        return bool(dropped.any() and 2 * dropped.sum() >= wrong.sum())

    def singles(self, name: str, recipe: Recipe, skipped: Skipped) -> list[Causes]:
        """Returns the choices that mend a field, or else a coarser dtype that it was rounded to, or else numbers."""
        return self._remember(("single", name, recipe, skipped), lambda: self._search_singles(name, recipe, skipped))

    def _search_singles(self, name: str, recipe: Recipe, skipped: Skipped) -> Iterator[Causes]:
        choices = [(cause,) for cause in self._relevant(name) if self._mends((cause,), name, recipe, skipped)]
        roundings = self.roundings(name, recipe)
        yield from choices or roundings
        if roundings and not choices:
            return
        for number in self._relevant_numbers(name):
            solved = self._fit(number, name, recipe, skipped)
            if solved is not None and self._mends((solved,), name, recipe, skipped):
                yield (solved,)

    def pairs(self, name: str, recipe: Recipe, skipped: Skipped) -> list[Causes]:
        """Returns the pairs of causes that mend a field and leave all before it in agreement."""
        return self._remember(("pair", name, recipe, skipped), lambda: self._search_pairs(name, recipe, skipped))

    def _search_pairs(self, name: str, recipe: Recipe, skipped: Skipped) -> Iterator[Causes]:
        """Yields pairs that mend a field: promising choices, choices with numbers, numbers, then all choices."""
        choices = self._by_promise(name, recipe, skipped)
        numbers = [number for number in self._relevant_numbers(name) if not number.alone]
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
        targets = [name, *(self.after(name, skipped) if self.replay.arrays[name].size == 1 else ())]

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
                    solved = self._fit(number, name, changed, skipped)
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
                first = self._fit(number, name, recipe, skipped, element=element)
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
                for rest in self.singles(name, changed, skipped):
                    if not rest[0].conflicts(first):
                        yield (first, *rest)

    def _linear_pairs(
        self, numbers: Sequence[UnknownNumber], name: str, recipe: Recipe, skipped: Skipped
    ) -> Iterator[Causes]:
        """Yields two numbers at once that the results are linear in, each of them or their product."""
        for first, second in itertools.combinations([number for number in numbers if not number.grid], 2):
            targets = fields_of(self.replay, first, name, self.after(name, skipped))[0]

            def evaluate(values: Sequence[float], pair: Any = (first, second), targets: Any = targets) -> Residual:
                changed = recipe
                for number, value in zip(pair, values, strict=True):
                    changed = number.cause(changed, value).apply(changed)
                return residual_of(self.replay, targets, changed)

            starts = [value_of(number, recipe) or 0.0 for number in (first, second)]
            if not self._count(0) or (values := solve_two(evaluate, starts)) is None:
                continue
            for digits in DIGITS:
                value = float(f"{values[0]:.{digits}g}")
                cause = first.cause(recipe, value, note_on_factor(self.replay, first, value))
                rest = self._fit(second, name, cause.apply(recipe), skipped)
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

    def roundings(self, name: str, recipe: Recipe) -> list[Causes]:
        """Returns the coarser dtype that a field was rounded to: its grid holds all the numbers of the field."""
        values = self.replay.arrays[name]
        kind = narrowest_dtype(values)
        if len(np.unique(values)) < DISTINCT and not self._is_rounded(name, kind, recipe):
            return []
        causes = [cause for cause in rounding_causes(self.replay, name) if cause.name == kind]
        return [(cause,) for cause in causes if self.agrees(name, cause.apply(recipe))]

    def _is_rounded(self, name: str, kind: str, recipe: Recipe) -> bool:
        """Whether one number is that of a recipe, rounded: chance has it on the grid once in 8,192 or 65,536 cases."""
        recorded, prediction = np.asarray(self.replay.arrays[name], np.float64), self.replay.predict(name, recipe)
        if recorded.size != 1 or not recorded.any():
            return False
        low, high = (round_to(prediction.value + side * prediction.bound, kind) for side in (-1, 1))
        return bool(((low <= recorded) & (recorded <= high)).all())

    def _relevant(self, name: str) -> list[Cause]:
        """Lists the choices that can move a field: choices of its own stages."""
        stages = ORDER.get(name, ORDER["loss"])
        return [cause for cause in self.causes if cause.stage in stages]

    def _relevant_numbers(self, name: str) -> list[UnknownNumber]:
        stages = ORDER.get(name, ORDER["loss"])
        return [number for number in self.numbers if number.stage in stages]

    def _fit(
        self, number: UnknownNumber, name: str, recipe: Recipe, skipped: Skipped, *, element: int | None = None
    ) -> Cause | None:
        later = self.after(name, skipped)
        return fit_number(self.replay, number, name, recipe, later=later, element=element)


def applied(causes: Causes, recipe: Recipe) -> Recipe:
    """Applies several causes, one after the other."""
    for cause in causes:
        recipe = cause.apply(recipe)
    return recipe
