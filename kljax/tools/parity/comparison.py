"""How far recorded results lie from recomputed ones, and what their differences look like."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from kljax.tools.parity.positions import over_tokens, tokens_after
from kljax.tools.parity.recipe import Recipe
from kljax.tools.parity.replay import Prediction, Replay
from kljax.tools.parity.report import Difference

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


def recompute(replay: Replay, name: str, recipe: Recipe) -> Prediction:
    """Recomputes a recorded result; a loss or a metric a few rows at a time."""
    if replay.arrays[name].ndim:
        return replay.predict(name, recipe)
    values, bounds, _ = zip(*(part.predict(name, recipe) for part in replay.parts()), strict=True)
    return Prediction(np.asarray(np.sum(values)), np.asarray(np.sum(bounds)), np.asarray(True))


def offsets(recorded: np.ndarray, prediction: Prediction) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns signed differences, bounds and the compared numbers, in the shape of the field; two NaN are equal."""
    value, bound = (np.broadcast_to(np.asarray(x, np.float64), recorded.shape) for x in prediction[:2])
    with np.errstate(all="ignore"):
        difference = np.subtract(recorded, value, dtype=np.float64)
        same = (recorded == value) | (np.isnan(recorded) & np.isnan(value))
        difference = np.where(same, 0, np.where(np.isnan(difference), np.inf, difference))
    return difference, bound, np.broadcast_to(prediction.at, recorded.shape)


def residual_of(replay: Replay, names: Iterable[str], recipe: Recipe) -> Residual:
    """Returns the signed differences of recorded results from recomputed ones, at every compared number."""
    each = [offsets(replay.arrays[name], replay.predict(name, recipe)) for name in names]
    return Residual(
        np.concatenate([difference[at] for difference, _, at in each]),
        np.concatenate([bound[at] for _, bound, at in each]),
    )


def compare_field(replay: Replay, name: str, recipe: Recipe) -> Difference:
    """Compares one recorded result with the recomputed one, a few rows at a time."""
    result = Difference(name)
    by_parts = replay is replay.batch and replay.arrays[name].ndim
    for part in replay.parts() if by_parts else [replay]:
        result = result.joined(_compare(name, part, recompute(part, name, recipe)))
    return result


def _compare(name: str, replay: Replay, prediction: Prediction) -> Difference:
    recorded = np.asarray(replay.arrays[name], np.float64)
    difference, bound, at = offsets(recorded, prediction)
    if not at.any():
        return Difference(name)
    size = np.where(at, np.abs(difference), 0)
    with np.errstate(all="ignore"):
        excess = np.where(size == 0, 0, size / np.maximum(bound, 1e-300))
        relative = np.where(size == 0, 0, size / np.maximum(np.abs(recorded), 1e-300))
    where = np.unravel_index(int(np.argmax(np.where(at, excess, -1))), size.shape) if size.ndim else ()
    wrong = excess > 1 if excess.ndim < 2 else (excess > 1).any(1)
    known = at & np.isfinite(recorded) & (recorded != 0)
    clear = (np.abs(recorded[known]) > CLEAR * bound[known]).any()
    return Difference(
        name,
        absolute=float(size.max()),
        relative=float(relative.max()),
        at=(int(replay.rows[where[0]]), *map(int, where[1:])) if where and size.max() else (),
        recorded=float(recorded[where]),
        expected=float(np.broadcast_to(prediction.value, size.shape)[where]),
        bound=float(bound[where]),
        excess=float(excess[where]),
        compared=int(at.sum()),
        rows=tuple(int(row) for row in replay.rows[wrong]) if wrong.ndim else (),
        determined=recorded.size == 1 or not known.any() or bool(clear),
    )


def is_permuted(replay: Replay, name: str, recipe: Recipe) -> bool:
    """Tells whether the recorded numbers are the expected ones in another order, as of rows that were shuffled."""
    recorded = replay.arrays[name]
    if recorded.ndim == 0 or recorded.dtype == bool or replay is not replay.batch:
        return False
    prediction = replay.predict(name, recipe)
    _, bound, at = offsets(recorded, prediction)
    values = np.broadcast_to(prediction.value, recorded.shape)[at]
    bounds = bound[at]
    if len(values) < 4 or not np.isfinite(values).all() or np.ptp(values) <= 16 * bounds.max():
        return False
    order = np.argsort(values)
    return bool((np.abs(np.sort(recorded[at]) - values[order]) <= bounds[order]).all())


def describe(replay: Replay, name: str, recipe: Recipe) -> str:
    """Returns what a difference looks like, for a reader who looks for its cause."""
    recorded = np.asarray(replay.arrays[name], np.float64)
    difference, bound, at = offsets(recorded, recompute(replay, name, recipe))
    differs = at & (np.abs(difference) > bound)
    pattern = _pattern(recorded[differs], (recorded - difference)[differs], bound[differs])
    if not recorded.ndim or not differs.any():
        return "; ".join(pattern) or "one number differs"
    return "; ".join(
        [f"{int(differs.sum())} of {int(at.sum())} numbers differ", *_places(replay, differs, at), *pattern]
    )


def _pattern(recorded: np.ndarray, value: np.ndarray, bound: np.ndarray) -> Iterator[str]:
    """Yields a factor or an offset that all differences share."""
    if not recorded.size or not (np.isfinite(value) & np.isfinite(recorded)).all():
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
    groups = {
        "outside the mask": ~mask,
        "at the last token of a row": mask & (tokens_after(mask) == 1),
        "at the first token of a row": mask & (mask.cumsum(1) == 1),
        "in rows cut at the limit": np.broadcast_to(~layout.complete[:, None], mask.shape),
        "in rows with padding on the left": np.broadcast_to((layout.starts > 0)[:, None], mask.shape),
        "behind the end of a row": np.arange(mask.shape[1]) >= layout.lengths[:, None],
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
