"""Tokens packed into tiles in their order, and the vocabulary cut into chunks in which every column counts once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kljax import Tile
from kljax.log_probs._inputs import Spec, Weights
from kljax.log_probs._tiles import (
    Chunk,
    MeshAxes,
    chunk_width,
    get_tile,
    pack,
    plan_packing,
    scan_chunks,
    set_tile,
    tile_rows,
    unpack,
)
from tests import oracles
from tests.kljax.calls import known_options

# ---- tokens ----


@pytest.mark.parametrize("limit", [1, 5, 8, 16, 100, 4096])
@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 21, 64, 1000])
def test_tiles_cover_the_tokens_evenly(tokens: int, limit: int) -> None:
    rows, count = tile_rows(tokens, limit)
    assert 1 <= rows <= limit
    assert rows * count >= tokens
    # No tile more than are needed, and none of them needlessly large: less than 8 rows each are empty.
    assert count == max(1, -(-tokens // limit))
    assert rows * count - tokens < 8 * count


@functools.cache
def packed_and_unpacked(limit: int) -> Any:
    """One program for each number of tokens."""

    def run(mask: jax.Array, tree: Any) -> tuple[Any, Any, Any]:
        packing = plan_packing(mask, mask.shape[0], limit)
        packed = pack(packing, tree)
        return packing.tiles, packed, unpack(packing, packed)

    return jax.jit(run, compiler_options=known_options())


@given(oracles.mask_rows(24), st.sampled_from([1, 9, 24]), st.sampled_from([1, 5, 32]))
def test_unmasked_tokens_are_packed_in_their_order(kept: list[bool], tokens: int, limit: int) -> None:
    mask = np.resize(np.array([*kept, False], bool), tokens)
    values = np.arange(1, 1 + tokens, dtype=np.float32)
    tree = {"flat": values, "wide": values[:, None] * np.ones((1, 3), np.float32)}
    tiles, packed, unpacked = jax.device_get(packed_and_unpacked(limit)(mask, tree))
    size, count = tile_rows(tokens, limit)
    assert packed["flat"].shape == (size * count,)
    assert packed["wide"].shape == (size * count, 3)
    np.testing.assert_array_equal(packed["flat"][: mask.sum()], values[mask])
    np.testing.assert_array_equal(packed["wide"][:, 1], packed["flat"])
    assert int(tiles) == -(-int(mask.sum()) // size)
    np.testing.assert_array_equal(unpacked["flat"], np.where(mask, values, 0))
    np.testing.assert_array_equal(unpacked["wide"][:, 2], np.where(mask, values, 0))


@pytest.mark.parametrize("limit", [1, 4, 8, 32])
@pytest.mark.parametrize("total", [0, 1, 8, 21])
def test_tokens_without_a_mask_stay_in_place(total: int, limit: int) -> None:
    packing = plan_packing(None, total, limit)
    values = jnp.arange(1, 1 + total, dtype=jnp.float32)
    packed = pack(packing, values)
    assert packed.shape == (packing.rows,)
    np.testing.assert_array_equal(packed[:total], values)
    np.testing.assert_array_equal(unpack(packing, packed), values)
    assert packing.tiles * packing.tile_size == packing.rows >= total


def test_the_mask_is_traced() -> None:
    traces = []

    def run(mask: jax.Array, values: jax.Array) -> tuple[Any, Any]:
        traces.append(mask)
        packing = plan_packing(mask, 10, 4)
        return packing.tiles, unpack(packing, pack(packing, values))

    program = jax.jit(run)
    values = jnp.arange(10.0)
    for count, tiles in ((0, 0), (3, 1), (4, 1), (5, 2), (10, 3)):
        mask = jnp.arange(10) >= 10 - count
        got, unpacked = program(mask, values)
        assert int(got) == tiles
        np.testing.assert_array_equal(unpacked, jnp.where(mask, values, 0))
    assert len(traces) == 1


def test_a_tile_is_cut_and_put_back() -> None:
    packing = plan_packing(None, 10, 4)
    values = pack(packing, {"x": jnp.arange(10.0), "y": jnp.ones((10, 2))})
    tile = get_tile(packing, jnp.int32(1), values)
    np.testing.assert_array_equal(tile["x"], values["x"][packing.tile_size : 2 * packing.tile_size])
    assert tile["y"].shape == (packing.tile_size, 2)
    changed = set_tile(packing, jnp.int32(1), values, jax.tree.map(lambda x: -x, tile))
    np.testing.assert_array_equal(changed["x"][packing.tile_size : 2 * packing.tile_size], -tile["x"])
    np.testing.assert_array_equal(changed["x"][: packing.tile_size], values["x"][: packing.tile_size])
    np.testing.assert_array_equal(changed["x"][2 * packing.tile_size :], values["x"][2 * packing.tile_size :])


# ---- the vocabulary ----


@pytest.mark.parametrize("limit", [1, 5, 128, 200, 256, 4096])
@pytest.mark.parametrize("columns", [1, 4, 5, 127, 128, 129, 300, 1000, 1187])
def test_chunks_cover_the_vocabulary_evenly(columns: int, limit: int) -> None:
    width = chunk_width(columns, limit)
    assert 1 <= width <= min(columns, limit)
    # No chunk more than are needed, and less than 128 columns of each are shared.
    count = -(-columns // width)
    assert count == -(-columns // limit)
    assert count * width - columns < 128 * count


def test_chunks_of_an_awkward_vocabulary_hardly_overlap() -> None:
    assert {limit: chunk_width(151_936, limit) for limit in (896, 2304, 3456)} == {896: 896, 2304: 2304, 3456: 3456}
    assert 66 * 2304 - 151_936 == 44 * 3456 - 151_936 == 128


@pytest.mark.parametrize(("columns", "limit"), [(1, 1), (12, 4), (13, 4), (15, 4), (5, 4), (300, 256), (9, 100)])
def test_every_column_counts_once_and_is_written_last(columns: int, limit: int) -> None:
    spec = Spec("dv", "dv", columns, Tile(1, limit), None)
    head = jnp.arange(2 * columns, dtype=jnp.float32).reshape(2, columns)
    weights = Weights(jnp.zeros((1, 2), jnp.float32), head)

    def body(carry: tuple, chunk: Chunk) -> tuple:
        counted, written, copied = carry
        at = chunk.start + jnp.arange(chunk.size, dtype=jnp.int32)
        valid = jnp.ones(chunk.size, bool) if chunk.valid is None else chunk.valid
        assert chunk.head.shape == (2, chunk.size)
        # What does not count is written as 0, as a gradient would be.
        return (
            counted.at[at].add(valid.astype(jnp.int32)),
            written.at[at].set(valid),
            copied.at[:, at].set(jnp.where(valid, chunk.head, 0)),
        )

    start = jnp.zeros(columns, jnp.int32), jnp.zeros(columns, bool), jnp.zeros_like(head)
    counted, written, copied = scan_chunks(spec, weights, body, start)
    np.testing.assert_array_equal(counted, 1)
    assert written.all()
    np.testing.assert_array_equal(copied, head)


def test_columns_are_taken_from_overlapping_pieces() -> None:
    head = jnp.stack([jnp.arange(5000.0), 10_000 + jnp.arange(5000.0)])
    at = jnp.array([0, 2047, 2048, 4095, 4096, 2951, 2952, 4999, -1, 5000])
    taken = MeshAxes().take_columns(head, at, 0)
    expected = [[n, 10_000 + n] if 0 <= n < 5000 else [0, 0] for n in at.tolist()]
    np.testing.assert_array_equal(taken, expected)
    np.testing.assert_array_equal(MeshAxes().take_columns(head.T, at[:-2], 1), expected[:-2])
