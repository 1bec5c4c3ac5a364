"""Sums of the words of a row in which every word is weighted by its position, on the host or where the array is.

An array is a matrix of 32-bit words: its last axis, and all axes before it as rows. A row has two sums modulo 2^32,
its lanes. Word w at position j adds x * p[j] to one and x * q[j] to the other, with y = w * m[j], x = y ^ (y >> 17),
and odd numbers m, p and q that are drawn from the position. Each step is a bijection of the word, so damage to one word
of a row always changes both lanes. The shift mixes high bits into low ones: without it, bit 31 flipped in two words
would cancel, whatever the odd numbers. Lanes of the parts of a row add up, so they do not depend on the sharding.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WORD = 4
SHIFT = np.uint32(17)
ROWS_OF_CPU = 4
"""Rows that a compiled program of a CPU works on at once: fewer compute more weights, more need more registers."""
BLOCK = 1 << 16
"""Words that the host works on at once: they and their weights fit the cache of a core."""


def host_lanes(array: np.ndarray, *, block_size: int = BLOCK) -> np.ndarray:
    """Computes the lanes of a host array, uint32 [2, ...]; an array of one axis or none is its words."""
    words = _host_words(array)
    if words.ndim < 2:
        return words
    rows = words.reshape(math.prod(words.shape[:-1]), words.shape[-1])
    lanes = np.zeros((2, len(rows)), np.uint32)
    for start in range(0, rows.shape[1], block_size):
        columns = rows[:, start : start + block_size]
        height = max(1, min(len(rows), block_size // columns.shape[1]))
        weights = _weights_of_block(start, columns.shape[1], height)
        # New memory for each block would cost more than the sums.
        scratch = np.empty((2, height, columns.shape[1]), np.uint32)
        for first in range(0, len(rows), height):
            block = columns[first : first + height]
            _add_block(lanes[:, first : first + height], block, weights, scratch[:, : len(block)])
    return lanes.reshape(2, *words.shape[:-1])


def device_lanes(array: jax.Array, at_once: int = 1) -> tuple[jax.Array, ...]:
    """Computes the lanes of an array on devices, inside a compiled function, as parts that follow each other.

    To join them there would double the time of the compilation.

    Args:
      array: of any sharding if `at_once` is 1, else on one device.
      at_once: rows that share the computation of the weights, if the number of rows is divisible.
    """
    words = _device_words(array)
    if words.ndim < 2:
        return (words,)
    blocks = [words]
    rows = math.prod(words.shape[:-1])
    if (count := math.gcd(rows, at_once)) > 1:
        blocks = list(words.reshape(count, rows // count, words.shape[-1]))
    last = blocks[0].ndim - 1
    positions = jax.lax.broadcasted_iota(jnp.uint32, (1,) * last + words.shape[-1:], last)
    m, p, q = position_weights(positions)
    mixed = [(block * m) ^ (block * m >> SHIFT) for block in blocks]
    weighted = [block * weight for weight in (p, q) for block in mixed]
    # CPUs reduce all at once as fast as they read memory, and one after the other at a tenth of that.
    return tuple(jax.lax.reduce(weighted, [jnp.uint32(0)] * len(weighted), _add_lanes, (last,)))


def position_weights(positions: Any) -> tuple[Any, Any, Any]:
    """Draws the three odd numbers of each position, uint32 as the positions."""
    m, p, q = (_scrambled(positions * np.uint32(3) + np.uint32(number)) | np.uint32(1) for number in range(3))
    return m, p, q


def _scrambled(numbers: Any) -> Any:
    """Maps 32-bit numbers one to one onto numbers that look drawn at random."""
    numbers = (numbers ^ numbers >> np.uint32(16)) * np.uint32(0x7FEB352D)
    numbers = (numbers ^ numbers >> np.uint32(15)) * np.uint32(0x846CA68B)
    return numbers ^ numbers >> np.uint32(16)


def _add_lanes(first: Sequence[jax.Array], second: Sequence[jax.Array]) -> list[jax.Array]:
    return [a + b for a, b in zip(first, second, strict=True)]


@functools.lru_cache(maxsize=8)
def _weights_of_block(start: int, width: int, height: int) -> tuple[np.ndarray, ...]:
    """Repeats the weights of some positions over the rows of a block: NumPy multiplies arrays of one shape fastest."""
    weights = position_weights(np.arange(start, start + width, dtype=np.uint32))
    return tuple(np.tile(weight, (height, 1)) for weight in weights)


def _add_block(lanes: np.ndarray, words: np.ndarray, weights: tuple[np.ndarray, ...], scratch: np.ndarray) -> None:
    """Adds the words of a block to the lanes of its rows; overwrites the scratch."""
    m, p, q = (weight[: len(words)] for weight in weights)
    mixed, other = scratch
    np.multiply(words, m, out=mixed)
    np.right_shift(mixed, SHIFT, out=other)
    np.bitwise_xor(mixed, other, out=mixed)
    for lane, weight in enumerate((p, q)):
        np.multiply(mixed, weight, out=other)
        lanes[lane] += np.sum(other, axis=-1, dtype=np.uint32)


def _has_whole_words(shape: tuple[int, ...], size: int) -> bool:
    """Whether the rows of an array are a number of words; otherwise each of its elements, below a word, is one."""
    return size % WORD == 0 or (bool(shape) and shape[-1] * size % WORD == 0)


def _host_words(array: np.ndarray) -> np.ndarray:
    rows = np.atleast_1d(np.ascontiguousarray(array))
    size = array.dtype.itemsize
    if _has_whole_words(array.shape, size):
        return rows.view(np.uint32)
    return rows.view(f"u{size}").astype(np.uint32)


def _device_words(array: jax.Array) -> jax.Array:
    size = array.dtype.itemsize
    rows = jnp.atleast_1d(array.astype(jnp.uint8) if array.dtype == jnp.bool_ else array)
    *leading, width = rows.shape
    if not _has_whole_words(array.shape, size):
        return jax.lax.bitcast_convert_type(rows, jnp.dtype(f"uint{8 * size}")).astype(jnp.uint32)
    if size < WORD:
        rows = rows.reshape(*leading, width * size // WORD, WORD // size)
    words = jax.lax.bitcast_convert_type(rows, jnp.uint32)
    return words.reshape(*leading, -1) if size > WORD else words
