"""Tokens packed into tiles: those that are kept in their order at the front, as many tiles as hold one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kljax.log_probs._rows import arrange, pack, put_tile, tile_of, unpack
from kljax.log_probs._tiles import tile_rows
from tests import oracles


@pytest.mark.parametrize("limit", [1, 5, 8, 16, 100, 4096])
@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 21, 64, 1000])
def test_tiles_cover_the_tokens_evenly(tokens: int, limit: int) -> None:
    rows, count = tile_rows(tokens, limit)
    assert 1 <= rows <= limit
    assert rows * count >= tokens
    # No tile more than are needed, and none of them needlessly large: less than 8 rows each are empty.
    assert count == max(1, -(-tokens // limit))
    assert rows * count - tokens < 8 * count


@given(oracles.mask_rows(24), st.sampled_from([1, 5, 32]))
def test_kept_tokens_are_packed_in_their_order(kept: list[bool], limit: int) -> None:
    mask = np.array(kept, bool)
    values = np.arange(1, 1 + mask.size, dtype=np.float32)
    tree = {"flat": jnp.asarray(values), "wide": jnp.asarray(values)[:, None] * jnp.ones((1, 3), jnp.float32)}
    rows = arrange(jnp.asarray(mask), mask.size, limit)
    packed = pack(rows, tree)
    assert packed["flat"].shape == (rows.padded,)
    assert packed["wide"].shape == (rows.padded, 3)
    np.testing.assert_array_equal(packed["flat"][: mask.sum()], values[mask])
    np.testing.assert_array_equal(packed["wide"][:, 1], packed["flat"])
    assert int(rows.tiles) == -(-int(mask.sum()) // rows.size)
    unpacked = unpack(rows, packed)
    np.testing.assert_array_equal(unpacked["flat"], np.where(mask, values, 0))
    np.testing.assert_array_equal(unpacked["wide"][:, 2], np.where(mask, values, 0))


@pytest.mark.parametrize("limit", [1, 4, 8, 32])
@pytest.mark.parametrize("total", [0, 1, 8, 21])
def test_without_a_mask_all_tokens_stay_where_they_are(total: int, limit: int) -> None:
    rows = arrange(None, total, limit)
    values = jnp.arange(1, 1 + total, dtype=jnp.float32)
    packed = pack(rows, values)
    assert packed.shape == (rows.padded,)
    np.testing.assert_array_equal(packed[:total], values)
    np.testing.assert_array_equal(unpack(rows, packed), values)
    assert rows.tiles * rows.size == rows.padded >= total


def test_the_mask_is_traced() -> None:
    def run(mask: jax.Array, values: jax.Array) -> tuple[Any, Any]:
        rows = arrange(mask, 10, 4)
        return rows.tiles, unpack(rows, pack(rows, values))

    program = jax.jit(run)
    values = jnp.arange(10.0)
    for count, tiles in ((0, 0), (3, 1), (4, 1), (5, 2), (10, 3)):
        mask = jnp.arange(10) >= 10 - count
        got, unpacked = program(mask, values)
        assert int(got) == tiles
        np.testing.assert_array_equal(unpacked, jnp.where(mask, values, 0))
    assert program._cache_size() == 1


def test_a_tile_is_cut_and_put_back() -> None:
    rows = arrange(None, 10, 4)
    values = pack(rows, {"x": jnp.arange(10.0), "y": jnp.ones((10, 2))})
    tile = tile_of(rows, jnp.int32(1), values)
    np.testing.assert_array_equal(tile["x"], values["x"][rows.size : 2 * rows.size])
    assert tile["y"].shape == (rows.size, 2)
    changed = put_tile(rows, jnp.int32(1), values, jax.tree.map(lambda x: -x, tile))
    np.testing.assert_array_equal(changed["x"][rows.size : 2 * rows.size], -tile["x"])
    np.testing.assert_array_equal(changed["x"][: rows.size], values["x"][: rows.size])
    np.testing.assert_array_equal(changed["x"][2 * rows.size :], values["x"][2 * rows.size :])
