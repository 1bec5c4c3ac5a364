"""Draws: the distribution by enumeration of the uniform numbers, the cuts against sorting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.rollouts.sampler.draw import CHUNK, Sampling, draw, draw_index, filter_weights, token_uniforms

drawn = jax.jit(draw, static_argnums=2)
filtered = jax.jit(filter_weights, static_argnums=1)


def test_every_token_gets_its_share_of_uniforms():
    rng, size, grid = np.random.default_rng(0), 2 * CHUNK + 37, 400
    masses = rng.exponential(size=size).astype(np.float32) ** 2
    masses[rng.random(size) < 0.3] = 0
    masses[CHUNK - 3 : CHUNK] = 0
    masses[-2:] = 0
    middle = (np.arange(grid, dtype=np.float32) + 0.5) / grid
    uniforms = np.stack(np.meshgrid(middle, middle, indexing="ij"), axis=-1).reshape(-1, 2)
    index = jax.jit(jax.vmap(lambda u: draw_index(masses[None], u[None])[0]))(uniforms)
    share = np.bincount(index, minlength=size) / len(uniforms)
    exact = masses.astype(np.float64) / masses.sum(dtype=np.float64)
    assert not share[masses == 0].any()
    assert len(share) == size, "what fills the last chunk is never drawn"
    # Either border of a token lies within half a cell of the grid, in the chunk and of the chunk.
    by_chunk = np.add.reduceat(exact, np.arange(0, size, CHUNK))
    np.testing.assert_allclose(np.add.reduceat(share, np.arange(0, size, CHUNK)), by_chunk, atol=1.01 / grid)
    np.testing.assert_allclose(share, exact, atol=1.01 / grid * by_chunk.max() + 1.01 / grid**2 + 1e-3)
    last = np.float32(1) - np.float32(2) ** -24
    ends = np.array([[a, b] for a in (0, last) for b in (0, last)], np.float32)
    at_ends = np.asarray(draw_index(np.repeat(masses[None], 4, axis=0), ends))
    assert (masses[at_ends] > 0).all()
    single = np.zeros((3, size), np.float32)
    single[np.arange(3), [0, CHUNK, size - 1]] = 1e-30
    np.testing.assert_array_equal(draw_index(single, np.full((3, 2), last)), [0, CHUNK, size - 1])


def test_samples_pass_a_chi_square_test_over_uniforms():
    rows, size = 20000, 300
    logits = (2 * np.random.default_rng(1).normal(size=size)).astype(np.float32)
    uniforms = jax.random.uniform(jax.random.key(3), (rows, 2))
    draws = drawn(jnp.broadcast_to(logits, (rows, size)), uniforms, Sampling(1.0))
    tokens, log_probs = draws["tokens"], draws["rollout_log_probs"]
    exact = np.exp(logits.astype(np.float64) - np.logaddexp.reduce(logits.astype(np.float64)))
    often = exact > 5 / rows
    seen, expected = np.bincount(tokens, minlength=size)[often], exact[often] * rows
    statistic, freedom = ((seen - expected) ** 2 / expected).sum(), often.sum()
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)
    np.testing.assert_allclose(log_probs, np.log(exact)[tokens], atol=2e-6)
    back = drawn(jnp.broadcast_to(logits, (rows, size)), uniforms[::-1], Sampling(1.0))["tokens"]
    np.testing.assert_array_equal(back[::-1], tokens)


def test_random_numbers_depend_on_row_and_position():
    key, ids = jax.random.key(7), jnp.array([4, 0, 9])
    actual = token_uniforms(key, ids, 0, 5, jnp.float32)
    for row, number in enumerate(ids):
        for token in range(5):
            token_key = jax.random.fold_in(jax.random.fold_in(key, number), token)
            np.testing.assert_array_equal(actual[row, token], jax.random.uniform(token_key, (2,)))


def by_sorting(weights: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Returns the tokens that the cuts keep, [V] bool, one sort after the other; of equal weights all or none."""
    keep = np.ones(len(weights), bool)
    if sampling.top_k:
        keep &= weights >= np.sort(weights)[::-1][min(sampling.top_k, len(weights)) - 1]
    if sampling.top_p < 1:
        left = np.where(keep, weights, 0).astype(np.float64)
        order = np.argsort(-left, kind="stable")
        before = np.cumsum(left[order]) - left[order]
        lowest = left[order][before < sampling.top_p * left.sum()].min()
        keep &= left >= lowest
    return keep & (weights >= sampling.min_p * weights.max())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, top_k=1),
        Sampling(1.0, top_k=7),
        Sampling(1.0, top_k=1000),
        Sampling(1.0, top_p=0.9),
        Sampling(1.0, top_p=1e-6),
        Sampling(1.0, min_p=0.05),
        Sampling(1.0, top_k=20, top_p=0.7, min_p=0.1),
    ],
    ids=str,
)
def test_cuts_select_the_same_tokens_as_sorting(sampling):
    rng = np.random.default_rng(4)
    logits = np.concatenate([3 * rng.normal(size=(6, 200)), rng.integers(0, 4, (6, 200))]).astype(np.float32)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    got = np.asarray(filtered(weights, sampling))
    expected = np.stack([by_sorting(row, sampling) for row in weights])
    np.testing.assert_array_equal(got, np.where(expected, weights, 0))
    draws = drawn(logits, jax.random.uniform(jax.random.key(0), (12, 2)), sampling)
    tokens, log_probs = draws["tokens"], draws["rollout_log_probs"]
    assert expected[np.arange(12), tokens].all()
    full = logits - np.logaddexp.reduce(logits.astype(np.float64), axis=-1, keepdims=True)
    np.testing.assert_allclose(log_probs, full[np.arange(12), tokens], atol=2e-6)


