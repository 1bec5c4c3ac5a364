import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import other_seeds
from tests.kljax.ratios.level_ratios import LP, OLD, level_ratio
from tests.masks import MASK, check_masked


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_truncated_weights_ignore_masked_tokens(level: str) -> None:
    weights = kljax.truncated_importance_weights(LP, OLD, MASK, level=level, max_weight=1.1)
    np.testing.assert_allclose(weights, np.where(MASK, np.minimum(level_ratio(level), 1.1), 0), 1e-13)
    untruncated = kljax.truncated_importance_weights(LP, OLD, MASK, level=level, max_weight=None)
    np.testing.assert_allclose(untruncated, np.where(MASK, level_ratio(level), 0), 1e-13)
    check_masked(
        lambda lp, old: kljax.truncated_importance_weights(lp, old, MASK, level=level, max_weight=1.1), [LP, OLD]
    )


def test_capped_overflowing_weight_has_gradient_zero() -> None:
    def weight(lp: jax.Array) -> jax.Array:
        return kljax.truncated_importance_weights(lp, jnp.zeros(2), jnp.ones(2, bool), max_weight=2.0).sum()

    value, grad = jax.value_and_grad(weight)(jnp.array([2000.0, 0.0]))
    assert value == 3
    np.testing.assert_array_equal(grad, [0, 1])


def bounded(ratio: np.ndarray, mode: str, lower: float | None, upper: float | None) -> np.ndarray:
    low, high = lower or 0.0, upper or np.inf
    return np.where((ratio >= low) & (ratio <= high), ratio, 0) if mode == "mask" else np.clip(ratio, low, high)


BOUNDS = [("truncate", None, 1.1), ("mask", 0.4, 1.9), ("mask", None, 1.1), ("clip", 0.5, 1.5), ("clip", 0.9, None)]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("mode", "lower", "upper"), BOUNDS)
def test_importance_weights(level: str, mode: str, lower: float | None, upper: float | None) -> None:
    expected = np.where(MASK, bounded(level_ratio(level), mode, lower, upper), 0)

    def weights(lp: jax.Array, old: jax.Array, normalize: str = "none") -> jax.Array:
        options = {"level": level, "mode": mode, "lower": lower, "upper": upper, "normalize": normalize}
        return kljax.importance_weights(lp, old, MASK, **options)

    assert other_seeds.shown((expected != np.where(MASK, level_ratio(level), 0)).any())
    assert other_seeds.shown(len(np.unique(expected)) >= 2)
    np.testing.assert_allclose(weights(LP, OLD), expected, 1e-13)
    np.testing.assert_allclose(weights(LP, OLD, "tokens"), expected / expected[MASK].mean(), 1e-12)
    means = [row[unmasked].mean() for row, unmasked in zip(expected, MASK, strict=True) if unmasked.any()]
    np.testing.assert_allclose(weights(LP, OLD, "rows"), expected / np.mean(means), 1e-12)
    check_masked(weights, [LP, OLD])
    check_masked(lambda lp, old: weights(lp, old, "rows"), [LP, OLD])


def test_log_ratio_clip_applies_to_the_level() -> None:
    lp, old, mask = jnp.array([[3.0, -3.0], [3.0, 3.0]]), jnp.zeros((2, 2)), jnp.ones((2, 2), bool)
    got = [kljax.importance_weights(lp, old, mask, level=x, log_ratio_clip=2.0) for x in ("token", "sequence")]
    np.testing.assert_allclose(got[0], np.exp([[2.0, -2.0], [2.0, 2.0]]), 1e-15)
    np.testing.assert_allclose(got[1], np.exp([[0.0, 0.0], [2.0, 2.0]]), 1e-15)


