"""Packed rows: every statistic of a segment is that of the same sequence in a row of its own."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from kljax import rows

# Masks of the sequences: holes, no token at all, a single one, every one, padding within a sequence.
SEQUENCES = [[0, 1, 0, 1, 1], [0, 0, 0], [1], [1, 1, 1], [0, 0, 1, 0, 0], [1, 0, 1]]
# Which of them share a row; a gap is padding between two segments.
GAP = None
PACKED = [[0, 1, GAP, 2], [3, 4, GAP], [GAP, 5]]
LENGTH = 10
PROMPTS = np.array([0, 0, 1, 2, 1, 0])
EXACT = {"rtol": 1e-12, "atol": 1e-14}


def packed(parts: list[np.ndarray], fill: Any = 0) -> jax.Array:
    """Lays `[n_i]` arrays out as `PACKED` says."""
    out = np.full((len(PACKED), LENGTH), fill, parts[0].dtype)
    for row, members in enumerate(PACKED):
        start = 0
        for member in members:
            if member is not GAP:
                out[row, start : start + len(parts[member])] = parts[member]
            start += 1 if member is GAP else len(parts[member])
    return jnp.asarray(out)


def padded(parts: list[np.ndarray]) -> jax.Array:
    """Lays `[n_i]` arrays out as one row each."""
    return jnp.asarray(np.stack([np.pad(part, (0, LENGTH - len(part))) for part in parts]))


def unpacked(tokens: jax.Array) -> list[np.ndarray]:
    """The `[n_i]` parts of an array in packed rows."""
    places = packed([np.full(len(mask), number) for number, mask in enumerate(SEQUENCES)], -1)
    return [np.asarray(tokens)[np.asarray(places) == number] for number in range(len(SEQUENCES))]


def segment_ids() -> jax.Array:
    """Numbered from 0 in every row; gaps and the rest of the row belong to none."""
    inner = {member: place for members in PACKED for place, member in enumerate(members) if member is not GAP}
    return packed([np.full(len(mask), inner[number]) for number, mask in enumerate(SEQUENCES)], -1)


MASKS = [np.array(mask, bool) for mask in SEQUENCES]


def draw(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=len(mask)) for mask in SEQUENCES]


def test_the_layout_is_what_it_says() -> None:
    np.testing.assert_array_equal(segment_ids()[0], [0, 0, 0, 0, 0, 1, 1, 1, -1, 3])
    chosen = [mask.astype(int) for mask in MASKS]
    for part, mask in zip(unpacked(packed(chosen)), chosen, strict=True):
        np.testing.assert_array_equal(part, mask)


STATISTICS: dict[str, Callable[..., jax.Array]] = {
    "sum": rows.row_sum,
    "count": lambda values, mask, **ids: rows.row_count(mask, **ids),
    "any": lambda values, mask, **ids: rows.row_any(mask, **ids),
    "mean": rows.row_mean,
    "max": functools.partial(rows.row_max, initial=-jnp.inf),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_a_statistic_of_a_segment_is_that_of_its_sequence(name: str) -> None:
    ids = segment_ids()
    whole = jnp.where(ids >= 0, packed(draw(0)), jnp.nan)
    per_segment = STATISTICS[name](whole, packed(MASKS), segment_ids=ids)
    assert per_segment.shape == (len(PACKED), LENGTH)
    parts = unpacked(rows.to_tokens(per_segment, LENGTH, segment_ids=ids))
    for part, values, mask in zip(parts, draw(0), MASKS, strict=True):
        expected = STATISTICS[name](jnp.asarray(values), jnp.asarray(mask))
        assert (expected.dtype, expected.shape) == (per_segment.dtype, (1,))
        np.testing.assert_allclose(part, np.broadcast_to(expected, part.shape), **EXACT)


@pytest.mark.parametrize("name", ["last", "cumsum"])
def test_marks_and_running_sums_stay_within_their_segment(name: str) -> None:
    def of(values: jax.Array, mask: jax.Array, **ids: Any) -> jax.Array:
        return rows.row_last(mask, **ids) if name == "last" else rows.row_cumsum(jnp.where(mask, values, 0), **ids)

    parts = unpacked(of(packed(draw(0)), packed(MASKS), segment_ids=segment_ids()))
    for part, values, mask in zip(parts, draw(0), MASKS, strict=True):
        np.testing.assert_allclose(part, of(jnp.asarray(values), jnp.asarray(mask)), **EXACT)


def test_the_first_token_of_a_segment_is_a_position_of_the_row() -> None:
    ids, mask = segment_ids(), packed(MASKS)
    first = rows.to_tokens(rows.row_first(mask, segment_ids=ids), LENGTH, segment_ids=ids)
    for row, own_ids, own_mask in zip(first, ids, mask, strict=True):
        for segment in set(np.asarray(own_ids)[np.asarray(own_mask)]):
            inside = np.asarray(own_ids) == segment
            expected = np.argmax(np.asarray(own_mask) & inside)
            np.testing.assert_array_equal(np.asarray(row)[inside], expected)


def check_per_sequence(function: Callable[..., Any], arrays: list[list[np.ndarray]]) -> None:
    """Checks values and gradients of `function(*arrays, mask)` against each sequence by itself, without padding."""

    @jax.jit
    def value_and_grads(*arrays: jax.Array, mask: jax.Array, **ids: jax.Array) -> Any:
        def per_token(*arrays: jax.Array) -> Any:
            # A number of a row by itself is given to its tokens.
            return jax.tree.map(lambda leaf: jnp.where(mask, leaf, 0), function(*arrays, mask, **ids))

        value, pull = jax.vjp(per_token, *arrays)
        return value, pull(jax.tree.map(jnp.ones_like, value))

    together = value_and_grads(*map(packed, arrays), mask=packed(MASKS), segment_ids=segment_ids())
    for leaf in jax.tree.leaves(together):
        np.testing.assert_array_equal(np.asarray(leaf)[np.asarray(segment_ids()) < 0], 0)
    of_sequences = [unpacked(leaf) for leaf in jax.tree.leaves(together)]
    for number, mask in enumerate(MASKS):
        alone = value_and_grads(*(jnp.asarray(array[number]) for array in arrays), mask=jnp.asarray(mask))
        for part, expected in zip((leaf[number] for leaf in of_sequences), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(part, expected, **EXACT)


@pytest.mark.parametrize("function", [kljax.sequence_ratios, kljax.geometric_ratios])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_ratios(function: Callable[..., Any], clip: float | None) -> None:
    check_per_sequence(functools.partial(function, log_ratio_clip=clip), [draw(0), draw(1)])


@pytest.mark.parametrize("rule", ["skip", "reset", "zero"])
def test_returns(rule: str) -> None:
    returns = functools.partial(kljax.reinforce_plus_plus_returns, gamma=0.9, masked_tokens=rule)
    check_per_sequence(returns, [draw(0)])


@pytest.mark.parametrize("rule", ["skip", "zero", "none"])
def test_advantages(rule: str) -> None:
    check_per_sequence(functools.partial(kljax.gae, gamma=0.9, lam=0.8, masked_tokens=rule), [draw(0), draw(1)])


def test_last_tokens() -> None:
    last = unpacked(kljax.last_token_mask(packed(MASKS), segment_ids=segment_ids()))
    for part, mask in zip(last, MASKS, strict=True):
        np.testing.assert_array_equal(part, kljax.last_token_mask(jnp.asarray(mask)))


MODES: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "token_sum": {},
    "seq_mean_token_sum": {},
    "seq_mean_token_mean": {},
    "seq_mean_token_sum_norm": {"max_length": 7.0},
    "prompt_mean": {"num_groups": 4},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("empty_rows", ["drop", "count"])
@pytest.mark.parametrize("denominator", [None, 3.0])
def test_token_weights(mode: str, empty_rows: str, denominator: float | None) -> None:
    if mode == "token_sum" and denominator is not None:
        pytest.skip("divides by 1")
    options = {**MODES[mode], "mode": mode, "empty_rows": empty_rows, "denominator": denominator}
    per_token = packed([np.full(len(mask), prompt) for mask, prompt in zip(MASKS, PROMPTS, strict=True)], -1)
    prompts = ({"group_ids": jnp.asarray(PROMPTS)}, {"group_ids": per_token}) if mode == "prompt_mean" else ({}, {})
    alone = kljax.token_weights(padded(MASKS), **options, **prompts[0])
    together = kljax.token_weights(packed(MASKS), **options, **prompts[1], segment_ids=segment_ids())
    assert together.dtype == alone.dtype
    for part, expected in zip(unpacked(together), alone, strict=True):
        np.testing.assert_allclose(part, expected[: len(part)], **EXACT)
    np.testing.assert_allclose(together.sum(), alone.sum(), **EXACT)
    total = kljax.aggregate(packed(draw(0)), packed(MASKS), **options, **prompts[1], segment_ids=segment_ids())
    expected = kljax.aggregate(padded(draw(0)), padded(MASKS), **options, **prompts[0])
    np.testing.assert_allclose(total, expected, **EXACT)


def test_segments_are_checked() -> None:
    mask = jnp.ones((2, 3), bool)
    for ids, wrong in {
        "T": ([[0, 0, 0], [0, 1, 3]], "segment_ids: got 3, expected ids below T = 3"),
        "run": ([[0, 0, 0], [0, 1, 0]], r"segment_ids: got \[0, 1, 0\], expected each id in one run"),
        "gap": ([[0, 0, 0], [1, -1, 1]], r"segment_ids: got \[1, -1, 1\], expected each id in one run"),
        "shape": ([0, 0, 0], r"shapes differ: segment_ids \[3\], mask \[2, 3\]"),
    }.values():
        with pytest.raises(ValueError, match=wrong):
            kljax.last_token_mask(mask, segment_ids=jnp.asarray(ids))
    with pytest.raises(TypeError, match="segment_ids: got dtype float64, expected an integer type"):
        kljax.last_token_mask(mask, segment_ids=jnp.zeros((2, 3)))
    chosen = kljax.last_token_mask(mask, segment_ids=jnp.asarray([[-1, -1, 0], [1, 1, 0]]))
    np.testing.assert_array_equal(chosen, [[False, False, True], [False, True, True]])


def test_an_id_that_cannot_be_seen_makes_nan() -> None:
    ids = jnp.array([[0, 5, 5]])
    ratios = jax.jit(lambda ids: kljax.sequence_ratios(*jnp.ones((2, 1, 3)), jnp.ones((1, 3), bool), segment_ids=ids))
    np.testing.assert_array_equal(ratios(ids), [[1, np.nan, np.nan]])
