import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.masks import LENGTH, MASK, ROWS, check_masked, draw

LP, REF, TOKEN_SCORES = draw(1.0, 1.0, 2.0)
SCORES = np.arange(1.0, ROWS + 1)


def placed(scores: np.ndarray) -> np.ndarray:
    """Scores at the last unmasked token, in plain Python."""
    rewards = np.zeros(MASK.shape)
    for row, score in enumerate(scores):
        if MASK[row].any():
            rewards[row, np.flatnonzero(MASK[row])[-1]] = score
    return rewards


def test_scores_land_on_the_last_unmasked_token() -> None:
    np.testing.assert_array_equal(kljax.place_rewards(SCORES, MASK), placed(SCORES))
    np.testing.assert_array_equal(kljax.place_rewards(TOKEN_SCORES, MASK), np.where(MASK, TOKEN_SCORES, 0))
    check_masked(lambda scores: kljax.place_rewards(scores, MASK), [TOKEN_SCORES])


def test_row_without_tokens_drops_its_score() -> None:
    def total(scores: jax.Array) -> jax.Array:
        return kljax.kl_shaped_rewards(scores, LP, REF, MASK, coef=0.1)[0].sum()

    scores = SCORES.copy()
    scores[0] = np.nan
    value, grad = jax.value_and_grad(total)(jnp.asarray(scores))
    assert np.isfinite(value)
    np.testing.assert_array_equal(grad, [0, 1, 1, 1, 1, 1])


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "low_var_kl", "none"])
@pytest.mark.parametrize("scores", [SCORES, TOKEN_SCORES], ids=["row", "token"])
def test_rewards_are_scores_minus_scaled_raw_kl(estimator: str, scores: np.ndarray) -> None:
    x = LP - REF
    k3 = np.exp(-x) - 1 + x
    estimates = {"k1": x, "abs": abs(x), "k2": x * x / 2, "k3": k3, "low_var_kl": np.minimum(k3, 10), "none": 0 * x}
    expected_kl = np.where(MASK, estimates[estimator], 0)
    expected = (placed(scores) if scores.ndim == 1 else np.where(MASK, scores, 0)) - 0.3 * expected_kl
    rewards, kl = kljax.kl_shaped_rewards(scores, LP, REF, MASK, coef=0.3, estimator=estimator)
    np.testing.assert_allclose(kl, expected_kl, 1e-12, 1e-14)
    np.testing.assert_allclose(rewards, expected, 1e-12, 1e-14)


def test_masked_inputs_reach_nothing() -> None:
    check_masked(
        lambda scores, lp, ref: kljax.kl_shaped_rewards(scores, lp, ref, MASK, coef=0.3), [TOKEN_SCORES, LP, REF]
    )


@pytest.mark.parametrize("rewards", [SCORES, TOKEN_SCORES], ids=["row", "token"])
def test_kl_array_is_subtracted_unchanged(rewards: np.ndarray) -> None:
    arguments = placed(rewards) if rewards.ndim == 1 else np.where(MASK, rewards, 0)
    got = kljax.subtract_kl(rewards, LP, MASK, coef=0.3)
    np.testing.assert_allclose(got, arguments - np.where(MASK, 0.3 * LP, 0), 1e-12, 1e-14)
    check_masked(lambda rewards, kl: kljax.subtract_kl(rewards, kl, MASK, coef=0.3), [TOKEN_SCORES, LP])
    slopes = jax.grad(lambda r, kl: kljax.subtract_kl(r, kl, MASK, coef=0.3).sum(), (0, 1))(TOKEN_SCORES, LP)
    np.testing.assert_array_equal(slopes[0], MASK)
    np.testing.assert_allclose(slopes[1], np.where(MASK, -0.3, 0), 1e-15)


def test_kl_shape_is_checked_and_coefficient_zero_works() -> None:
    infinite = np.full(MASK.shape, np.inf)
    subtract = jax.jit(lambda coef: kljax.subtract_kl(SCORES, infinite, MASK, coef=coef))
    np.testing.assert_array_equal(subtract(0.0), placed(SCORES))
    np.testing.assert_array_equal(subtract(1.0)[MASK], -np.inf)
    with pytest.raises(ValueError, match=rf"rewards: got shape \[3\], expected \[{ROWS}\].*\[{ROWS}, {LENGTH}\]"):
        kljax.subtract_kl(np.zeros(3), LP, MASK, coef=0.1)
    with pytest.raises(ValueError, match=r"shapes differ: kl \[6\], mask"):
        kljax.subtract_kl(SCORES, SCORES, MASK, coef=0.1)
    with pytest.raises(ValueError, match="coef: got -1"):
        kljax.subtract_kl(SCORES, LP, MASK, coef=-1)


