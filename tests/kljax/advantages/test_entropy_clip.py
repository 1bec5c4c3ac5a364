import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

import kljax

RNG = np.random.default_rng(0)
SHAPE = (6, 10)
VOCABULARY = log_softmax(2 * RNG.normal(size=(*SHAPE, 5)), -1)
P = np.exp(VOCABULARY)
LOG_PROBS, ENTROPIES = VOCABULARY[..., 1], -(P * VOCABULARY).sum(-1)
SCORES = P[..., 1] * (ENTROPIES + LOG_PROBS)
EXPECTED = (P**2 * (ENTROPIES[..., None] + VOCABULARY)).sum(-1)
ADVANTAGES, MASK = RNG.normal(size=SHAPE), RNG.random(SHAPE) < 0.8
ARRAYS = ADVANTAGES, LOG_PROBS, ENTROPIES


def test_score_is_the_entropy_effect_of_a_logit() -> None:
    def entropy(z: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(z)
        return -(jnp.exp(log_p) * log_p).sum()

    np.testing.assert_allclose(jax.grad(entropy)(jnp.asarray(VOCABULARY[0, 0]))[1], -SCORES[0, 0], 1e-10)


@pytest.mark.parametrize("mu", [0.0, 0.5, 2.5])
def test_clip_b_drops_low_scores_of_negative_advantage(mu: float) -> None:
    s = SCORES[MASK]
    expected = MASK & ((ADVANTAGES >= 0) | (SCORES - s.mean() >= -mu * s.std()))
    got = jax.jit(lambda m: kljax.clip_b_mask(*ARRAYS, MASK, mu=m))(mu)
    np.testing.assert_array_equal(got, expected)
    if mu < 1:
        assert (MASK & ~expected).any()


@pytest.mark.parametrize(("mu", "fraction"), [(0.2, 1.0), (0.2, 0.05), (0.2, 1e-4), (9.0, 1.0)])
def test_clip_v_drops_the_farthest_of_negative_advantage(mu: float, fraction: float) -> None:
    below = EXPECTED - SCORES
    candidates = MASK & (ADVANTAGES < 0) & (below > mu * below[MASK].std())
    farthest = sorted(zip(*np.nonzero(candidates), strict=True), key=lambda at: -below[at])
    expected = MASK.copy()
    for at in farthest[: max(int(fraction * MASK.sum()), 1)]:
        expected[at] = False
    got = jax.jit(lambda m, f: kljax.clip_v_mask(*ARRAYS, EXPECTED, MASK, mu=m, max_fraction=f))(mu, fraction)
    np.testing.assert_array_equal(got, expected)
    assert (mu == 9.0) == (expected == MASK).all()


def test_dropped_fraction_follows_python_floats() -> None:
    ones = np.ones(100, np.float32)
    below = np.arange(1, 101, dtype=np.float32)
    for wide in (False, True):
        with jax.enable_x64(wide):
            selected = jax.jit(
                lambda x: kljax.clip_v_mask(-x, 0 * x, 0 * x, below, x.astype(bool), mu=0.0, max_fraction=0.29)
            )(ones)
        assert (~selected).sum() == int(0.29 * 100) == 28


def test_tokens_with_equal_scores_are_all_retained() -> None:
    same = np.full(SHAPE, -1.0)
    assert kljax.clip_b_mask(same, same, -same, np.ones(SHAPE, bool), mu=0.0).all()


def test_impossible_tokens_and_an_empty_mask() -> None:
    gone = np.where(np.arange(SHAPE[1]) == 0, -np.inf, LOG_PROBS)
    assert kljax.clip_b_mask(ADVANTAGES, gone, ENTROPIES, MASK).any()
    assert not kljax.clip_b_mask(*ARRAYS, np.zeros(SHAPE, bool)).any()


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="mu: got -1"):
        kljax.clip_b_mask(*ARRAYS, MASK, mu=-1)
    with pytest.raises(ValueError, match="max_fraction: got -1"):
        kljax.clip_v_mask(*ARRAYS, EXPECTED, MASK, max_fraction=-1)
    with pytest.raises(ValueError, match="shapes differ: advantages"):
        kljax.clip_v_mask(ADVANTAGES[1:], LOG_PROBS, ENTROPIES, EXPECTED, MASK)
