"""Stop strings, matched byte by byte in the compiled program, independently of token boundaries."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StopTable:
    """The transition table of the search for stop strings.

    Attributes:
      next: [states, V] int32, the state after each token. State 0 has matched no byte, the last state a whole string.
    """

    next: jax.Array

    @property
    def matched(self) -> int:
        """The state after a match, which is final."""
        return self.next.shape[0] - 1

    def advance(self, states: jax.Array, tokens: jax.Array) -> jax.Array:
        """Returns the states [B] after one more token of each row, [B]."""
        return self.next[states, tokens]


def row_ends(
    tokens: jax.Array, eos_ids: jax.Array | np.ndarray, stop: StopTable | None, states: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns which tokens [B] end their rows, by EOS or a stop string, and the states [B] of the search after them."""
    ended = jnp.any(tokens[:, None] == eos_ids, axis=1)
    if stop is not None:
        states = stop.advance(states, tokens)
        ended |= states == stop.matched
    return ended, states


def _byte_automaton(patterns: Sequence[bytes]) -> np.ndarray:
    """Builds the Aho-Corasick automaton [states, 256]; all matches share the last state, which is final."""
    prefixes = sorted({pattern[:end] for pattern in patterns for end in range(len(pattern))}, key=len)
    states = {prefix: state for state, prefix in enumerate(prefixes)}
    table = np.full((len(prefixes) + 1, 256), len(prefixes), np.int32)
    for prefix, state in states.items():
        for byte in range(256):
            seen = prefix + bytes((byte,))
            if not any(seen.endswith(pattern) for pattern in patterns):
                suffixes = (seen[start:] for start in range(len(seen) + 1))
                table[state, byte] = next(states[suffix] for suffix in suffixes if suffix in states)
    return table


def stop_table(stops: Sequence[str], token_bytes: Sequence[bytes]) -> StopTable | None:
    """Builds the transition table of a vocabulary; returns None without stop strings.

    Args:
      stops: the strings, compared as UTF-8 bytes.
      token_bytes: [V] the bytes that each token adds to the text; a token without bytes does not change the state.

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
    for index in range(lengths.max(initial=0)):
        longer = np.flatnonzero(lengths > index)
        byte = np.array([token_bytes[int(token)][index] for token in longer])
        states[:, longer] = automaton[states[:, longer], byte]
    return StopTable(jnp.asarray(states))
