"""Routes of a mixture of experts: whether the trainer used the experts that the sampler recorded, and their loads."""

import collections
import math
from collections.abc import Iterable, Iterator

import numpy as np

from kljax.tools.parity.causes import Cause
from kljax.tools.parity.dump import Dump
from kljax.tools.parity.report import Difference, Finding

RECORDED = "routed_experts"
USED = "used_experts"
LAG = "lag"
ENTROPY = "router_entropy"
SHIFTS = {"before": 1, "after": -1}
"""How far a recording is moved so that a token has the experts of a neighbour."""


def compare_routes(dump: Dump) -> tuple[tuple[Difference, ...], tuple[Finding, ...], tuple[str, ...]]:
    """Compares the experts that were used with the recorded ones, as sets, wherever both are known.

    Returns the difference, the finding if there is one, and notes; nothing if a side is not recorded.
    """
    if RECORDED not in dump or USED not in dump:
        return (), (), ()
    rows = dump.sizes["B"]
    layers = dump.sizes["L"]
    # Pairs of a token and a layer whose experts are known on both sides, and those that differ.
    pairs, differing = np.zeros((2, rows, layers), int)
    neighbours = {name: np.zeros(2, int) for name in SHIFTS}
    first: tuple[int, ...] = ()
    # Routes are the largest array of a dump after logits.
    for row in range(rows):
        used, recorded = (np.sort(dump.stored(name).part(row).astype(np.int64)) for name in (USED, RECORDED))
        known, differs = _compare(used, recorded)
        pairs[row] = known.sum(0)
        differing[row] = differs.sum(0)
        for name, shift in SHIFTS.items():
            overlap = slice(max(shift, 0), len(used) + min(shift, 0))
            counted = _compare(used[overlap], np.roll(recorded, shift, axis=0)[overlap])
            neighbours[name] += [part.sum() for part in counted]
        if not first and differs.any():
            token, layer = map(int, np.argwhere(differs)[0])
            index = int(np.argmax(used[token, layer] != recorded[token, layer]))
            first = (row, token, int(used[token, layer, index]), int(recorded[token, layer, index]))
    if not first:
        return (Difference(USED, compared=int(pairs.sum())),), (), ()
    row, token, chosen, wanted = first
    difference = Difference(
        USED,
        absolute=abs(chosen - wanted),
        relative=abs(chosen - wanted) / max(wanted, 1),
        at=(row, token),
        recorded=chosen,
        expected=wanted,
        excess=math.inf,
        compared=int(pairs.sum()),
    )
    lost = np.flatnonzero(differing.any(0))
    share = 100 * differing.sum() / pairs.sum()
    text = f"routes not replayed: the trainer chose other experts for {share:.3g} % of the pairs of token and layer"
    cause = Cause("routes", "not replayed", text)
    if len(lost) < layers:
        text = f"routes not replayed in layer {', '.join(map(str, lost))} of the {layers} with experts"
        cause = Cause("routes", "not replayed in some layers", text)
    for name in (name for name, (known, wrong) in neighbours.items() if known and not wrong):
        text = f"routes are shifted by one token: the trainer used the recorded experts of the token {name}"
        cause = Cause("routes", f"of the token {name}", text)
    shares = _listed(100 * differing.sum(0) / np.maximum(pairs.sum(0), 1), ".3g")
    notes = [f"routes: other experts used than recorded, % by layer: {shares}"]
    lags = dump.read(LAG) if LAG in dump else np.zeros(0)
    for lag in np.unique(lags):
        share = 100 * differing[lags == lag].sum() / max(pairs[lags == lag].sum(), 1)
        notes.append(f"routes: other experts used than recorded at a lag of {lag:g}: {share:.3g} %")
    return (difference,), (Finding(difference, (cause,)),), tuple(notes)


def _compare(used: np.ndarray, recorded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns which pairs `[T, L]` are known on both sides, and which of them differ."""
    known = (used[..., 0] >= 0) & (recorded[..., 0] >= 0)
    return known, known & (used != recorded).any(-1)


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
        entropies = dump.read(ENTROPY)[dump.read("mask")].mean(0)
        yield f"routers: mean entropy in nats, by layer: {_listed(entropies, '.3f')}"


def uncompared_routes(dump: Dump) -> tuple[tuple[str, str], ...]:
    """Names the routes that a dump has of one side alone."""
    sides = [name for name in (RECORDED, USED) if name in dump]
    return tuple((name, f"needs {USED if name == RECORDED else RECORDED}") for name in sides if len(sides) == 1)


def _listed(values: Iterable[float], form: str) -> str:
    return ", ".join(format(value, form) for value in values)
