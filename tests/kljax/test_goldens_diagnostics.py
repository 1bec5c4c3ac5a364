"""Diagnostics of a train/rollout mismatch against the recorded results of verl."""

import jax
import jax.numpy as jnp

import kljax
from tests.goldens import cases
from tests.goldens.epsilon import EPS, factors

# verl bounds the log-ratios of its chi-squared divergences.
LOG_RATIO_CLIP = 20.0


@cases.parametrize(("verl", "compute_offpolicy_metrics"))
def test_offpolicy_metrics(case: cases.Case) -> None:
    """verl's means per token divide by `n + 1e-8`, and its means over rows count those without a token."""
    mask = case.given("mask")
    lp, rollout = case.given("log_probs"), case.given("rollout_log_probs")
    # Means over a row divide by its length + 1e-8: its values are scaled before.
    row_lp, row_rollout = (x * factors(mask, "row") for x in (lp, rollout))
    n = mask.sum().astype(jnp.float64)
    empty = (~mask.any(-1)).sum().astype(jnp.float64)

    def tokens(metric: kljax.WeightedSum) -> jax.Array:
        return metric.value() * n / (n + EPS)

    def rows(metric: kljax.WeightedSum, of_nothing: float = 0.0) -> jax.Array:
        assert metric.weight == len(mask) - empty
        return (metric.sum + of_nothing * empty) / len(mask)

    extremes = kljax.log_prob_diff_extremes(row_lp, row_rollout, mask, level="geometric")
    of_empty = jnp.where(empty > 0, 0.0, jnp.array([-jnp.inf, jnp.inf]))
    squares = kljax.chi_squared(lp, rollout, mask, log_ratio_clip=LOG_RATIO_CLIP)
    metrics = {
        "kl": tokens(kljax.rollout_kl(lp, rollout, mask, estimator="k1")),
        "k3_kl": tokens(kljax.rollout_kl(lp, rollout, mask)),
        "training_ppl": rows(kljax.perplexity(row_lp, mask), 1.0),
        "training_log_ppl": rows(kljax.log_perplexity(row_lp, mask)),
        "rollout_ppl": rows(kljax.perplexity(row_rollout, mask), 1.0),
        "rollout_log_ppl": rows(kljax.log_perplexity(row_rollout, mask)),
        "log_ppl_diff": rows(kljax.log_perplexity_diff(row_lp, row_rollout, mask)),
        "log_ppl_abs_diff": rows(kljax.log_perplexity_diff(row_lp, row_rollout, mask, absolute=True)),
        "log_ppl_diff_max": jnp.maximum(-extremes.min, of_empty[0]),
        "log_ppl_diff_min": jnp.minimum(-extremes.max, of_empty[1]),
        "ppl_ratio": rows(kljax.perplexity_ratio(row_lp, row_rollout, mask), 1.0),
        # E[r^2] - 1, whose mean of r^2 has the epsilon.
        "chi2_token": (squares.value() + 1) * n / (n + EPS) - 1,
        "chi2_seq": rows(kljax.chi_squared(lp, rollout, mask, level="sequence", log_ratio_clip=LOG_RATIO_CLIP)),
    }
    assert set(metrics) == set(case.outputs)
    for name, value in metrics.items():
        case.assert_matches(value, case.result(name))
