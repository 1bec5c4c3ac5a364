"""How far recorded results lie from recomputed ones, and the report of a comparison."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from kljax.tools.parity.causes import Cause
from kljax.tools.parity.positions import over_tokens
from kljax.tools.parity.recipe import Recipe
from kljax.tools.parity.replay import Prediction, Replay

# A number says more than rounding if it is so many times as large as its bound.
CLEAR = 4.0


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
      rows: the rows that differ.
      determined: whether some recorded numbers are clearly larger than their bounds. Equal rewards, for one, have
        advantages of 0, which a whitening turns into noise of size 1. One number alone may be 0 by cancellation, and
        numbers that are all exactly 0 show it: both are determined.
    """

    field: str
    absolute: float = 0.0
    relative: float = 0.0
    at: tuple[int, ...] = ()
    recorded: float = 0.0
    expected: float = 0.0
    bound: float = 0.0
    excess: float = 0.0
    compared: int = 0
    rows: tuple[int, ...] = ()
    determined: bool = True

    @property
    def agrees(self) -> bool:
        """Whether every number is within its bound."""
        return self.excess <= 1

    def joined(self, other: "Difference") -> "Difference":
        """Returns the difference of the rows of both."""
        if not self.compared or not other.compared:
            return self if self.compared else other
        worst = max(self, other, key=lambda difference: difference.excess)
        return dataclasses.replace(
            worst,
            absolute=max(self.absolute, other.absolute),
            relative=max(self.relative, other.relative),
            compared=self.compared + other.compared,
            rows=self.rows + other.rows,
            determined=self.determined or other.determined,
        )


@dataclasses.dataclass(frozen=True)
class Finding:
    """A field that differs, with its explanation.

    Attributes:
      difference: how it differs under the causes of earlier fields.
      explanations: causes that each bring it within the bound; several are ties. Empty is unknown.
      advice: the field that would decide, if the cause is unknown or tied.
      follows: an earlier field of unknown cause that this one is computed from.
      shape: the pattern of a difference of unknown cause.
    """

    difference: Difference
    explanations: tuple[Cause, ...] = ()
    advice: str = ""
    follows: str = ""
    shape: str = ""


@dataclasses.dataclass(frozen=True)
class Invariant:
    """A statement that holds in a right update without knowledge of its settings.

    Attributes:
      text: what the arrays say.
      holds: whether that is as it should be; None for a number that only a reader can judge.
    """

    text: str
    holds: bool | None = None


