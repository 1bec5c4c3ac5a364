import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.masks import MASK, draw

LP, OLD = draw(0.7, 0.7)
D = (LP - OLD)[MASK]
TOKENS = MASK.sum()
ROWS = [(LP - OLD)[row][unmasked] for row, unmasked in enumerate(MASK) if unmasked.any()]


def check_mean(metric: kljax.WeightedSum, expected: np.ndarray) -> None:
    """The metric is the mean of the values expected, and carries their number as its weight."""
    np.testing.assert_allclose(metric.value(), np.mean(expected), 1e-12)
    np.testing.assert_allclose(metric.weight, len(expected))


def test_ppo_kl() -> None:
    check_mean(kljax.ppo_kl(LP, OLD, MASK), -D)
    check_mean(kljax.ppo_kl(LP, OLD, MASK, log_ratio_clip=0.3), -np.clip(D, -0.3, 0.3))
    check_mean(kljax.ppo_kl(LP, OLD, MASK, estimator="k3"), np.exp(D) - 1 - D)
    check_mean(kljax.ppo_kl(LP, OLD, MASK, mode="seq_mean_token_mean"), [-row.mean() for row in ROWS])


def test_reference_kl_is_over_tokens_of_the_policy() -> None:
    check_mean(kljax.reference_kl(LP, OLD, MASK), np.exp(-D) - 1 + D)
    check_mean(kljax.reference_kl(LP, OLD, MASK, estimator="k1"), D)
    check_mean(kljax.reference_kl(LP, OLD, MASK, estimator="k1", mode="seq_mean_token_sum"), [r.sum() for r in ROWS])
    check_mean(
        kljax.reference_kl(LP, OLD, MASK, estimator="k1", mode="seq_mean_token_max"), [abs(r).max() for r in ROWS]
    )


def test_rollout_kl_is_over_tokens_of_the_rollout() -> None:
    check_mean(kljax.rollout_kl(LP, OLD, MASK), np.exp(D) - 1 - D)
    check_mean(kljax.rollout_kl(LP, OLD, MASK, estimator="k1"), -D)
    check_mean(kljax.rollout_kl(LP, OLD, MASK, estimator="k1", mode="seq_mean_token_sum"), [-r.sum() for r in ROWS])


def test_differences_and_their_standard_deviation() -> None:
    check_mean(kljax.log_prob_abs_diff(LP, OLD, MASK), abs(D))
    squares = kljax.log_prob_squared_diff(LP, OLD, MASK)
    check_mean(squares, D**2)
    np.testing.assert_allclose(kljax.log_prob_abs_diff(LP, OLD, MASK).std(squares), abs(D).std(), 1e-12)
    np.testing.assert_allclose(kljax.rollout_kl(LP, OLD, MASK, estimator="k1").std(squares), D.std(), 1e-12)
    assert kljax.log_prob_abs_diff(LP, LP - 0.1, MASK).std(kljax.log_prob_squared_diff(LP, LP - 0.1, MASK)) < 1e-7


@pytest.mark.parametrize("clip", [None, 0.4])
def test_chi_squared(clip: float | None) -> None:
    bound = np.inf if clip is None else clip
    levels = {"token": D, "sequence": [r.sum() for r in ROWS], "geometric": [r.mean() for r in ROWS]}
    for level, d in levels.items():
        metric = kljax.chi_squared(LP, OLD, MASK, level=level, log_ratio_clip=clip)
        check_mean(metric, np.exp(2 * np.clip(d, -bound, bound)) - 1)


def test_chi_squared_of_the_whole_distribution() -> None:
    """Over every token of a vocabulary, weighed by its probability, it is the divergence by its definition."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    ratios = kljax.chi_squared(np.log(p)[:, None], np.log(q)[:, None], np.ones((3, 1), bool)).sum
    expected = sum(q * (p / q) ** 2) - 1
    samples = np.repeat(np.arange(3), (10 * q).astype(int))
    metric = kljax.chi_squared(np.log(p)[samples], np.log(q)[samples], np.ones(10, bool))
    np.testing.assert_allclose(metric.value(), expected, 1e-12)
    assert ratios != expected


def test_chi_squared_near_0_and_far_away() -> None:
    near = kljax.chi_squared(jnp.array([1e-6], jnp.float32), jnp.zeros(1, jnp.float32), jnp.ones(1, bool))
    np.testing.assert_allclose(near.value(), 2e-6, 1e-5)
    far = jnp.array([[200.0, 100.0]], jnp.float32), jnp.zeros((1, 2), jnp.float32), jnp.ones((1, 2), bool)
    assert jnp.isinf(kljax.chi_squared(*far, level="sequence").value())
    bounded = kljax.chi_squared(*far, level="sequence", log_ratio_clip=20.0)
    np.testing.assert_allclose(bounded.value(), np.exp(40.0) - 1, 1e-5)


def test_far_log_ratios_have_finite_metrics() -> None:
    lp, old = jnp.array([-200.0, -1.0], jnp.float32), jnp.array([0.0, -1.0], jnp.float32)
    mask = jnp.ones(2, bool)
    for metric, expected in [
        (kljax.ppo_kl(lp, old, mask), 100),
        (kljax.rollout_kl(lp, old, mask), 99.5),
        (kljax.log_prob_abs_diff(lp, old, mask), 100),
        (kljax.log_prob_squared_diff(lp, old, mask), 20000),
        (kljax.chi_squared(lp, old, mask), -0.5),
        (kljax.log_perplexity(lp[None], mask[None]), 100.5),
        (kljax.log_perplexity_diff(lp[None], old[None], mask[None]), 100),
    ]:
        np.testing.assert_allclose(metric.value(), expected, 1e-6)
