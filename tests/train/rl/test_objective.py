"""The composed loss against the same terms written by hand, and what is done to advantages and to the reported KL."""

import dataclasses
import functools
from typing import get_args
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from kljax.aggregation import MODES
from kljax.kl import ESTIMATORS
from tests import oracles, other_seeds, tiny
from train.config import types
from train.config.plan import Plan
from train.models.head import stored_head
from train.rl.algorithms import make_controllers
from train.rl.objective import coefficients, make_objective
from train.rl.policy import ScoredPolicy, Sequences, hidden_states, slot_states, token_stats, token_values
from train.rl.preparation import make_preparation
from train.rl.terms import make_token_weights, make_weighting
from train.sequences.batch import Batch
from train.sequences.forest import row_forest

MODEL = tiny.model_of(tiny.config_of())
HEAD = {"kernel": np.linspace(-1, 1, 16, dtype=np.float32), "bias": np.float32(0.1)}
CLIP = ["loss.clip_low=0.2", "loss.clip_high=0.2"]
ESTIMATED = ["grpo", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"]
EVERYTHING = (
    "advantage.type=gae",
    "loss.value_coef=0.5",
    "loss.value_clip=0.2",
    "loss.clip_high=0.28",
    "loss.entropy_coef=0.05",
    "kl.loss.coef=0.3",
    "kl.rollout.coef=0.2",
)


@functools.cache
def scored() -> tuple[kljax.TokenStats, jax.Array]:
    """Statistics and hidden states [B, T, D] of the tiny policy on the tokens of the tiny batch."""
    batch = tiny.rollout_batch()
    sequences = Sequences.rows(batch.tokens, batch.token_mask)

    @jax.jit
    def score(params):
        stats, hidden = token_stats(ScoredPolicy(MODEL, kljax.Policy(params)), sequences, temperature=1.0, entropy=True)
        return stats, sequences.forest.gather(hidden)

    return score(tiny.host_params())


@functools.cache
def measured() -> dict[str, np.ndarray]:
    """Log-probs, entropies and values."""
    stats, hidden = scored()
    forest = row_forest(tiny.rollout_batch().token_mask)
    values = token_values(HEAD, forest.take(hidden), forest)
    arrays = {"log_prob": stats.log_prob, "entropy": stats.entropy, "value": values}
    return {name: np.asarray(value, np.float64) for name, value in arrays.items()}


def batch_of() -> Batch:
    return tiny.full_batch(measured()["log_prob"])


def slot_states_of(scored: ScoredPolicy, _: Sequences) -> tuple[jax.Array, None]:
    """Takes the place of the decoder: its hidden states are parameters."""
    return scored.policy.params["hidden"], None


@functools.cache
def compiled_objective(config, plan: Plan, with_gradient: bool, decoder: bool):
    """The objective of a config, whose plan a test may change, compiled once; `decoder` is part of the key."""
    objective = make_objective(Plan.of(config), MODEL)
    return jax.jit(jax.value_and_grad(objective, has_aux=True) if with_gradient else objective)


def loss_of(config, batch: Batch, with_gradient: bool = False, *, decoder: bool = False, ref_head=None):
    """Loss and metrics, with a gradient if asked for; that of the decoder's hidden states, unless it is run too."""
    params, real, plan = tiny.host_params(), slot_states, Plan.of(config)
    if not decoder:
        hidden = Sequences.of(batch, plan.layout).forest.take(scored()[1])
        params, real = {"embed_tokens": params["embed_tokens"], "hidden": hidden}, slot_states_of
    trainable = {"params": params, **({"value_head": HEAD} if plan.value_head else {})}
    with mock.patch("train.rl.policy.slot_states", real):
        function = compiled_objective(config, plan, with_gradient, decoder)
        result = function(trainable, None, batch, coefficients(config), ref_head)
    (loss, metrics), gradient = result if with_gradient else (result, None)
    return ((loss, metrics.of_update()), gradient) if with_gradient else (loss, metrics.of_update())


def numbers(batch: Batch) -> dict[str, np.ndarray]:
    """The fields in float64, 0 under the mask."""
    fields = {f.name: np.asarray(getattr(batch, f.name)) for f in dataclasses.fields(batch)}
    mask = fields["completion_mask"]
    return {name: np.where(mask, x, 0).astype(float) if x.shape == mask.shape else x for name, x in fields.items()}


def ppo(x, log_prob, low=0.2, high=0.2):
    ratio = np.exp(log_prob - x["old_log_probs"])
    return np.maximum(-x["advantages"] * ratio, -x["advantages"] * np.clip(ratio, 1 - low, 1 + high))


def weights_of(config, batch: Batch) -> jax.Array:
    return make_token_weights(Plan.of(config))(batch)


def total(batch: Batch, per_token: np.ndarray) -> float:
    """The mean over tokens."""
    return per_token[np.asarray(batch.completion_mask)].mean()


def test_rollout_kl_estimators_equal_the_library():
    assert set(get_args(types.RolloutEstimator)) <= set(ESTIMATORS)


def test_schema_names_equal_the_library():
    # The schema is read without jax, which the library imports.
    assert types.Estimator == kljax.typing.Estimator
    assert types.KLGradient == kljax.typing.KLGradient
    assert types.Aggregation == kljax.typing.Reduction
    assert types.EmptyRows == kljax.typing.EmptyRows
    assert types.Direction == kljax.typing.Direction
    assert types.Level == kljax.typing.Level


def test_loss_is_the_sum_of_its_terms():
    config, batch = tiny.config_of(*EVERYTHING), batch_of()
    x, mine = numbers(batch), measured()
    log_ratio = mine["log_prob"] - x["ref_log_probs"]
    near = x["values"] + np.clip(mine["value"] - x["values"], -0.2, 0.2)
    errors = [(value - x["returns"]) ** 2 for value in (mine["value"], near)]
    terms = {
        "policy_loss": total(batch, ppo(x, mine["log_prob"], high=0.28)),
        "kl_loss": total(batch, oracles.k3(log_ratio)),
        "rollout_kl_loss": total(batch, (mine["log_prob"] - x["rollout_log_probs"]) ** 2 / 2),
        "value_loss": total(batch, np.maximum(*errors) / 2),
    }
    entropy = total(batch, mine["entropy"])
    expected = (
        terms["policy_loss"]
        + 0.3 * terms["kl_loss"]
        + 0.2 * terms["rollout_kl_loss"]
        + 0.5 * terms["value_loss"]
        - 0.05 * entropy
    )
    loss, metrics = loss_of(config, batch)
    values = {name: float(metric.value()) for name, metric in metrics.items()}
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    for name, value in {**terms, "loss": expected, "entropy": entropy}.items():
        np.testing.assert_allclose(values[name], value, rtol=2e-6, err_msg=name)
    reverse = x["rollout_log_probs"] - mine["log_prob"]
    np.testing.assert_allclose(values["kl_reference"], terms["kl_loss"], rtol=2e-6)
    np.testing.assert_allclose(values["rollout_kl"], total(batch, oracles.k3(reverse)), rtol=2e-6)
    np.testing.assert_allclose(values["ppo_kl"], total(batch, x["old_log_probs"] - mine["log_prob"]), rtol=2e-5)
    ratio = np.exp(mine["log_prob"] - x["old_log_probs"])
    clipped = np.where(x["advantages"] > 0, ratio > 1.28, ratio < 0.8)
    assert 0 < total(batch, clipped) < 1
    np.testing.assert_allclose(values["clip_fraction"], total(batch, clipped), rtol=1e-6)
    error = np.abs(x["old_log_probs"] - x["rollout_log_probs"])
    assert values["rollout_log_prob_error"] == np.float32(error.max()) > 0.2
    largest = metrics["kl_reference_max"]
    estimates = np.where(np.asarray(batch.completion_mask), oracles.k3(log_ratio), -np.inf)
    at = np.unravel_index(estimates.argmax(), estimates.shape)
    assert (int(largest.row), int(largest.column)) == at
    np.testing.assert_allclose(values["kl_reference_max"], estimates.max(), rtol=2e-5)
    np.testing.assert_allclose(largest.log_prob, mine["log_prob"][at], rtol=2e-6)
    assert largest.other_log_prob == x["ref_log_probs"][at]
    np.testing.assert_allclose(
        values["rollout_kl_max"], oracles.k3(reverse)[np.asarray(batch.completion_mask)].max(), rtol=2e-5
    )
    surplus = np.minimum(np.exp(-reverse), 5) * (mine["log_prob"] + mine["entropy"])
    np.testing.assert_allclose(values["sampling_bias"], total(batch, surplus), rtol=1e-5)
    means = {"loss", "entropy", "kl_reference", "rollout_kl", "ppo_kl", "clip_fraction", "sampling_bias"}
    largest_of = {"rollout_log_prob_error", "kl_reference_max", "rollout_kl_max"}
    assert values.keys() == {*terms, *means, *largest_of, "sampling_bias_z"}


@pytest.mark.parametrize("term", ["kl.loss={coef: 0.2, importance_corrected: true}", "loss.type=gspo"])
def test_single_update_needs_no_old_log_probs(term):
    """They are its own: scored before, they change neither the gradient nor what is reported."""
    config = tiny.config_of(term, "kl.rollout.coef=0.2")
    batch = dataclasses.replace(batch_of(), old_log_probs=jnp.asarray(measured()["log_prob"], jnp.float32))
    scored = loss_of(config, batch, with_gradient=True)
    alone = loss_of(config, dataclasses.replace(batch, old_log_probs=None), with_gradient=True)
    chex.assert_trees_all_close(alone, scored, rtol=2e-5, atol=2e-6)
    assert float(alone[0][1]["rollout_log_prob_error"].value()) > 1e-3


def test_gradient_is_policy_loss_plus_k2():
    config, batch = tiny.config_of("kl.loss.coef=0.3", "kl.rollout.coef=0.2"), batch_of()
    x, log_prob = numbers(batch), measured()["log_prob"]
    ratio = np.exp(log_prob - x["old_log_probs"])
    active = np.where(x["advantages"] > 0, ratio <= 1.2, ratio >= 0.8)
    slope = -x["advantages"] * ratio * active
    slope += 0.3 * (log_prob - x["ref_log_probs"]) + 0.2 * (log_prob - x["rollout_log_probs"])
    slope = np.where(batch.completion_mask, slope, 0) / np.asarray(batch.completion_mask).sum()

    def log_probs(params):
        policy = kljax.Policy(params)
        return token_stats(
            ScoredPolicy(MODEL, policy), Sequences.rows(batch.tokens, batch.token_mask), temperature=1.0
        )[0].log_prob

    pull = jax.jit(lambda params, cotangent: jax.vjp(log_probs, params)[1](cotangent)[0])
    expected = pull(tiny.host_params(), slope.astype(np.float32))
    _, gradient = loss_of(config, batch, with_gradient=True, decoder=True)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    assert largest > 1e-2
    chex.assert_trees_all_close(gradient["params"], expected, rtol=1e-5, atol=1e-6 * largest)


def test_importance_corrected_term_has_the_capped_ratio():
    config = tiny.config_of(
        "kl.loss={coef: 0.7, estimator: k3, gradient: value, importance_corrected: true, max_ratio: 1.1}"
    )
    batch = batch_of()
    x, log_prob = numbers(batch), measured()["log_prob"]
    ratio = np.minimum(np.exp(log_prob - x["old_log_probs"]), 1.1)
    kl = ratio * oracles.k3(log_prob - x["ref_log_probs"])
    loss, metrics = loss_of(config, batch)
    np.testing.assert_allclose(metrics["kl_loss"].value(), total(batch, kl), rtol=2e-6)
    np.testing.assert_allclose(loss, total(batch, ppo(x, log_prob) + 0.7 * kl), rtol=2e-6)
    uncorrected = total(batch, oracles.k3(log_prob - x["ref_log_probs"]))
    assert other_seeds.shown(abs(uncorrected / total(batch, kl) - 1) > 1e-2)
    np.testing.assert_allclose(metrics["kl_reference"].value(), uncorrected, rtol=2e-6)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_kl_term_has_the_ratio_of_the_row(level):
    config = tiny.config_of(
        f"kl.loss={{coef: 0.7, gradient: value, importance_corrected: true, importance_level: {level}}}"
    )
    batch = batch_of()
    x, log_prob = numbers(batch), measured()["log_prob"]
    sums = np.where(batch.completion_mask, log_prob - x["old_log_probs"], 0).sum(1, keepdims=True)
    lengths = np.asarray(batch.completion_mask).sum(1, keepdims=True)
    ratio = np.exp(sums if level == "sequence" else sums / np.maximum(lengths, 1))
    kl = ratio * oracles.k3(log_prob - x["ref_log_probs"])
    loss, metrics = loss_of(config, batch)
    np.testing.assert_allclose(metrics["kl_loss"].value(), total(batch, kl), rtol=2e-6)
    np.testing.assert_allclose(loss, total(batch, ppo(x, log_prob) + 0.7 * kl), rtol=2e-6)
    assert Plan.of(config).scope == "row"


def distributions(params, batch: Batch) -> jax.Array:
    """Log-probs [B, T, V] of every token that could stand in a column."""
    hidden = hidden_states(ScoredPolicy(MODEL, kljax.Policy(params)), Sequences.rows(batch.tokens, batch.token_mask))
    return jnp.roll(jax.nn.log_softmax(hidden @ stored_head(MODEL, params).T), 1, axis=1)


def test_exact_kl_of_the_loss():
    config = tiny.config_of("kl.loss={coef: 0.7, estimator: exact}")
    other, batch = tiny.moved(tiny.host_params(), 0.05), batch_of()
    hidden = jax.jit(hidden_states)(
        ScoredPolicy(MODEL, kljax.Policy(other)), Sequences.rows(batch.tokens, batch.token_mask)
    )
    batch = dataclasses.replace(batch, ref_hidden=hidden)
    arguments, coefs = ({"params": tiny.host_params()}, None, batch), coefficients(config)
    mask = np.asarray(batch.completion_mask)

    def kl_of(params) -> jax.Array:
        mine, expected = distributions(params, batch), distributions(other, batch)
        return (jnp.exp(mine) * (mine - expected)).sum(-1)[mask].mean()

    objective = jax.jit(jax.value_and_grad(make_objective(Plan.of(config), MODEL), has_aux=True))
    (loss, metrics), gradient = objective(*arguments, coefs, stored_head(MODEL, other))
    metrics = metrics.of_update()
    (without, _), rest = objective(*arguments, coefs | {"kl_loss": jnp.float32(0)}, stored_head(MODEL, other))
    expected, slope = jax.jit(jax.value_and_grad(kl_of))(tiny.host_params())
    assert expected > 1e-2
    for name in ("kl_reference_exact", "kl_loss"):
        np.testing.assert_allclose(metrics[name].value(), expected, rtol=1e-5)
    np.testing.assert_allclose(loss - without, 0.7 * expected, rtol=1e-4)
    # Embedding and head are one array: the slope goes through both, and the head of the reference stays what it was.
    change = jax.tree.map(lambda a, b: (a - b) / 0.7, gradient["params"], rest["params"])
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient))
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(slope)) > 1e-2 * largest
    chex.assert_trees_all_close(change, slope, rtol=0, atol=2e-6 * largest)
    with pytest.raises(ValueError, match="ref_head: got None"):
        make_objective(Plan.of(config), MODEL)(*arguments, coefs)


