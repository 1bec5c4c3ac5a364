"""Changes of the words of arrays, and how many of them leave the lanes of a digest as they were.

    python -m tests.kljax.word_changes             1,000,000 changes of each kind; about five minutes
    python -m tests.kljax.word_changes 10000       as many of each kind

A change is missed if both lanes of every row stay; the columns of one lane show how much the other one adds.
"""

import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from kljax.checkpoint import _lanes as lanes

ROWS, COLUMNS = 2, 48
SIGN = np.uint32(1 << 31)
Draw = np.random.Generator
Change = Callable[[Draw, np.ndarray], np.ndarray]


class Missed(NamedTuple):
    """Counts of changes: all, those that no lane shows, and those that the first or the second does not show."""

    changes: int
    both: int
    first: int
    second: int


def _positions(draw: Draw, words: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws some columns of one row of each array, without a repeated one; an index of the words."""
    batch, rows, columns = words.shape
    order = np.argpartition(draw.random((batch, columns), np.float32), count, axis=-1)[:, :count]
    return np.arange(batch)[:, None], draw.integers(rows, size=(batch, 1)), order


def _at_some(count: int, change: Callable[[Draw, np.ndarray], np.ndarray]) -> Change:
    """Makes a change of some words of one row: `change` maps them, [N, count], to others."""

    def changed(draw: Draw, words: np.ndarray) -> np.ndarray:
        index, out = _positions(draw, words, count), words.copy()
        out[index] = change(draw, out[index])
        return out

    return changed


def _random(draw: Draw, words: np.ndarray) -> np.ndarray:
    return draw.integers(1 << 32, size=words.shape, dtype=np.uint32)


def _one_bit_each(draw: Draw, words: np.ndarray) -> np.ndarray:
    return words ^ np.uint32(1) << draw.integers(32, size=words.shape, dtype=np.uint32)


def _same_bit(draw: Draw, words: np.ndarray) -> np.ndarray:
    return words ^ np.uint32(1) << draw.integers(32, size=(len(words), 1), dtype=np.uint32)


def _sum_preserved(draw: Draw, words: np.ndarray) -> np.ndarray:
    added = _random(draw, words)
    added[:, -1] -= added.sum(axis=-1, dtype=np.uint32)
    return words + added


def _xor_preserved(draw: Draw, words: np.ndarray) -> np.ndarray:
    flipped = _random(draw, words)
    flipped[:, -1] ^= np.bitwise_xor.reduce(flipped, axis=-1)
    return words ^ flipped


def _bit_moved(draw: Draw, words: np.ndarray) -> np.ndarray:
    """Moves a bit that is set in the first word and not in the second, if there is one."""
    movable = words[:, 0] & ~words[:, 1]
    moved = movable & (~movable + np.uint32(1))
    return np.stack([words[:, 0] ^ moved, words[:, 1] ^ moved], axis=-1)


def _blocks(swapped: bool) -> Change:
    """Swaps two blocks of a row, or copies one over the other."""

    def changed(draw: Draw, words: np.ndarray) -> np.ndarray:
        size = int(draw.integers(1, words.shape[-1] // 2))
        first = int(draw.integers(words.shape[-1] - 2 * size + 1))
        second = int(draw.integers(first + size, words.shape[-1] - size + 1))
        out, row = words.copy(), int(draw.integers(words.shape[1]))
        out[:, row, second : second + size] = words[:, row, first : first + size]
        if swapped:
            out[:, row, first : first + size] = words[:, row, second : second + size]
        return out

    return changed


def _zeroed(draw: Draw, words: np.ndarray) -> np.ndarray:
    first, last = sorted(draw.choice(words.shape[-1] + 1, 2, replace=False).tolist())
    out = words.copy()
    out[:, int(draw.integers(words.shape[1])), first:last] = 0
    return out


def _row_shifted(draw: Draw, words: np.ndarray) -> np.ndarray:
    out, row = words.copy(), int(draw.integers(words.shape[1]))
    out[:, row] = np.roll(out[:, row], int(draw.integers(1, words.shape[-1])), axis=-1)
    return out


def _row_reversed(draw: Draw, words: np.ndarray) -> np.ndarray:
    out, row = words.copy(), int(draw.integers(words.shape[1]))
    out[:, row] = out[:, row, ::-1]
    return out


KINDS: dict[str, Change] = {
    "one word": _at_some(1, _random),
    "two words": _at_some(2, _random),
    "three words": _at_some(3, _random),
    "four words": _at_some(4, _random),
    "a bit in each of two words": _at_some(2, _one_bit_each),
    "a bit in each of three words": _at_some(3, _one_bit_each),
    "a bit in each of four words": _at_some(4, _one_bit_each),
    "the same bit in two words": _at_some(2, _same_bit),
    "the same bit in three words": _at_some(3, _same_bit),
    "the same bit in four words": _at_some(4, _same_bit),
    "the signs of four pairs of bfloat16": _at_some(4, lambda _, words: words ^ (SIGN | SIGN >> np.uint32(16))),
    "the signs of two words": _at_some(2, lambda _, words: words ^ SIGN),
    "the signs of four words": _at_some(4, lambda _, words: words ^ SIGN),
    "two words, sum preserved": _at_some(2, _sum_preserved),
    "four words, sum preserved": _at_some(4, _sum_preserved),
    "two words, exclusive or preserved": _at_some(2, _xor_preserved),
    "a bit moved to another word": _at_some(2, _bit_moved),
    "two words swapped": _at_some(2, lambda _, words: words[:, ::-1]),
    "four words rotated": _at_some(4, lambda _, words: np.roll(words, 1, axis=-1)),
    "two blocks swapped": _blocks(swapped=True),
    "a block copied over another": _blocks(swapped=False),
    "a block of zeros": _zeroed,
    "a row shifted": _row_shifted,
    "a row reversed": _row_reversed,
    "all rows reversed": lambda _, words: words[..., ::-1].copy(),
    "rows swapped": lambda _, words: words[:, ::-1].copy(),
    "a matrix negated": lambda _, words: words ^ SIGN,
    "a matrix inverted": lambda _, words: ~words,
}


def _high_half(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    """Draws a normal number in bfloat16, in the high half of a word."""
    return draw.standard_normal(shape, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)


CONTENTS: dict[str, Callable[[Draw, tuple[int, ...]], np.ndarray]] = {
    "normal float32": lambda draw, shape: draw.standard_normal(shape, np.float32).view(np.uint32),
    "pairs of bfloat16": lambda draw, shape: _high_half(draw, shape) | _high_half(draw, shape) >> np.uint32(16),
    "small integers": lambda draw, shape: draw.integers(8, size=shape, dtype=np.uint32),
    "zeros": lambda _, shape: np.zeros(shape, np.uint32),
}


def missed(name: str, number: int, draw: Draw, *, batch: int = 4096) -> Missed:
    """Makes about a number of changes of a kind, and counts the missed; a change that changes nothing is none."""
    total = np.zeros(4, np.int64)
    for content in CONTENTS.values():
        for start in range(0, number // len(CONTENTS), batch):
            words = content(draw, (min(batch, number // len(CONTENTS) - start), ROWS, COLUMNS))
            total += _count(words, KINDS[name](draw, words))
    return Missed(*total.tolist())


def _count(words: np.ndarray, changed: np.ndarray) -> np.ndarray:
    real = (words != changed).any(axis=(1, 2))
    same = (lanes.host_lanes(words) == lanes.host_lanes(changed)).all(axis=2)[:, real]
    return np.array([real.sum(), same.all(axis=0).sum(), same[0].sum(), same[1].sum()])


def report(number: int) -> Iterator[str]:
    """Yields the lines of the table."""
    yield "| change | changes | missed | missed by the first lane | by the second |"
    yield "|---|--:|--:|--:|--:|"
    for name in KINDS:
        counted = missed(name, number, np.random.default_rng(0))
        yield f"| {name} | {counted.changes:,} | {counted.both} | {counted.first} | {counted.second} |"


if __name__ == "__main__":
    for line in report(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000):
        print(line, flush=True)
