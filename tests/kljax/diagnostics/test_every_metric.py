"""Properties of every diagnostic: nothing masked is seen, no gradient flows, parts of a batch add up to the whole."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
import kljax.diagnostics
from tests.masks import MASK, draw

LP, OLD, ADV = draw(0.7, 0.7, 2.0)
KEPT = draw(1.0, seed=1)[0] > 0
MODES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_max")
LEVELS = ("token", "sequence", "geometric")

# (log-probs, log-probs, advantages, mask, booleans) -> metric. Under a name, every option that makes another path.
Metric = Callable[[Any, Any, Any, Any, Any], Any]
MEANS: dict[str, dict[str, Metric]] = {
    "chi_squared": {x: lambda lp, old, adv, m, kept, x=x: kljax.chi_squared(lp, old, m, level=x) for x in LEVELS},
    "clip_fraction": {
        f"{side} {x}": lambda lp, old, adv, m, kept, side=side, x=x: kljax.clip_fraction(
            lp, old, adv, m, side=side, level=x
        )
        for side in ("both", "low", "high")
        for x in LEVELS
    },
    "value_clip_fraction": {
        "": lambda lp, old, adv, m, kept: kljax.value_clip_fraction(lp, old, adv, m, clip=0.2),
    },
    "dual_clip_fraction": {
        x: lambda lp, old, adv, m, kept, x=x: kljax.dual_clip_fraction(lp, old, adv, m, dual_clip=1.1, level=x)
        for x in LEVELS
    },
    "kl_by_position": {
        "": lambda lp, old, adv, m, kept: kljax.kl_by_position(lp, old, m, num_buckets=3),
        "longer": lambda lp, old, adv, m, kept: kljax.kl_by_position(lp, old, m, num_buckets=3, max_length=9),
    },
    "log_perplexity": {"": lambda lp, old, adv, m, kept: kljax.log_perplexity(lp, m)},
    "log_perplexity_diff": {
        "": lambda lp, old, adv, m, kept: kljax.log_perplexity_diff(lp, old, m),
        "absolute": lambda lp, old, adv, m, kept: kljax.log_perplexity_diff(lp, old, m, absolute=True),
    },
    "log_prob_abs_diff": {
        mode: lambda lp, old, adv, m, kept, mode=mode: kljax.log_prob_abs_diff(lp, old, m, mode=mode) for mode in MODES
    },
    "log_prob_squared_diff": {"": lambda lp, old, adv, m, kept: kljax.log_prob_squared_diff(lp, old, m)},
    "masked_fraction": {
        mode: lambda lp, old, adv, m, kept, mode=mode: kljax.masked_fraction(kept, m, mode=mode) for mode in MODES
    },
    "mean_by_position": {"": lambda lp, old, adv, m, kept: kljax.mean_by_position(lp, m, num_buckets=2)},
    "mean_metric": {
        mode: lambda lp, old, adv, m, kept, mode=mode: kljax.mean_metric(lp, m, mode=mode) for mode in MODES
    },
    "perplexity": {"": lambda lp, old, adv, m, kept: kljax.perplexity(lp, m)},
    "perplexity_ratio": {"": lambda lp, old, adv, m, kept: kljax.perplexity_ratio(lp, old, m)},
    "ppo_kl": {mode: lambda lp, old, adv, m, kept, mode=mode: kljax.ppo_kl(lp, old, m, mode=mode) for mode in MODES},
    "ratio_fraction": {
        x: lambda lp, old, adv, m, kept, x=x: kljax.ratio_fraction(lp, old, m, lower=0.7, upper=1.4, level=x)
        for x in LEVELS
    },
    "reference_kl": {"": lambda lp, old, adv, m, kept: kljax.reference_kl(lp, old, m)},
    "rollout_kl": {"": lambda lp, old, adv, m, kept: kljax.rollout_kl(lp, old, m)},
}
EXTREMES: dict[str, dict[str, Metric]] = {
    "log_prob_diff_extremes": {
        f"{x} {absolute}": lambda lp, old, adv, m, kept, x=x, absolute=absolute: kljax.log_prob_diff_extremes(
            lp, old, m, level=x, absolute=absolute
        )
        for x in LEVELS
        for absolute in (False, True)
    }
}
WHOLE: dict[str, dict[str, Metric]] = {
    "clipped_tokens": {"": lambda lp, old, adv, m, kept: kljax.clipped_tokens(lp, old, adv, m).astype(jnp.float32)},
    "effective_sample_size": {"": lambda lp, old, adv, m, kept: kljax.effective_sample_size(jnp.exp(lp), m)},
    "explained_variance": {"": lambda lp, old, adv, m, kept: kljax.explained_variance(lp, old, m)},
    "probability_correlation": {"": lambda lp, old, adv, m, kept: kljax.probability_correlation(lp, old, m)},
    "ratio_quantiles": {
        x: lambda lp, old, adv, m, kept, x=x: kljax.ratio_quantiles(lp, old, m, quantiles=(0.1, 0.5), level=x)
        for x in LEVELS
    },
}


# Numbers of each token, which have tests of their own.
PER_TOKEN = {"probability_diff", "top_k_overlap"}


def calls(*tables: dict[str, dict[str, Metric]]) -> list[Any]:
    entries = [(name, options, call) for table in tables for name, of in table.items() for options, call in of.items()]
    return [pytest.param(call, id=f"{name} {options}".strip()) for name, options, call in entries]


def test_every_diagnostic_is_here() -> None:
    assert {*MEANS, *EXTREMES, *WHOLE} == set(kljax.diagnostics.__all__) - {"Extremes", *PER_TOKEN}


@pytest.mark.parametrize("metric", calls(MEANS))
def test_means_of_parts_add_up(metric: Metric) -> None:
    full = metric(LP, OLD, ADV, MASK, KEPT)
    assert isinstance(full, kljax.WeightedSum)
    assert jnp.any(full.weight > 0)
    for cuts in ((2, 4), (1, 2, 3, 4, 5)):
        parts = [
            metric(*arrays) for arrays in zip(*(np.split(x, cuts) for x in (LP, OLD, ADV, MASK, KEPT)), strict=True)
        ]
        total = sum(parts[1:], parts[0])
        np.testing.assert_array_equal(total.weight, full.weight)
        np.testing.assert_allclose(total.sum, full.sum, 1e-13, 1e-15)
        np.testing.assert_allclose(total.value(), full.value(), 1e-13, 1e-15)


@pytest.mark.parametrize("metric", calls(EXTREMES))
def test_extremes_of_parts_merge(metric: Metric) -> None:
    full = metric(LP, OLD, ADV, MASK, KEPT)
    parts = [metric(*arrays) for arrays in zip(*(np.split(x, (1, 3)) for x in (LP, OLD, ADV, MASK, KEPT)), strict=True)]
    assert sum(parts[1:], parts[0]) == full
    assert parts[0] == kljax.Extremes(jnp.inf, -jnp.inf)  # a row without a token


@pytest.mark.parametrize("metric", calls(MEANS, EXTREMES, WHOLE))
def test_masked_values_reach_no_metric_and_no_gradient(metric: Metric) -> None:
    inputs = [jnp.asarray(x) for x in (LP, OLD, ADV)]
    nothing = metric(*inputs, MASK, KEPT)
    outside = metric(*(jnp.where(MASK, x, jnp.nan) for x in inputs), MASK, KEPT ^ ~MASK)
    jax.tree.map(np.testing.assert_array_equal, outside, nothing)

    def total(lp: jax.Array, old: jax.Array) -> jax.Array:
        return sum(leaf.sum() for leaf in jax.tree.leaves(metric(lp, old, inputs[2], MASK, KEPT)))

    for gradient in jax.grad(total, argnums=(0, 1))(*inputs[:2]):
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("metric", calls(MEANS))
def test_batch_without_a_token_has_weight_0(metric: Metric) -> None:
    metric = metric(LP, OLD, ADV, np.zeros_like(MASK), KEPT)
    for number in (metric.sum, metric.weight, metric.value()):
        np.testing.assert_array_equal(number, 0)
