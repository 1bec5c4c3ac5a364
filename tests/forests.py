"""Random forests of sequences in slots, their spans, and the keys of each slot by its definition."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from train.models.attention.spans import Spans

KINDS = ("rows", "packed", "groups", "turns", "trees")


@dataclasses.dataclass(frozen=True)
class DrawnForest:
    """Rows of slots in depth-first order.

    Attributes:
      parents: [R, W] int, the slot before on the path; -1 for a root; W for padding.
      end: [R, W] int, one past the last slot that continues the token; slot + 1 for padding.
      depth: [R, W] int, position in the sequence.
    """

    parents: np.ndarray
    end: np.ndarray
    depth: np.ndarray

    @property
    def real(self) -> np.ndarray:
        """The slots that are no padding."""
        return self.parents < self.parents.shape[1]

    def keys(self, window: int | None = None) -> np.ndarray:
        """The mask [R, W, W] by its definition: the path from a slot to its root, the last `window` tokens of it."""
        rows, width = self.parents.shape
        mask = np.zeros((rows, width, width), bool)
        for row, slot in np.ndindex(rows, width):
            path, at = [slot], self.parents[row, slot]
            while 0 <= at < width:
                path.append(at)
                at = self.parents[row, at]
            mask[row, slot, path[:window]] = True
        return mask

    def spans(self, window: int | None = None) -> Spans:
        """The spans, in sliding layers with a window."""

        def start(window: int | None) -> jnp.ndarray:
            first = np.tile(np.arange(self.end.shape[1]), (len(self.end), 1))
            for row, slot in np.ndindex(first.shape):
                for _ in range(len(first[row]) if window is None else window - 1):
                    before = self.parents[row, first[row, slot]]
                    first[row, slot] = before if 0 <= before < first.shape[1] else first[row, slot]
            return jnp.asarray(first, jnp.int32)

        return Spans(jnp.asarray(self.end, jnp.int32), start(None), None if window is None else start(window))


def draw(kind: str, width: int, rng: np.random.Generator, rows: int = 2, mean: int = 6, align: int = 1) -> DrawnForest:
    """Draws rows of one kind: single sequences, several, groups that share a prompt, or trees; the rest is padding.

    Args:
      kind: one of KINDS.
      width: W.
      rng: decides.
      rows: R.
      mean: length of a run of tokens.
      align: trees begin at multiples of it.
    """
    parents = np.full((rows, width), width)
    end = np.tile(np.arange(1, width + 1), (rows, 1))
    depth = np.zeros((rows, width), int)

    def write(row: int, at: int, parent: int, levels: int, children: int) -> int:
        """Writes a run and its subtrees from slot `at` on; returns the slot after them."""
        first, length = at, min(int(rng.integers(1, 2 * mean)), width - at)
        for slot in range(at, at + length):
            parents[row, slot] = parent
            depth[row, slot] = 0 if parent < 0 else depth[row, parent] + 1
            parent = slot
        at += length
        for _ in range(children if levels else 0):
            if length and at < width:
                at = write(row, at, parent, levels - 1, int(rng.integers(1, 4)))
        end[row, first : first + length] = at
        return at

    for row in range(rows):
        at = 0
        for _ in range({"rows": 1, "turns": 2, "packed": 4, "groups": 2, "trees": 2}[kind]):
            at = -(-at // align) * align
            levels, children = {"groups": (1, 4), "trees": (3, 2)}.get(kind, (0, 0))
            if at < width:
                at = write(row, at, -1, levels, children)
    return DrawnForest(parents, end, depth)
