"""An update that is not finite is skipped in the compiled step; KL controllers ignore a KL that is not a number."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import tiny
from train.rl.algorithms import make_optimizer
from train.rl.batch import Batch
from train.rl.objective import coefficients, make_control
from train.rl.state import first_nonfinite
from train.rl.step import make_update

CONFIG = tiny.config_of("loss.old_log_probs=trainer", "optim.epochs=2")
MODEL = tiny.model_of(CONFIG)
ROWS = np.arange(tiny.ROWS)


@functools.cache
def prepared() -> Batch:
    """A batch that is ready for an update."""
    return tiny.full_batch(np.full((tiny.ROWS, tiny.LENGTH), -5.6))


@pytest.fixture(scope="module")
def update():
    optimizer = make_optimizer(CONFIG.optim)
    return make_update(CONFIG, MODEL, optimizer, tiny.state_of(CONFIG, optimizer), tiny.mesh_of())


def apply(update, batch, state):
    return update(state, None, batch, ROWS, coefficients(CONFIG))


def test_an_update_without_a_finite_loss_changes_neither_weights_nor_optimizer(update):
    optimizer = make_optimizer(CONFIG.optim)
    state, _ = apply(update, prepared(), tiny.state_of(CONFIG, optimizer))
    before = jax.device_get(state)
    poisoned = dataclasses.replace(prepared(), advantages=prepared().advantages * jnp.nan)
    for skipped in (1, 2):
        state, metrics = apply(update, poisoned, state)
        assert float(metrics["skipped_updates"].value()) == 1
        assert int(state.guard.skipped) == skipped
        # The whole loss is a number that is none, and so is every gradient.
        assert int(state.guard.nonfinite) == 0
    chex.assert_trees_all_equal(
        jax.device_get((state.trainable, state.opt_state)), (before.trainable, before.opt_state)
    )
    state, metrics = apply(update, prepared(), state)
    assert float(metrics["skipped_updates"].value()) == 0
    assert (int(state.guard.skipped), int(state.guard.nonfinite)) == (0, -1)
    assert not np.array_equal(*(jax.tree.leaves(tree)[0] for tree in (state.trainable, before.trainable)))


def test_a_gradient_beyond_float32_is_skipped_although_the_loss_is_finite(update):
    optimizer = make_optimizer(CONFIG.optim)
    huge = dataclasses.replace(prepared(), advantages=jnp.full_like(prepared().advantages, 3e37))
    state = tiny.state_of(CONFIG, optimizer)
    before = jax.device_get(state.trainable)
    state, metrics = apply(update, huge, state)
    assert jnp.isfinite(metrics["loss"].value())
    assert float(metrics["skipped_updates"].value()) == 1
    chex.assert_trees_all_equal(jax.device_get(state.trainable), before)


def test_an_array_whose_gradient_has_finite_numbers_and_no_finite_norm_is_named(update):
    large = dataclasses.replace(prepared(), advantages=jnp.full_like(prepared().advantages, 1e25))
    state, metrics = apply(update, large, tiny.state_of(CONFIG, make_optimizer(CONFIG.optim)))
    assert float(metrics["skipped_updates"].value()) == 1
    assert int(state.guard.nonfinite) >= 0


def test_the_first_leaf_that_is_not_finite_is_found():
    tree = {"a": jnp.ones(2), "b": jnp.array([1.0, jnp.inf]), "c": jnp.array(jnp.nan), "n": jnp.arange(3)}
    assert int(first_nonfinite(tree)) == 1
    assert int(first_nonfinite({"a": tree["a"], "n": tree["n"]})) == -1


def test_a_controller_does_not_take_a_kl_that_is_no_number():
    config = tiny.config_of("kl.loss={coef: 0.1, controller: {type: adaptive, target: 0.1, horizon: 100}}")
    control = jax.jit(make_control(config))
    states = {"loss": kljax.adaptive_kl(0.1, target=0.1, horizon=100).init()}
    mask = prepared().completion_mask
    after = control(states, kljax.WeightedSum(jnp.float32(jnp.nan), jnp.float32(1)), mask)
    chex.assert_trees_all_equal(after, states)
    moved = control(states, kljax.WeightedSum(jnp.float32(5), jnp.float32(1)), mask)
    assert float(moved["loss"].coef) > float(states["loss"].coef)