def test_kl_is_a_constant() -> None:
    def total(lp: jax.Array, ref: jax.Array) -> jax.Array:
        rewards, kl = kljax.kl_shaped_rewards(SCORES, lp, ref, MASK, coef=0.3, estimator="k2")
        return (rewards + kl).sum()

    for grad in jax.grad(total, argnums=(0, 1))(jnp.asarray(LP), jnp.asarray(REF)):
        np.testing.assert_array_equal(grad, 0)


def test_coefficient_zero_leaves_rewards_with_infinite_kl() -> None:
    ref = REF.copy()
    ref[1, 2] = np.inf
    rewards, kl = jax.jit(lambda coef: kljax.kl_shaped_rewards(SCORES, LP, ref, MASK, coef=coef))(0.0)
    np.testing.assert_array_equal(rewards, placed(SCORES))
    assert np.isneginf(kl[1, 2])


def test_coefficient_may_be_traced_in_another_type() -> None:
    shaped = jax.jit(lambda coef: kljax.kl_shaped_rewards(SCORES, LP, REF, MASK, coef=coef)[0])
    expected, _ = kljax.kl_shaped_rewards(SCORES, LP, REF, MASK, coef=0.25)
    np.testing.assert_array_equal(shaped(jnp.float32(0.25)), expected)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match=rf"scores: got shape \[3\], expected \[{ROWS}\].*\[{ROWS}, {LENGTH}\]"):
        kljax.kl_shaped_rewards(np.zeros(3), LP, REF, MASK, coef=0.1)
    with pytest.raises(ValueError, match=r"coef: got -0\.1"):
        kljax.kl_shaped_rewards(SCORES, LP, REF, MASK, coef=-0.1)
    with pytest.raises(ValueError, match="estimator: got 'k4'"):
        kljax.kl_shaped_rewards(SCORES, LP, REF, MASK, coef=0.1, estimator="k4")
    with pytest.raises(ValueError, match="shapes differ"):
        kljax.kl_shaped_rewards(SCORES, LP, REF[:, 1:], MASK, coef=0.1)


@pytest.mark.parametrize(
    "options", [{}, {"estimator": "k3", "coef": 0.3}, {"estimator": "k1", "value_clip": 0.5}], ids=str
)
def test_distillation_rewards_are_the_subtracted_kl(options: dict[str, object]) -> None:
    got = kljax.distillation_rewards(LP, REF, MASK, **options)
    coef = options.get("coef", 1.0)
    log_ratio = LP - REF
    kl = np.expm1(-log_ratio) + log_ratio if options.get("estimator") == "k3" else log_ratio
    if "value_clip" in options:
        kl = np.clip(kl, -0.5, 0.5)
    np.testing.assert_allclose(got, np.where(MASK, -coef * kl, 0), 1e-12, 1e-14)
    check_masked(lambda *x: kljax.distillation_rewards(*x, MASK, **options), [LP, REF])
    gradients = jax.grad(lambda *x: kljax.distillation_rewards(*x, MASK, **options).sum(), (0, 1))(LP, REF)
    np.testing.assert_array_equal(gradients, 0)


def test_distillation_rewards_with_missing_or_negative_coefficient() -> None:
    gone = np.full(MASK.shape, -np.inf)
    np.testing.assert_array_equal(kljax.distillation_rewards(LP, gone, MASK, coef=0.0), 0)
    with pytest.raises(ValueError, match="coef: got -1"):
        kljax.distillation_rewards(LP, REF, MASK, coef=-1)


def test_token_estimate_is_bounded_on_request() -> None:
    rewards, kl = kljax.kl_shaped_rewards(np.zeros(ROWS), LP, REF, MASK, coef=2.0, value_clip=0.5)
    expected = np.where(MASK, np.clip(LP - REF, -0.5, 0.5), 0)
    assert (np.abs(LP - REF)[MASK] > 0.5).any()
    np.testing.assert_allclose(kl, expected, 1e-12, 1e-14)
    np.testing.assert_allclose(rewards, -2 * expected, 1e-12, 1e-14)
