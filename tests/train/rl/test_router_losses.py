"""Losses and bias of the routers: of the definition, of the update however it is split; and routers that stay."""

import dataclasses
import functools
import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import tiny
from train.config.errors import UserError
from train.config.plan import Plan
from train.models import Decoder, ExpertsConfig, LayerKind
from train.models.blocks import layer_stacks
from train.models.experts import Routed
from train.models.sharding import make_mesh
from train.rl import objective as objectives
from train.rl.optimizer import make_optimizer
from train.rl.routing import (
    ExpertLoad,
    Routers,
    RouterTotals,
    balance_loss,
    z_loss,
)
from train.rl.state import TrainState
from train.rl.step import make_update
from train.sequences.packing import StepPacking, make_packer
from train.weights.model import make_policy_model

RECORDED = json.loads((Path(__file__).parents[2] / "goldens" / "router_losses.json").read_text())
EXPERTS = "model.experts={count: 6, active: 2, width: 8}"
LOSSES = ("routing.balance_coef=0.7", "routing.z_coef=0.3")
BIASED = ("routing.bias_update_rate=0.25",)
BIAS = np.array([[0.2, 0.0, -0.2, 0.1, 0.0, 0.0], [0.0, 0.0, 0.3, 0.0, 0.0, 0.0], [0.0] * 6], np.float32)
DECAY = ("optim.optimizer.weight_decay=0.1", "optim.learning_rate=0.01")
ALONE = "optim.share_prompts=false"


def recorded_router() -> tuple[jax.Array, jax.Array]:
    """Logits [B, T, L, E] with numbers under the mask that would show, and the mask."""
    mask = jnp.array(RECORDED["mask"])
    return jnp.where(mask[..., None, None] > 0, jnp.array(RECORDED["logits"]), 1e30), mask


@jax.jit
def totals_of(logits: jax.Array, mask: jax.Array) -> RouterTotals:
    chosen = jnp.sort(jax.lax.top_k(logits, RECORDED["active"])[1]).astype(jnp.int16)
    return RouterTotals.of(mask, Routed(chosen, chosen, logits))


def test_balance_loss_equals_transformers_with_gradient():
    logits, mask = recorded_router()
    totals = totals_of(logits, mask)
    value, gradient = jax.jit(jax.value_and_grad(lambda x: balance_loss(x, mask, totals, over="model")))(logits)
    np.testing.assert_allclose(value, RECORDED["model"], rtol=1e-6)
    np.testing.assert_allclose(gradient, RECORDED["model_gradient"], atol=1e-7)
    each = jax.jit(lambda x: balance_loss(x, mask, totals, over="layer"))(logits)
    np.testing.assert_allclose(each, np.mean(RECORDED["layers"]), rtol=1e-6)
    assert abs(RECORDED["model"] - np.mean(RECORDED["layers"])) > 0.01


def test_parts_of_an_update_add_up():
    """The rows have unequal lengths: a mean of means would be another number."""
    logits, mask = recorded_router()
    totals = totals_of(logits, mask)
    for loss in (jax.jit(lambda *args: balance_loss(*args, over="model")), jax.jit(z_loss)):
        parts = [loss(logits[row : row + 1], mask[row : row + 1], totals) for row in (0, 1)]
        np.testing.assert_allclose(sum(parts), loss(logits, mask, totals), rtol=1e-6)


def test_z_loss_equals_its_formula():
    logits, mask = recorded_router()
    values = np.asarray(RECORDED["logits"])[np.asarray(mask) > 0]
    expected = np.mean(np.log(np.exp(values).sum(-1)) ** 2)
    value, gradient = jax.value_and_grad(lambda x: z_loss(x, mask, totals_of(logits, mask)))(logits)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert not np.asarray(gradient)[np.asarray(mask) == 0].any()