@pytest.mark.parametrize("name", ["cispo", "gspo", "ppo"])
def test_every_policy_loss_equals_the_library(name):
    options = {"ppo": ["loss.dual_clip=1.1"], "cispo": CLIP, "gspo": ["loss.clip_low=0.01", "loss.clip_high=0.02"]}[
        name
    ]
    config, batch = tiny.config_of(f"loss.type={name}", *options), batch_of()
    x, log_prob, mask = numbers(batch), measured()["log_prob"], np.asarray(batch.completion_mask)
    difference, advantages = np.where(mask, log_prob - x["old_log_probs"], 0), x["advantages"]
    ratio = np.exp(difference)
    sequence = np.exp(difference.sum(1) / np.maximum(mask.sum(1), 1))[:, None]
    expected = {
        "ppo": np.where(advantages < 0, np.minimum(ppo(x, log_prob), -1.1 * advantages), ppo(x, log_prob)),
        "cispo": -advantages * np.clip(ratio, 0.8, 1.2) * log_prob,
        "gspo": np.maximum(-advantages * sequence, -advantages * np.clip(sequence, 0.99, 1.02)),
    }[name]
    loss, metrics = loss_of(config, batch)
    np.testing.assert_allclose(loss, total(batch, expected), rtol=5e-6)
    low, high = {"ppo": (0.8, 1.2), "cispo": (0.8, 1.2), "gspo": (0.99, 1.02)}[name]
    judged = sequence if name == "gspo" else ratio
    clipped = ((advantages > 0) & (judged > high)) | ((advantages < 0) & (judged < low))
    assert 0 < total(batch, clipped) < 1
    np.testing.assert_allclose(metrics["clip_fraction"].value(), total(batch, clipped), rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_token_weights_follow_the_config(mode):
    options = ["loss.max_length=7"] if mode == "seq_mean_token_sum_norm" else []
    batch = tiny.rollout_batch()
    for empty_rows in ("drop", "count"):
        config = tiny.config_of(f"loss.aggregation={mode}", f"loss.empty_rows={empty_rows}", *options)
        mask, groups = np.asarray(batch.completion_mask), np.asarray(batch.group_ids)
        expected = oracles.token_weights(mask, mode, max_length=7, group_ids=groups, count=empty_rows == "count")
        np.testing.assert_allclose(weights_of(config, batch), expected, rtol=1e-6)


def controllers_of(config):
    return {name: controller.init() for name, controller in make_controllers(Plan.of(config)).items()}


def prepared(config, batch: Batch):
    """Operation by operation: the configs here have most of them in common, and compile no program each."""
    return make_preparation(Plan.of(config))(batch, controllers_of(config))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "seq_mean_token_sum_norm"])
