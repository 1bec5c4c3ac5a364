"""A forest of sequences that share prefixes, written on the host: those of a row one after another, depth first."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from train.sequences.forest import Forest

FEWEST_BRANCHES = 8
"""Branches of a row that programs have at least, so that few of them are compiled."""


class Placed(NamedTuple):
    """A sequence in a row of slots.

    Attributes:
      number: of the sequence within its unit.
      length: its tokens.
      trained: tokens before the first that may be trained.
      shared: its first tokens that are tokens of the sequence before it in the row too, and share their slots. Of all
        sequences before it, this one shares the most: the order is depth first.
    """

    number: int
    length: int
    trained: int
    shared: int = 0


def write_forest(
    units: Sequence[Sequence[Sequence[Placed]]], *, rows: int, width: int, sequences: int, columns: int
) -> Forest:
    """Writes the forest of sequences whose rows, and order in these, are given.

    Args:
      units: the rows of each unit, and the sequences of each row.
      rows: R / U, of each unit; missing ones have no token.
      width: W.
      sequences: B / U.
      columns: T.

    Returns:
      Arrays of NumPy; N and K are rounded up to powers of two.
    """
    written = []
    places = np.full((len(units), sequences, columns), -1, np.int32)
    for unit, of_unit in enumerate(units):
        for at in range(rows):
            row = _Row(width)
            for placed in of_unit[at] if at < len(of_unit) else ():
                path = row.append(placed, columns)
                places[unit, placed.number, : placed.length] = at * width + path
            row.close()
            written.append(row)
    most = _power_of_two(max(FEWEST_BRANCHES, *(len(row.branches) for row in written)))
    branches, parents = (np.full((len(written), most), fill, np.int32) for fill in (width, 0))
    readers = np.full((len(written), width, _power_of_two(max(len(row.readers) for row in written))), -1, np.int32)
    for at, row in enumerate(written):
        branches[at, : len(row.branches)] = row.branches
        parents[at, : len(row.parents)] = row.parents
        readers[at, :, : len(row.readers)] = np.stack(row.readers, axis=-1)
    # The arrays stay on the host until a program takes them.
    arrays: Any = {
        "readers": readers,
        "places": places.reshape(-1, columns),
        "branches": branches,
        "parents": parents,
        **{name: np.stack([getattr(row, name) for row in written]) for name in ("depth", "end", "start", "counts")},
    }
    return Forest(**arrays, units=len(units))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


class _Row:
    """The slots of a row, to which sequences are appended."""

    def __init__(self, width: int) -> None:
        slots = np.arange(width, dtype=np.int32)
        self.start = slots.copy()
        self.end = slots + 1
        self.depth = np.zeros_like(slots)
        self.counts = np.zeros_like(slots)
        self.readers = [np.full_like(slots, -1)]
        self.branches: list[int] = []
        self.parents: list[int] = []
        self._may_train = np.zeros(width, bool)
        self._path = np.zeros(0, np.int32)
        self._used = 0

    def append(self, placed: Placed, columns: int) -> np.ndarray:
        """Appends a sequence, and returns the slots of its tokens."""
        shared = placed.shared
        self.end[self._path[shared:]] = self._used
        new = np.arange(self._used, self._used + placed.length - shared, dtype=np.int32)
        if shared and len(new) and self._path[shared - 1] != self._used - 1:
            self.branches.append(self._used)
            self.parents.append(int(self._path[shared - 1]))
        path = np.concatenate([self._path[:shared], new])
        self._path = path
        self._used = self._used + len(new)
        self.depth[new] = np.arange(shared, placed.length)
        self.start[new] = path[0]
        self.counts[path] += 1
        tokens = placed.number * columns + np.arange(placed.length, dtype=np.int32)
        self.readers[0][new] = tokens[shared:]
        self._may_train[new] = np.arange(shared, placed.length) >= placed.trained
        for depth in range(placed.trained, shared):
            self._add_reader(path[depth], tokens[depth])
        return path

    def close(self) -> None:
        """Ends the last sequence."""
        self.end[self._path] = self._used

    def _add_reader(self, slot: int, token: int) -> None:
        """Adds a token that may be trained to those of its slot, in front of one that may not."""
        if not self._may_train[slot]:
            self._may_train[slot] = True
            self.readers[0][slot] = token
            return
        free = next((readers for readers in self.readers if readers[slot] < 0), None)
        if free is None:
            free = np.full_like(self.readers[0], -1)
            self.readers.append(free)
        free[slot] = token