@dataclasses.dataclass(frozen=True)
class StageCount:
    """The stages that apply to a dump.

    Attributes:
      compared: stages whose result was recomputed and compared, or judged by an invariant.
      missing: stages that were not, each with the reason.
      claimed: missing stages that the header has a section for.
    """

    compared: tuple[str, ...]
    missing: tuple[tuple[str, str], ...]
    claimed: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """The result of a comparison.

    Attributes:
      differences: every compared field as recorded, before any cause is applied.
      findings: the fields that differ, in the order of the data.
      not_compared: results that could not be recomputed, with the reason.
      dtype: the dtype whose rounding is allowed.
      stages: what was compared of the whole update.
      invariants: what the arrays say without the header.
      notes: further remarks.
    """

    differences: tuple[Difference, ...]
    findings: tuple[Finding, ...]
    not_compared: tuple[tuple[str, str], ...]
    dtype: str
    stages: StageCount
    invariants: tuple[Invariant, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether all compared fields agree, and no invariant is broken."""
        return not self.findings and all(invariant.holds is not False for invariant in self.invariants)

    @property
    def passes(self) -> bool:
        """Whether all agrees, something was compared, and so was every stage that the header claims."""
        compared = any(difference.compared for difference in self.differences)
        return self.agrees and compared and not self.stages.claimed

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The first explanation of each finding."""
        return tuple(finding.explanations[0] for finding in self.findings if finding.explanations)


def _offsets(recorded: np.ndarray, prediction: Prediction) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns signed differences, bounds and the compared numbers, in the shape of the field; two NaN are equal."""
    recorded = np.asarray(recorded, np.float64)
    value, bound = (np.broadcast_to(np.asarray(x, np.float64), recorded.shape) for x in prediction[:2])
    with np.errstate(all="ignore"):
        difference = recorded - value
        same = (recorded == value) | (np.isnan(recorded) & np.isnan(value))
        difference = np.where(same, 0, np.where(np.isnan(difference), np.inf, difference))
    return difference, bound, np.broadcast_to(prediction.at, recorded.shape)


def compare_field(replay: Replay, name: str, recipe: Recipe) -> Difference:
    """Compares one recorded result with the recomputed one, a few rows at a time."""
    if np.ndim(replay.arrays[name]):
        result = Difference(name)
        for part in replay.parts() if replay is replay.batch else [replay]:
            result = result.joined(_compare(name, part.arrays[name], part.predict(name, recipe), part.rows))
        return result
    return _compare(name, replay.arrays[name], scalar(replay, name, recipe), replay.rows)


def scalar(replay: Replay, name: str, recipe: Recipe) -> Prediction:
    """Recomputes a loss or a metric, a few rows at a time."""
    values, bounds, _ = zip(*(part.predict(name, recipe) for part in replay.parts()), strict=True)
    return Prediction(np.asarray(np.sum(values)), np.asarray(np.sum(bounds)), np.asarray(True))


def _compare(name: str, recorded: np.ndarray, prediction: Prediction, rows: np.ndarray) -> Difference:
    difference, bound, at = _offsets(recorded, prediction)
    if not at.any():
        return Difference(name)
    size = np.where(at, np.abs(difference), 0)
    with np.errstate(all="ignore"):
        excess = np.where(size == 0, 0, size / np.maximum(bound, 1e-300))
        relative = np.where(size == 0, 0, size / np.maximum(np.abs(recorded), 1e-300))
    where = np.unravel_index(int(np.argmax(np.where(at, excess, -1))), size.shape) if size.ndim else ()
    recorded = np.asarray(recorded, np.float64)
    numbers = (recorded, np.broadcast_to(prediction.value, size.shape), bound, excess)
    wrong = excess > 1 if excess.ndim < 2 else (excess > 1).any(1)
    known = np.abs(recorded[at & np.isfinite(recorded) & (recorded != 0)])
    limits = bound[at & np.isfinite(recorded) & (recorded != 0)]
    at_worst = [float(array[where]) for array in numbers]
    return Difference(
        name,
        absolute=float(size.max()),
        relative=float(relative.max()),
        at=(int(rows[where[0]]), *map(int, where[1:])) if where and size.max() else (),
        recorded=at_worst[0],
        expected=at_worst[1],
        bound=at_worst[2],
        excess=at_worst[3],
        compared=int(at.sum()),
        rows=tuple(int(row) for row in rows[wrong]) if wrong.ndim else (),
        determined=recorded.size == 1 or not known.size or bool((known > CLEAR * limits).any()),
    )


def residual_of(replay: Replay, names: Iterable[str], recipe: Recipe) -> Residual:
    """Returns the signed differences of recorded results from recomputed ones, at every compared number."""
    each = [_offsets(replay.arrays[name], replay.predict(name, recipe)) for name in names]
    return Residual(
        np.concatenate([difference[at] for difference, _, at in each]),
        np.concatenate([bound[at] for _, bound, at in each]),
    )


def is_permuted(replay: Replay, name: str, recipe: Recipe) -> bool:
    """Tells whether the recorded numbers are the expected ones in another order, as of rows that were shuffled."""
    recorded = np.asarray(replay.arrays[name], np.float64)
    prediction = replay.predict(name, recipe)
    if recorded.ndim == 0 or replay is not replay.batch:
        return False
    _, bound, at = _offsets(recorded, prediction)
    values = np.broadcast_to(prediction.value, recorded.shape)[at]
    bounds = bound[at]
    if len(values) < 4 or not np.isfinite(values).all() or np.ptp(values) <= 16 * bounds.max():
        return False
    order = np.argsort(values)
    return bool((np.abs(np.sort(recorded[at]) - values[order]) <= bounds[order]).all())


def describe(replay: Replay, name: str, recipe: Recipe) -> str:
    """Returns what a difference looks like, for a reader who looks for its cause."""
    recorded = np.asarray(replay.arrays[name], np.float64)
    prediction = replay.predict(name, recipe) if recorded.ndim else scalar(replay, name, recipe)
    difference, bound, at = _offsets(recorded, prediction)
    differs = at & (np.abs(difference) > bound)
    numbers = recorded[differs], (recorded - difference)[differs], bound[differs]
    if not recorded.ndim or not differs.any():
        return "; ".join(_pattern(*numbers)) or "one number differs"
    phrases = [f"{int(differs.sum())} of {int(at.sum())} numbers differ", *_places(replay, differs, at)]
    return "; ".join([*phrases, *_pattern(*numbers)])


def _pattern(recorded: np.ndarray, value: np.ndarray, bound: np.ndarray) -> Iterator[str]:
    """Yields a factor or an offset that all differences share."""
    finite = np.isfinite(value) & np.isfinite(recorded)
    if not recorded.size or not finite.all():
        return
    with np.errstate(all="ignore"):
        factors = recorded / value
        offsets = recorded - value
        width = bound / np.abs(value)
    if np.isfinite(factors).all() and (np.abs(factors - np.median(factors)) <= 2 * width + 1e-6).all():
        yield f"by the factor {np.median(factors):.6g}"
    elif recorded.size > 1 and (np.abs(offsets - np.median(offsets)) <= 2 * bound + 1e-6 * np.abs(offsets)).all():
        yield f"by the offset {np.median(offsets):.6g}"
    elif (recorded == 0).all():
        yield "recorded are zeros"
    elif recorded.size > 8 and np.ptp(factors) < 1e3:
        yield f"recorded over expected from {factors.min():.3g} to {factors.max():.3g}"


def _places(replay: Replay, differs: np.ndarray, at: np.ndarray) -> Iterator[str]:
    """Yields the rows and tokens that the difference is limited to."""
    rows = replay.rows[differs if differs.ndim == 1 else differs.any(1)]
    if len(rows) <= max(1, len(differs) // 2):
        yield f"in rows {', '.join(map(str, rows[:16]))}{', ...' if len(rows) > 16 else ''}"
    if differs.ndim == 1:
        return
    mask = replay.arrays["mask"]
    layout = replay.layout
    position = np.arange(mask.shape[1])
    groups = {
        "outside the mask": ~mask,
        "at the last token of a row": mask & (mask[:, ::-1].cumsum(1)[:, ::-1] == 1),
        "at the first token of a row": mask & (mask.cumsum(1) == 1),
        "in rows cut at the limit": np.broadcast_to(~layout.complete[:, None], mask.shape),
        "in rows with padding on the left": np.broadcast_to((layout.starts > 0)[:, None], mask.shape),
        "behind the end of a row": position >= layout.lengths[:, None],
    }
    if layout.tools is not None:
        groups["at the answers of tools"] = layout.tools
    if "advantages" in replay.arrays:
        advantages = over_tokens(replay.arrays["advantages"], replay.shape)
        groups |= {"at advantages above 0": advantages > 0, "at advantages below 0": advantages < 0}
    for title, group in groups.items():
        if not (differs & ~group).any() and (at & ~group).any():
            yield f"only {title}"
            return
