"""A base in int8 computes what its weights compute, value and gradient, in a quarter of the memory."""

import dataclasses
import functools
import re
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kljax
from kljax.checkpoint import named_leaves
from tests import tiny
from train.models import Decoder, DecoderConfig, LoraConfig
from train.models.config import PROJECTIONS
from train.models.int8 import dequantise, dequantise_params, is_int8, quantise, quantise_params
from train.models.layers import InitKey, Int8Kernel, Linear, int8_matmul
from train.models.merge import merge
from train.models.parameters import abstract_adapter, abstract_params, init_adapter, init_params
from train.models.sharding import batch_sharding, make_mesh
from train.rl.policy import ScoredPolicy, Sequences, paired_slot_states, token_stats
from train.rl.policy import hidden_states as eager_hidden_states
from train.rollouts.sampler import Samples, Sampling, sample
from train.weights.huggingface import load, load_params, save_folder

GOLDENS = Path(__file__).parents[2] / "goldens" / "models"
LORA = LoraConfig(rank=3, alpha=12.0, targets=PROJECTIONS)
CONFIG = DecoderConfig(
    vocab_size=48, layers=3, width=32, heads=4, kv_heads=4, head_dim=8, mlp_width=64, qkv_bias=True, lora=LORA
)
FLOAT, INT8 = Decoder(CONFIG), Decoder(dataclasses.replace(CONFIG, quantization="int8"))
TOKENS = np.random.default_rng(5).integers(0, 48, (4, 7), np.int32)
MASK = np.arange(7) < np.array([7, 4, 6, 7])[:, None]
# As one program: all processes import this module.
SEQUENCES = jax.jit(Sequences.rows)(TOKENS, MASK)
AXES = ("embed", "mlp")
hidden_states = jax.jit(eager_hidden_states)


