"""The state of a run as shapes is that of the run itself, array by array."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.tiny import config_of, mesh_of, model_of, state_of
from train.config.errors import UserError
from train.config.plan import Plan
from train.models.parameters import init_adapter
from train.plan.abstract import abstract_reference, abstract_state
from train.plan.shapes import PUBLISHED
from train.rl.host_memory import make_run_optimizer

CASES = {
    "all weights": (),
    "lora": ("lora.rank=2",),
    "value head": ("advantage=gae", "loss.value_coef=1"),
    "lag": ("rollout.policy_lag=2",),
    "lion": ("optim.optimizer=lion",),
    "muon": ("optim.optimizer=muon",),
    "adafactor": ("optim.optimizer=adafactor",),
    "moments in host memory": ("optim.host_memory=true",),
    "controller": ("kl.reward={coef: 0.1, controller: {type: adaptive, target: 0.1, horizon: 100}}",),
}


def described(tree: Any) -> dict[str, tuple]:
    """Shape, type, the parts that each axis is split into, the number of devices, and the memory, by path."""

    def parts(x: Any) -> tuple[int, ...]:
        return tuple(a // b for a, b in zip(x.shape, x.sharding.shard_shape(x.shape), strict=True))

    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    places = {path: (x.sharding.num_devices, x.sharding.memory_kind or "device") for path, x in leaves}
    return {jax.tree_util.keystr(path): (x.shape, jnp.dtype(x.dtype), parts(x), *places[path]) for path, x in leaves}


@pytest.mark.parametrize("name", CASES)
def test_planned_state_equals_the_state_of_a_run(name):
    config, mesh = config_of(*CASES[name]), mesh_of(2, 2, 1)
    optimizer = make_run_optimizer(config.optim)
    state, base = abstract_state(Plan.of(config), model_of(config), optimizer, mesh)
    assert described(state) == described(state_of(config, optimizer, mesh))
    assert (base is None) == (config.lora is None)


def test_arrays_of_the_state_are_counted_once():
    config, mesh = config_of("rollout.policy_lag=2"), mesh_of(2, 2, 1)
    state, _ = abstract_state(Plan.of(config), model_of(config), make_run_optimizer(config.optim), mesh)
    assert state.past is not None
    weights = {id(x) for x in jax.tree.leaves(state.trainable)}
    past = [id(x) for x in jax.tree.leaves(state.past)]
    assert not weights & set(past)
    assert len(past) == len(set(past))


@functools.cache
def reference_of(*overrides: str) -> Any:
    config, mesh = config_of(*overrides), mesh_of(2, 2, 1)
    model = model_of(config)
    state, _ = abstract_state(Plan.of(config), model, make_run_optimizer(config.optim), mesh)
    return state, abstract_reference(Plan.of(config), model, mesh, state)


KL = "kl.loss.coef=0.1"


def test_no_term_reads_a_reference():
    assert reference_of()[1] is None


def test_reference_without_lora_has_separate_arrays():
    for source in ("{source: base}", "{source: step, step: 0}"):
        state, reference = reference_of(KL, f"reference={source}")
        assert described(reference.policy.params) == described(state.trainable["params"])
        assert not {id(x) for x in jax.tree.leaves(reference)} & {id(x) for x in jax.tree.leaves(state)}


def test_a_reference_with_lora_shares_the_base():
    _, base = reference_of(KL, "lora.rank=2")
    assert (base.policy.params, base.policy.adapter) == (None, None)
    state, step = reference_of(KL, "lora.rank=2", "reference={source: step, step: 0}")
    assert step.policy.params is None
    assert described(step.policy.adapter) == described(state.trainable["adapter"])


def test_average_is_stored_once():
    state, reference = reference_of(KL, "reference={source: ema}")
    stored = {id(x) for x in jax.tree.leaves(state.reference)}
    assert stored == {id(x) for x in jax.tree.leaves(reference.policy.params)}


def test_a_teacher_has_the_shape_of_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED["Qwen3-0.6B"], "vocab_size": 264}))
    checkpoint = f"reference={{source: checkpoint, path: {tmp_path}}}"
    _, teacher = reference_of(KL, "model.dtype=bfloat16", checkpoint)
    assert teacher.model.config.layers == 28
    assert {x.dtype for x in jax.tree.leaves(teacher.policy.params)} == {jnp.dtype("bfloat16")}
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-0.6B"]))
    with pytest.raises(UserError, match=r"reference\.path: .* has a vocabulary of 151936 tokens, expected 264"):
        reference_of(KL, checkpoint)


def test_the_adapter_of_a_run_has_these_shapes():
    config, mesh = config_of("lora.rank=2"), mesh_of(2, 2, 1)
    model = model_of(config)
    state, _ = abstract_state(Plan.of(config), model, make_run_optimizer(config.optim), mesh)
    drawn = init_adapter(model, jax.random.key(0), mesh)
    assert described(state.trainable["adapter"]) == described(drawn)