def test_loss_kl_has_its_reduction_beside_another(mode):
    config = tiny.config_of(
        *("loss={type: ppo, aggregation: seq_mean_token_sum_norm, max_length: 4}", "rollout.samples_per_prompt=2"),
        f"kl.loss={{coef: 0.1, aggregation: {mode}}}",
    )
    batch = tiny.rollout_batch()
    mask, groups = np.asarray(batch.completion_mask), np.asarray(batch.group_ids)
    expected = oracles.token_weights(mask, mode, max_length=7, group_ids=groups, count=False)
    weighted = make_weighting(Plan.of(config))(batch)
    np.testing.assert_allclose(weighted.term_weights["kl"], expected, rtol=1e-6)


@pytest.mark.parametrize("mode", [None, "token_mean", "seq_mean_token_mean"])
def test_entropy_bonus_has_its_reduction_beside_another(mode):
    """As TRL's, which is a mean over tokens whatever the loss."""
    own = [] if mode is None else [f"loss.entropy_aggregation={mode}"]
    config = tiny.config_of("loss={type: none, aggregation: seq_mean_token_mean}", "loss.entropy_coef=0.5", *own)
    batch = make_weighting(Plan.of(config))(batch_of())
    mask, entropies = np.asarray(batch.completion_mask), measured()["entropy"]
    per_row = np.where(mask, entropies, 0).sum(1)[mask.any(1)] / mask.sum(1)[mask.any(1)]
    expected = entropies[mask].mean() if mode == "token_mean" else per_row.mean()
    np.testing.assert_allclose(loss_of(config, batch)[0], -0.5 * expected, rtol=1e-5)


