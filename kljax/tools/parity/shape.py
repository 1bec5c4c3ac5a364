"""Describes a difference whose cause is unknown: how many numbers differ, where, and by what pattern."""

from collections.abc import Iterator

import numpy as np

from kljax.tools.parity.positions import over_tokens
from kljax.tools.parity.recipe import Recipe
from kljax.tools.parity.replay import Replay


def describe(replay: Replay, name: str, recipe: Recipe) -> str:
    """Returns what a difference looks like, for a reader who looks for its cause.

    Args:
      name: a field that differs under the recipe.

    Returns:
      Phrases joined by semicolons, such as "12 of 83 numbers differ; in rows 2, 5; by the factor 1.5".
    """
    prediction = replay.predict(name, recipe)
    recorded = np.asarray(replay.arrays[name], np.float64)
    value, bound = (np.broadcast_to(array, recorded.shape) for array in (prediction.value, prediction.bound))
    at = np.broadcast_to(prediction.at, recorded.shape) & np.isfinite(recorded) & np.isfinite(value)
    with np.errstate(all="ignore"):
        differs = at & (np.abs(recorded - value) > bound)
    if not recorded.ndim or not differs.any():
        return "; ".join(_pattern(recorded[differs], value[differs], bound[differs])) or "one number differs"
    phrases = [f"{int(differs.sum())} of {int(at.sum())} numbers differ"]
    phrases += _where(replay, differs, at)
    return "; ".join([*phrases, *_pattern(recorded[differs], value[differs], bound[differs])])


def _pattern(recorded: np.ndarray, value: np.ndarray, bound: np.ndarray) -> Iterator[str]:
    """Yields a factor or an offset that all differences share."""
    if not recorded.size:
        return
    with np.errstate(all="ignore"):
        factors, offsets = recorded / value, recorded - value
        width = bound / np.abs(value)
    if np.isfinite(factors).all() and (np.abs(factors - np.median(factors)) <= 2 * width + 1e-6).all():
        yield f"by the factor {np.median(factors):.6g}"
    elif recorded.size > 1 and (np.abs(offsets - np.median(offsets)) <= 2 * bound + 1e-6 * np.abs(offsets)).all():
        yield f"by the offset {np.median(offsets):.6g}"
    elif (recorded == 0).all():
        yield "recorded are zeros"


def _where(replay: Replay, differs: np.ndarray, at: np.ndarray) -> Iterator[str]:
    """Yields the rows and tokens that the difference is limited to."""
    rows = np.flatnonzero(differs if differs.ndim == 1 else differs.any(1))
    if len(rows) <= max(1, len(differs) // 2):
        yield f"in rows {', '.join(map(str, rows))}"
    if differs.ndim == 1:
        return
    mask = replay.arrays["mask"]
    last = mask & (mask[:, ::-1].cumsum(1)[:, ::-1] == 1)
    first = mask & (mask.cumsum(1) == 1)
    groups = {"outside the mask": ~mask, "at the last token of a row": last, "at the first token of a row": first}
    if "advantages" in replay.arrays:
        advantages = over_tokens(replay.arrays["advantages"], replay.shape)
        groups |= {"at advantages above 0": advantages > 0, "at advantages below 0": advantages < 0}
    for title, group in groups.items():
        if not (differs & ~group).any() and (at & ~group).any():
            yield f"only {title}"
            return
