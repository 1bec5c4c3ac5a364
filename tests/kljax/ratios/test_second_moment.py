import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import other_seeds
from tests.masks import MASK, draw

LP, DRIFT, ADV = draw(0.7, 0.3, 2.0)
LP = LP - 2.0
OLD = LP - DRIFT
D = LP - OLD
POISON = [np.where(MASK, LP, np.nan), np.where(MASK, OLD, np.inf), np.where(MASK, ADV, np.nan)]


def kept(log_ratio: np.ndarray, candidates: np.ndarray, threshold: float) -> np.ndarray:
    """Algorithm 1, one removal at a time: the largest square leaves while the mean of the rest is too high."""
    left = candidates.copy()
    while left.any() and np.mean(np.square(log_ratio[left])) > threshold:
        squares = np.where(left, np.square(log_ratio), -1.0)
        left &= squares != squares.max()
    return ~(candidates & ~left)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 0.01, 0.04, 0.08, 10.0])
def test_largest_squares_leave_until_the_mean_fits(threshold: float, symmetric: bool) -> None:
    candidates = MASK if symmetric else MASK & (np.sign(D) == np.sign(ADV)) & (ADV != 0)
    expected = MASK & kept(D, candidates, threshold)
    if threshold in (0.01, 0.04):
        assert other_seeds.shown(0 < (MASK & ~expected).sum() < candidates.sum())
    actual = kljax.second_moment_mask(*POISON, MASK, threshold=threshold, symmetric=symmetric)
    np.testing.assert_array_equal(actual, expected)


def test_mask_of_parts_differs_from_the_batch_mask() -> None:
    full = kljax.second_moment_mask(LP, OLD, ADV, MASK)
    rows = [kljax.second_moment_mask(*(x[i : i + 1] for x in (LP, OLD, ADV, MASK))) for i in range(len(LP))]
    assert (full != jnp.concatenate(rows)).any()
    order = np.random.default_rng(0).permutation(len(LP))
    shuffled = kljax.second_moment_mask(*(x[order] for x in (LP, OLD, ADV, MASK)))
    np.testing.assert_array_equal(shuffled, full[order])


def test_equal_squares_are_kept_or_dropped_together() -> None:
    lp, zeros, ones = jnp.array([0.1, 0.3, -0.3, 0.3]), jnp.zeros(4), jnp.array([1.0, 1.0, -1.0, 1.0])
    # With one of the three the mean is 0.05, with two 0.063, with all of them 0.07.
    actual = kljax.second_moment_mask(lp, zeros, ones, ones > -2, threshold=0.055)
    np.testing.assert_array_equal(actual, [True, False, False, False])


def test_infinite_log_ratios_are_dropped() -> None:
    lp, old = jnp.array([-1.0, -1.0, -jnp.inf]), jnp.array([-1.1, -jnp.inf, -1.0])
    actual = kljax.second_moment_mask(lp, old, jnp.array([1.0, 1.0, -1.0]), jnp.ones(3, bool))
    np.testing.assert_array_equal(actual, [True, False, False])


def test_batch_without_rows_has_an_empty_mask() -> None:
    mask = jax.jit(kljax.second_moment_mask)(*np.zeros((3, 0, 4)), np.zeros((0, 4), bool))
    assert mask.shape == (0, 4)


@jax.jit
def value_and_slope(lp: jax.Array) -> tuple[jax.Array, jax.Array]:
    value, pull = jax.vjp(lambda lp: kljax.m2po_loss(lp, OLD, ADV, MASK), lp)
    return value, pull(jnp.ones_like(value))[0]


def test_loss_is_importance_sampling_on_the_mask() -> None:
    expected = MASK & kept(D, MASK & (np.sign(D) == np.sign(ADV)), 0.04)
    value, slope = value_and_slope(LP)
    np.testing.assert_allclose(value, np.where(expected, -ADV * np.exp(D), 0), 1e-12, 1e-14)
    np.testing.assert_allclose(slope, np.where(expected, -ADV * np.exp(D), 0), 1e-12, 1e-14)


@pytest.mark.parametrize("parts", [2, 4])
def test_two_passes_give_the_loss_of_the_batch(parts: int) -> None:
    """The mask of the whole batch first, then the loss in micro-batches: nothing depends on the split."""
    mask = kljax.second_moment_mask(LP, OLD, ADV, MASK)
    split = [np.array_split(x, parts) for x in (LP, OLD, ADV, np.asarray(mask))]
    pieces = [kljax.importance_sampling_loss(*piece) for piece in zip(*split, strict=True)]
    np.testing.assert_allclose(jnp.concatenate(pieces), value_and_slope(LP)[0], 1e-14)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"threshold": -0.1}, "threshold: got -0.1"), ({"log_ratio_clip": 0.0}, "log_ratio_clip: got 0.0")],
)
def test_bound_out_of_range_names_the_argument(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kljax.m2po_loss(LP, OLD, ADV, MASK, **options)
