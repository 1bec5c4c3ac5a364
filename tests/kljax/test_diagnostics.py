import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.masks import MASK, check_masked, draw

LP, OLD, ADV = draw(0.7, 0.7, 2.0)
D = (LP - OLD)[MASK]
A = ADV[MASK]
TOKENS = MASK.sum()


def check_mean(metric: kljax.WeightedSum, expected: np.ndarray) -> None:
    """The metric is the mean of the unmasked values expected, and carries their number as its weight."""
    np.testing.assert_allclose(metric.value(), expected.mean(), 1e-12)
    np.testing.assert_allclose(metric.weight, TOKENS)


def test_ppo_kl() -> None:
    check_mean(kljax.ppo_kl(LP, OLD, MASK), -D)
    check_mean(kljax.ppo_kl(LP, OLD, MASK, log_ratio_clip=0.3), -np.clip(D, -0.3, 0.3))


def test_reference_kl_is_over_tokens_of_the_policy() -> None:
    check_mean(kljax.reference_kl(LP, OLD, MASK), np.exp(-D) - 1 + D)
    check_mean(kljax.reference_kl(LP, OLD, MASK, estimator="k1"), D)


def test_rollout_kl_is_over_tokens_of_the_rollout() -> None:
    check_mean(kljax.rollout_kl(LP, OLD, MASK), np.exp(D) - 1 - D)
    check_mean(kljax.rollout_kl(LP, OLD, MASK, estimator="k1"), -D)


def test_log_prob_abs_diff() -> None:
    check_mean(kljax.log_prob_abs_diff(LP, OLD, MASK), abs(D))


def test_clip_fractions_count_the_tokens_without_gradient() -> None:
    r = np.exp(D)
    clipped = np.where(A > 0, r > 1.3, r < 0.8)
    assert 0 < clipped.sum() < TOKENS
    check_mean(kljax.clip_fraction(LP, OLD, ADV, MASK, clip_low=0.2, clip_high=0.3), clipped)
    grad = jax.grad(lambda lp: kljax.ppo_clip_loss(lp, OLD, ADV, MASK, clip_low=0.2, clip_high=0.3).sum())
    np.testing.assert_array_equal(np.asarray(grad(jnp.asarray(LP)))[MASK] == 0, clipped)
    bounded = (A < 0) & (r > 1.5)
    assert bounded.any()
    check_mean(kljax.dual_clip_fraction(LP, OLD, ADV, MASK, dual_clip=1.5), bounded)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_clip_fractions_of_sequences(level: str) -> None:
    total = np.where(MASK, LP - OLD, 0).sum(-1, keepdims=True)
    r = np.exp(total if level == "sequence" else total / np.maximum(MASK.sum(-1, keepdims=True), 1))
    r = np.broadcast_to(r, MASK.shape)[MASK]
    check_mean(kljax.clip_fraction(LP, OLD, ADV, MASK, level=level), np.where(A > 0, r > 1.2, r < 0.8))
    check_mean(kljax.dual_clip_fraction(LP, OLD, ADV, MASK, dual_clip=1.1, level=level), (A < 0) & (r > 1.1))


def test_an_advantage_of_zero_is_not_clipped() -> None:
    lp, old, mask = jnp.array([3.0, -3.0]), jnp.zeros(2), jnp.ones(2, bool)
    assert kljax.clip_fraction(lp, old, jnp.zeros(2), mask).value() == 0


def test_effective_sample_size() -> None:
    w = np.exp(LP)
    expected = w[MASK].sum() ** 2 / (TOKENS * (w[MASK] ** 2).sum())
    np.testing.assert_allclose(kljax.effective_sample_size(w, MASK), expected, 1e-12)
    np.testing.assert_allclose(kljax.effective_sample_size(1e200 * w, MASK), expected, 1e-12)
    assert kljax.effective_sample_size(0 * w, MASK) == 0
    assert kljax.effective_sample_size(w, np.zeros_like(MASK)) == 0


def test_explained_variance() -> None:
    values, returns = LP, LP + 0.5 * OLD
    expected = 1 - (returns - values)[MASK].var() / returns[MASK].var()
    np.testing.assert_allclose(kljax.explained_variance(values, returns, MASK), expected, 1e-12)
    assert kljax.explained_variance(values, np.ones_like(values), MASK) == 0


METRICS = {
    "ppo_kl": lambda lp, old, adv: kljax.ppo_kl(lp, old, MASK),
    "reference_kl": lambda lp, old, adv: kljax.reference_kl(lp, old, MASK),
    "rollout_kl": lambda lp, old, adv: kljax.rollout_kl(lp, old, MASK),
    "log_prob_abs_diff": lambda lp, old, adv: kljax.log_prob_abs_diff(lp, old, MASK),
    "clip_fraction": lambda lp, old, adv: kljax.clip_fraction(lp, old, adv, MASK),
    "dual_clip_fraction": lambda lp, old, adv: kljax.dual_clip_fraction(lp, old, adv, MASK, dual_clip=1.1),
    "effective_sample_size": lambda lp, old, adv: kljax.effective_sample_size(jnp.exp(lp), MASK),
    "explained_variance": lambda lp, old, adv: kljax.explained_variance(lp, old, MASK),
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_see_nothing_that_is_masked_and_carry_no_gradient(name: str) -> None:
    check_masked(METRICS[name], [LP, OLD, ADV])

    def total(lp: jax.Array) -> jax.Array:
        return sum(jax.tree.leaves(METRICS[name](lp, OLD, ADV)))

    np.testing.assert_array_equal(jax.grad(total)(jnp.asarray(LP)), 0)


def test_metrics_of_parts_add_up() -> None:
    whole = kljax.clip_fraction(LP, OLD, ADV, MASK)
    parts = [kljax.clip_fraction(LP[p], OLD[p], ADV[p], MASK[p]) for p in (slice(0, 1), slice(1, 6))]
    assert (parts[0] + parts[1]).value() == whole.value()


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="level: got 'row'"):
        kljax.clip_fraction(LP, OLD, ADV, MASK, level="row")
    with pytest.raises(ValueError, match="dual_clip: got 1"):
        kljax.dual_clip_fraction(LP, OLD, ADV, MASK, dual_clip=1)
    with pytest.raises(ValueError, match=r"advantages: got shape \[6\]"):
        kljax.clip_fraction(LP, OLD, ADV[:, 0], MASK)
    with pytest.raises(ValueError, match="shapes differ"):
        kljax.explained_variance(LP, OLD[1:], MASK)
