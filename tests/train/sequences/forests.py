"""Random forests, and what a forest has to be by the sequences that it holds."""

from typing import NamedTuple

import numpy as np

from train.sequences.forest import Forest, group_forest
from train.sequences.write_forest import Placed, write_forest


class Drawn(NamedTuple):
    """A batch of sequences in a forest.

    Attributes:
      tokens: [B, T] int32, equal in shared prefixes.
      token_mask: [B, T] bool.
      completion_mask: [B, T] bool, with holes; a token may be trained in one sequence and not in another.
      groups: [B] int32, the first sequence of the tree of each.
      forest: the forest, with arrays of NumPy.
    """

    tokens: np.ndarray
    token_mask: np.ndarray
    completion_mask: np.ndarray
    groups: np.ndarray
    forest: Forest


def draw_forest(
    seed: int, *, units: int = 2, sequences: int = 5, length: int = 9, vocab: int = 24, trees: bool = True
) -> Drawn:
    """Draws sequences that continue others at any token, in rows as they come; without `trees` no two share any."""
    rng = np.random.default_rng(seed)
    columns, width = length + 2, 2 * length
    count = units * sequences
    tokens = rng.integers(0, vocab, (count, columns)).astype(np.int32)
    token_mask, completion_mask = (np.zeros(tokens.shape, bool) for _ in range(2))
    groups = np.arange(count, dtype=np.int32)
    rows: list[list[list[Placed]]] = []
    for unit in range(units):
        of_unit: list[list[Placed]] = [[]]
        used = 0
        for number in range(sequences):
            row = unit * sequences + number
            before = of_unit[-1][-1] if of_unit[-1] else None
            shared = 0 if before is None or not trees or rng.random() < 0.3 else int(rng.integers(1, before.length + 1))
            size = int(rng.integers(max(shared, 2), length + 1))
            if used + size - shared > width:
                of_unit.append([])
                used = shared = 0
            placed = Placed(number, size, int(rng.integers(1, size // 2 + 1)), shared)
            if shared:
                assert before is not None
                source = unit * sequences + before.number
                tokens[row, :shared] = tokens[source, :shared]
                groups[row] = groups[source]
            of_unit[-1].append(placed)
            used += size - shared
            token_mask[row, :size] = True
            completion_mask[row, placed.trained : size] = rng.random(size - placed.trained) < 0.8
        rows.append(of_unit)
    most = max(map(len, rows))
    forest = write_forest(rows, rows=most, width=width, sequences=sequences, columns=columns)
    return Drawn(tokens, token_mask, completion_mask, groups, forest)


def draw_groups(seed: int, *, units: int = 2, sequences: int = 5, prompt: int = 5, vocab: int = 24) -> Drawn:
    """Draws prompts and completions of them in a forest of groups; as wide as `draw_forest`'s."""
    rng = np.random.default_rng(seed)
    columns, count = 11, units * sequences
    groups = np.arange(count, dtype=np.int32) // sequences * sequences
    tokens = rng.integers(0, vocab, (count, columns)).astype(np.int32)
    begins = rng.integers(1, prompt + 1, count)[groups]
    ends = begins + rng.integers(1, columns - prompt + 1, count)
    column = np.arange(columns)
    tokens = np.where(column < begins[:, None], tokens[groups], tokens)
    token_mask = column < ends[:, None]
    completion_mask = token_mask & (column >= begins[:, None]) & (rng.random(tokens.shape) < 0.8)
    forest = group_forest(token_mask, begins, (prompt, columns - prompt), sequences)
    return Drawn(tokens, token_mask, completion_mask, groups, forest)


def paths(forest: Forest, token_mask: np.ndarray) -> list[np.ndarray]:
    """The slots of each sequence that has some, from its first token on, as numbers over all rows."""
    places, units = np.asarray(forest.places), forest.units
    slots = forest.depth.size // units
    found = []
    for row, mask in enumerate(token_mask):
        path = places[row, mask]
        if len(path) and path[0] >= 0:
            found.append(path + row // (len(places) // units) * slots)
    return found


def assert_is_forest(forest: Forest, token_mask: np.ndarray, window: int | None) -> None:
    """Checks depths, spans and counts by the definition: a slot sees the slots before it in its sequences."""
    rows, width = forest.depth.shape
    keys = np.zeros((rows * width, rows * width), bool)
    depth, counts = np.zeros(rows * width, int), np.zeros(rows * width, int)
    for path in paths(forest, token_mask):
        assert (path // width == path[0] // width).all(), "a sequence is in one row"
        depth[path] = np.arange(len(path))
        counts[path] += 1
        for at, slot in enumerate(path):
            keys[slot, path[0 if window is None else max(at + 1 - window, 0) : at + 1]] = True
    real = counts > 0
    np.fill_diagonal(keys, True)
    spans = forest.spans(window)
    start = np.asarray(spans.for_layer(window is not None))
    slots = np.arange(width)
    actual = (
        (start[:, :, None] <= slots) & (slots <= slots[:, None]) & (slots[:, None] < np.asarray(spans.end)[:, None])
    )
    expected = np.stack([keys[row * width : (row + 1) * width, row * width : (row + 1) * width] for row in range(rows)])
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.asarray(forest.depth).reshape(-1), depth)
    np.testing.assert_array_equal(np.asarray(forest.readers[..., 0]).reshape(-1) >= 0, real)
