"""Stop strings, matched byte by byte in the compiled program, wherever the borders between tokens are."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StopTable:
    """The transition table of the search: `next` [states, V] int32. State 0 has seen nothing, the last one a match."""

    next: jax.Array

    @property
    def matched(self) -> int:
        """The state after a match, which is never left."""
        return self.next.shape[0] - 1

    def advance(self, states: jax.Array, tokens: jax.Array) -> jax.Array:
        """The states [B] after one more token each, [B]."""
        return self.next[states, tokens]


def _byte_automaton(patterns: Sequence[bytes]) -> np.ndarray:
    """[states, 256]: Aho and Corasick's automaton, with one state for all matches, the last, which is never left."""
    prefixes = sorted({pattern[:end] for pattern in patterns for end in range(len(pattern))}, key=len)
    numbers = {prefix: state for state, prefix in enumerate(prefixes)}
    table = np.full((len(prefixes) + 1, 256), len(prefixes), np.int32)
    for prefix, state in numbers.items():
        for byte in range(256):
            seen = prefix + bytes((byte,))
            if not any(seen.endswith(pattern) for pattern in patterns):
                table[state, byte] = next(numbers[seen[cut:]] for cut in range(len(seen) + 1) if seen[cut:] in numbers)
    return table


def stop_table(stops: Sequence[str], token_bytes: Sequence[bytes]) -> StopTable | None:
    """The table of a vocabulary; None without stop strings.

    Args:
      stops: the strings; UTF-8 bytes are compared.
      token_bytes: what each token adds to the text; a token that adds nothing leaves a search as it is.

    Raises:
      ValueError: an empty stop string.

    Example:
      >>> table = stop_table(["ab"], [b"a", b"b", b"cab", b""])
      >>> table.next.tolist()
      [[1, 0, 2, 0], [1, 2, 2, 1], [2, 2, 2, 2]]
    """
    if not stops:
        return None
    if "" in stops:
        raise ValueError("stop: got an empty string, expected at least one character")
    automaton = _byte_automaton([stop.encode() for stop in stops])
    lengths = np.array([len(piece) for piece in token_bytes])
    states = np.repeat(np.arange(len(automaton), dtype=np.int32)[:, None], len(token_bytes), axis=1)
    for place in range(lengths.max(initial=0)):
        longer = np.flatnonzero(lengths > place)
        byte = np.array([token_bytes[int(token)][place] for token in longer])
        states[:, longer] = automaton[states[:, longer], byte]
    return StopTable(jnp.asarray(states))
