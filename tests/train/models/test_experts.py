"""A mixture of experts: its routes, its layouts, its narrow forms and its adapters.

`test_parity.py` compares values and gradients with transformers, `test_expert_axis.py` those of a mesh.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import rounding, tiny
from train.models import (
    ClampedSwiglu,
    Decoder,
    DecoderConfig,
    DecoderState,
    ExpertsConfig,
    LayerKind,
    LoraConfig,
    Rope,
)
from train.models.experts import Routed, route
from train.models.int8 import dequantise_params, is_int8, quantise_params
from train.models.merge import merge
from train.rl.policy import ScoredPolicy, Sequences, slot_states
from train.rl.routing import routing_metrics
from train.sequences.forest import group_forest, row_forest
from train.sequences.token_fields import ROUTES
from train.weights.peft import save_adapter

EXPERTS = ExpertsConfig(count=6, active=2, width=8, shared_width=4, bias=True, swiglu=ClampedSwiglu(1.702, limit=1.0))
SHAPE = DecoderConfig(
    vocab_size=24,
    layers=3,
    width=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp_width=24,
    rope=Rope(100.0),
    pattern=(LayerKind(), LayerKind(mlp="experts"), LayerKind(mlp="experts")),
    sinks=True,
    experts=EXPERTS,
)
BOUND = rounding.of_decoder(layers=SHAPE.layers, longest_sum=SHAPE.mlp_width)
TOKENS = jax.random.randint(jax.random.key(1), (4, 8), 0, 24)
MASK = jnp.arange(8) >= jnp.array([[0], [3], [1], [2]])
compiled_route = jax.jit(route, static_argnames=("experts", "threshold"))


@functools.cache
def draw(shape: DecoderConfig = SHAPE) -> tuple[Decoder, dict]:
    model = Decoder(shape)
    return model, tiny.filled(model.structure().params, 0)


@functools.cache
def routed_rows() -> tuple[jax.Array, Routed]:
    """Hidden states and routes of `TOKENS`, in whole rows."""
    model, params = draw()
    return jax.jit(lambda: model.bind(params).routed(TOKENS, MASK))()


def test_router_takes_the_lower_of_equal_experts():
    logits = jnp.array([[1.0, 2.0, 2.0, 2.0, 0.0, 1.0], [0.0] * 6, [3.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    gates, routes, chosen = compiled_route(logits, EXPERTS, jnp.array([True, True, False]))
    np.testing.assert_array_equal(routes, [[1, 2], [0, 1], [-1, -1]])
    np.testing.assert_array_equal(chosen, routes)
    np.testing.assert_allclose(gates[:2], 0.5, rtol=1e-6)
    plain = jax.nn.softmax(logits)[0, 1]
    unnormalised = compiled_route(logits, dataclasses.replace(EXPERTS, normalize=False), jnp.ones(3, bool))[0]
    np.testing.assert_allclose(unnormalised[0], [plain, plain], rtol=1e-6)
    assert compiled_route(logits.astype(jnp.bfloat16), EXPERTS, jnp.ones(3, bool))[0].dtype == jnp.float32


def test_replayed_routes_get_the_gates_of_the_router():
    """In any order; the gradient reaches the logits of all experts, and -1 leaves the choice to the router."""
    logits = jax.random.normal(jax.random.key(0), (3, 6))
    replayed = jnp.array([[5, 0], [0, 5], [-1, -1]])
    gates, routes, chosen = compiled_route(logits[jnp.array([0, 0, 1])], EXPERTS, jnp.ones(3, bool), replayed)
    np.testing.assert_array_equal(routes[:2], [[0, 5], [0, 5]])
    np.testing.assert_array_equal(routes[2], chosen[2])
    np.testing.assert_array_equal(chosen[0], np.sort(np.argsort(-logits[0])[:2]))
    exact = np.exp(np.float64(logits[0]))[[0, 5]]
    np.testing.assert_allclose(gates[0], exact / exact.sum(), rtol=1e-6)
    plain = dataclasses.replace(EXPERTS, normalize=False)
    slope = jax.grad(lambda z: compiled_route(z, plain, jnp.ones(1, bool), replayed[:1])[0][0, 0])(logits[:1])
    probabilities = np.asarray(jax.nn.softmax(logits[0]))
    np.testing.assert_allclose(slope[0], probabilities[0] * (np.eye(6)[0] - probabilities), atol=1e-7)


def thresholded(probabilities: np.ndarray, recorded: list[int], threshold: float, bias=(0,) * 6) -> list[int]:
    """The experts of a token, one after the other."""
    ranked = sorted(range(len(probabilities)), key=lambda expert: -probabilities[expert] - bias[expert])
    weakest = min(probabilities[ranked[: len(recorded)]])
    used = [expert for expert in recorded if probabilities[expert] >= threshold * weakest]
    return sorted(used + [expert for expert in ranked if expert not in used][: len(recorded) - len(used)])


def test_bias_decides_the_choice_and_no_gate():
    """It has no gradient, and replayed routes ignore it."""
    logits = jax.random.normal(jax.random.key(0), (40, 6))
    bias, real = jnp.array([0.3, 0.0, -0.3, 0.1, 0.0, -0.1]), jnp.ones(40, bool)
    plain = dataclasses.replace(EXPERTS, normalize=False)
    gates, routes, chosen = compiled_route(logits, plain, real, bias=bias)
    probabilities = np.asarray(jax.nn.softmax(logits))
    np.testing.assert_array_equal(chosen, np.sort(np.argsort(-probabilities - bias, axis=-1)[:, :2]))
    np.testing.assert_array_equal(routes, chosen)
    assert 0.2 < (np.asarray(chosen) != compiled_route(logits, plain, real)[2]).any(-1).mean() < 0.9
    np.testing.assert_allclose(gates, np.take_along_axis(probabilities, np.asarray(routes), -1), rtol=1e-6)
    slope = jax.grad(lambda b: compiled_route(logits, EXPERTS, real, bias=b)[0][:, 0].sum())(bias)
    np.testing.assert_array_equal(slope, 0)
    replayed = jnp.tile(jnp.array([2, 5]), (40, 1))
    gates, routes, again = compiled_route(logits, plain, real, replayed, bias=bias)
    np.testing.assert_array_equal(routes, replayed)
    np.testing.assert_allclose(gates, probabilities[:, [2, 5]], rtol=1e-6)
    np.testing.assert_array_equal(again, chosen)


@pytest.mark.parametrize("scale", [0.2, 4.0])
def test_threshold_fills_places_by_probability_plus_bias(scale):
    """A bias may be larger than any probability; what passes the threshold stays."""
    experts, random = dataclasses.replace(EXPERTS, active=3), np.random.default_rng(0)
    logits = jnp.asarray(random.normal(size=(40, 6)), jnp.float32)
    recorded = random.permuted(np.tile(np.arange(6), (40, 1)), axis=-1)[:, :3]
    bias, probabilities = (scale * random.normal(size=6)).astype(np.float32), np.asarray(jax.nn.softmax(logits))
    _, routes, _ = compiled_route(logits, experts, jnp.ones(40, bool), jnp.asarray(recorded), bias=bias, threshold=0.8)
    expected = [thresholded(*row, 0.8, bias) for row in zip(probabilities, recorded.tolist(), strict=True)]
    np.testing.assert_array_equal(routes, expected)


def test_threshold_replaces_improbable_replayed_experts():
    """Gates and gradient are of the used experts; 0 uses the recorded ones, 1 the router's own."""
    experts = dataclasses.replace(EXPERTS, active=3, normalize=False)
    random = np.random.default_rng(0)
    logits = jnp.asarray(random.normal(size=(40, 6)), jnp.float32)
    recorded = random.permuted(np.tile(np.arange(6), (40, 1)), axis=-1)[:, :3]
    recorded[-1] = -1
    real, probabilities = jnp.ones(40, bool), np.asarray(jax.nn.softmax(logits))
    changed = []
    for threshold in (0.0, 0.5, 1.0):
        gates, routes, chosen = compiled_route(logits, experts, real, jnp.asarray(recorded), threshold=threshold)
        expected = [thresholded(probabilities[row], recorded[row].tolist(), threshold) for row in range(39)]
        np.testing.assert_array_equal(routes[:-1], expected)
        np.testing.assert_array_equal(routes[-1], chosen[-1])
        np.testing.assert_allclose(gates, np.take_along_axis(probabilities, np.asarray(routes), -1), rtol=1e-6)
        changed.append(int((np.sort(recorded[:-1], -1) != routes[:-1]).any(-1).sum()))
    np.testing.assert_array_equal(routes, chosen)
    assert 0 == changed[0] < changed[1] < changed[2]
    run = functools.partial(compiled_route, experts=experts, real=real, replayed=jnp.asarray(recorded), threshold=0.5)
    slope = jax.grad(lambda logits: run(logits)[0][0, 0])(logits)[0]
    used = thresholded(probabilities[0], recorded[0].tolist(), 0.5)[0]
    np.testing.assert_allclose(slope, probabilities[0, used] * (np.eye(6)[used] - probabilities[0]), atol=1e-7)