def update_of(*options: str, **shape: int) -> tuple[TrainState, dict]:
    """The state after an update, whose optimizer keeps the gradient, and its metrics, in a layout."""
    axes = (f"mesh.{axis}={size}" for axis, size in shape.items())
    config = tiny.config_of(EXPERTS, *LOSSES, *options, *axes)
    plan, mesh = Plan.of(config), make_mesh(**shape)
    model, width = tiny.model_of(config), config.data.max_completion_length
    with jax.set_mesh(mesh), jax.enable_x64(True):
        weights = jax.tree.map(lambda x: np.asarray(x) * 2, tiny.drawn(model, jax.random.key(0)))
        if "choice_bias" in weights["layers"]["mlp"]:
            weights["layers"]["mlp"]["choice_bias"] = BIAS
        params = tiny.placed(kljax.Policy(weights), model, mesh).params
        state = tiny.first_state(plan, model, mesh, params, tiny.keep_gradient())
        state, batch = tiny.wide(state), tiny.wide(tiny.full_batch(np.full((tiny.ROWS, tiny.LENGTH), -5.6)))
        # Padding, so that packed rows pay.
        batch = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, width - tiny.NEW_TOKENS))) if x.ndim == 2 else x, batch)
        rows, packer = [np.arange(tiny.ROWS)], make_packer(plan, mesh)
        packing = StepPacking.off(rows) if packer is None else packer(batch, rows)
        chosen, packed = packing.updates[0]
        assert (packed is not None) == config.optim.packing
        update = make_update(plan, model, tiny.keep_gradient(), state, mesh)
        after, metrics = update(state, None, batch, chosen, objectives.coefficients(config), packed=packed)
        return jax.device_get((after, {name: m.value() for name, m in metrics.items()}))


TOGETHER = "together"
LAYOUTS = {
    TOGETHER: ((ALONE,), {}),
    "micro-batches on two devices": ((ALONE, "optim.micro_batches=4"), {"data": 2}),
    "experts over devices": ((ALONE, "optim.micro_batches=2"), {"expert": 2, "fsdp": 2}),
    "shared prompts": (("optim.micro_batches=2",), {}),
    "packed": (("optim.packing=true", "data.max_completion_length=12", "optim.micro_batches=2"), {}),
}
SPLITS = [name for name in LAYOUTS if name != TOGETHER]


@functools.cache
def update_in(layout: str, *options: str) -> tuple[TrainState, dict]:
    """The update of `update_of` in a layout, for all tests that read it."""
    of_layout, shape = LAYOUTS[layout]
    return update_of(*of_layout, *options, **shape)


def gradient_of(state: TrainState) -> dict:
    """The gradient that `tiny.keep_gradient` left in a state."""
    return state.opt_state["params"]


def test_load_is_of_all_parts_together():
    """The busiest expert of the sum, not the largest of the parts, and the idlest."""
    parts = jnp.array([[6, 0, 0], [0, 4, 2]])
    for load in (ExpertLoad(parts).reduce(), ExpertLoad(parts[0]) + ExpertLoad(parts[1])):
        assert float(load.value()) == pytest.approx(6 / 4)
        assert float(load.least()) == pytest.approx(2 / 4)


# With a bias all the same numbers are computed.
WITHOUT_BIAS = [pytest.param(name, (), id=f"{name} without bias", marks=pytest.mark.thorough) for name in SPLITS]


@pytest.mark.parametrize(
    ("name", "options"), [*(pytest.param(name, BIASED, id=name) for name in SPLITS), *WITHOUT_BIAS]
)
def test_router_losses_are_of_the_update(name, options):
    (together, metrics), (split, split_metrics) = (update_in(layout, *options) for layout in (TOGETHER, name))
    loads = [f"router_load_layer_{layer}" for layer in range(tiny.LAYERS)]
    assert all(1 <= metrics[load] <= 6 / 2 for load in loads)
    for loss in ("router_balance_loss", "router_z_loss", "loss", *loads):
        np.testing.assert_allclose(split_metrics[loss], metrics[loss], rtol=1e-12)
    atol = 1e-12 * float(metrics["grad_norm"])
    chex.assert_trees_all_close(gradient_of(split), gradient_of(together), rtol=0, atol=atol)