def kernel(shape=(16, 24), seed=0) -> np.ndarray:
    """Channels of very different sizes, as those of a checkpoint."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 10.0 ** rng.uniform(-3, 1, shape[-1])).astype(np.float32)


@functools.cache
def drawn() -> dict:
    """Weights before they are quantised."""
    return tiny.drawn(FLOAT, jax.random.key(0))


@functools.cache
def built() -> tuple[dict, dict, dict]:
    """A base in int8, the weights that it stands for, and an adapter of which neither half is 0."""
    params = quantise_params(tiny.copied(drawn()))
    adapter = jax.tree.map(lambda x: x + 0.02, tiny.drawn(INT8, jax.random.key(1), adapter=True))
    return params, dequantise_params(params, jnp.float32), adapter


def log_probs(model: Decoder, params: dict, adapter: dict | None) -> jax.Array:
    return token_stats(ScoredPolicy(model, kljax.Policy(params, adapter)), SEQUENCES, temperature=1.0)[0].log_prob


def test_quantised_weight_is_within_half_a_scale():
    weights = kernel((3, 16, 24))
    weights[1, :, 5] = 0
    made = jax.tree.map(np.asarray, quantise(jnp.asarray(weights)))
    assert (made["qvalue"].dtype, made["qvalue"].shape) == (np.int8, (3, 16, 24))
    assert (made["scale"].dtype, made["scale"].shape) == (np.float32, (3, 24))
    wide, scale = weights.astype(np.float64), made["scale"].astype(np.float64)[:, None]
    largest = np.abs(wide).max(1)
    np.testing.assert_allclose(made["scale"], np.where(largest == 0, 127, largest) / 127, rtol=1e-7)
    off = np.abs(made["qvalue"] * scale - wide)
    assert np.all(off <= scale / 2 * (1 + 1e-5))
    assert np.all(np.abs(made["qvalue"]).max(1)[largest > 0] == 127)
    assert not made["qvalue"][1, :, 5].any()
    assert off.max() > 0
    np.testing.assert_allclose(dequantise(made), made["qvalue"] * scale, rtol=1e-7)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 2.0**-6)])
def test_product_and_gradient_match_float64_weights(dtype, tolerance):
    made = quantise(jnp.asarray(kernel()))
    rng = np.random.default_rng(1)
    x, up = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((2, 5, 16), (2, 5, 24)))
    y, pull = jax.vjp(lambda x: int8_matmul(x, Int8Kernel(jnp.asarray(kernel()), AXES), AXES), x)
    weights = np.asarray(made["qvalue"], np.float64) * np.asarray(made["scale"], np.float64)
    wide, wide_up = (np.asarray(array, np.float64) for array in (x, up))
    for got, expected in ((y, wide @ weights), (pull(up)[0], wide_up @ weights.T)):
        assert got.dtype == jnp.dtype(dtype)
        # Relative to the size of a channel: a sum of terms that cancel has the rounding of the terms.
        size = np.abs(expected).mean(axis=(0, 1)) + np.abs(expected) * 0.5
        assert np.all(np.abs(np.asarray(got, np.float64) - expected) <= tolerance * size)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        made = quantise(jnp.asarray(kernel()))
        x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 16)))
        weights = np.asarray(made["qvalue"], np.float64) * np.asarray(made["scale"], np.float64)
        np.testing.assert_allclose(
            int8_matmul(x, Int8Kernel(jnp.asarray(kernel()), AXES), AXES), np.asarray(x) @ weights, rtol=1e-12
        )


@functools.partial(jax.jit, static_argnums=0)
def differentiated(model: Decoder, base: dict, adapter: dict) -> tuple[dict, jax.Array]:
    """The gradient of the adapter, and log-probs."""

    def total(adapter: dict) -> tuple[jax.Array, jax.Array]:
        actual = log_probs(model, base, adapter)
        return jnp.sum(actual * jnp.sin(jnp.arange(actual.size).reshape(actual.shape))), actual

    return jax.grad(total, has_aux=True)(adapter)


def test_adapter_log_probs_and_gradients_match_dequantised_weights():
    params, weights, adapter = built()
    (got, actual), (expected, same) = differentiated(INT8, params, adapter), differentiated(FLOAT, weights, adapter)
    np.testing.assert_allclose(actual, same, rtol=0, atol=5e-6)
    chex.assert_trees_all_close(got, expected, rtol=0, atol=5e-6 * max(jnp.abs(x).max() for x in jax.tree.leaves(got)))
    assert all(jnp.abs(x).max() > 1e-3 for x in jax.tree.leaves(expected))
    # Not those of the weights before: the test would pass if nothing were rounded.
    _, exact = differentiated(FLOAT, drawn(), adapter)
    assert 1e-3 < np.abs(actual - exact).max() < 0.3


def test_only_layer_kernels_are_quantised_to_fewer_bytes():
    mesh = make_mesh()
    for dtype, part in (("float32", 0.26), ("bfloat16", 0.52)):
        wide = DecoderConfig(
            vocab_size=64, layers=2, width=256, heads=4, kv_heads=4, head_dim=64, mlp_width=512, param_dtype=dtype
        )
        quantised, full = (
            named_leaves(abstract_params(Decoder(dataclasses.replace(wide, quantization=how)), mesh))
            for how in ("int8", None)
        )
        kernels = [name for name in full if name.startswith("layers.") and name.endswith(".kernel")]
        assert len(kernels) == len(PROJECTIONS)
        bytes_of = [
            sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
            for leaves in (
                [leaf for name, leaf in quantised.items() if ".kernel." in name],
                [full[name] for name in kernels],
            )
        ]
        assert bytes_of[0] < part * bytes_of[1]
        assert {leaf.dtype.name for name, leaf in quantised.items() if name.endswith("qvalue")} == {"int8"}
        others = {name: leaf for name, leaf in quantised.items() if ".kernel." not in name}
        assert others == {name: full[name] for name in full.keys() - set(kernels)}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, 30.5), ({"param_dtype": "bfloat16"}, 15.3), ({"param_dtype": "bfloat16", "quantization": "int8"}, 8.8)],
)
def test_sizes_of_an_8b_model_are_the_documented(fields, expected):
    shape = {"layers": 36, "width": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp_width": 12288}
    model = Decoder(DecoderConfig(vocab_size=151936, qk_norm=True, **shape, **fields))
    leaves = jax.tree.leaves(abstract_params(model, make_mesh()))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / 2**30
    assert round(size, 1) == expected, "the GiB that docs/adapters.md quotes"


@functools.cache
def wide_log_probs(dtype: str, quantization: str | None) -> jax.Array:
    """Log-probs of a random model, in which every digit of the weights matters."""
    shape = {"layers": 8, "width": 256, "heads": 4, "kv_heads": 4, "head_dim": 64, "mlp_width": 768}
    config = DecoderConfig(vocab_size=4096, qk_norm=True, **shape)
    drawn_params = init_params(Decoder(config), jax.random.key(0), make_mesh())
    params = jax.tree.map(lambda x: jnp.array(x, dtype), drawn_params)
    model = Decoder(dataclasses.replace(config, dtype=dtype, param_dtype=dtype, quantization=quantization))
    tokens = jax.random.randint(jax.random.key(1), (1, 64), 0, 4096)
    policy = kljax.Policy(quantise_params(params) if quantization else params)
    score = jax.jit(
        lambda policy: (
            token_stats(ScoredPolicy(model, policy), Sequences.rows(tokens, tokens >= 0), temperature=1.0)[0].log_prob
        )
    )
    return score(policy)[:, 1:]


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "int8"), ("bfloat16", None), ("bfloat16", "int8")])
def test_log_probs_move_within_the_documented_bounds(dtype, quantization):
    change = jnp.abs(wide_log_probs(dtype, quantization) - wide_log_probs("float32", None)).mean()
    assert 0.005 < change < 0.06, "docs/adapters.md quotes 0.03 with int8"


def test_new_weights_equal_the_unquantised_model():
    mesh = make_mesh(1, 2, 2)
    params = tiny.placed(kljax.Policy(drawn()), FLOAT, mesh).params
    arguments = dict(named_leaves(params))
    made = quantise_params(params)
    chex.assert_trees_all_equal(made, init_params(INT8, jax.random.key(0), mesh))
    shardings = jax.tree.map(lambda x: x.sharding, made)
    assert shardings == jax.tree.map(lambda x: x.sharding, abstract_params(INT8, mesh))
    gone = {name for name, leaf in arguments.items() if leaf.is_deleted()}
    assert gone == {name for name in arguments if name.startswith("layers.") and name.endswith(".kernel")}


@pytest.mark.parametrize(
    ("shape", "chunk_bytes"),
    [((1, 2, 2), 700), ((1, 1, 2), 2**24), pytest.param((1, 1, 1), 700, marks=pytest.mark.thorough)],
    ids=str,
)
def test_a_folder_is_quantised_as_it_is_read(shape, chunk_bytes, monkeypatch):
    """Rows of one tensor at a time; stacked kernels of another type never exist on the devices."""
    model = Decoder(
        DecoderConfig(
            vocab_size=160,
            layers=3,
            width=32,
            heads=4,
            kv_heads=2,
            head_dim=8,
            mlp_width=48,
            tie_embeddings=True,
            qkv_bias=True,
        )
    )
    mesh, quantised, seen = make_mesh(*shape), Decoder(dataclasses.replace(model.config, quantization="int8")), []
    expected = quantise_params(load_params(GOLDENS / "qwen2", model, mesh))
    read, before = load._read, jax.live_arrays()

    def looking_read(*arguments, **options):
        piece, known = read(*arguments, **options), set(map(id, before))
        seen.extend(x for x in jax.live_arrays() if id(x) not in known)
        return piece

    monkeypatch.setattr(load, "_read", looking_read)
    params = load_params(GOLDENS / "qwen2", quantised, mesh, chunk_bytes=chunk_bytes)
    chex.assert_trees_all_equal(params, expected)
    shardings = jax.tree.map(lambda x: x.sharding, params)
    assert shardings == jax.tree.map(lambda x: x.sharding, abstract_params(quantised, mesh))
    stacked = {x.dtype.name for x in seen if x.ndim == 3}
    assert stacked == {"int8"}


def test_merged_folder_has_the_weights_seen_in_training(tmp_path):
    lora = dataclasses.replace(LORA, targets=("q_proj", "down_proj"))
    model = Decoder(dataclasses.replace(INT8.config, lora=lora))
    params, weights, _ = built()
    adapter = jax.tree.map(lambda x: x + 0.02, init_adapter(model, jax.random.key(1), make_mesh()))
    plain = Decoder(dataclasses.replace(CONFIG, lora=None))
    merged = merge(model, params, adapter)
    assert not any(is_int8(x) for x in jax.tree.leaves(merged, is_leaf=is_int8))
    chex.assert_trees_all_close(merged, merge(model, weights, adapter), rtol=0, atol=1e-7)
    expected = hidden_states(ScoredPolicy(model, kljax.Policy(params, adapter)), SEQUENCES)
    real = MASK[..., None]
    np.testing.assert_allclose(
        jnp.where(real, hidden_states(ScoredPolicy(plain, kljax.Policy(merged)), SEQUENCES), 0),
        jnp.where(real, expected, 0),
        rtol=0,
        atol=2e-5,
    )
    save_folder(tmp_path / "out", model, kljax.Policy(params, adapter))
    chex.assert_trees_all_equal(load_params(tmp_path / "out", plain, make_mesh()), merged)
    save_folder(tmp_path / "base", model, kljax.Policy(params))
    chex.assert_trees_all_equal(load_params(tmp_path / "base", plain, make_mesh()), weights)


@functools.cache
def sampled(model: Decoder, unroll: bool) -> Samples:
    run = jax.jit(
        functools.partial(
            sample, model, max_new_tokens=6, sampling=Sampling(temperature=1.0), eos_ids=[0], unroll=unroll, group=2
        )
    )
    params, weights, adapter = built()
    policy = kljax.Policy(params if model is INT8 else weights, adapter)
    return run(policy, TOKENS[:, :3], jnp.ones((4, 3), bool), key=jax.random.key(2))


# Layers in a scan compute log-probs above.
@pytest.mark.parametrize("unroll", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_sampler_samples_like_the_dequantised_weights(unroll):
    got, expected = sampled(INT8, unroll), sampled(FLOAT, False)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_allclose(got.fields["rollout_log_probs"], expected.fields["rollout_log_probs"], rtol=0, atol=5e-6)


def test_a_pair_of_adapters_goes_over_one_base():
    params, weights, adapter = built()
    other = jax.tree.map(lambda x: 0.5 * x, adapter)
    pair = jax.jit(paired_slot_states)
    for second in (other, None):
        got = pair(ScoredPolicy(INT8, kljax.Policy(params, adapter)), second, SEQUENCES)
        for item, chosen in zip(got, (adapter, second), strict=True):
            expected = hidden_states(ScoredPolicy(FLOAT, kljax.Policy(weights, chosen)), SEQUENCES)
            np.testing.assert_allclose(item[MASK], expected[MASK], rtol=0, atol=1e-5)


def test_mesh_gives_equal_numbers_and_gathers_int8():
    mesh = make_mesh(1, 2, 2)
    params, _, adapter = built()
    _, expected = differentiated(INT8, params, adapter)
    placed = tiny.placed(kljax.Policy(params, adapter), INT8, mesh)
    params, adapter = placed.params, placed.adapter
    with jax.set_mesh(mesh):
        tokens, mask = jax.device_put((TOKENS, MASK), batch_sharding(mesh))

        def total(adapter, params, tokens, mask):
            actual = token_stats(
                ScoredPolicy(INT8, kljax.Policy(params, adapter)), Sequences.rows(tokens, mask), temperature=1.0
            )[0].log_prob
            return actual.sum(), actual

        program = jax.jit(jax.grad(total, has_aux=True)).lower(adapter, params, tokens, mask).compile()
        np.testing.assert_allclose(program(adapter, params, tokens, mask)[1], expected, rtol=0, atol=5e-6)
    gathered = re.findall(r"= (\w+)\[([\d,]+)\]\S* all-gather\(", program.as_text())
    assert sum(kind == "s8" for kind, _ in gathered) >= len(PROJECTIONS)
    # Of a device's half of the heads and of the MLP: 16 and 32 wide.
    assert not {"32,16", "16,32"} & {shape for kind, shape in gathered if kind != "s8"}


def test_int8_base_is_one_argument_without_float_copies():
    """XLA plans it so: weights become floats inside of the loop over layers, one layer at a time."""
    deep = dataclasses.replace(INT8.config, layers=24, qkv_bias=False)
    sizes = {}
    for how in ("int8", None):
        model, mesh = Decoder(dataclasses.replace(deep, quantization=how)), make_mesh()
        base, adapter = abstract_params(model, mesh), abstract_adapter(model, mesh)

        def total(adapter, base, model=model):
            return log_probs(model, base, adapter).sum()

        plan = jax.jit(jax.grad(total)).lower(adapter, base).compile().memory_analysis()
        sizes[how] = plan.argument_size_in_bytes, plan.temp_size_in_bytes
        arguments = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((adapter, base)))
        # TOKENS and MASK are part of the program.
        assert plan.argument_size_in_bytes == arguments
    kernels = 24 * 4 * (4 * 32 * 32 + 3 * 32 * 64)
    assert sizes[None][0] - sizes["int8"][0] > 0.7 * kernels
    assert sizes["int8"][1] - sizes[None][1] < 0.1 * kernels


def test_linear_layer_initialises_the_same_float_kernel():
    drawn, plain = (
        nnx.to_pure_dict(nnx.state(Linear(16, 24, AXES, key=InitKey(jax.random.key(0)), quantization=how)))["kernel"]
        for how in ("int8", None)
    )
    chex.assert_trees_all_equal(drawn, quantise(plain))
