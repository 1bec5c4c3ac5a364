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
from train.config.plan import Plan
from train.models.sharding import batch_sharding
from train.rl.metrics import SHARE, LargestToken, is_beyond, single
from train.rl.objective import coefficients
from train.rl.optimizer import make_optimizer
from train.rl.preparation import make_control
from train.rl.state import first_nonfinite
from train.rl.step import make_update
from train.sequences.batch import Batch

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
    return make_update(Plan.of(CONFIG), MODEL, optimizer, tiny.state_of(CONFIG, optimizer), tiny.mesh_of())


def apply(update, batch, state):
    return update(state, None, batch, ROWS, coefficients(CONFIG))


def test_update_without_a_finite_loss_changes_nothing(update):
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


def test_gradient_beyond_float32_is_skipped(update):
    optimizer = make_optimizer(CONFIG.optim)
    huge = dataclasses.replace(prepared(), advantages=jnp.full_like(prepared().advantages, 3e37))
    state = tiny.state_of(CONFIG, optimizer)
    before = jax.device_get((state.trainable, state.opt_state))
    state, metrics = apply(update, huge, state)
    assert jnp.isfinite(metrics["loss"].value())
    assert float(metrics["skipped_updates"].value()) == 1
    chex.assert_trees_all_equal(jax.device_get((state.trainable, state.opt_state)), before)


def test_array_without_a_finite_gradient_norm_is_named(update):
    large = dataclasses.replace(prepared(), advantages=jnp.full_like(prepared().advantages, 1e25))
    state, metrics = apply(update, large, tiny.state_of(CONFIG, make_optimizer(CONFIG.optim)))
    assert float(metrics["skipped_updates"].value()) == 1
    assert int(state.guard.nonfinite) >= 0


def test_update_beyond_a_limit_is_skipped_by_means():
    config = tiny.config_of("guard.action=skip", "reference.monitor=true", "optim.micro_batches=2")
    optimizer = make_optimizer(config.optim)
    state = tiny.state_of(config, optimizer)
    update = make_update(Plan.of(config), MODEL, optimizer, state, tiny.mesh_of())
    row, column, before = 3, 6, jax.device_get((state.trainable, state.opt_state))

    def with_reference(log_prob):
        spike = prepared().ref_log_probs.at[row, column].set(log_prob)
        return dataclasses.replace(prepared(), ref_log_probs=spike)

    state, metrics = apply(update, with_reference(40.0), state)
    largest = metrics["kl_reference_max"]
    assert (int(largest.row), int(largest.column), float(largest.other_log_prob)) == (row, column, 40.0)
    # k3 of one token is exp(6) - 7 = 396, of 20 tokens in the mean: 19.8, beyond 10.
    state, metrics = apply(update, with_reference(float(largest.log_prob) + 6), state)
    assert (float(metrics["skipped_updates"].value()), float(metrics[SHARE].value())) == (1, 1)
    assert (int(state.guard.skipped), int(state.guard.nonfinite)) == (2, -1)
    chex.assert_trees_all_equal(jax.device_get((state.trainable, state.opt_state)), before)
    # exp(5) - 6 = 142 is 7.1 in the mean, although about 14 in that of its micro-batch.
    state, metrics = apply(update, with_reference(float(largest.log_prob) + 5), state)
    assert 7 < float(metrics["kl_reference"].value()) < 10
    assert (float(metrics["skipped_updates"].value()), float(metrics[SHARE].value())) == (0, 0)
    assert int(state.guard.skipped) == 0


def test_rollout_kl_of_one_token_is_limited():
    """As `kl.rollout` pulls the policy to the sampler, one wrong log-prob of it would be all of an update."""
    config = tiny.config_of("guard.action=skip", "kl.rollout.coef=0.1", "loss.old_log_probs=trainer", "optim.epochs=2")
    optimizer = make_optimizer(config.optim)
    state = tiny.state_of(config, optimizer)
    update = make_update(Plan.of(config), MODEL, optimizer, state, tiny.mesh_of())
    row, column, before = 3, 6, jax.device_get(state.trainable)
    spike = prepared().rollout_log_probs.at[row, column].set(-45.0)
    state, metrics = update(
        state, None, dataclasses.replace(prepared(), rollout_log_probs=spike), ROWS, coefficients(config)
    )
    largest = metrics["rollout_kl_max"]
    assert (int(largest.row), int(largest.column), float(largest.other_log_prob)) == (row, column, -45.0)
    assert float(largest.value()) > 1e15
    assert (float(metrics["skipped_updates"].value()), float(metrics[SHARE].value())) == (1, 1)
    chex.assert_trees_all_equal(jax.device_get(state.trainable), before)
    state, metrics = update(state, None, prepared(), ROWS, coefficients(config))
    assert float(metrics[SHARE].value()) == 0
    assert float(metrics["rollout_kl_max"].value()) >= float(metrics["rollout_kl"].value()) > 0


