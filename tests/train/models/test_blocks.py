"""Blocks: patterns of layers, and an MLP kind that is added to the tables."""

import dataclasses
from typing import Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests import rounding, tiny
from train.models import Decoder, DecoderConfig, DecoderState, LayerKind, LoraConfig, Rope, blocks, config
from train.models.blocks import layer_segments
from train.models.layers import InitKey, param
from train.models.merge import merge
from train.models.mlp import DenseMlp
from train.models.self_attention import LayerContext
from train.models.sharding import make_mesh
from train.rl.host_memory import host_memory
from train.weights.huggingface import names
from train.weights.peft import load_adapter, save_adapter

EXPERTS = 3
SHAPE = DecoderConfig(
    vocab_size=24,
    layers=7,
    width=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp_width=24,
    rope=Rope(100.0),
    lora=LoraConfig(2, 4.0, ("q_proj", "down_proj")),
)
BOUND = rounding.of_decoder(layers=SHAPE.layers, longest_sum=EXPERTS * SHAPE.mlp_width)


class Mixture(nnx.Module):
    """All experts, weighted by a router: parameters of other names and shapes than those of the dense MLP."""

    def __init__(self, config: DecoderConfig, key: InitKey):
        shape = (EXPERTS, config.width, config.mlp_width)
        self.gate = param(jax.random.normal(key.child("gate").draw(0, 1), (config.width, EXPERTS)), ("embed", "router"))
        self.up = param(0.2 * jax.random.normal(key.child("up").draw(0, 1), shape), ("expert", "expert_embed", "mlp"))
        down = 0.2 * jax.random.normal(key.child("down").draw(0, 1), (EXPERTS, *shape[:0:-1]))
        self.down = param(down, ("expert", "mlp", "expert_embed"))

    def __call__(self, x: jax.Array, context: LayerContext) -> tuple[jax.Array, None]:
        hidden = jax.nn.silu(jnp.einsum("...D,EDF->...EF", x, self.up[...]))
        outputs = jnp.einsum("...EF,EFD->...ED", hidden, self.down[...])
        return jnp.einsum("...E,...ED->...D", jax.nn.softmax(x @ self.gate[...]), outputs), None


@pytest.fixture
def mixture(monkeypatch) -> DecoderConfig:
    """Adds the kind; a pattern of three layers, of which two have the same parameters, and a layer that is left."""
    monkeypatch.setattr(config, "MlpKind", Literal["dense", "mixture"])
    monkeypatch.setitem(blocks.MLPS, "mixture", Mixture)
    for leaf in ("gate", "up", "down"):
        monkeypatch.setitem(names.ENDINGS, leaf, f"{leaf}_proj")
    pattern = (LayerKind(), LayerKind("sliding", "mixture"), LayerKind("full", "mixture"))
    return dataclasses.replace(SHAPE, sliding_window=3, pattern=pattern)


def draw(shape: DecoderConfig) -> tuple[Decoder, dict, dict, jax.Array, jax.Array]:
    model = Decoder(shape)
    params, adapter = tiny.filled(model.structure().params, 0), tiny.filled(model.structure().adapter, 1)
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 24)
    return model, params, adapter, tokens, jnp.arange(8) >= jnp.array([[0], [3]])


