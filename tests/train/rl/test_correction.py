"""Corrections of a rollout batch against loops in float64, and their effect on the loss and its gradient."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import oracles, tiny
from tests.train.rl.test_objective import controllers_of, loss_of, measured, numbers, ppo
from train.config.plan import Plan
from train.rl.objective import coefficients, make_objective
from train.rl.policy import ScoredPolicy, Sequences, token_stats
from train.rl.preparation import make_preparation
from train.rl.step import make_update
from train.rl.terms import make_token_weights
from train.sequences.batch import Batch

MODEL = tiny.model_of(tiny.config_of())
TRUNCATED = "{type: truncated_importance_weights, max_weight: 1.1}"
REJECTING = "{type: rejection_mask, lower: 0.75, upper: 1.25}"
# No type below may be at its bounds everywhere or nowhere: the ratios of the batch are exp of about 0.3 N(0, 1).
ENTRIES = {
    "token": "{type: importance_weights, upper: 1.1}",
    "sequence": "{type: importance_weights, level: sequence, mode: clip, lower: 0.9, upper: 1.2}",
    "geometric": "{type: importance_weights, level: geometric, mode: mask, lower: 0.85, upper: 1.1}",
    "icepop": "{type: importance_weights, mode: mask, lower: 0.8, upper: 1.2}",
    "normalized": "{type: importance_weights, upper: 1.1, normalize: tokens}",
    "truncated": TRUNCATED,
    "rejected": REJECTING,
    "rejected_rows": "{type: rejection_mask, level: sequence, lower: 0.9}",
    "kl": "{type: kl_rejection_mask, estimator: k3, reduction: mean, upper: 0.03}",
    "kl_sum": "{type: kl_rejection_mask, reduction: sum, lower: -0.1, upper: 0.3}",
    "kl_max": "{type: kl_rejection_mask, estimator: k2, reduction: max, upper: 0.1}",
    "divergence": "{type: divergence_mask, max_divergence: 0.0005}",
    "veto": "{type: veto_mask, min_ratio: 0.75}",
    "off_policy": "{type: off_policy_sequence_mask, max_kl: 0.01}",
}


@functools.cache
def batch_of() -> Batch:
    return tiny.full_batch(measured()["log_prob"])


def ratios(difference: np.ndarray, mask: np.ndarray, level: str) -> np.ndarray:
    """The ratio [B, T] of a level, by a loop over rows."""
    out = np.zeros(mask.shape)
    for row in np.flatnonzero(mask.any(1)):
        d = difference[row, mask[row]]
        out[row, mask[row]] = np.exp({"token": d, "sequence": d.sum(), "geometric": d.mean()}[level])
    return out


def by_row(values: np.ndarray, mask: np.ndarray, function) -> np.ndarray:
    """One value of each row with a token, in all columns."""
    out = np.full(mask.shape, np.inf)
    for row in np.flatnonzero(mask.any(1)):
        out[row] = function(values[row, mask[row]])
    return out


def expected_of(name: str, mask: np.ndarray) -> np.ndarray:
    """The weights, or the tokens kept, of an entry under a mask."""
    x = numbers(batch_of())
    difference = x["old_log_probs"] - x["rollout_log_probs"]
    token, row = ratios(difference, mask, "token"), ratios(difference, mask, "sequence")
    mean = ratios(difference, mask, "geometric")
    capped = np.minimum(token, 1.1)
    k3 = np.expm1(difference) - difference
    probabilities = np.exp(x["old_log_probs"]), np.exp(x["rollout_log_probs"])
    drifted = by_row(-difference, mask, np.mean) > 0.01
    weights_or_mask = {
        "token": capped,
        "sequence": np.clip(row, 0.9, 1.2),
        "geometric": np.where((mean >= 0.85) & (mean <= 1.1), mean, 0),
        "icepop": np.where((token >= 0.8) & (token <= 1.2), token, 0),
        "normalized": capped / capped[mask].mean(),
        "truncated": capped,
        "rejected": (token >= 0.75) & (token <= 1.25),
        "rejected_rows": row >= 0.9,
        "kl": by_row(k3, mask, np.mean) <= 0.03,
        "kl_sum": np.abs(by_row(-difference, mask, np.sum) - 0.1) <= 0.2,
        "kl_max": by_row(difference**2 / 2, mask, np.max) <= 0.1,
        "divergence": np.abs(probabilities[0] - probabilities[1]) <= 0.0005,
        "veto": ~(by_row(token, mask, np.min) < 0.75),
        "off_policy": ~(drifted & (x["advantages"] < 0)),
    }[name]
    return np.where(mask, weights_or_mask, 0).astype(weights_or_mask.dtype)


def corrected(*entries: str, options: tuple[str, ...] = ()):
    """The batch and the metrics of a preparation with these entries; the advantages are those of the batch."""
    config = tiny.config_of(f"correction=[{', '.join(entries)}]", *options)
    batch = dataclasses.replace(batch_of(), returns=None)
    # Operation by operation: the entries have most of them in common, and compile no program each.
    prepared, _, metrics = make_preparation(Plan.of(config))(batch, controllers_of(config))
    return config, prepared, {name: float(metric.value()) for name, metric in metrics.items()}


@pytest.fixture
def _recorded_advantages(monkeypatch):
    """Advantages of both signs in one row, which no estimator of the config makes."""
    estimate = "train.rl.preparation.make_estimator"
    monkeypatch.setattr(estimate, lambda plan: lambda batch, shaped: (batch_of().advantages, None))


@pytest.mark.usefixtures("_recorded_advantages")
@pytest.mark.parametrize("name", ENTRIES)
def test_every_correction_type_equals_the_library(name):
    mask = np.asarray(batch_of().completion_mask)
    expected = expected_of(name, mask)
    _, batch, metrics = corrected(ENTRIES[name])
    if expected.dtype == bool:
        assert 0 < expected.sum() < mask.sum()
        np.testing.assert_array_equal(batch.kept_mask, expected)
        np.testing.assert_array_equal(batch.correction_weights, expected)
        np.testing.assert_allclose(metrics["correction_rejected"], 1 - expected.sum() / mask.sum(), rtol=1e-6)
        assert metrics["correction_clipped"] == 0
    else:
        assert batch.kept_mask is None
        np.testing.assert_allclose(batch.correction_weights, expected, rtol=2e-5)
        assert metrics["correction_rejected"] == 0
        assert 0 < metrics["correction_clipped"] < 1
    selected = expected[mask].astype(float)
    np.testing.assert_allclose(
        metrics["correction_sample_size"], selected.mean() ** 2 / (selected**2).mean(), rtol=2e-5
    )


def test_the_metrics_of_the_mismatch():
    _, batch, metrics = corrected(TRUNCATED, options=("rollout.mismatch_by_position=2",))
    x, mask = numbers(batch_of()), np.asarray(batch.completion_mask)
    difference = x["old_log_probs"] - x["rollout_log_probs"]
    d, k3 = difference[mask], np.expm1(difference) - difference
    lengths = mask.sum(1)
    means = by_row(difference, mask, np.mean)[lengths > 0, 0]
    column = mask.cumsum(1) - 1
    expected = {
        "mismatch_k1": -d.mean(),
        "mismatch_k3": k3[mask].mean(),
        "mismatch_chi_squared": np.expm1(2 * d).mean(),
        "mismatch_perplexity_ratio": np.exp(-means).mean(),
        "mismatch_k3_part_1_of_2": k3[mask & (column < 2)].mean(),
        "mismatch_k3_part_2_of_2": k3[mask & (column >= 2)].mean(),
        "correction_clipped": (np.exp(d) > 1.1).mean(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, err_msg=name)
    assert set(metrics) - set(expected) == {"correction_sample_size", "correction_rejected", "groups_with_spread"}
    _, plain, alone = corrected(options=("rollout.mismatch_by_position=1",))
    assert (plain.correction_weights, plain.kept_mask) == (None, None)
    full = {name for name in expected if name.startswith("mismatch_") and "part" not in name}
    assert set(alone) == {*full, "mismatch_k3_part_1_of_1", "groups_with_spread"}


def test_entry_sees_the_mask_of_earlier_entries():
    mask = np.asarray(batch_of().completion_mask)
    selected = expected_of("rejected", mask)
    _, first, _ = corrected(REJECTING, ENTRIES["sequence"])
    _, last, _ = corrected(ENTRIES["sequence"], REJECTING)
    np.testing.assert_allclose(first.correction_weights, expected_of("sequence", selected), rtol=2e-5)
    np.testing.assert_allclose(last.correction_weights, expected_of("sequence", mask) * selected, rtol=2e-5)
    np.testing.assert_array_equal(first.kept_mask, last.kept_mask)
    assert np.abs(first.correction_weights - last.correction_weights).max() > 1e-3, "the order counts"


@functools.cache
def objective_of(rejected_tokens: str):
    """The loss and gradient with corrections and a KL; which corrections is in the batch."""
    config = tiny.config_of(f"correction=[{REJECTING}]", f"loss.rejected_tokens={rejected_tokens}", "kl.loss.coef=0.3")
    return config, jax.jit(jax.value_and_grad(make_objective(Plan.of(config), MODEL), has_aux=True))


@jax.jit
def log_probs_and_gradient(params, tokens, token_mask, cotangent):
    """The log-probs of tokens, and the gradient of the weights for one of the log-probs."""

    def log_probs(params):
        policy = kljax.Policy(params)
        return token_stats(ScoredPolicy(MODEL, policy), Sequences.rows(tokens, token_mask), temperature=1.0)[0].log_prob

    value, pull = jax.vjp(log_probs, params)
    return value, pull(cotangent)[0]


@pytest.mark.parametrize(
    ("entries", "rejected_tokens"),
    [
        pytest.param((TRUNCATED,), "drop", id="weights-drop", marks=pytest.mark.thorough),
        # Nothing is rejected, so there is nothing to count.
        pytest.param((TRUNCATED,), "count", id="weights-count", marks=pytest.mark.thorough),
        pytest.param((REJECTING, ENTRIES["token"]), "drop", id="mask_and_weights-drop"),
        pytest.param((REJECTING, ENTRIES["token"]), "count", id="mask_and_weights-count"),
    ],
)
def test_weight_scales_the_policy_term_without_rejected_tokens(entries, rejected_tokens):
    config, objective = objective_of(rejected_tokens)
    batch = dataclasses.replace(corrected(*entries)[1], advantages=batch_of().advantages)
    # In float64: the oracle's log-probs are those of another program, and rounding is not the subject.
    with jax.enable_x64(True):
        params, batch = tiny.wide(tiny.host_params()), tiny.wide(batch)
        batch = dataclasses.replace(batch, token_weights=make_token_weights(Plan.of(config))(batch))
        x, mask = numbers(batch), np.asarray(batch.completion_mask)
        scored = functools.partial(log_probs_and_gradient, params, batch.tokens, batch.token_mask)
        log_prob = np.asarray(scored(np.zeros(mask.shape))[0])
        selected = mask if batch.kept_mask is None else np.asarray(batch.kept_mask)
        weights, count = x["correction_weights"], (selected if rejected_tokens == "drop" else mask).sum()
        assert (selected.sum() < mask.sum()) == (len(entries) > 1)
        assert len(np.unique(weights[selected])) > 3
        policy = np.where(selected, weights * ppo(x, log_prob), 0).sum() / count
        kl = np.where(selected, oracles.k3(log_prob - x["ref_log_probs"]), 0).sum() / count
        # Not beyond float32: the coefficient 0.3 is an array of that type.
        coefs = jax.tree.map(lambda c: jnp.float64(0.3) if c == jnp.float32(0.3) else c, coefficients(config))
        (loss, metrics), gradient = objective({"params": params}, None, batch, coefs)
        metrics = metrics.of_update()
        np.testing.assert_allclose(metrics["policy_loss"].value(), policy, rtol=1e-12)
        np.testing.assert_allclose(metrics["kl_loss"].value(), kl, rtol=1e-12)
        np.testing.assert_allclose(loss, policy + 0.3 * kl, rtol=1e-12)
        ratio = np.exp(log_prob - x["old_log_probs"])
        active = np.where(x["advantages"] > 0, ratio <= 1.2, ratio >= 0.8)
        slope = weights * -x["advantages"] * ratio * active + 0.3 * (log_prob - x["ref_log_probs"])
        _, expected = scored(np.where(selected, slope, 0) / count)
        largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
        assert largest > 1e-2
        chex.assert_trees_all_close(gradient["params"], expected, rtol=1e-10, atol=1e-12 * largest)


@pytest.mark.thorough
def test_micro_batches_do_not_change_the_correction():
    """In float32; in float64 a test of the step has corrections among everything else."""
    results = []
    prepared = corrected(REJECTING, ENTRIES["sequence"])[1]
    prepared = dataclasses.replace(prepared, advantages=batch_of().advantages)
    for parts in (1, 4):
        config, _ = objective_of("drop")
        config = config.model_copy(update={"optim": config.optim.model_copy(update={"micro_batches": parts})})
        state = tiny.state_of(config, tiny.keep_gradient())
        update = make_update(Plan.of(config), MODEL, tiny.keep_gradient(), state, tiny.mesh_of())
        after, metrics = update(state, None, prepared, jnp.arange(tiny.ROWS), coefficients(config))
        results.append((after.opt_state, {name: metric.value() for name, metric in metrics.items()}))
    atol = 1e-6 * float(results[0][1]["grad_norm"])
    chex.assert_trees_all_close(results[1], results[0], rtol=2e-6, atol=atol)


def test_recorded_log_probs_can_be_the_old_policy():
    config = tiny.config_of("loss.old_log_probs=sampler", "optim.updates_per_batch=2")
    batch = dataclasses.replace(batch_of(), old_log_probs=None)
    prepared, _, metrics = jax.jit(make_preparation(Plan.of(config)))(batch, controllers_of(config))
    assert set(metrics) == {"groups_with_spread"}
    np.testing.assert_array_equal(prepared.old_log_probs, batch.rollout_log_probs)
    # A mask still compares the trainer's policy with the sampler's.
    masked = corrected(REJECTING, options=("loss.old_log_probs=sampler",))[1]
    np.testing.assert_array_equal(masked.kept_mask, expected_of("rejected", np.asarray(batch.completion_mask)))
    np.testing.assert_array_equal(masked.old_log_probs, batch.rollout_log_probs)


def test_tokens_left_out_before_stay_out():
    """Rows that a limit ended, say, although the correction keeps them."""
    config = tiny.config_of(f"correction=[{ENTRIES['rejected']}]")
    mask = np.asarray(batch_of().completion_mask)
    before = mask & (np.arange(len(mask)) % 2 == 0)[:, None]
    batch = dataclasses.replace(batch_of(), returns=None, kept_mask=jnp.asarray(before))
    prepared, _, _ = make_preparation(Plan.of(config))(batch, controllers_of(config))
    expected = before & expected_of("rejected", mask)
    assert 0 < expected.sum() < before.sum()
    np.testing.assert_array_equal(prepared.kept_mask, expected)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_old_tokens_are_rejected_and_counted(level):
    """By loops over the lags of a batch, of which some are unknown, beside another mask that sees what is left."""
    mask = np.asarray(batch_of().completion_mask)
    lags = np.where(mask, np.random.default_rng(5).integers(-1, 5, mask.shape), -1).astype(np.int32)
    kept = mask.copy()
    for row, column in np.argwhere(mask):
        if lags[row, column] > 3:
            kept[row, column if level == "token" else slice(None)] = False
    assert 0 < kept.sum() < mask.sum()
    config = tiny.config_of(f"correction=[{{type: max_lag, max_lag: 3, level: {level}}}, {ENTRIES['rejected']}]")
    batch = dataclasses.replace(batch_of(), returns=None, fields={"token_lags": jnp.asarray(lags)})
    prepared, _, metrics = make_preparation(Plan.of(config))(batch, controllers_of(config))
    np.testing.assert_array_equal(prepared.kept_mask, kept & expected_of("rejected", mask))
    assert float(metrics["rollout_lag_rejected"].value()) == pytest.approx(1 - kept.sum() / mask.sum(), rel=1e-6)
    rejected = 1 - np.asarray(prepared.kept_mask).sum() / mask.sum()
    assert float(metrics["correction_rejected"].value()) == pytest.approx(rejected, rel=1e-6)
    np.testing.assert_array_equal(np.asarray(prepared.correction_weights) > 0, prepared.kept_mask)


def test_value_head_learns_no_rejected_token():
    """Also where these count in the denominator."""
    options = ("advantage.type=gae", "loss.value_coef=0.5", "loss.rejected_tokens=count", "loss.value_clip=0.2")
    config = tiny.config_of(f"correction=[{REJECTING}]", *options)
    batch = dataclasses.replace(batch_of(), kept_mask=jnp.asarray(expected_of("rejected", batch_of().completion_mask)))
    batch = dataclasses.replace(batch, token_weights=make_token_weights(Plan.of(config))(batch))
    x = numbers(batch)
    value = measured()["value"]
    near = x["values"] + np.clip(value - x["values"], -0.2, 0.2)
    errors = np.maximum((value - x["returns"]) ** 2, (near - x["returns"]) ** 2) / 2
    expected = np.where(batch.kept_mask, errors, 0).sum() / np.asarray(batch.completion_mask).sum()
    _, metrics = loss_of(config, batch)
    np.testing.assert_allclose(metrics["value_loss"].value(), expected, rtol=2e-6)
