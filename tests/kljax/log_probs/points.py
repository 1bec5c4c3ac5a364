"""Points of a grid of options, few enough to compile each, in which every two values of two options meet."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Point = dict[str, Any]


def pairwise(options: Mapping[str, Sequence[Any]]) -> list[Point]:
    """Points that hold every pair of values of every two options; the greedy choice, the same every time."""
    names = list(options)
    missing = {
        ((first, i), (other, j))
        for first, other in itertools.combinations(names, 2)
        for i in range(len(options[first]))
        for j in range(len(options[other]))
    }
    points = []
    while missing:
        chosen: dict[str, int] = dict(min(missing))
        while len(chosen) < len(names):
            # Of all values of the options that are open, the one that settles the most pairs with what is chosen.
            open_values = [(name, i) for name in names if name not in chosen for i in range(len(options[name]))]
            gains = [len({pair for a in chosen.items() for pair in ((a, b), (b, a))} & missing) for b in open_values]
            name, i = open_values[gains.index(max(gains))]
            chosen[name] = i
        missing -= set(itertools.combinations([(name, chosen[name]) for name in names], 2))
        points.append({name: options[name][chosen[name]] for name in names})
    return points