def load_by_hand() -> np.ndarray:
    """The tokens for which each router chooses each expert, [L, E], counted one by one."""
    config, batch = tiny.config_of(EXPERTS, *BIASED), tiny.rollout_batch()
    model = tiny.model_of(config)
    weights = jax.tree.map(lambda x: np.asarray(x) * 2, tiny.drawn(model, jax.random.key(0)))
    weights["layers"]["mlp"]["choice_bias"] = BIAS
    _, routed = jax.jit(lambda: model.bind(weights).routed(batch.tokens, batch.token_mask))()
    load = np.zeros(BIAS.shape, int)
    completed = np.asarray(batch.completion_mask).any(1)
    for row, column in np.argwhere(np.asarray(batch.token_mask) & completed[:, None]):
        for layer in range(tiny.LAYERS):
            load[layer, np.asarray(routed.chosen)[row, column, layer]] += 1
    return load


def test_bias_moves_by_its_rate_towards_equal_loads():
    """Only the choice knows it: its gradient is 0."""
    after, metrics = update_in(TOGETHER, *BIASED)
    load = load_by_hand()
    mean = load.mean(-1, keepdims=True)
    assert (load < mean).any(-1).all()
    assert (load > mean).any(-1).all()
    bias = after.trainable["params"]["layers"]["mlp"]["choice_bias"]
    np.testing.assert_allclose(bias, BIAS + 0.25 * np.sign(mean - load), atol=1e-15)
    np.testing.assert_array_equal(after.opt_state["params"]["layers"]["mlp"]["choice_bias"], 0)
    assert (metrics["router_bias_min"], metrics["router_bias_max"]) == (bias.min(), bias.max())


@pytest.mark.parametrize("name", SPLITS)
def test_bias_is_of_the_update(name):
    (together, metrics), (split, split_metrics) = (update_in(layout, *BIASED) for layout in (TOGETHER, name))
    biases = (state.trainable["params"]["layers"]["mlp"]["choice_bias"] for state in (split, together))
    chex.assert_trees_all_equal(*biases)
    atol = 1e-12 * float(metrics["grad_norm"])
    chex.assert_trees_all_close(gradient_of(split), gradient_of(together), rtol=0, atol=atol)
    np.testing.assert_allclose(split_metrics["router_balance_loss"], metrics["router_balance_loss"], rtol=1e-12)


def test_bias_alone_takes_no_second_pass():
    """The loads are known after the last micro-batch, and no loss needs them before."""
    config = tiny.config_of(EXPERTS, "routing.bias_update_rate=0.1", "optim.micro_batches=4", ALONE)
    assert not Routers(config.routing, tiny.model_of(config)).need_totals


def test_layers_between_dense_ones_keep_their_bias():
    """The layers of a stack are not neighbours."""
    config = tiny.config_of(EXPERTS, "routing.bias_update_rate=1.0")
    kinds = tuple(LayerKind(mlp=mlp) for mlp in ("dense", "experts", "experts"))
    shape = dataclasses.replace(tiny.model_of(config).config, layers=7, pattern=kinds)
    shape = dataclasses.replace(shape, experts=ExpertsConfig(2, 1, 8, choice_bias=True))
    model, choices = Decoder(shape), jnp.array([[3, 1], [1, 3], [2, 2], [1, 4]])
    changes = jax.tree.map(lambda x: jnp.full(x.shape, 7.0), model.structure().params)
    moved = Routers(config.routing, model).changes({"params": changes}, choices)["params"]["layers"]
    steps = {layer: [] for layer in shape.expert_layers}
    for stack in layer_stacks(shape):
        for index, layer in enumerate(stack.layers if stack.layers[0] in steps else ()):
            steps[layer] = moved[stack.path[-1]]["mlp"]["choice_bias"][index].tolist()
    assert steps == {1: [-1, 1], 2: [1, -1], 4: [0, 0], 5: [1, -1]}
    for path, leaf in jax.tree_util.tree_leaves_with_path(moved):
        assert path[-1].key == "choice_bias" or (leaf == 7).all()


