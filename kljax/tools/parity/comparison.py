"""How far recorded results lie from recomputed ones, and the report of a comparison."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from kljax.tools.parity.causes import Cause
from kljax.tools.parity.recipe import Recipe
from kljax.tools.parity.replay import Replay
from kljax.tools.parity.solvers import Residual

# A number says more than rounding if it is so many times as large as its bound.
CLEAR = 4.0


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
      shape: the pattern of a difference of unknown cause.
    """

    difference: Difference
    explanations: tuple[tuple[Cause, ...], ...] = ()
    advice: str = ""
    follows: str = ""
    shape: str = ""


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


def differing(replay: Replay, name: str, recipe: Recipe) -> np.ndarray:
    """Returns where a recorded result exceeds its rounding bound, in the shape of the field."""
    prediction, recorded = replay.predict(name, recipe), np.asarray(replay.arrays[name], np.float64)
    with np.errstate(all="ignore"):
        same = (recorded == prediction.value) | (np.isnan(recorded) & np.isnan(prediction.value))
        inside = same | (np.abs(recorded - prediction.value) <= prediction.bound)
    return np.asarray(np.broadcast_to(prediction.at, recorded.shape) & ~inside)


def is_determined(replay: Replay, name: str, recipe: Recipe) -> bool:
    """Tells whether a result says more than rounding: some of its numbers are clearly larger than their bounds.

    Equal rewards, for one, have advantages of 0, which a whitening turns into noise of size 1.

    Returns:
      False if the bounds hide all recorded numbers. One number alone may be 0 by cancellation, and numbers that are
      all exactly 0 show it: both are determined.
    """
    prediction, recorded = replay.predict(name, recipe), np.abs(np.asarray(replay.arrays[name], np.float64))
    at = np.broadcast_to(prediction.at, recorded.shape) & np.isfinite(recorded) & (recorded > 0)
    bound = np.broadcast_to(np.asarray(prediction.bound, np.float64), recorded.shape)
    return recorded.size == 1 or not at.any() or bool((recorded > CLEAR * bound)[at].any())


def residual_of(replay: Replay, names: Iterable[str], recipe: Recipe) -> Residual:
    """Returns the signed differences of recorded results from recomputed ones, at every compared number.

    Args:
      names: fields, whose numbers follow each other.

    Returns:
      The `Residual`; a difference is infinite where one side alone is not finite.

    Raises:
      ValueError: if a function of the library refuses the settings.
    """
    differences, bounds = [], []
    for name in names:
        prediction = replay.predict(name, recipe)
        recorded = np.asarray(replay.arrays[name], np.float64)
        at = np.broadcast_to(prediction.at, recorded.shape)
        value = np.broadcast_to(np.asarray(prediction.value, np.float64), recorded.shape)
        bound = np.broadcast_to(np.asarray(prediction.bound, np.float64), recorded.shape)
        with np.errstate(all="ignore"):
            difference = recorded - value
            same = (recorded == value) | (np.isnan(recorded) & np.isnan(value))
            difference = np.where(same, 0, np.where(np.isnan(difference), np.inf, difference))
        differences.append(difference[at])
        bounds.append(bound[at])
    return Residual(np.concatenate(differences), np.concatenate(bounds))