def test_recorded_routes_replay_to_the_bit():
    """In whole rows, with shared prompts and while decoding; other routes change the result."""
    model, params = draw()
    run = jax.jit(lambda routes: model.bind(params).routed(TOKENS, MASK, routes=routes))
    hidden, routed = routed_rows()
    assert routed.routes.shape == (4, 8, *SHAPE.route_shape) == (4, 8, 2, 2)
    assert ((routed.routes == -1).all((2, 3)) == ~MASK).all()
    chex.assert_trees_all_equal(run(routed.routes), (hidden, routed))
    other = jnp.where(MASK[..., None, None], (routed.routes + 1) % 6, -1).astype(jnp.int16)
    changed, second = run(other)
    np.testing.assert_array_equal(second.routes, jnp.sort(other, -1))
    np.testing.assert_array_equal(second.chosen[:, :, 0], routed.chosen[:, :, 0])
    assert (jnp.abs(changed - hidden).max(-1) > 1e-3)[MASK].all()


def test_decoded_tokens_have_the_routes_of_whole_rows():
    model, params = draw()
    hidden, routed = routed_rows()
    bound = model.bind(params)
    # One program for all columns.
    decode = jax.jit(bound.decode)
    _, prompts, first = jax.jit(bound.prefill)(TOKENS[:, :5], MASK[:, :5])
    np.testing.assert_array_equal(first.routes, routed.routes[:, :5])
    for unroll in (False, True):
        state = DecoderState.of(prompts, 1, 3, unroll=unroll)
        for column in range(5, 8):
            seen = MASK & (jnp.arange(8) <= column)
            last, state, now = decode(TOKENS[:, column], seen.sum(-1) - 1, state, seen, column)
            rounding.assert_close_by_norm(last, hidden[:, column], roundings=BOUND)
            np.testing.assert_array_equal(now.routes, routed.routes[:, column])


