import numpy as np

import kljax
from tests.masks import MASK, draw

NOISE, DRIFT = draw(1.0, 0.3)
LP = -0.05 - abs(NOISE)
ROLLOUT = LP + DRIFT
ROWS = [row for row, unmasked in enumerate(MASK) if unmasked.any()]
NLL, ROLLOUT_NLL = (np.array([-x[row][MASK[row]].mean() for row in ROWS]) for x in (LP, ROLLOUT))


def check_mean(metric: kljax.WeightedSum, expected: np.ndarray) -> None:
    np.testing.assert_allclose(metric.value(), expected.mean(), 1e-12)
    np.testing.assert_allclose(metric.weight, len(ROWS))


def test_perplexities_are_means_over_rows_with_tokens() -> None:
    check_mean(kljax.perplexity(LP, MASK), np.exp(NLL))
    check_mean(kljax.log_perplexity(LP, MASK), NLL)


def test_differences_of_perplexities() -> None:
    check_mean(kljax.log_perplexity_diff(LP, ROLLOUT, MASK), NLL - ROLLOUT_NLL)
    check_mean(kljax.log_perplexity_diff(LP, ROLLOUT, MASK, absolute=True), abs(NLL - ROLLOUT_NLL))
    check_mean(kljax.perplexity_ratio(LP, ROLLOUT, MASK), np.exp(NLL) / np.exp(ROLLOUT_NLL))
    extremes = kljax.log_prob_diff_extremes(LP, ROLLOUT, MASK, level="geometric")
    np.testing.assert_allclose([-extremes.max, -extremes.min], np.sort(NLL - ROLLOUT_NLL)[[0, -1]], 1e-12)


def test_perplexity_of_a_uniform_policy_is_vocabulary_size() -> None:
    uniform = np.full(MASK.shape, -np.log(7.0))
    np.testing.assert_allclose(kljax.perplexity(uniform, MASK).value(), 7, 1e-14)
