"""Compares a dump with its replay and finds the causes of the differences."""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kljax.parity.causes import Cause, causes_of, rounding_causes
from kljax.parity.fields import ORDER
from kljax.parity.recipe import Recipe
from kljax.parity.replay import Replay
from kljax.parity.rounding import narrowest_dtype
from kljax.parity.stages import comparable, reason_not_compared, recorded

# Causes of one report, groups of equally good candidates that are followed at a field, ties that are kept.
MAX_CAUSES, GROUPS, TIES = 4, 3, 12
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


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far a recorded result lies from the recomputed one.

    Attributes:
      field: its name.
      absolute: the largest absolute difference; infinite where one side is not finite.
      relative: the largest difference over the magnitude of the recorded number.
      at: row and token of the number that exceeds its bound most; empty for a scalar.
      recorded: the recorded number there.
      expected: the recomputed number there.
      bound: the rounding bound there.
      excess: the largest ratio of difference and bound; at most 1 agrees.
      compared: how many numbers were compared.
    """

    field: str
    absolute: float
    relative: float
    at: tuple[int, ...]
    recorded: float
    expected: float
    bound: float
    excess: float
    compared: int

    @property
    def agrees(self) -> bool:
        """Whether every number is within its bound."""
        return self.excess <= 1


@dataclasses.dataclass(frozen=True)
class Finding:
    """A field that differs, with its explanation.

    Attributes:
      difference: how it differs under the causes of earlier fields.
      explanations: sets of causes that each bring it within the bound; several are ties. Empty is unknown.
      advice: the field that would decide, if the cause is unknown or tied.
      follows: an earlier field of unknown cause that this one is computed from.
    """

    difference: Difference
    explanations: tuple[tuple[Cause, ...], ...] = ()
    advice: str = ""
    follows: str = ""


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """The result of a comparison.

    Attributes:
      differences: every compared field as recorded, before any cause is applied.
      findings: the fields that differ, in the order of the data.
      not_compared: results that could not be recomputed, with the reason.
      dtype: the dtype whose rounding is allowed.
      notes: further remarks.
    """

    differences: tuple[Difference, ...]
    findings: tuple[Finding, ...]
    not_compared: tuple[tuple[str, str], ...]
    dtype: str
    notes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether all compared fields agree."""
        return not self.findings

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The causes of the first explanation of each finding."""
        return tuple(cause for finding in self.findings for cause in (finding.explanations or ((),))[0])


def compare_field(replay: Replay, name: str, recipe: Recipe) -> Difference:
    """Compares one recorded result with the recomputed one.

    Returns:
      The largest differences, and the number that exceeds its rounding bound the most. Two NaN are equal.

    Raises:
      ValueError: if a function of the library refuses the settings.
    """
    prediction = replay.predict(name, recipe)
    recorded_values, at = np.asarray(replay.arrays[name], np.float64), prediction.at
    value, bound = np.asarray(prediction.value, np.float64), np.asarray(prediction.bound, np.float64)
    at = np.broadcast_to(at, recorded_values.shape)
    with np.errstate(all="ignore"):
        difference = np.abs(recorded_values - value)
        same = (recorded_values == value) | (np.isnan(recorded_values) & np.isnan(value))
        difference = np.where(same | ~at, 0, np.where(np.isfinite(difference), difference, np.inf))
        excess = np.where(difference == 0, 0, difference / np.maximum(bound, 1e-300))
        relative = np.where(difference == 0, 0, difference / np.maximum(np.abs(recorded_values), 1e-300))
    if recorded_values.size == 0 or not at.any():
        return Difference(name, 0.0, 0.0, (), 0.0, 0.0, 0.0, 0.0, 0)
    where = (
        np.unravel_index(int(np.argmax(np.where(at, excess, -1))), recorded_values.shape)
        if recorded_values.ndim
        else ()
    )
    largest = (float(difference.max()), float(relative.max()))
    numbers = (float(array[where]) for array in (recorded_values, value, bound, excess))
    recorded, expected, limit, worst = numbers
    position = tuple(int(index) for index in where)
    return Difference(name, *largest, position, recorded, expected, limit, worst, int(at.sum()))


class Search:
    """Finds the smallest set of causes under which every field agrees."""

    def __init__(self, replay: Replay, *, seconds: float = 600.0) -> None:
        self.replay = replay
        self.fields = comparable(replay)
        self.causes = causes_of(replay)
        self.deadline = time.monotonic() + seconds
        self.stopped = False
        self._found_pairs: dict[Any, list[Causes]] = {}

    def run(self) -> ParityReport:
        """Compares every field and explains the differing ones.

        Returns:
          The `ParityReport`, with a note if the search for pairs of causes ran out of time.
        """
        recipe = self.replay.plan.recipe
        differences = tuple(compare_field(self.replay, name, recipe) for name in self.fields)
        findings = self._explain(recipe)
        missing = [name for name in recorded(self.replay) if name not in self.fields]
        reasons = tuple((name, reason_not_compared(self.replay, name) or "") for name in missing)
        notes = ("the search for pairs of causes stopped at its time limit",) if self.stopped else ()
        return ParityReport(differences, tuple(findings), reasons, self.replay.dtype, notes)

    def agrees(self, name: str, recipe: Recipe) -> bool:
        """Tells whether a field agrees under a recipe; settings that a function of the library refuses do not.

        Returns:
          True if every compared number is within its rounding bound.

        Raises:
          ValueError: if the library refuses the settings of the header.
          TypeError: the same.
        """
        try:
            return compare_field(self.replay, name, recipe).agrees
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
        skipped: set[str] = set()
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
            skipped.add(first)
            findings.append(Finding(difference, advice="" if source else self._advice(first), follows=source))
            if first == "ratio":
                recipe = recipe.changed("ratio", recorded=True)
        return findings

    def _solve(self, recipe: Recipe, budget: int) -> list[Finding] | None:
        """Returns findings under which every field agrees, of at most so many causes, or None."""
        first = self._first(recipe, set())
        if first is None:
            return []
        difference = compare_field(self.replay, first, recipe)
        singles = self._singles(first, recipe, set()) + self._roundings(first, recipe, exact=True)
        for ties in self._ranked(singles, recipe, set())[:GROUPS] if budget >= 1 else []:
            rest = self._solve(_applied(ties[0], recipe), budget - 1)
            if rest is not None:
                advice = self._advice(first, tied=True) if len(ties) > 1 else ""
                return [Finding(difference, tuple(ties), advice), *rest]
        # One number may be mended by chance; an array is not, so that what mends it holds.
        if budget < 2 or (singles and self.replay.arrays[first].size > 1):
            return None
        for ties in self._ranked(self._pairs(first, recipe, set()), recipe, set())[:GROUPS]:
            rest = self._solve(_applied(ties[0], recipe), budget - 2)
            if rest is not None:
                advice = self._advice(first, tied=True) if len(ties) > 1 else ""
                return [Finding(difference, tuple(ties), advice), *rest]
        return None

    def _first(self, recipe: Recipe, skipped: set[str]) -> str | None:
        """Returns the first field that does not agree."""
        return next((name for name in self._open(skipped) if not self.agrees(name, recipe)), None)

    def _open(self, skipped: set[str]) -> list[str]:
        return [name for name in self.fields if name not in skipped]

    def _candidates(self, name: str, recipe: Recipe, skipped: set[str]) -> list[Causes]:
        """Returns the sets of causes that mend a field: of one, or else of two, or else a coarser dtype."""
        return (
            self._singles(name, recipe, skipped)
            or self._roundings(name, recipe, exact=True)
            or self._pairs(name, recipe, skipped)
            or self._roundings(name, recipe, exact=False)
        )

    def _ranked(self, candidates: Sequence[Causes], recipe: Recipe, skipped: set[str]) -> list[list[Causes]]:
        """Groups candidates by how many fields agree with them, the most first."""
        groups: dict[int, list[Causes]] = {}
        for candidate in candidates:
            changed = _applied(candidate, recipe)
            score = sum(self.agrees(name, changed) for name in self._open(skipped))
            groups.setdefault(score, []).append(candidate)
        return [groups[score][:TIES] for score in sorted(groups, reverse=True)]

    def _mends(self, causes: Causes, name: str, recipe: Recipe, skipped: set[str]) -> bool:
        """Whether a field and all before it agree once the causes are applied."""
        changed = _applied(causes, recipe)
        if changed == recipe or not self.agrees(name, changed):
            return False
        before = self.fields[: self.fields.index(name)]
        return all(self.agrees(field, changed) for field in before if field not in skipped)

    def _singles(self, name: str, recipe: Recipe, skipped: set[str]) -> list[Causes]:
        return [(cause,) for cause in self._relevant(name) if self._mends((cause,), name, recipe, skipped)]

    def _pairs(self, name: str, recipe: Recipe, skipped: set[str]) -> list[Causes]:
        key = (name, recipe, frozenset(skipped))
        if key not in self._found_pairs:
            self._found_pairs[key] = list(self._search_pairs(name, recipe, skipped))
        return self._found_pairs[key]

    def _search_pairs(self, name: str, recipe: Recipe, skipped: set[str]) -> Iterator[Causes]:
        causes = [cause for cause in self._relevant(name) if not cause.alone]
        for pair in itertools.combinations(causes, 2):
            if time.monotonic() > self.deadline:
                self.stopped = True
                return
            if not pair[0].conflicts(pair[1]) and self._mends(pair, name, recipe, skipped):
                yield pair

    def _roundings(self, name: str, recipe: Recipe, *, exact: bool) -> list[Causes]:
        """Returns the finest coarser dtype that explains a field; exact if it holds all its numbers."""
        causes = rounding_causes(self.replay, name)
        if exact:
            kind = narrowest_dtype(self.replay.arrays[name]) if self.replay.arrays[name].size > 1 else ""
            causes = [cause for cause in causes if cause.name == kind]
        sufficient: list[Causes] = [(cause,) for cause in causes if self.agrees(name, cause.apply(recipe))]
        return sufficient[:1]

    def _relevant(self, name: str) -> list[Cause]:
        """Lists the causes that can move a field: causes of its own stages."""
        stages = ORDER.get(name, ORDER["loss"])
        return [cause for cause in self.causes if cause.stage in stages]

    def _advice(self, name: str, *, tied: bool = False) -> str:
        """Names the field that would decide."""
        missing = [field for field in DECIDING.get(name, ("token_loss", "kl")) if field not in self.replay.arrays]
        if not missing:
            return "" if tied else "record logits, or hidden and head, of the row where it is largest"
        return f"record {', '.join(missing)}"


def _applied(causes: Causes, recipe: Recipe) -> Recipe:
    for cause in causes:
        recipe = cause.apply(recipe)
    return recipe


def _follows(name: str, earlier: str) -> bool:
    """Whether a field is recomputed from functions whose own result differs for an unknown reason."""
    return name == "grad_log_probs" and earlier in ("kl", "token_loss", "loss")
