import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from kljax._numerics import floor_share
from tests.kljax.losses.pointwise import check_far
from tests.masks import MASK, draw

LP, DRIFT, ADV = draw(0.7, 0.15, 2.0)
OLD = LP - DRIFT
N = int(MASK.sum())
COVARIANCE = np.where(MASK, (ADV - ADV[MASK].mean()) * (LP - LP[MASK].mean()), -np.inf)
RATIO = np.exp(LP - OLD)
CLIPPED = np.where(ADV > 0, RATIO > 1.2, RATIO < 0.8)
KEYS = jax.random.split(jax.random.key(3), 200)


def highest(count: int) -> np.ndarray:
    """The positions of the `count` highest covariances, as booleans."""
    chosen = np.zeros(MASK.size, bool)
    chosen[np.argsort(-COVARIANCE.ravel(), kind="stable")[:count]] = True
    return chosen.reshape(MASK.shape)


@pytest.mark.parametrize(("fraction", "count"), [(1e-4, 1), (0.2, int(0.2 * N)), (1.0, N), (3.0, N)])
def test_kl_cov_value_and_gradient(fraction: float, count: int) -> None:
    def loss(lp: jax.Array) -> jax.Array:
        return kljax.kl_cov_loss(lp, OLD, ADV, MASK, fraction=fraction, coef=0.7)

    @jax.jit
    def value_and_grad(lp: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, pull = jax.vjp(loss, lp)
        return value, pull(jnp.ones_like(value))[0]

    pays = highest(count)
    expected = np.where(MASK, -ADV * RATIO + np.where(pays, 0.7 * np.abs(LP - OLD), 0), 0)
    value, grad = value_and_grad(LP)
    np.testing.assert_allclose(value, expected, 1e-12, 1e-14)
    expected = np.where(MASK, -ADV * RATIO + np.where(pays, 0.7 * np.sign(LP - OLD), 0), 0)
    np.testing.assert_allclose(grad, expected, 1e-12, 1e-14)


# Where a product in float32 is a whole number and Python's is below it, where both are rounded up to one, and others.
FRACTIONS = [0.29, 0.57, 0.1, 0.2, 0.3, 0.07, 1 / 3, 2 / 3, 0.55, 2e-4, 1e-9, 0.0, 0.999999, float(np.nextafter(1, 0))]


@pytest.mark.parametrize("x64", [False, True])
def test_counts_equal_python(x64: bool) -> None:
    counts, drawn = np.arange(2**15 + 1), np.random.default_rng(0)
    fractions = [*FRACTIONS, 1.0, 3.0, np.float32(0.29), *drawn.random(10), *np.round(drawn.random(20), 3)]
    with jax.enable_x64(x64):
        shares = jax.jit(lambda n: [floor_share(fraction, n, counts.size - 1) for fraction in fractions])
        for fraction, share in zip(fractions, shares(jnp.asarray(counts)), strict=True):
            expected = [min(int(float(fraction) * n), n) for n in counts.tolist()]
            np.testing.assert_array_equal(share, expected, str(fraction))


def test_counts_of_millions_equal_python() -> None:
    counts = np.unique(np.r_[np.arange(0, 2**24 + 1, 100), 2**24 - np.arange(1000)])
    fractions = (0.29, 2e-4, 0.123456789)
    shares = jax.jit(lambda n: [floor_share(fraction, n, 2**24) for fraction in fractions])
    for fraction, share in zip(fractions, shares(jnp.asarray(counts)), strict=True):
        np.testing.assert_array_equal(share, np.floor(fraction * counts), str(fraction))


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(("fraction", "tokens"), [(0.29, 100), (0.57, 200), (0.58, 50), (0.1, 30)])
def test_losses_choose_as_many_tokens_as_python_counts(fraction: float, tokens: int, x64: bool) -> None:
    with jax.enable_x64(x64):
        adv = np.linspace(1.0, 2.0, tokens, dtype=np.float32)
        mask, none = np.ones(tokens, bool), np.zeros(tokens, np.float32)

        @jax.jit
        def both(lp: jax.Array) -> tuple[jax.Array, jax.Array]:
            paid = kljax.kl_cov_loss(lp, lp - 1, none, mask, fraction=fraction)
            selected = kljax.clip_cov_loss(lp, lp, adv, mask, KEYS[0], fraction=fraction, lower=-9.0)
            return paid, selected

        paid, selected = map(np.asarray, both(np.linspace(-2.0, -1.0, tokens, dtype=np.float32)))
        assert (paid != 0).sum() == (selected == 0).sum() == int(fraction * tokens)


def test_kl_cov_penalty_has_no_gradient_at_start() -> None:
    total = jax.jit(lambda lp: kljax.kl_cov_loss(lp, LP, ADV, MASK, fraction=1.0, coef=5.0).sum())
    grad = jax.jit(jax.grad(total))(LP)
    np.testing.assert_array_equal(grad, np.where(MASK, -ADV, 0))


def test_kl_cov_takes_the_earlier_of_equal_covariances() -> None:
    old, mask = np.full((2, 3), -1.0), np.array([[False, True, True], [True, True, True]])
    paid = jax.jit(lambda lp: kljax.kl_cov_loss(lp, old, np.zeros((2, 3)), mask, fraction=0.4))(np.zeros((2, 3)))
    np.testing.assert_array_equal(paid, np.array([[0, 1, 1], [0, 0, 0]]))


def dropped(key: jax.Array, **options: float) -> jax.Array:
    """Which tokens lose the loss that PPO gives them."""
    ppo = kljax.ppo_clip_loss(LP, OLD, ADV, MASK)
    return (kljax.clip_cov_loss(LP, OLD, ADV, MASK, key, **options) == 0) & (ppo != 0)


def test_clip_cov_drops_its_fraction_of_candidates() -> None:
    # Both bounds lie between two covariances, so that half of the tokens are candidates, whatever was drawn.
    ordered = np.sort(COVARIANCE[MASK & ~CLIPPED])
    lower, upper = (ordered[at - 1 : at + 1].mean() for at in (len(ordered) // 4, 3 * len(ordered) // 4))
    candidates = (lower < COVARIANCE) & (upper > COVARIANCE) & ~CLIPPED & MASK
    assert int(0.1 * N) < candidates.sum() < len(ordered)
    # No draw of so many leaves a candidate out: (1 - 1 / C) ** draws < 1e-12 for each.
    keys = jax.random.split(KEYS[0], 28 * int(candidates.sum()))
    for fraction, count in ((1e-4, 1), (0.1, int(0.1 * N)), (1.0, candidates.sum())):
        lost = jax.jit(jax.vmap(lambda key, f=fraction: dropped(key, fraction=f, lower=lower, upper=upper)))(keys)
        np.testing.assert_array_equal(lost.sum((1, 2)), count)
        np.testing.assert_array_equal(lost.any(0), candidates)


def test_clip_cov_is_ppo_at_the_remaining_tokens() -> None:
    def of(weights: np.ndarray, function, *more, **options) -> tuple[jax.Array, jax.Array]:
        return jax.value_and_grad(lambda lp: (function(lp, OLD, ADV, MASK, *more, **options) * weights).sum())(
            jnp.asarray(LP)
        )

    options = {"fraction": 0.1, "lower": 0.05}
    selected = ~dropped(KEYS[0], **options)
    weights = np.where(selected, 1.0 + np.arange(MASK.size).reshape(MASK.shape) % 5, 0)
    value, grad = of(weights, kljax.clip_cov_loss, KEYS[0], **options)
    ppo_value, ppo_grad = of(weights, kljax.ppo_clip_loss)
    np.testing.assert_allclose(value, ppo_value, 1e-13)
    np.testing.assert_allclose(grad, ppo_grad, 1e-13)
    value, grad = of(np.where(selected, 0.0, 1.0), kljax.clip_cov_loss, KEYS[0], **options)
    assert value == 0
    assert not grad.any()


def test_clip_cov_without_a_candidate_is_ppo() -> None:
    loss = kljax.clip_cov_loss(LP, OLD, ADV, MASK, KEYS[0], lower=1e6, upper=np.inf)
    np.testing.assert_array_equal(loss, kljax.ppo_clip_loss(LP, OLD, ADV, MASK))


@pytest.mark.parametrize("fraction", [-0.1, -1])
def test_negative_fractions_are_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"fraction: got -.*, expected a number >= 0"):
        kljax.kl_cov_loss(LP, OLD, ADV, MASK, fraction=fraction)
    with pytest.raises(ValueError, match=r"fraction: got -"):
        kljax.clip_cov_loss(LP, OLD, ADV, MASK, KEYS[0], fraction=fraction)


def test_dual_clip_of_clip_cov_equals_ppo() -> None:
    options = {"clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.05}
    ppo = kljax.ppo_clip_loss(LP, OLD, ADV, MASK, **options)
    loss = kljax.clip_cov_loss(LP, OLD, ADV, MASK, KEYS[0], lower=1e6, upper=np.inf, **options)
    np.testing.assert_array_equal(loss, ppo)
    assert (ppo != kljax.ppo_clip_loss(LP, OLD, ADV, MASK, clip_low=0.1, clip_high=0.1)).any()


@pytest.mark.parametrize("function", [kljax.kl_cov_loss, lambda *x: kljax.clip_cov_loss(*x, KEYS[0], fraction=0.2)])
def test_far_apart(function) -> None:
    check_far(lambda lp, old, adv: function(lp, old, adv, np.ones(9, bool)))


def test_kl_cov_with_overflow_and_zero_advantage() -> None:
    lp, old, adv = np.array([1000.0, -1.0]), np.array([0.0, -1.0]), np.array([0.0, 1.0])
    value, grad = jax.jit(
        jax.value_and_grad(lambda lp: kljax.kl_cov_loss(lp, old, adv, np.ones(2, bool), coef=0.5).sum())
    )(lp)
    assert value == 0.5 * 1000 - 1  # two equal covariances: the first token pays
    np.testing.assert_array_equal(grad, [0.5, -1.0])
