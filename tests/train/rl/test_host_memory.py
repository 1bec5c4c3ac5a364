"""The optimizer's state in the memory of the host: the values of the state on the devices, bit by bit."""

import dataclasses
import functools
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from train.config.errors import ConfigError
from train.config.plan import Plan
from train.models.sharding import HOST, make_mesh
from train.rl.host_memory import make_run_optimizer
from train.rl.objective import coefficients
from train.rl.step import make_prepare, make_score, make_update
from train.sequences.batch import row_count
from train.weights.orbax import RunCheckpoints

IN_HOST = "optim.host_memory=true"
ADAMW = "optim.optimizer={type: adamw, weight_decay: 0.1}"


def memories(opt_state) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(opt_state) if leaf.ndim}


@functools.cache
def programs_of(*overrides: str):
    """The config, its first state, and the programs of a step."""
    config = tiny.config_of("mesh={fsdp: 2, tensor: 1}", "advantage=reinforce_plus_plus", *overrides)
    mesh, model, optimizer = make_mesh(1, 2, 1), tiny.model_of(config), make_run_optimizer(config.optim)
    state = tiny.state_of(config, optimizer, mesh)
    update = make_update(Plan.of(config), model, optimizer, state, mesh)
    return config, mesh, state, make_score(Plan.of(config), model, mesh), make_prepare(Plan.of(config), mesh), update


def trained(*overrides: str, updates: int = 3, spoil: bool = False):
    """The state after some updates on one batch; `spoil` puts NaN into its rewards."""
    config, mesh, first, score, prepare, update = programs_of(*overrides)
    with jax.set_mesh(mesh):
        state, batch = tiny.copied(first), jax.device_put(tiny.rollout_batch())
        if spoil:
            batch = dataclasses.replace(batch, rewards=batch.rewards * jnp.nan)
        scored, controllers, _ = prepare(score(state.trainable, None, None, batch), state.controllers)
        for _ in range(updates):
            rows = jnp.arange(row_count(scored))
            state, metrics = update(state, None, scored, rows, coefficients(config, controllers))
    return state, memories(first.opt_state), metrics


def assert_same(one, other) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, other)


OTHERS = [pytest.param(name, marks=pytest.mark.thorough) for name in ("adam", "lion", "sgd", "rmsprop")]


@pytest.mark.parametrize("optimizer", ["adamw", *OTHERS])
def test_values_equal_the_values_on_devices(optimizer):
    extra = (ADAMW if optimizer == "adamw" else f"optim.optimizer.type={optimizer}",)
    on_device, kinds, _ = trained(*extra)
    in_host, host_kinds, _ = trained(*extra, IN_HOST)
    assert_same((on_device.trainable, on_device.opt_state), (in_host.trainable, in_host.opt_state))
    if optimizer != "sgd":  # which has no moments
        assert kinds == {"device"}
        assert host_kinds == memories(in_host.opt_state) == {HOST}
    moved = [np.abs(np.asarray(a) - b).max() for a, b in zip(
        jax.tree.leaves(in_host.trainable["params"]), jax.tree.leaves(tiny.host_params()), strict=True
    )]  # fmt: skip
    assert min(moved) > 0


def test_a_skipped_update_changes_no_moment():
    before, _, _ = trained(ADAMW, IN_HOST, updates=1)
    after, _, _ = trained(ADAMW, IN_HOST, updates=1, spoil=True)
    assert int(after.guard.skipped) == 1
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(after.opt_state))
    assert any((np.asarray(leaf) != 0).any() for leaf in jax.tree.leaves(before.opt_state))


@pytest.mark.parametrize("saved_in_host", [True, False])
def test_checkpoint_continues_in_the_other_memory(tmp_path, saved_in_host):
    def state_with(in_host: bool):
        config = tiny.config_of(f"optim.host_memory={in_host}".lower())
        return config, tiny.state_of(config, make_run_optimizer(config.optim))

    (config, state), (_, like) = state_with(saved_in_host), state_with(not saved_in_host)
    marked = jax.tree.map(lambda x: jax.device_put(np.asarray(x) + 3, x.sharding), state.opt_state)
    state = dataclasses.replace(state, opt_state=marked)
    with closing(RunCheckpoints(tmp_path, config.checkpoint)) as checkpoints:
        checkpoints.save(state, 1)
        restored = checkpoints.restore_last(like)
    assert memories(state.opt_state) != memories(restored.opt_state) == memories(like.opt_state)
    assert_same(restored.opt_state, state.opt_state)


def test_optimizer_reading_whole_matrices_is_refused():
    with pytest.raises(ConfigError, match=r"optim\.host_memory: got true, but optimizer muon reads whole matrices"):
        tiny.config_of(IN_HOST, "optim.optimizer={type: muon}")
