"""The audit's sampled numbers: unbiased, covered by their intervals, and the same however positions are grouped."""

import jax
import numpy as np
import pytest

import kljax
from kljax.tools.audit import Audit
from kljax.tools.audit.logits import AuditOptions, Block, measure
from tests.other_seeds import example

METRICS = {"value": ("mean", "variance"), "gradient": ("gain", "variance")}


@pytest.fixture(scope="module")
def one() -> list[np.ndarray]:
    """Policy, reference and behaviour policy of a single row of two positions."""
    return list(0.7 * example(3).normal(size=(3, 1, 2, 4)))


@pytest.fixture(scope="module")
def repeated(one: list[np.ndarray]) -> Audit:
    """The same row two thousand times, with three tokens drawn at each position."""
    many = [np.repeat(array, 2000, axis=0) for array in one]
    return kljax.audit.audit_logits(*many, draws=3, bootstrap=100, confidence=0.999, chunk_size=64)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["value", "gradient"])
def test_few_draws_estimate_without_bias(kind: str, level: str, repeated: Audit) -> None:
    # The exact number lies within the interval of means over thousands of independent repetitions.
    for exact in repeated.select(kind=kind, level=level, how="exact"):
        if exact.place == "reward_baseline":
            continue  # its baseline comes from the same three draws
        labels = {name: getattr(exact, name) for name in ("kind", "level", "estimator", "place", "correction")}
        sampled = repeated.find(how="sampled", **labels)
        for metric in METRICS[kind]:
            low, high = sampled.metrics[metric].low, sampled.metrics[metric].high
            slack = 0.1 * (high - low)
            value = exact.metrics[metric].value
            assert low - slack <= value <= high + slack, (labels, metric, value, sampled.metrics[metric])


def test_squared_expectations_have_no_noise_bias(repeated: Audit) -> None:
    # A gradient that is exactly right: naively squared, three draws would show a bias larger than the gradient.
    actual = repeated.find(kind="gradient", level="token", how="sampled", place="straight_through", correction="ratio")
    assert actual.metrics["relative_bias"].value < 0.1
    assert actual.metrics["snr"].value == pytest.approx(
        repeated.find(kind="gradient", level="token", how="exact", place="straight_through", correction="ratio")
        .metrics["snr"]
        .value,
        rel=0.05,
    )


def test_intervals_cover_at_their_stated_rate() -> None:
    rng = np.random.default_rng(0)
    policy = rng.normal(size=(40, 2, 4))
    ref = policy + 0.4 * rng.normal(size=policy.shape)
    seeds, inside = 30, dict.fromkeys(("k1", "k3"), 0)
    for seed in range(seeds):
        audit = kljax.audit.audit_logits(
            policy, ref, draws=3, bootstrap=150, chunk_size=64, confidence=0.9, key=jax.random.key(seed)
        )
        for name in inside:
            # Both are unbiased at every prefix, so 0 is the truth whatever the rows.
            bias = audit.find(kind="value", level="token", how="sampled", estimator=name).metrics["bias"]
            inside[name] += bias.low <= 0 <= bias.high
    # Binomial with p = 0.9: within three standard deviations of 27.
    assert all(22 <= count <= 30 for count in inside.values()), inside


def test_a_biased_estimator_is_found_out() -> None:
    rng = np.random.default_rng(1)
    policy = rng.normal(size=(800, 2, 4))
    ref = policy + 0.8 * rng.normal(size=policy.shape)
    audit = kljax.audit.audit_logits(policy, ref, draws=3, bootstrap=200, chunk_size=64)
    for name in ("abs", "k2"):
        bias = audit.find(kind="value", level="token", how="sampled", estimator=name).metrics["bias"]
        exact = audit.find(kind="value", level="token", how="exact", estimator=name).metrics["bias"].value
        assert 0 < bias.low < exact < bias.high


def test_grouping_of_positions_changes_nothing(one: list[np.ndarray]) -> None:
    policy, ref = (np.repeat(array, 5, axis=0) * np.arange(1.0, 6)[:, None, None] for array in one[:2])
    full = kljax.audit.audit_logits(policy, ref, draws=3, bootstrap=10)
    parts = kljax.audit.audit_logits(policy, ref, draws=3, bootstrap=10, chunk_size=3)
    blocks = [Block.of(policy[start : start + 2], ref[start : start + 2]) for start in range(0, 5, 2)]
    options = AuditOptions(3, 10, 0.95, 2.0, None, 3, None)
    by_rows = measure(blocks, np.ones((5, 2), bool), options, "logits")
    for other in (parts, by_rows):
        for a, b in zip(full.results, other.results, strict=True):
            for name, metric in a.metrics.items():
                np.testing.assert_allclose(metric, b.metrics[name], rtol=1e-10, atol=1e-12)