def test_each_limit_has_its_side_and_ignores_nan():
    names = ("kl_reference", "kl_reference_max", "rollout_kl_max", "entropy")
    metrics = {name: single(jnp.float32(1)) for name in names}
    for limit, name, beyond in (
        ("max_token_kl", "rollout_kl_max", 2e6),
        ("max_kl", "kl_reference", 10.5),
        ("max_token_kl", "kl_reference_max", 2e6),
        ("min_entropy", "entropy", 0.1),
    ):
        guard = tiny.config_of("guard.min_entropy=0.2").guard
        assert not is_beyond(guard, metrics)
        assert is_beyond(guard, metrics | {name: single(jnp.float32(beyond))})
        assert not is_beyond(guard, metrics | {name: single(jnp.float32(jnp.nan))})
        without = guard.model_copy(update={limit: None})
        assert not is_beyond(without, metrics | {name: single(jnp.float32(beyond))})


@pytest.mark.parametrize("special", [1.0, np.inf, np.nan])
def test_largest_token_is_the_same_in_any_split(special):
    rng, shape = np.random.default_rng(0), (8, 5)
    mask, log_probs = rng.random(shape) < 0.6, rng.normal(size=shape).astype(np.float32)
    mask[5], values = False, rng.integers(-3, 1, shape).astype(np.float32)
    # Three equal ones, and a larger one that is masked.
    for row, column in ((6, 3), (2, 4), (2, 1)):
        mask[row, column], values[row, column] = True, special
    mask[0, 0], values[0, 0] = False, 9

    def of(rows):
        parts = (jnp.asarray(x[rows]) for x in (values, mask))
        more = {"log_probs": jnp.asarray(log_probs[rows]), "other_log_probs": jnp.asarray(2 * log_probs[rows])}
        return LargestToken.of(*parts, rows=jnp.asarray(rows, jnp.int32), **more)

    expected = (2, 1, log_probs[2, 1], 2 * log_probs[2, 1])
    order = rng.permutation(8)
    micro = jax.tree.map(lambda *parts: jnp.stack(parts), *map(of, order.reshape(4, 2))).reduce()
    for token in (of(np.arange(8)), of(order), micro, of(order[:3]) + of(order[3:]), of(order[3:]) + of(order[:3])):
        np.testing.assert_array_equal(token.value(), np.float32(special))
        assert (int(token.row), int(token.column), token.log_prob, token.other_log_prob) == expected
    empty = of(np.array([5]))
    assert empty.value() == -np.inf
    assert int((empty + micro).column) == expected[1]
    mesh = tiny.mesh_of(2, 2)
    arrays = jax.device_put((values, mask, np.arange(8, dtype=np.int32), log_probs), batch_sharding(mesh))
    find = jax.jit(lambda v, m, r, x: LargestToken.of(v, m, rows=r, log_probs=x, other_log_probs=2 * x))
    token = jax.device_get(find(*arrays))
    assert (int(token.row), int(token.column), token.log_prob, token.other_log_prob) == expected


def test_first_non_finite_leaf_is_found():
    tree = {"a": jnp.ones(2), "b": jnp.array([1.0, jnp.inf]), "c": jnp.array(jnp.nan), "n": jnp.arange(3)}
    assert int(first_nonfinite(tree)) == 1
    assert int(first_nonfinite({"a": tree["a"], "n": tree["n"]})) == -1


def test_controller_ignores_a_nan_kl():
    config = tiny.config_of("kl.loss={coef: 0.1, controller: {type: adaptive, target: 0.1, horizon: 100}}")
    control = jax.jit(make_control(Plan.of(config)))
    states = {"loss": kljax.adaptive_kl(0.1, target=0.1, horizon=100).init()}
    mask = prepared().completion_mask
    after = control(states, {"loss": kljax.WeightedSum(jnp.float32(jnp.nan), jnp.float32(1))}, mask)
    chex.assert_trees_all_equal(after, states)
    moved = control(states, {"loss": kljax.WeightedSum(jnp.float32(5), jnp.float32(1))}, mask)
    assert float(moved["loss"].coef) > float(states["loss"].coef)