def test_forests_use_and_return_the_routes_of_their_sequences():
    model, params = draw()
    prompts, columns = jnp.array([4, 4, 3, 3]), jnp.arange(8)
    in_prompt = columns < prompts[:, None]
    mask = columns < jnp.array([[8], [6], [7], [5]])
    tokens = jnp.where(in_prompt, jnp.repeat(TOKENS[::2], 2, axis=0), TOKENS)
    bound = model.bind(params)
    run = jax.jit(lambda routes: bound.routed(tokens, mask, routes=routes))
    _, routed = run(jnp.full((4, 8, *SHAPE.route_shape), -1, jnp.int16))
    replayed = jnp.where(mask[..., None, None], (routed.routes + 2) % 6, -1).astype(jnp.int16)
    # The prompts of a group agree here, but not the routes of its second sequence, which are those of the first.
    shared = jnp.where(in_prompt[..., None, None], jnp.repeat(replayed[::2], 2, axis=0), replayed)
    for forest, routes in ((group_forest(mask, prompts, (4, 4), 2), shared), (row_forest(mask), replayed)):
        sequences = Sequences(tokens, mask, forest, None, {ROUTES: replayed})
        hidden, used = jax.jit(slot_states)(ScoredPolicy(model, kljax.Policy(params)), sequences)
        expected, _ = run(routes)
        rounding.assert_close_by_norm(forest.gather(hidden)[mask], expected[mask], roundings=BOUND)
        np.testing.assert_array_equal(forest.gather(used.routes, -1), jnp.sort(routes, -1).astype(jnp.int16))


