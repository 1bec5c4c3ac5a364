"""A base in int8 under policy and reference: one copy, and the numbers of the weights that it stands for."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import tiny
from train.config.plan import Plan
from train.models.int8 import dequantise_params, quantise_params
from train.models.parameters import init_adapter
from train.models.sharding import replicated
from train.references.load import load_reference
from train.rl.algorithms import make_controllers
from train.rl.objective import coefficients
from train.rl.policy import ScoredPolicy
from train.rl.state import initial_state
from train.rl.step import make_prepare, make_score, make_update

LORA = "lora={rank: 2, alpha: 4.0, targets: [q_proj, v_proj, down_proj]}"
NEEDED = ("kl.loss.coef=0.1", "kl.reward.coef=0.1", "optim.micro_batches=2")


def adapter_of(seed: int):
    """Neither half of it is 0."""
    drawn = init_adapter(tiny.model_of(tiny.config_of(LORA)), jax.random.key(seed), tiny.mesh_of())
    return jax.tree.map(lambda x: x + 0.05 * (1 + seed), drawn)


@pytest.fixture(scope="module")
def base() -> dict:
    return quantise_params(jax.tree.map(jnp.array, tiny.host_params()))


@functools.cache
def prepare():
    """Advantages and token weights, which no base is read for."""
    return make_prepare(Plan.of(tiny.config_of(LORA, *NEEDED)), tiny.mesh_of())


def step_of(how: str | None, base: dict, other: int | None) -> tuple[object, dict, dict[str, float]]:
    """The batch as it is scored, gradients and metrics of one update, against adapter `other` on the same base."""
    config, mesh = tiny.config_of(LORA, f"model.quantization={how or 'null'}", *NEEDED), tiny.mesh_of()
    model = tiny.model_of(config)
    trainable = {"adapter": adapter_of(1)}
    reference = ScoredPolicy(model, kljax.Policy(None, None if other is None else adapter_of(other)))
    scored = make_score(Plan.of(config), model, mesh)(trainable, base, reference, tiny.rollout_batch())
    state = initial_state(trainable, tiny.keep_gradient(), make_controllers(Plan.of(config)), replicated(mesh))
    batch, _, _ = prepare()(scored, state.controllers)
    update = make_update(Plan.of(config), model, tiny.keep_gradient(), state, mesh)
    after, metrics = update(state, base, batch, jnp.arange(tiny.ROWS), coefficients(config))
    return scored, after.opt_state, {name: float(value.value()) for name, value in metrics.items()}


@pytest.mark.parametrize("other", [None, pytest.param(2, marks=pytest.mark.thorough)])
def test_scores_gradients_and_metrics_match_dequantised_weights(base, other):
    scored, gradient, metrics = step_of("int8", base, other)
    same, expected, values = step_of(None, dequantise_params(base, jnp.float32), other)
    for name in ("old_log_probs", "ref_log_probs"):
        np.testing.assert_allclose(getattr(scored, name), getattr(same, name), rtol=0, atol=5e-6)
    assert np.abs(scored.old_log_probs - scored.ref_log_probs).max() > 1e-2
    assert jax.tree.structure(gradient) == jax.tree.structure(expected)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    chex.assert_trees_all_close(gradient, expected, rtol=0, atol=1e-5 * scale)
    np.testing.assert_allclose(metrics["kl_reference"], values["kl_reference"], rtol=1e-4)


def test_every_reference_on_the_base_shares_it():
    config = tiny.config_of(LORA, "model.quantization=int8", *NEEDED, "reference={source: base}")
    model = tiny.model_of(config)
    loaded = load_reference(
        Plan.of(config), model, tiny.mesh_of(), saved=None, read_base=lambda: None, checkpoints=None
    )
    assert loaded.shares_base
    assert loaded.policy.adapter is None
    assert loaded.model == model