@pytest.mark.parametrize("name", ESTIMATED)
def test_every_advantage_estimator_equals_the_library(name):
    options = {"gae": ["loss.value_coef=1.0", "advantage.lam=0.9", "advantage.gamma=0.8"]}
    options["reinforce_plus_plus"] = ["advantage.gamma=0.8"]
    config, batch = tiny.config_of(f"advantage.type={name}", *options.get(name, [])), batch_of()
    x, mask = numbers(batch), np.asarray(batch.completion_mask)
    lengths, rows = mask.sum(1), range(tiny.ROWS)
    rewards = x["rewards"].astype(float)
    pairs = rewards.reshape(4, 2)
    other = pairs[:, ::-1].reshape(-1)
    mean = np.repeat(pairs.mean(1), 2)
    weighted = np.repeat((pairs * lengths.reshape(4, 2)).sum(1) / lengths.reshape(4, 2).sum(1), 2)
    per_row = {
        "grpo": (rewards - mean) / (np.repeat(pairs.std(1, ddof=1), 2) + 1e-6),
        "rloo": rewards - other,
        "opo": rewards - weighted,
        "reinforce_plus_plus_baseline": rewards - mean,
    }
    expected = np.zeros(mask.shape)
    for row in rows:
        later_value, later = 0.0, 0.0
        for t in reversed(np.flatnonzero(mask[row])):
            reward = rewards[row] if t == np.flatnonzero(mask[row])[-1] else 0.0
            if name == "gae":
                later = reward + 0.8 * later_value - x["values"][row, t] + 0.8 * 0.9 * later
                later_value = x["values"][row, t]
            elif name == "reinforce_plus_plus":
                later = reward + 0.8 * later
            else:
                later = per_row[name][row]
            expected[row, t] = later
    result, _, metrics = prepared(config, batch)
    np.testing.assert_allclose(result.advantages, expected, rtol=2e-5, atol=1e-6)
    spread = (rewards[::2] != rewards[1::2]).mean()
    assert {key: float(metric.value()) for key, metric in metrics.items()} == {"groups_with_spread": spread}
    if name == "gae":
        np.testing.assert_allclose(result.returns, np.where(mask, expected + x["values"], 0), rtol=2e-5, atol=1e-6)
    else:
        assert result.returns is None


