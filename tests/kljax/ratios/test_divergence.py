import decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from kljax.ratios._bernoulli import bernoulli_kl, bernoulli_tv
from tests.masks import MASK, draw

NOISE, DRIFT, ADV = draw(1.0, 0.7, 1.0)
LP = -0.05 - abs(NOISE)
OLD = np.minimum(LP + DRIFT, -0.01)
D = LP - OLD
K = {"k1": -D, "k2": D**2 / 2, "k3": np.exp(D) - 1 - D}
POISON = [np.where(MASK, LP, np.nan), np.where(MASK, OLD, np.inf)]


def rows(values: np.ndarray, reduction: str) -> np.ndarray:
    """The divergence that each token is compared by, `[B, T]`; the loops of the definition."""
    if reduction == "token":
        return values
    reduce = {"sum": np.sum, "mean": np.mean, "max": np.max}[reduction]
    judged = np.zeros(MASK.shape)
    for row, unmasked in enumerate(MASK):
        judged[row] = reduce(values[row][unmasked]) if unmasked.any() else 0
    return judged


@pytest.mark.parametrize("reduction", ["token", "sum", "mean", "max"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_rejection(estimator: str, reduction: str) -> None:
    judged = rows(K[estimator], reduction)
    lower, upper = np.quantile(judged[MASK], [0.2, 0.8]) + 1e-12 * np.array([-1, 1])
    got = kljax.kl_rejection_mask(*POISON, MASK, estimator=estimator, reduction=reduction, lower=lower, upper=upper)
    expected = MASK & (judged >= lower) & (judged <= upper)
    assert 0 < expected.sum() < MASK.sum()
    np.testing.assert_array_equal(got, expected)


def test_row_of_negative_estimates_has_a_negative_maximum() -> None:
    lp, old, mask = jnp.array([[-1.0, -1.0, -9.0]]), jnp.full((1, 3), -2.0), jnp.array([[True, True, False]])
    assert not kljax.kl_rejection_mask(lp, old, mask, estimator="k1", reduction="max", lower=-0.5).any()
    kept = kljax.kl_rejection_mask(lp, old, mask, estimator="k1", reduction="max", lower=-1.5)
    np.testing.assert_array_equal(kept, mask)


def test_clip_applies_to_each_log_ratio() -> None:
    lp, old, mask = jnp.array([[-30.0, 25.0]]), jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    options = {"reduction": "sum", "lower": -1.0, "upper": 1.0}
    assert not kljax.kl_rejection_mask(lp, old, mask, **options).any()
    assert kljax.kl_rejection_mask(lp, old, mask, **options, log_ratio_clip=20.0).all()


def test_far_log_ratios_are_rejected_by_kl() -> None:
    lp = jnp.array([200.0, -200.0, jnp.inf, -jnp.inf, jnp.nan, 0.0], jnp.float32)
    old, mask = jnp.zeros(6, jnp.float32), jnp.ones(6, bool)
    for estimator in ("k1", "k2", "k3"):
        got = kljax.kl_rejection_mask(lp, old, mask, estimator=estimator, lower=-9.0, upper=9.0)
        np.testing.assert_array_equal(got, [False] * 5 + [True])


def exact(name: str, first: float, second: float) -> float:
    """The divergence of two coins from their log-probs, with 100 digits."""
    decimal.getcontext().prec = 100
    a, b = decimal.Decimal(first), decimal.Decimal(second)
    p, q = a.exp(), b.exp()
    return float(abs(p - q) if name == "tv" else p * (a - b) + (1 - p) * ((1 - p).ln() - (1 - q).ln()))


# From a probability of 1 - 1e-20 to one of 1e-35, with close pairs everywhere.
NEAR = [-1e-20, -1e-7, -1.001e-7, -1e-3, -1.001e-3, -0.3, -0.3001, -0.69, -0.7, -1, -1.0001, -5, -5.001, -40, -80]


@pytest.mark.parametrize(("name", "divergence"), [("tv", bernoulli_tv), ("kl", bernoulli_kl)])
def test_divergences_of_coins_are_accurate_in_float32(name: str, divergence) -> None:
    values = np.array(NEAR, np.float32)
    first, second = (grid.ravel() for grid in np.meshgrid(values, values))
    expected = np.array([exact(name, *pair) for pair in zip(first.tolist(), second.tolist(), strict=True)])
    got = jax.jit(divergence)(first, second)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, 2e-6, 1e-37)


def test_divergences_of_certain_and_impossible_tokens() -> None:
    none, half = -jnp.inf, -np.log(2.0)
    first = jnp.array([none, none, 0.0, 0.0, half, half, none, 0.0, 1e-9])
    second = jnp.array([none, half, 0.0, half, none, 0.0, 0.0, none, half])
    kl = [0, np.log(2), 0, np.log(2), np.inf, np.inf, np.inf, np.inf, np.log(2)]
    np.testing.assert_allclose(bernoulli_kl(first, second), kl, 1e-15)
    np.testing.assert_allclose(bernoulli_tv(first, second), [0, 0.5, 0, 0.5, 0.5, 0.5, 1, 1, 0.5], 1e-8)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_divergence_mask(divergence: str, level: str) -> None:
    mu, pi = np.exp(OLD), np.exp(LP)
    kl = mu * np.log(mu / pi) + (1 - mu) * np.log((1 - mu) / (1 - pi))
    judged = rows(abs(pi - mu) if divergence == "tv" else kl, "token" if level == "token" else "mean")
    bound = np.quantile(judged[MASK], 0.6)
    expected = MASK & (judged <= bound * (1 + 1e-12))
    got = kljax.divergence_mask(*POISON, MASK, divergence=divergence, level=level, max_divergence=bound * (1 + 1e-12))
    assert 0 < expected.sum() < MASK.sum()
    np.testing.assert_array_equal(got, expected)


def test_off_policy_sequence_mask() -> None:
    kl = rows(-D, "mean")
    bound = np.sort(kl[:, 0])[3]
    # Tokens of advantage 0 did not go wrong.
    adv = np.where(abs(ADV) < 0.5, 0, ADV)
    expected = MASK & ((adv >= 0) | (kl <= bound))
    assert (adv == 0)[MASK & (kl > bound)].any()
    got = kljax.off_policy_sequence_mask(*POISON, np.where(MASK, adv, np.nan), MASK, max_kl=bound)
    np.testing.assert_array_equal(got, expected)
    # No mean of log-ratios within 0.1 is larger, up to the rounding of the mean.
    clipped = kljax.off_policy_sequence_mask(LP, OLD, ADV, MASK, max_kl=0.1 * (1 + 1e-6), log_ratio_clip=0.1)
    np.testing.assert_array_equal(clipped, MASK)


def test_row_with_nan_kl_loses_its_negative_tokens() -> None:
    lp, old, adv = jnp.array([[jnp.nan, -1.0]]), jnp.full((1, 2), -1.0), jnp.array([[1.0, -1.0]])
    got = kljax.off_policy_sequence_mask(lp, old, adv, jnp.ones((1, 2), bool), max_kl=1.0)
    np.testing.assert_array_equal(got, [[True, False]])


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="estimator: got 'abs'"):
        kljax.kl_rejection_mask(LP, OLD, MASK, estimator="abs", upper=1.0)
    with pytest.raises(ValueError, match="reduction: got 'seq'"):
        kljax.kl_rejection_mask(LP, OLD, MASK, reduction="seq", upper=1.0)
    with pytest.raises(ValueError, match="lower, upper"):
        kljax.kl_rejection_mask(LP, OLD, MASK)
    with pytest.raises(ValueError, match="lower: got 1"):
        kljax.kl_rejection_mask(LP, OLD, MASK, lower=1, upper=-1)
    with pytest.raises(ValueError, match="divergence: got 'js'"):
        kljax.divergence_mask(LP, OLD, MASK, divergence="js", max_divergence=0.1)
    with pytest.raises(ValueError, match="level: got 'geometric'"):
        kljax.divergence_mask(LP, OLD, MASK, level="geometric", max_divergence=0.1)
    with pytest.raises(ValueError, match="max_divergence: got -1"):
        kljax.divergence_mask(LP, OLD, MASK, max_divergence=-1)
    with pytest.raises(ValueError, match=r"advantages \[6\]"):
        kljax.off_policy_sequence_mask(LP, OLD, ADV[:, 0], MASK, max_kl=0.1)