def test_optimizer_leaves_the_bias_alone():
    """Neither weight decay nor a skipped update moves it."""
    config = tiny.config_of(EXPERTS, "routing.bias_update_rate=0.25", *DECAY, ALONE)
    plan, model, mesh = Plan.of(config), tiny.model_of(config), tiny.mesh_of()
    optimizer, params = make_optimizer(config.optim), tiny.drawn(model, jax.random.key(0))
    params["layers"]["mlp"]["choice_bias"] = jnp.full(BIAS.shape, 0.5)
    params = tiny.placed(kljax.Policy(params), model, mesh).params
    state = tiny.first_state(plan, model, mesh, params, optimizer)
    update = make_update(plan, model, optimizer, state, mesh)
    for nonfinite in (True, False):
        batch = tiny.full_batch(np.full((tiny.ROWS, tiny.LENGTH), np.nan if nonfinite else -5.6))
        after, metrics = update(tiny.copied(state), None, batch, np.arange(tiny.ROWS), objectives.coefficients(config))
        bias = np.asarray(after.trainable["params"]["layers"]["mlp"]["choice_bias"])
        assert metrics["skipped_updates"].value() == nonfinite
        assert set(bias.ravel().tolist()) <= {0.25, 0.5, 0.75}  # 0.5 where an expert has exactly its share
        assert (bias == 0.5).all() == nonfinite


def test_router_losses_reach_routers_with_their_coefficients():
    """Equal loads give k; a loss without its coefficient is not computed."""
    with_losses, metrics = update_in(TOGETHER)
    assert 2 - 1e-3 < metrics["router_balance_loss"] < 5
    without, others = update_in(TOGETHER, "routing.balance_coef=0", "routing.z_coef=0")
    assert not {"router_balance_loss", "router_z_loss"} & others.keys()
    added = 0.7 * metrics["router_balance_loss"] + 0.3 * metrics["router_z_loss"]
    np.testing.assert_allclose(metrics["loss"] - others["loss"], added, rtol=1e-5)
    router, before = (gradient_of(state)["layers"]["mlp"]["gate"]["kernel"] for state in (with_losses, without))
    assert (np.abs(router - before).max((1, 2)) > 1e-4).all()


def test_frozen_routers_stay_while_others_train():
    """Also with weight decay, which needs no gradient."""
    config = tiny.config_of(EXPERTS, "routing.freeze=true", *DECAY, ALONE)
    plan, model, mesh = Plan.of(config), tiny.model_of(config), tiny.mesh_of()
    optimizer = make_optimizer(config.optim)
    params = tiny.placed(kljax.Policy(tiny.drawn(model, jax.random.key(0))), model, mesh).params
    state = tiny.first_state(plan, model, mesh, params, optimizer)
    before, batch = jax.device_get(params), tiny.full_batch(np.full((tiny.ROWS, tiny.LENGTH), -5.6))
    update = make_update(plan, model, optimizer, state, mesh)
    after, _ = update(state, None, batch, np.arange(tiny.ROWS), objectives.coefficients(config))
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), before, jax.device_get(after.trainable["params"]))
    router = moved["layers"]["mlp"].pop("gate")
    assert not any(jax.tree.leaves(router))
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("routing.z_coef=0.1",), r"routing\.z_coef: got 0\.1, but the model has no experts; expected 0"),
        (("routing.freeze=true",), r"routing\.freeze: got true, but the model has no experts; expected false"),
        (("routing.freeze=true", EXPERTS, "lora={}"), r"routing\.freeze: got true, but lora trains adapters alone"),
        (("routing.bias_update_rate=0.1",), r"routing\.bias_update_rate: got 0\.1, but the model has no experts"),
        (
            ("routing.bias_update_rate=0.1", "routing.freeze=true", EXPERTS),
            r"routing\.bias_update_rate: got 0\.1, but routing\.freeze leaves the routers as they are; set only one",
        ),
        (
            ("routing.bias_update_rate=0.1", EXPERTS, "lora={}"),
            r"routing\.bias_update_rate: got 0\.1, but lora trains adapters alone, .* set it to 0",
        ),
    ],
)
def test_router_fields_without_use_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        make_policy_model(tiny.config_of(*options), tiny.ByteTokenizer())