def test_whitening_covers_the_tokens_of_the_batch():
    batch = batch_of()
    options = "advantage.type=rloo", "advantage.whiten=false"
    plain = np.asarray(prepared(tiny.config_of(*options), batch)[0].advantages, float)
    white = prepared(tiny.config_of(options[0], "advantage.whiten=true"), batch)[0].advantages
    tokens = plain[np.asarray(batch.completion_mask)]
    expected = np.where(batch.completion_mask, kljax.masked_whiten(plain, batch.completion_mask), 0)
    np.testing.assert_allclose(white, expected, rtol=1e-5, atol=1e-6)
    assert abs(white[np.asarray(batch.completion_mask)].mean()) < 1e-6 < abs(tokens.mean())


REWARD_KL = (
    "advantage.type=reinforce_plus_plus",
    "kl.reward={coef: 0.2, estimator: k1, controller: {type: adaptive, target: 0.05, horizon: 40}}",
)


def test_raw_kl_drives_the_controller_after_shaping():
    config, batch = tiny.config_of(*REWARD_KL), batch_of()
    x, mask = numbers(batch), np.asarray(batch.completion_mask)
    kl = np.where(mask, x["old_log_probs"] - x["ref_log_probs"], 0)
    state = {"reward": kljax.ControllerState(jnp.float32(0.4))}
    result, _, metrics = make_preparation(Plan.of(config))(batch, state)
    np.testing.assert_allclose(metrics["kl_reward"].value(), kl.sum() / mask.sum(), rtol=1e-5)
    assert float(metrics["kl_coef"].value()) == np.float32(0.4), "the coefficient that was used, not the next one"
    rewards = -0.4 * kl
    for row in range(tiny.ROWS):
        if mask[row].any():
            rewards[row, np.flatnonzero(mask[row])[-1]] += x["rewards"][row]
    returns = np.where(mask, rewards[:, ::-1].cumsum(1)[:, ::-1], 0)
    np.testing.assert_allclose(result.advantages, returns, rtol=1e-5, atol=1e-6)
    for name in ("rewards", "old_log_probs", "ref_log_probs"):
        np.testing.assert_array_equal(getattr(result, name), getattr(batch, name), err_msg=name)


