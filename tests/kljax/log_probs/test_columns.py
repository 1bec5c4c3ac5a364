"""The vocabulary in chunks of one width: every column counts once, also where the chunks do not fit."""

import jax.numpy as jnp
import numpy as np
import pytest

from kljax import Tile
from kljax.log_probs._columns import Columns, chunk_width, over_columns
from kljax.log_probs._inputs import Weights
from kljax.log_probs._options import Spec


@pytest.mark.parametrize("limit", [1, 5, 128, 200, 256, 4096])
@pytest.mark.parametrize("columns", [1, 4, 5, 127, 128, 129, 300, 1000, 1187])
def test_chunks_cover_the_vocabulary_evenly(columns: int, limit: int) -> None:
    width = chunk_width(columns, limit)
    assert 1 <= width <= min(columns, limit)
    # No chunk more than are needed, and less than 128 columns of each are shared.
    count = -(-columns // width)
    assert count == -(-columns // limit)
    assert count * width - columns < 128 * count


def test_a_vocabulary_of_128_times_a_prime_number_shares_next_to_nothing() -> None:
    assert {limit: chunk_width(151_936, limit) for limit in (896, 2304, 3456)} == {896: 896, 2304: 2304, 3456: 3456}
    assert 66 * 2304 - 151_936 == 44 * 3456 - 151_936 == 128


@pytest.mark.parametrize(("columns", "limit"), [(1, 1), (12, 4), (13, 4), (15, 4), (5, 4), (300, 256), (9, 100)])
def test_every_column_counts_once_and_is_written_last_where_it_counts(columns: int, limit: int) -> None:
    spec = Spec("dv", columns, Tile(1, limit), None, entropy=False, entropy_gradient=False, divergence=None)
    head = jnp.arange(2 * columns, dtype=jnp.float32).reshape(2, columns)
    weights = Weights(jnp.zeros((1, 2), jnp.float32), head)

    def body(carry: tuple, chunk: Columns) -> tuple:
        counted, written, copied = carry
        at = chunk.start + jnp.arange(chunk.size, dtype=jnp.int32)
        known = jnp.ones(chunk.size, bool) if chunk.known is None else chunk.known
        assert chunk.head.shape == (2, chunk.size)
        # What does not count is written as 0, as a gradient would be.
        return (
            counted.at[at].add(known.astype(jnp.int32)),
            written.at[at].set(known),
            copied.at[:, at].set(jnp.where(known, chunk.head, 0)),
        )

    start = jnp.zeros(columns, jnp.int32), jnp.zeros(columns, bool), jnp.zeros_like(head)
    counted, written, copied = over_columns(spec, weights, body, start)
    np.testing.assert_array_equal(counted, 1)
    assert written.all()
    np.testing.assert_array_equal(copied, head)
