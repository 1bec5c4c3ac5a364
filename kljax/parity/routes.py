"""Routes of a mixture of experts: whether the trainer used the experts that the sampler recorded."""

import dataclasses
import math

import numpy as np

from kljax.parity.causes import Cause, make
from kljax.parity.comparison import Difference, Finding
from kljax.parity.dump import Dump

RECORDED, USED = "routed_experts", "used_experts"
SHIFTS = {"before": 1, "after": -1}
"""How far a recording is moved so that a token has the experts of a neighbour."""


@dataclasses.dataclass
class _Counts:
    """Counts over pairs of a token and a layer, `[layers]` each.

    Attributes:
      pairs: whose experts are known on both sides.
      differing: with other experts on both sides.
      neighbours: pairs, and differing ones, of the recording of a neighbour.
      first: row, token, used and recorded expert of the first differing pair.
    """

    pairs: np.ndarray
    differing: np.ndarray
    neighbours: dict[str, np.ndarray]
    first: tuple[int, int, int, int] | None = None


def compare_routes(dump: Dump) -> tuple[Difference, Finding | None] | None:
    """Compares the experts that were used with the recorded ones, as sets, wherever both are known.

    Returns:
      The difference, and the finding if a set differs, with one cause: routes not replayed, lost in some layers, or
      shifted by one token. None if the dump lacks one of both.
    """
    if RECORDED not in dump or USED not in dump:
        return None
    counts = _count(dump)
    compared = int(counts.pairs.sum())
    if counts.first is None:
        return Difference(USED, 0.0, 0.0, (), 0.0, 0.0, 0.0, 0.0, compared), None
    row, token, used, recorded = counts.first
    absolute = float(abs(used - recorded))
    difference = Difference(
        USED, absolute, absolute / max(recorded, 1), (row, token), float(used), float(recorded), 0.0, math.inf, compared
    )
    return difference, Finding(difference, ((_cause(counts),),))


def uncompared_routes(dump: Dump) -> tuple[tuple[str, str], ...]:
    """Names the routes that a dump has of one side alone.

    Returns:
      Field and reason, or nothing.
    """
    sides = [name for name in (RECORDED, USED) if name in dump]
    return tuple((name, f"needs {USED if name == RECORDED else RECORDED}") for name in sides if len(sides) == 1)


def _count(dump: Dump) -> _Counts:
    """Counts row by row: routes are the largest array of a dump after logits."""
    layers = dump.sizes["L"]
    neighbours = {name: np.zeros((2, layers), int) for name in SHIFTS}
    counts = _Counts(np.zeros(layers, int), np.zeros(layers, int), neighbours)
    for row in range(dump.sizes["B"]):
        used, recorded = (np.sort(dump.stored(name).part(row).astype(np.int64)) for name in (USED, RECORDED))
        known, differs = _compare(used, recorded)
        counts.pairs += known.sum(0)
        counts.differing += differs.sum(0)
        for name, shift in SHIFTS.items():
            overlap = slice(max(shift, 0), len(used) + min(shift, 0))
            pairs = _compare(used[overlap], np.roll(recorded, shift, axis=0)[overlap])
            counts.neighbours[name] += np.stack([part.sum(0) for part in pairs])
        if counts.first is None and differs.any():
            token, layer = map(int, np.argwhere(differs)[0])
            index = int(np.argmax(used[token, layer] != recorded[token, layer]))
            counts.first = (row, token, int(used[token, layer, index]), int(recorded[token, layer, index]))
    return counts


def _compare(used: np.ndarray, recorded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns which pairs `[T, L]` are known on both sides, and which of them differ."""
    known = (used[..., 0] >= 0) & (recorded[..., 0] >= 0)
    return known, known & (used != recorded).any(-1)


def _cause(counts: _Counts) -> Cause:
    for name, (pairs, differing) in counts.neighbours.items():
        if pairs.sum() and not differing.sum():
            text = f"routes are shifted by one token: the trainer used the recorded experts of the token {name}"
            return make("routes", f"of the token {name}", text)
    share = 100 * counts.differing.sum() / counts.pairs.sum()
    lost = np.flatnonzero(counts.differing)
    if len(lost) < len(counts.pairs):
        text = f"routes not replayed in layer {', '.join(map(str, lost))} of the {len(counts.pairs)} with experts"
        return make("routes", "not replayed in some layers", text)
    text = f"routes not replayed: the trainer chose other experts for {share:.3g} % of the pairs of token and layer"
    return make("routes", "not replayed", text)