@pytest.mark.parametrize("kl", [(), ("kl.reward={coef: 0.2}",)])
def test_row_without_tokens_keeps_its_reward_or_is_left_out(kl):
    options, batch = ("advantage.scale=none", *kl), batch_of()
    mask, rewards = np.asarray(batch.completion_mask), np.asarray(batch.rewards, float)
    (empty,) = np.flatnonzero(~mask.any(1))
    batch = dataclasses.replace(batch, rewards=batch.rewards.at[empty].set(7.0))
    if kl:
        log_ratios = np.asarray(batch.old_log_probs, float) - np.asarray(batch.ref_log_probs)
        rewards = rewards - 0.2 * np.where(mask, log_ratios, 0).sum(1)
    alone = empty ^ 1  # pairs of rows share a prompt
    counted = prepared(tiny.config_of(*options), batch)[0].advantages
    dropped = prepared(tiny.config_of(*options, "advantage.empty_rows=drop"), batch)[0].advantages
    np.testing.assert_allclose(counted[alone][mask[alone]], (rewards[alone] - 7) / 2, rtol=1e-5)
    np.testing.assert_array_equal(dropped[alone], 0, "it has no one to be compared with")
    others = np.setdiff1d(np.arange(tiny.ROWS), [empty, alone])
    np.testing.assert_array_equal(counted[others], dropped[others])


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_tokens_of_advantage_0_can_be_dropped(aggregation):
    batch = batch_of()
    mask = np.asarray(batch.completion_mask)
    # The rows of the first prompt have equal rewards.
    batch = dataclasses.replace(batch, rewards=batch.rewards.at[:2].set(0.5))
    # Token weights have the aggregation, and the terms of the loss do not read it.
    terms = ("kl.loss.coef=0.3", "kl.rollout.coef=0.2", "loss.entropy_coef=0.1")
    options, loss = (f"loss.aggregation={aggregation}", *terms), tiny.config_of(*terms)
    selected = mask & (np.arange(tiny.ROWS) > 1)[:, None] & mask.any(1)[:, None]
    selected[np.flatnonzero(~mask.any(1)) ^ 1] = mask[np.flatnonzero(~mask.any(1)) ^ 1]
    config = tiny.config_of(*options, "advantage.zeros=drop")
    actual = prepared(config, batch)[0]
    np.testing.assert_array_equal(actual.kept_mask, selected)
    actual = dataclasses.replace(actual, token_weights=weights_of(config, actual))
    without = dataclasses.replace(actual, completion_mask=jnp.asarray(selected), kept_mask=None)
    without = dataclasses.replace(without, token_weights=weights_of(tiny.config_of(*options), without))
    expected, _ = loss_of(loss, without)
    np.testing.assert_allclose(loss_of(tiny.config_of(*terms, "advantage.zeros=drop"), actual)[0], expected, rtol=1e-5)
    counted = dataclasses.replace(actual, kept_mask=None)
    counted = dataclasses.replace(counted, token_weights=weights_of(tiny.config_of(*options), counted))
    assert abs(loss_of(loss, counted)[0] / expected - 1) > 1e-3


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_advantages_are_divided_by_their_weighted_mean(aggregation):
    batch, options = batch_of(), (f"loss.aggregation={aggregation}", "advantage.scale=none")
    mask = np.asarray(batch.completion_mask)
    plain = np.asarray(prepared(tiny.config_of(*options), batch)[0].advantages, float)
    result = prepared(tiny.config_of(*options, "advantage.scale_by_mean=true"), batch)[0].advantages
    rows = mask.any(1)
    per_row = np.abs(plain).sum(1)[rows] / mask.sum(1)[rows]
    mean = np.abs(plain[mask]).mean() if aggregation == "token_mean" else per_row.mean()
    np.testing.assert_allclose(result, plain / mean, rtol=1e-5)
    equal = dataclasses.replace(batch, rewards=jnp.ones_like(batch.rewards))
    zeros = prepared(tiny.config_of("advantage.empty_rows=drop", "advantage.scale_by_mean=true"), equal)[0].advantages
    np.testing.assert_array_equal(zeros, 0)


