"""Routes of a mixture of experts: whether the trainer used the experts that the sampler recorded, and their loads."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator

import numpy as np

from kljax.tools.parity.causes import Cause, make
from kljax.tools.parity.comparison import Difference, Finding
from kljax.tools.parity.dump import Dump

RECORDED, USED = "routed_experts", "used_experts"
LAG, ENTROPY = "lag", "router_entropy"
SHIFTS = {"before": 1, "after": -1}
"""How far a recording is moved so that a token has the experts of a neighbour."""


@dataclasses.dataclass
class _Counts:
    """Counts over pairs of a token and a layer.

    Attributes:
      pairs: whose experts are known on both sides, `[rows, layers]`.
      differing: with other experts on both sides, `[rows, layers]`.
      neighbours: pairs, and differing ones, of the recording of a neighbour, `[2, layers]`.
      first: row, token, used and recorded expert of the first differing pair.
    """

    pairs: np.ndarray
    differing: np.ndarray
    neighbours: dict[str, np.ndarray]
    first: tuple[int, int, int, int] | None = None


def compare_routes(dump: Dump) -> tuple[Difference, Finding | None, tuple[str, ...]] | None:
    """Compares the experts that were used with the recorded ones, as sets, wherever both are known."""
    if RECORDED not in dump or USED not in dump:
        return None
    counts = _count(dump)
    compared = int(counts.pairs.sum())
    if counts.first is None:
        return Difference(USED, compared=compared), None, ()
    row, token, used, recorded = counts.first
    absolute = float(abs(used - recorded))
    difference = Difference(
        USED, absolute, absolute / max(recorded, 1), (row, token), float(used), float(recorded), 0.0, math.inf, compared
    )
    return difference, Finding(difference, (_cause(counts),)), tuple(_flips(counts, dump))


def route_loads(dump: Dump) -> Iterator[str]:
    """Yields rows without routes, the load of the busiest expert by layer for each side, and the routers' entropy."""
    for side, name in (("recorded", RECORDED), ("used", USED)):
        if name in dump:
            empty = 0
            layers = [collections.Counter[int]() for _ in range(dump.sizes["L"])]
            for row in range(dump.sizes["B"]):
                experts = dump.stored(name).part(row).astype(np.int64)
                empty += int((experts < 0).all())
                for layer, tokens in enumerate(layers):
                    chosen, numbers = np.unique(experts[:, layer][experts[:, layer] >= 0], return_counts=True)
                    tokens.update(dict(zip(chosen.tolist(), numbers.tolist(), strict=True)))
            if name == RECORDED:
                yield f"routes: {empty} of {dump.sizes['B']} rows have none recorded"
            if known := set().union(*layers):
                loads = (len(known) * max(tokens.values(), default=0) / max(tokens.total(), 1) for tokens in layers)
                yield f"{side} routes: busiest of {len(known)} experts over the mean, by layer: {_listed(loads, '.2f')}"
    if ENTROPY in dump:
        values = dump.read(ENTROPY).astype(float)
        mask = dump.read("mask") > 0
        yield f"routers: mean entropy in nats, by layer: {_listed(values[mask].mean(0), '.3f')}"


def uncompared_routes(dump: Dump) -> tuple[tuple[str, str], ...]:
    """Names the routes that a dump has of one side alone."""
    sides = [name for name in (RECORDED, USED) if name in dump]
    return tuple((name, f"needs {USED if name == RECORDED else RECORDED}") for name in sides if len(sides) == 1)


def _count(dump: Dump) -> _Counts:
    """Counts row by row: routes are the largest array of a dump after logits."""
    layers = dump.sizes["L"]
    neighbours = {name: np.zeros((2, layers), int) for name in SHIFTS}
    counts = _Counts(np.zeros((dump.sizes["B"], layers), int), np.zeros((dump.sizes["B"], layers), int), neighbours)
    for row in range(dump.sizes["B"]):
        used, recorded = (np.sort(dump.stored(name).part(row).astype(np.int64)) for name in (USED, RECORDED))
        known, differs = _compare(used, recorded)
        counts.pairs[row] = known.sum(0)
        counts.differing[row] = differs.sum(0)
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
    lost = np.flatnonzero(counts.differing.any(0))
    layers = counts.pairs.shape[1]
    if len(lost) < layers:
        text = f"routes not replayed in layer {', '.join(map(str, lost))} of the {layers} with experts"
        return make("routes", "not replayed in some layers", text)
    text = f"routes not replayed: the trainer chose other experts for {share:.3g} % of the pairs of token and layer"
    return make("routes", "not replayed", text)


def _flips(counts: _Counts, dump: Dump) -> Iterator[str]:
    shares = 100 * counts.differing.sum(0) / np.maximum(counts.pairs.sum(0), 1)
    yield f"routes: other experts used than recorded, % by layer: {_listed(shares, '.3g')}"
    if LAG in dump:
        lags = dump.read(LAG)
        for lag in np.unique(lags):
            differing, pairs = (part[lags == lag].sum() for part in (counts.differing, counts.pairs))
            share = 100 * differing / max(pairs, 1)
            yield f"routes: other experts used than recorded at a lag of {lag:g}: {share:.3g} %"


def _listed(values: Iterable[float], form: str) -> str:
    return ", ".join(format(value, form) for value in values)
