"""Experts on a mesh, above all over axis expert: values and gradients of one device, and no dropped token."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from train.models import ClampedSwiglu, Decoder, DecoderConfig, ExpertsConfig, LayerKind, LoraConfig, Rope, dispatch
from train.models.int8 import quantise_params
from train.models.parameters import abstract_adapter, abstract_params
from train.models.sharding import make_mesh

COUNT = 8
SHAPE = DecoderConfig(
    vocab_size=24,
    layers=2,
    width=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp_width=24,
    rope=Rope(100.0),
    pattern=(LayerKind(), LayerKind(mlp="experts")),
    sinks=True,
    experts=ExpertsConfig(
        count=COUNT, active=3, width=8, shared_width=4, bias=True, swiglu=ClampedSwiglu(1.702, limit=1.0)
    ),
)
LORA = LoraConfig(2, 4.0, ("q_proj", "gate_proj", "down_proj", "gate"))
MESHES = (
    {"expert": 8},
    {"expert": 2, "fsdp": 2, "tensor": 2},
    {"expert": 2, "fsdp": 2, "context": 2},
    {"expert": 4, "tensor": 2},
    # Every device has all experts, in part.
    {"data": 2, "fsdp": 2, "tensor": 2},
)
# Its tokens are gathered, as on the second and the third mesh.
MORE_MESHES = ({"expert": 4, "data": 2},)
TOKENS = jax.random.randint(jax.random.key(1), (8, 6), 0, 24)
MASK = jnp.arange(6) >= jnp.array([0, 3, 1, 2, 0, 5, 0, 4])[:, None]
TARGET = jax.random.normal(jax.random.key(3), (8, 6, 16))
ROUTES = {
    # The router's own: one program takes both.
    "chosen": jnp.full((8, 6, 1, 3), -1, jnp.int16),
    # Six experts without a row; all rows at the first device, more than a block has room for.
    "one device": jnp.broadcast_to(jnp.array([0, 1, 2], jnp.int16), (8, 6, 1, 3)),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks of tokens, which the first and the last mesh exchange, and several blocks of rows."""
    monkeypatch.setattr(dispatch, "CHUNK_BYTES", 4 * 6 * 16 * 8)
    monkeypatch.setattr(dispatch, "LEAST_ROWS", 4)
    monkeypatch.setattr(dispatch, "DEVIATIONS", 0)


@functools.cache
def weights(shape: DecoderConfig) -> tuple[dict, dict | None]:
    """Weights with opinions, and an adapter that changes them, in float64 on the host."""
    structure = Decoder(dataclasses.replace(shape, quantization=None)).structure()
    params = jax.tree.map(lambda x: 2 * x, tiny.filled(structure.params, 0))
    if shape.quantization is not None:
        params = quantise_params(params)
    adapter = None if shape.lora is None else tiny.filled(structure.adapter, 2)
    wide = jax.tree.map(lambda x: x if x.dtype == np.int8 else np.asarray(x, np.float64), (params, adapter))
    return jax.device_get(wide)


@functools.cache
def gradients(shape: DecoderConfig, **sizes: int) -> Callable[[jax.Array], Any]:
    """The gradient of what is trained, hidden states and routes on a mesh, of replayed routes: one program."""
    model, mesh = Decoder(shape), make_mesh(**sizes)
    params, adapter = weights(shape)

    def loss(trained: dict, params: dict, routes: jax.Array):
        base, adapter = (trained, None) if shape.lora is None else (params, trained)
        hidden, routed = model.bind(base, adapter).routed(TOKENS, MASK, routes=routes)
        return jnp.where(MASK[..., None], hidden * TARGET, 0).sum(), (hidden, routed.routes)

    with jax.set_mesh(mesh), jax.enable_x64(True):
        params = jax.device_put(params, jax.tree.map(lambda x: x.sharding, abstract_params(model, mesh)))
        if adapter is not None:
            adapter = jax.device_put(adapter, jax.tree.map(lambda x: x.sharding, abstract_adapter(model, mesh)))
        trained = params if adapter is None else adapter
        program = jax.jit(jax.grad(loss, has_aux=True)).lower(trained, params, ROUTES["chosen"]).compile()
    return functools.partial(program, trained, params)


@functools.cache
def updated(shape: DecoderConfig, routes: str, **sizes: int):
    """Hidden states, routes and gradient of what is trained, on a mesh."""
    gradient, (hidden, used) = gradients(shape, **sizes)(ROUTES[routes])
    return (np.where(MASK[..., None], hidden, 0), jax.device_get(gradient)), np.asarray(used)


def assert_close(actual, expected):
    """In float64, where the order of sums shows at 1e-15: of the largest value of each array."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    # The LM head has no gradient here.
    far = jax.tree.map(lambda x, y: float(np.abs(x - y).max() / (np.abs(y).max() or 1)), actual, expected)
    wrong = {jax.tree_util.keystr(path): part for path, part in jax.tree.leaves_with_path(far) if part > 1e-12}
    assert not wrong


def test_tokens_are_exchanged_if_few_are_sent(monkeypatch):
    cut = functools.partial(dispatch.ChunkSizes.of, active=3, row_bytes=16 * 8)
    # The tokens of a device on the first, third and last mesh.
    assert [cut(tokens, ways=ways)[::3] for tokens, ways in ((6, 8), (6, 4), (12, 4))] == [(2, 2), (2, None), (3, 3)]
    monkeypatch.undo()
    # Of Qwen3-30B-A3B: a micro-batch over more and more devices, and a decode step.
    cut = functools.partial(dispatch.ChunkSizes.of, active=8, row_bytes=4096)
    assert [cut(4096, ways=ways).sent for ways in (2, 8, 16, 64)] == [None, None, 517, 166]
    assert cut(16, ways=16).sent is None


@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize(
    "sizes", [*MESHES, *(pytest.param(sizes, marks=pytest.mark.thorough) for sizes in MORE_MESHES)], ids=str
)
def test_mesh_changes_neither_values_nor_gradients(sizes, routes):
    (expected, used), (actual, same) = (updated(SHAPE, routes, **mesh) for mesh in ({}, sizes))
    np.testing.assert_array_equal(same, used)
    assert_close(actual, expected)


# The kernels of the experts are exact above, as floats.
@pytest.mark.parametrize("quantization", [pytest.param(None, marks=pytest.mark.thorough), "int8"])
def test_adapter_of_experts_is_exact(quantization):
    shape = dataclasses.replace(SHAPE, lora=LORA, quantization=quantization)
    (expected, _), (actual, _) = (updated(shape, "chosen", **mesh) for mesh in ({}, MESHES[1]))
    assert_close(actual, expected)
