"""kljax inside Tunix's learner, in the environment of `make test-tunix`."""

import dataclasses
import functools
import importlib.metadata
import subprocess
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix.models.llama3 import model as llama3
from tunix.rl import common

import kljax
from benchmarks.tunix import split_difference, temporary_bytes
from kljax.integrations import tunix
from tests.integrations.tunix.recorded import TunixWork, configs, update

WORK = TunixWork(vocab=128, layers=1, width=32, prompt_length=8, completion_length=16)
REDUCTIONS = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-scale", "sequence-mean-token-sum-norm")


def config_of(**fields):
    return tunix.TunixGRPOConfig(
        **{"num_generations": WORK.samples, "beta": 0.04, "loss_agg_mode": "token-mean", **fields}
    )


def loss_through_logits(config, graph, state):
    """The loss of the whole update as a formula over logits, with k3's value and the gradient of KL(pi || ref)."""
    tokens, sampled = WORK.completions()
    mask = np.array([np.arange(WORK.completion_length) < len(row) for row in tokens])
    completions = np.zeros(mask.shape, int)
    completions[mask] = np.concatenate(tokens)
    prompts = np.random.default_rng(4).integers(3, WORK.vocab, (WORK.prompts, WORK.prompt_length))
    both = jnp.concatenate([jnp.repeat(prompts, WORK.samples, axis=0), completions], axis=1)
    score = lambda graph, state: common.selective_log_softmax(  # noqa: E731
        nnx.merge(graph, state)(
            both, positions=common.build_positions_from_mask(both != 0), cache=None,
            attention_mask=common.make_causal_attn_mask(both != 0), segment_ids=(both != 0).astype(jnp.int32),
        )[0][:, WORK.prompt_length - 1 : -1] / 0.9, completions,
    )  # fmt: skip
    log_probs, reference = score(graph, state), jax.lax.stop_gradient(score(*nnx.split(WORK.model(1))))
    rewards = np.array([float(row % 3 == 0) + 0.1 * row for row in range(len(tokens))]).reshape(-1, WORK.samples)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    ratio = jnp.exp(log_probs - jax.lax.stop_gradient(log_probs))
    behind = jnp.exp(jnp.minimum(jax.lax.stop_gradient(log_probs) - sampled, jnp.log(2.0))) if config.correction else 1
    x = log_probs - reference
    kl = 0.5 * x**2 - jax.lax.stop_gradient(0.5 * x**2 - (jnp.exp(-x) - 1 + x))
    return (mask / mask.sum() * (config.beta * kl - ratio * behind * advantages.reshape(-1, 1))).sum()


@pytest.mark.parametrize("correction", [(), (functools.partial(kljax.truncated_importance_weights, max_weight=2.0),)])
def test_gradient_equals_the_formula_through_logits(correction):
    config = config_of(correction=correction)
    gradient, _ = update(WORK, config, micro=1, log_probs=True)
    graph, state = nnx.split(WORK.model(0))
    expected = jax.grad(lambda state: loss_through_logits(config, graph, state))(state)
    expected = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(expected)])
    assert np.linalg.norm(gradient - expected) < 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("loss_agg_mode", REDUCTIONS)
def test_two_micro_batches_are_one(loss_agg_mode):
    assert split_difference(WORK, config_of(loss_agg_mode=loss_agg_mode)) < 1e-6


def test_tunix_own_loss_differs_between_the_splits():
    """Otherwise the test above would show nothing."""
    config = configs(WORK.samples, loss_agg_mode="token-mean")["Tunix"]
    assert split_difference(WORK, config) > 0.05


def test_second_iteration_of_gspo_is_one_in_parts():
    assert split_difference(WORK, config_of(num_iterations=2, loss_algo="gspo-token")) < 1e-6


@pytest.mark.parametrize(("loss_algo", "expected"), [("grpo", 1.0), ("gspo-token", 0.0)])
def test_clip_fraction_is_of_the_clipped_ratio(loss_algo, expected, monkeypatch):
    """The ratios of both tokens are clipped, their geometric mean is 1."""
    log_probs = jnp.array([[0.5, -0.5], [0.5, -0.5]])
    stats = types.SimpleNamespace(log_prob=log_probs, entropy=jnp.zeros((2, 2)))
    monkeypatch.setattr(tunix, "token_stats", lambda *_: stats)
    example = types.SimpleNamespace(
        completion_mask=jnp.ones((2, 2), bool), advantages=jnp.array([1.0, -1.0]), token_weights=jnp.full((2, 2), 0.5),
        old_per_token_logps=jnp.zeros((2, 2)), ref_per_token_logps=None, sampler_is_weights=None,
    )  # fmt: skip
    _, metrics = tunix.policy_loss(None, example, config_of(loss_algo=loss_algo, epsilon=0.2))
    assert metrics["pg_clipfrac"] == expected


def test_no_array_of_logits_is_in_the_gradient():
    work = dataclasses.replace(WORK, vocab=16384, prompt_length=32, completion_length=96)
    logits = 4 * work.prompts * work.samples * work.completion_length * work.vocab
    bytes_of = {name: temporary_bytes(work, each) for name, each in configs(work.samples).items()}
    assert bytes_of["kljax"] < logits / 2 < logits < bytes_of["Tunix"]


def test_correction_without_rollout_log_probs_is_refused():
    steps = (functools.partial(kljax.truncated_importance_weights, max_weight=2.0),)
    with pytest.raises(ValueError, match=r"rollout_config\.return_logprobs: got False, expected True"):
        update(WORK, config_of(correction=steps), micro=2)


def test_wrong_names_and_models_are_refused():
    with pytest.raises(ValueError, match="kl_loss_mode: got 'k3', expected one of kl, mse_kl, low_var_kl"):
        config_of(kl_loss_mode="k3")
    rows = jnp.ones((1, 2), int)
    example = tunix.WeightedTrainExample(rows, rows, rows, rows, None, None, None)
    with pytest.raises(TypeError, match="model: got Llama3, which stores no hidden states"):
        tunix.token_stats(llama3.Llama3.__new__(llama3.Llama3), example, 1.0)


@pytest.mark.parametrize("version", ["0.1.8", None])
def test_another_release_of_tunix_is_named(version):
    installed = mock.Mock(
        return_value=version, side_effect=None if version else importlib.metadata.PackageNotFoundError
    )
    expected = rf"google-tunix: got {version or 'none'}, expected 0\.1\.7, .* pip install 'kljax\[tunix\]'"
    with mock.patch.object(importlib.metadata, "version", installed), pytest.raises(ImportError, match=expected):
        tunix.check_version()


def test_the_package_does_not_load_tunix():
    script = "import sys, kljax, kljax.integrations; assert not {'tunix', 'flax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