def test_pattern_is_stored_at_its_shortest():
    full, sliding = LayerKind(), LayerKind("sliding")
    shape = dataclasses.replace(SHAPE, sliding_window=3, pattern=(sliding, full) * 4)
    assert shape.pattern == (sliding, full)
    assert shape.kinds == (sliding, full, sliding, full, sliding, full, sliding)
    assert dataclasses.replace(shape, layers=1).pattern == (sliding,)
    with pytest.raises(ValueError, match="mlp: got 'moe', expected one of dense, experts"):
        LayerKind(mlp="moe")  # type: ignore[arg-type]
    for change, message in (
        ({"pattern": ()}, "pattern: got no layer"),
        ({"sliding_window": None}, "sliding_window: got None"),
        ({"pattern": (full,)}, "sliding_window: got 3, expected None"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(shape, **change)


def test_layers_with_equal_parameters_are_one_stack(mixture):
    """Whatever the pattern of their attention; other patterns are one scan of their repeats and one for each run."""

    def scans(mlps: str, attention: str = "f") -> list[list[tuple[str, list[int]]]]:
        kinds = {"d": "dense", "m": "mixture"}, {"f": "full", "s": "sliding"}
        pattern = tuple(
            LayerKind(kinds[1][attention[n % len(attention)]], kinds[0][mlp])  # type: ignore[arg-type]
            for n, mlp in enumerate(mlps)
        )
        window = 3 if "s" in attention else None
        shape = dataclasses.replace(SHAPE, layers=len(mlps), sliding_window=window, pattern=pattern)
        return [[(".".join(s.path), list(s.layers)) for s in segment] for segment in layer_segments(shape)]

    assert scans("dddddd", "ssf") == scans("mmmmmm", "sssssf") == [[("layers", [0, 1, 2, 3, 4, 5])]]
    assert scans("dmmdmmd") == [
        [("layers.dense_0", [0, 3]), ("layers.mixture_1", [1, 4]), ("layers.mixture_2", [2, 5])],
        [("layers.dense_6", [6])],
    ]
    assert scans("dmmm") == [[("layers.dense_0", [0])], [("layers.mixture_1", [1, 2, 3])]]


def test_mixed_layers_run_in_their_order(mixture):
    """Values are those of a loop over the layers by their numbers, in whole sequences and while decoding."""
    model, params, adapter, tokens, mask = draw(mixture)

    @jax.jit
    def run(params: dict, adapter: dict) -> jax.Array:
        return model.bind(params, adapter)(tokens, mask)

    hidden = run(params, adapter)
    assert np.isfinite(hidden).all()
    stacked = model.bind(params, adapter)
    prompts = jax.jit(stacked.prefill)(tokens[:, :4], mask[:, :4])[1]
    assert [jax.tree.leaves(stack)[0].shape for stack in prompts] == [(depth, 2, 4, 2, 4) for depth in (2, 2, 2, 1)]
    listed = stacked.unrolled()
    assert [type(layer.mlp) for layer in listed.layers] == [DenseMlp, Mixture, Mixture] * 2 + [DenseMlp]
    for decoder, unroll in ((stacked, False), (listed, True), (stacked, True)):
        decode = jax.jit(decoder.decode)  # one program for all columns
        state = DecoderState.of(prompts, 1, 4, unroll=unroll)
        for column in range(4, 8):
            seen = mask & (jnp.arange(8) <= column)
            last, state, _ = decode(tokens[:, column], seen.sum(-1) - 1, state, seen, column)
            rounding.assert_close_by_norm(last, hidden[:, column], roundings=BOUND)
    gradient = jax.jit(jax.grad(lambda params: (run(params, adapter)[mask] ** 2).sum()))(params)
    chex.assert_trees_all_equal_shapes(gradient, params)
    assert all((jnp.abs(leaf).reshape(len(leaf), -1).max(-1) > 0).all() for leaf in jax.tree.leaves(gradient["layers"]))


def test_mixed_decoder_layer_is_selected_by_number(mixture, tmp_path):
    """In the names of tensors, and in a PEFT folder that is written and read."""
    model, _, adapter, _, _ = draw(dataclasses.replace(mixture, layers=8))
    places = {mapping.path: mapping.names for mapping in names.leaf_mappings(model)}
    path = ("self_attn", "q_proj", "kernel")
    assert places["layers", "mixture_1", *path] == tuple(f"layers.{n}.self_attn.q_proj.weight" for n in (1, 4))
    assert places["layers", "dense_6", *path] == ("layers.6.self_attn.q_proj.weight",)
    assert places["layers", "mixture_2", "mlp", "down"] == ("layers.2.mlp.down_proj", "layers.5.mlp.down_proj")
    assert places["layers", "mixture_7", *path] == ("layers.7.self_attn.q_proj.weight",)
    save_adapter(tmp_path / "adapter", model, adapter, base_name=None)
    chex.assert_trees_all_equal(load_adapter(tmp_path / "adapter", model, make_mesh()), adapter)


def test_mixed_layers_merge_and_train_in_host_memory(mixture):
    model, params, adapter, tokens, mask = draw(mixture)
    merged = merge(model, params, adapter)
    actual = jax.jit(lambda: model.bind(merged)(tokens, mask))()
    expected = jax.jit(lambda: model.bind(params, adapter)(tokens, mask))()
    rounding.assert_close_by_norm(actual[mask], expected[mask], roundings=2 * BOUND)
    plain = optax.adam(1e-2)
    stored = host_memory(plain)
    grads = jax.tree.map(jnp.ones_like, params)
    changes, state = jax.jit(plain.update)(grads, plain.init(params), params)
    of_host = jax.jit(lambda *args: stored.update(*args, finite=jnp.bool(True)))(grads, stored.init(params), params)
    chex.assert_trees_all_equal(of_host, (changes, state))