def test_gradient_follows_the_ratio_within_the_bounds() -> None:
    lp = jnp.array([np.log(0.5), -0.1, 0.1, np.log(2.0), 3.0, -3.0])

    def total(lp: jax.Array, mode: str, lower: float | None) -> jax.Array:
        return kljax.importance_weights(lp, 0 * lp, lp < 9, mode=mode, lower=lower, upper=2.0).sum()

    r = np.exp(lp)
    np.testing.assert_allclose(jax.grad(total)(lp, "truncate", None), np.where(r <= 2, r, 0), 1e-14)
    for mode in ("clip", "mask"):
        np.testing.assert_allclose(jax.grad(total)(lp, mode, 0.5), np.where((r >= 0.5) & (r <= 2), r, 0), 1e-14)


@pytest.mark.parametrize("normalize", ["none", "tokens", "rows"])
def test_far_log_ratios_have_finite_weights_and_gradients(normalize: str) -> None:
    lp = jnp.array([200.0, -200.0, jnp.inf, -jnp.inf, 0.0], jnp.float32)
    mask = jnp.ones(5, bool)

    def total(lp: jax.Array, **options: object) -> jax.Array:
        weights = kljax.importance_weights(lp, jnp.zeros(5, jnp.float32), mask, normalize=normalize, **options)
        return (weights * jnp.arange(1.0, 6.0, dtype=jnp.float32)).sum(), weights

    options = [{"upper": 2.0}, {"mode": "mask", "lower": 0.5, "upper": 2.0}, {"mode": "clip", "lower": 0.5, "upper": 2}]
    for arguments, expected in zip(options, ([2, 0, 2, 0, 1], [0, 0, 0, 0, 1], [2, 0.5, 2, 0.5, 1]), strict=True):
        gradient, weights = jax.grad(total, has_aux=True)(lp, **arguments)
        scale = 1 if normalize == "none" else np.mean(expected)
        np.testing.assert_allclose(weights, np.array(expected) / scale, 1e-6)
        assert np.isfinite(gradient).all()


def test_normalized_weights_are_finite_at_overflow_and_underflow() -> None:
    for shift in (200.0, -200.0):
        lp = jnp.array([[shift, shift - 1.0], [shift - 2.0, 0.0]], jnp.float32)
        old, mask = jnp.zeros((2, 2), jnp.float32), jnp.array([[True, True], [True, False]])
        ratio = np.exp([0.0, -1.0, -2.0])
        weights = kljax.importance_weights(lp, old, mask, normalize="tokens")
        np.testing.assert_allclose(weights[mask], ratio / ratio.mean(), 1e-5)
    nothing = kljax.importance_weights(lp, old, mask, mode="mask", upper=3.0, lower=2.0, normalize="rows")
    np.testing.assert_array_equal(nothing, 0)


def test_token_of_unknown_behaviour_has_ratio_1() -> None:
    lp, rollout = jnp.array([-1.0, -1.0]), jnp.array([jnp.nan, -2.0])
    known = jnp.where(jnp.isnan(rollout), lp, rollout)
    np.testing.assert_allclose(kljax.importance_weights(lp, known, jnp.ones(2, bool)), [1, np.e], 1e-15)


def test_errors_name_the_argument() -> None:
    weights = kljax.importance_weights
    with pytest.raises(ValueError, match=r"level: got 'tokens'.*did you mean 'token'"):
        kljax.truncated_importance_weights(LP, OLD, MASK, level="tokens")
    with pytest.raises(ValueError, match="max_weight: got 0"):
        kljax.truncated_importance_weights(LP, OLD, MASK, max_weight=0)
    with pytest.raises(ValueError, match="mode: got 'icepop'"):
        weights(LP, OLD, MASK, mode="icepop")
    with pytest.raises(ValueError, match="normalize: got 'batch'"):
        weights(LP, OLD, MASK, normalize="batch")
    with pytest.raises(ValueError, match="lower: has no meaning in mode 'truncate'"):
        weights(LP, OLD, MASK, lower=0.5)
    with pytest.raises(ValueError, match="lower, upper: got None for both"):
        weights(LP, OLD, MASK, mode="clip")
    with pytest.raises(ValueError, match="upper: got 0"):
        weights(LP, OLD, MASK, upper=0)
    with pytest.raises(ValueError, match=r"lower: got 2\.0, expected at most upper"):
        weights(LP, OLD, MASK, mode="mask", lower=2.0, upper=1.0)