@pytest.mark.parametrize(("balance", "smaller"), [(0.25, "negative"), (-1.0, "positive")])
def test_balance_weighs_one_sign_less_before_the_mean(balance, smaller):
    batch, options = batch_of(), ("loss.aggregation=seq_mean_token_mean", "advantage.scale=none")
    plain, config = prepared(tiny.config_of(*options), batch)[0].advantages, tiny.config_of(*options)
    balanced = tiny.config_of(*options, "advantage.scale_by_mean=true", f"advantage.balance={balance}")
    result = prepared(balanced, batch)[0].advantages
    weights, mask = weights_of(config, batch), batch.completion_mask
    expected = kljax.balanced_advantages(plain, mask, balance=balance, weights=weights)
    np.testing.assert_array_equal(result, expected)
    assert {"negative": plain.min(), "positive": plain.max()}[smaller] != 0
    factor = np.where((np.asarray(plain) < 0) == (smaller == "negative"), 1 - abs(balance), 1)
    scaled = np.asarray(plain, float) * factor
    mean = (np.abs(scaled) * weights).sum() / np.asarray(weights, float).sum()
    np.testing.assert_allclose(result, scaled / mean, rtol=1e-5, atol=1e-7)


def test_the_exact_kl_of_the_reward():
    options = ("advantage.type=reinforce_plus_plus", "kl.reward={coef: 0.2, estimator: exact}")
    batch = batch_of()
    mask = np.asarray(batch.completion_mask)
    kl = np.where(mask, np.random.default_rng(0).uniform(0, 0.3, mask.shape), 1e4).astype(np.float32)
    batch = dataclasses.replace(batch, ref_exact_kl=jnp.asarray(kl))
    result, _, metrics = prepared(tiny.config_of(*options), batch)
    np.testing.assert_allclose(metrics["kl_reward"].value(), kl[mask].mean(dtype=float), rtol=1e-6)
    rewards = np.where(mask, -0.2 * kl.astype(float), 0)
    for row in range(tiny.ROWS):
        if mask[row].any():
            rewards[row, np.flatnonzero(mask[row])[-1]] += batch.rewards[row]
    returns = np.where(mask, rewards[:, ::-1].cumsum(1)[:, ::-1], 0)
    np.testing.assert_allclose(result.advantages, returns, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(result.ref_exact_kl, kl)


@pytest.mark.parametrize(("target", "error"), [(1e-3, 0.2), (1e3, -0.2), (None, None)])
def test_the_adaptive_coefficient_follows_the_formula_of_ziegler(target, error):
    batch = batch_of()
    full = np.ones((tiny.ROWS, tiny.LENGTH), bool) & (np.arange(tiny.LENGTH) >= tiny.PROMPT)
    distance = np.linspace(0.1, 0.5, full.size, dtype=np.float32).reshape(full.shape)
    batch = dataclasses.replace(
        batch,
        completion_mask=jnp.asarray(full),
        old_log_probs=jnp.zeros(full.shape),
        ref_log_probs=jnp.asarray(-distance),
    )
    mean = distance[full].mean(dtype=np.float64)  # over all tokens
    if target is None:
        target, error = mean / 1.1, 0.1
    controller = f"{{type: adaptive, target: {target}, horizon: 40}}"
    config = tiny.config_of(f"kl.reward={{coef: 0.2, estimator: k1, controller: {controller}}}")
    _, after, metrics = prepared(config, batch)
    np.testing.assert_allclose(metrics["kl_reward"].value(), mean, rtol=1e-6)
    np.testing.assert_allclose(after["reward"].coef, 0.2 * (1 + error * tiny.ROWS / 40), rtol=1e-6)


def test_fixed_coefficient_does_not_change():
    config = tiny.config_of("kl.reward={coef: 0.2, estimator: k1}")
    _, after, metrics = prepared(config, batch_of())
    assert float(after["reward"].coef) == float(metrics["kl_coef"].value()) == np.float32(0.2)


def test_centred_adjustment_sums_to_zero_over_the_batch():
    batch = batch_of()
    x, mask = numbers(batch), np.asarray(batch.completion_mask)
    plain = prepared(tiny.config_of("advantage.type=rloo"), batch)[0]
    config = tiny.config_of("advantage.type=rloo", "kl.advantage={coef: 0.7, estimator: k1}")
    shifted, _, metrics = prepared(config, batch)
    kl = x["old_log_probs"] - x["ref_log_probs"]
    mean = kl[mask].mean()
    shift = np.asarray(shifted.advantages, float) - np.asarray(plain.advantages, float)
    np.testing.assert_allclose(shift, np.where(mask, 0.7 * (mean - kl), 0), rtol=1e-5, atol=1e-6)
    assert np.abs(shift).max() > 0.1
    assert abs(shift.sum()) < 1e-6 * np.abs(shift).sum()
    np.testing.assert_allclose(metrics["kl_advantage"].value(), mean, rtol=1e-5)


def fields(config) -> list[str]:
    return list(Plan.of(config).fields)


def test_batch_needs_the_fields_of_the_config():
    always = ["rewards", "group_ids"]
    early = [*always, "old_log_probs"]
    assert fields(tiny.config_of()) == always
    assert fields(tiny.config_of("kl.rollout.coef=0.1")) == [*always, "rollout_log_probs"]
    assert fields(tiny.config_of("reference.monitor=true")) == [*always, "ref_log_probs"]
    assert fields(tiny.config_of("reference.monitor=exact")) == [*always, "ref_hidden"]
    exact = ("kl.loss={coef: 0.1, estimator: exact}", "kl.reward={coef: 0.1, estimator: exact}")
    assert fields(tiny.config_of(*exact)) == [*always, "ref_hidden", "ref_exact_kl"]
    both = fields(tiny.config_of(*exact, "kl.advantage.coef=0.1"))
    assert both == [*early, "ref_log_probs", "ref_hidden", "ref_exact_kl"]
    assert fields(tiny.config_of("optim.epochs=2")) == early
    assert fields(tiny.config_of("optim.updates_per_batch=2")) == early
    assert fields(tiny.config_of("kl.reward.coef=0.1")) == [*early, "ref_log_probs"]
    assert fields(tiny.config_of(*EVERYTHING)) == [*always, "rollout_log_probs", "ref_log_probs", "values"]


def test_coefficients_are_arrays():
    values = coefficients(tiny.config_of(*EVERYTHING))
    assert {name: round(float(value), 6) for name, value in values.items()} == {
        "kl_loss": 0.3,
        "rollout_kl": 0.2,
        "entropy": 0.05,
        "value": 0.5,
        "router_balance": 0.0,
        "router_z": 0.0,
    }
    assert all(isinstance(value, jax.Array) and value.dtype == jnp.float32 for value in values.values())