@pytest.mark.parametrize(
    "filters", [{"top_k": 7}, {"top_k": 20, "top_p": 0.7, "min_p": 0.1}, {"top_k": 1000, "top_p": 0.95}], ids=str
)
def test_recorded_tokens_equal_the_tokens_of_sorting(filters):
    """In float64, from the logits; and of ties for the last place the lowest ids."""
    rng, size = np.random.default_rng(5), 200
    ties = rng.integers(0, 4, (6, size))
    logits = np.concatenate([3 * rng.normal(size=(6, size)), ties]).astype(np.float32)
    recording, uniforms = Sampling(**filters, record_kept_tokens=True), jax.random.uniform(jax.random.key(0), (12, 2))
    draws = jax.tree.map(np.asarray, drawn(logits, uniforms, recording))
    assert draws["kept_ids"].shape == (12, min(filters["top_k"], size))
    assert draws["kept_ids"].dtype == np.int32
    wide = logits.astype(np.float64)
    weights = np.exp(wide - wide.max(-1, keepdims=True))
    for row in range(12):
        order = np.argsort(-weights[row], kind="stable")
        expected = [token for token in order if by_sorting(weights[row], recording)[token]][: filters["top_k"]]
        listed = draws["kept_ids"][row]
        assert listed[listed >= 0].tolist() == expected, row
        assert (listed[len(expected) :] == -1).all()
        assert draws["tokens"][row] in expected
        mass = weights[row, expected].sum() / weights[row].sum()
        np.testing.assert_allclose(draws["log_kept_mass"][row], np.log(mass), atol=2e-6)
    plain = drawn(logits, uniforms, Sampling(**filters))
    assert plain.keys() == {"tokens", "rollout_log_probs"}
    # Without ties for the last place, the draw is that of a sampler that records nothing.
    np.testing.assert_array_equal(draws["tokens"][:6], plain["tokens"][:6])
    np.testing.assert_array_equal(draws["rollout_log_probs"][:6], plain["rollout_log_probs"][:6])
    if filters == {"top_k": 7}:
        many = jnp.asarray(np.repeat(logits[6:7], 3000, axis=0))
        tokens = drawn(many, jax.random.uniform(jax.random.key(1), (3000, 2)), recording)["tokens"]
        assert set(np.asarray(tokens).tolist()) == set(draws["kept_ids"][6].tolist())


def test_a_list_without_a_bound_is_an_error():
    with pytest.raises(ValueError, match="record_kept_tokens: got True and top_k = 0, expected draws with a positive"):
        Sampling(record_kept_tokens=True)
    with pytest.raises(ValueError, match="record_kept_tokens: got True and greedy"):
        Sampling(top_k=3, greedy=True, record_kept_tokens=True)


def test_cuts_are_computed_on_request_only():
    def loops(sampling: Sampling) -> int:
        return str(jax.make_jaxpr(lambda x: filter_weights(x, sampling))(jnp.ones((2, 9)))).count("scan[")

    assert [loops(s) for s in (Sampling(1.0), Sampling(1.0, min_p=0.1), Sampling(1.0, top_k=2))] == [0, 0, 1]


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", 0.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1)]
)
def test_values_out_of_range_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field}: got {value}, expected "):
        Sampling(**{"temperature": 1.0, field: value})