def test_padding_reaches_no_expert():
    """Its values, NaN included, and those of replayed routes, change nothing."""
    model, params = draw()
    poisoned = {**params, "embed_tokens": {"embedding": params["embed_tokens"]["embedding"].at[0].set(jnp.nan)}}
    tokens = jnp.where(MASK, jnp.maximum(TOKENS, 1), 0)

    recorded = jnp.broadcast_to(jnp.array([1, 4], jnp.int16), (4, 8, *SHAPE.route_shape))

    @jax.jit
    def run(params: dict, routes: jax.Array) -> tuple[jax.Array, jax.Array, dict]:
        hidden, routed = model.bind(params).routed(tokens, MASK, routes=routes)
        logits = jnp.where(MASK[..., None, None], routed.logits, 0)
        routed = dataclasses.replace(routed, logits=logits)
        metrics = routing_metrics(SHAPE, routed, MASK.astype(jnp.int32), jnp.where(MASK[..., None, None], routes, -1))
        return jnp.where(MASK[..., None], hidden, 0), routed.routes, {name: x.value() for name, x in metrics.items()}

    garbage = jnp.where(MASK[..., None, None], recorded, jnp.array([32767, 4], jnp.int16))
    expected = run(params, recorded)
    assert (expected[1] == jnp.where(MASK[..., None, None], recorded, -1)).all()
    assert expected[2]["router_load_layer_1"] == 3
    chex.assert_trees_all_equal(run(poisoned, garbage), expected)
    slopes = jax.jit(jax.grad(lambda params: (run(params, garbage)[0][..., 0] ** 2).sum()))(poisoned)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes["layers"]))


def test_int8_experts_keep_a_float_router():
    model, params = draw()
    run = jax.jit(lambda params: model.bind(params)(TOKENS, MASK))
    expected = run(params)[MASK]
    narrow = Decoder(dataclasses.replace(SHAPE, quantization="int8"))
    quantised = quantise_params(jax.tree.map(jnp.copy, params))
    chex.assert_trees_all_equal_shapes_and_dtypes(quantised, narrow.structure().params)
    mlp = quantised["layers"]["experts_1"]["mlp"]
    assert is_int8(mlp["experts"]["up_proj"]["kernel"])
    assert not is_int8(mlp["gate"]["kernel"])
    wide = dequantise_params(quantised, jnp.float32)
    actual, same = jax.jit(lambda: narrow.bind(quantised)(TOKENS, MASK))()[MASK], run(wide)[MASK]
    rounding.assert_close_by_norm(actual, same, roundings=2 * BOUND)
    assert 1e-4 < np.abs(actual - expected).mean() < 0.05


def test_adapters_of_experts_and_router_merge(tmp_path):
    shape = dataclasses.replace(SHAPE, lora=LoraConfig(2, 4.0, ("q_proj", "up_proj", "down_proj", "gate")))
    model, params = draw(shape)
    adapter = tiny.filled(model.structure().adapter, 2)
    mlp = adapter["layers"]["experts_1"]["mlp"]
    assert mlp["experts"]["down_proj"]["lora_A"].shape == (2, 6, 8, 2)
    assert mlp["gate"]["lora_B"].shape == (2, 2, 6)
    run = jax.jit(lambda params: model.bind(params)(TOKENS, MASK))

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def slopes_of(adapter: dict) -> tuple[jax.Array, jax.Array]:
        hidden = model.bind(params, adapter)(TOKENS, MASK)
        return jnp.where(MASK, hidden[..., 0], 0).sum(), hidden

    slopes, expected = slopes_of(adapter)
    actual, expected = run(merge(model, params, adapter))[MASK], expected[MASK]
    rounding.assert_close_by_norm(actual, expected, roundings=2 * BOUND)
    assert np.abs(expected - run(params)[MASK]).max() > 0.01
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(slopes))
    with pytest.raises(
        ValueError,
        match=r"lora.targets: got up_proj of experts alone, which PEFT has as one with gate_proj; export the merged",
    ):
        save_adapter(tmp_path / "adapter", model, adapter, base_name=None)


def test_impossible_mixtures_are_named():
    with pytest.raises(ValueError, match=r"swiglu\.limit: got 0\.0, expected a number > 0"):
        ClampedSwiglu(1.702, limit=0.0)
    for change, message in (
        ({"active": 7}, "experts.active: got 7, expected at most experts.count = 6"),
        ({"width": 0}, "experts.width: got 0, expected at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(EXPERTS, **change)
    for change, message in (
        ({"experts": None}, "experts: got None, expected a mixture, as pattern has some"),
        ({"pattern": (LayerKind(),)}, "experts: got .* expected None, as pattern has none"),
        ({"qk_norm": True, "wide_qk_norm": True}, "wide_qk_norm: got true beside qk_norm"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(SHAPE, **change)
    dense = dataclasses.replace(SHAPE, experts=None, pattern=(LayerKind(),))
    with pytest.raises(ValueError, match=r"lora\.targets: got gate, but the model has no router"):
        dataclasses.replace(dense, lora=LoraConfig(2, 4.0, ("gate",)))
