"""Adapters: the update, the parameters they leave alone, and nothing at all when off."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kljax
from tests import tiny
from train.models import Decoder, DecoderConfig, LoraConfig
from train.models.config import PROJECTIONS
from train.models.layers import InitKey, Linear
from train.models.merge import merge
from train.models.parameters import abstract_adapter, init_adapter, init_params
from train.models.sharding import make_mesh
from train.rl.policy import ScoredPolicy, Sequences
from train.rl.policy import hidden_states as eager_hidden_states

LORA = LoraConfig(rank=3, alpha=12.0, targets=PROJECTIONS)
PLAIN = DecoderConfig(vocab_size=24, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=24)
MODEL = Decoder(dataclasses.replace(PLAIN, lora=LORA))
TOKENS = np.random.default_rng(5).integers(0, 24, (2, 4), np.int32)
MASK = np.ones((2, 4), bool)
# As one program: all processes import this module.
SEQUENCES = jax.jit(Sequences.rows)(TOKENS, MASK)
hidden_states = jax.jit(eager_hidden_states)


def build() -> tuple[dict, dict]:
    """Base parameters and an adapter of which neither half is 0, in dicts that a test may change."""
    return jax.tree.map(lambda x: x, drawn())


@functools.cache
def drawn() -> tuple[dict, dict]:
    key, mesh = jax.random.key(0), make_mesh()
    adapter = init_adapter(MODEL, key, mesh)
    rng = np.random.default_rng(0)
    filled = jax.tree.map(
        lambda x: x if np.asarray(x).any() else jnp.asarray(0.3 * rng.standard_normal(x.shape), jnp.float32), adapter
    )
    return init_params(MODEL, key, mesh), filled


def added(params: dict, adapter: dict, scale: float) -> dict:
    """The update in float64, by numpy, on the kernels of PROJECTIONS."""
    merged = jax.tree.map(lambda x: np.array(x, np.float64), params)
    for block, name in [("self_attn", n) for n in PROJECTIONS[:4]] + [("mlp", n) for n in PROJECTIONS[4:]]:
        low = jax.tree.map(lambda x: np.asarray(x, np.float64), adapter["layers"][block][name])
        merged["layers"][block][name]["kernel"] += scale * np.einsum("lir,lro->lio", low["lora_A"], low["lora_B"])
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), merged)


@pytest.mark.parametrize(("rslora", "scale"), [(False, 12 / 3), (True, 12 / 3**0.5)])
def test_adapted_model_equals_the_merged_model(rslora, scale):
    params, adapter = build()
    model = Decoder(dataclasses.replace(PLAIN, lora=dataclasses.replace(LORA, rslora=rslora)))
    expected = added(params, adapter, scale)
    adapted = hidden_states(ScoredPolicy(model, kljax.Policy(params, adapter)), SEQUENCES)
    # With either scale the merged weights go through one program.
    plain = Decoder(PLAIN)
    chex.assert_trees_all_close(
        adapted, hidden_states(ScoredPolicy(plain, kljax.Policy(expected)), SEQUENCES), atol=2e-5
    )
    assert jnp.abs(adapted - hidden_states(ScoredPolicy(plain, kljax.Policy(params)), SEQUENCES)).max() > 0.1
    chex.assert_trees_all_close(merge(model, params, adapter), expected, atol=1e-6)


def test_merging_preserves_layout_dtype_and_other_weights():
    mesh = make_mesh(1, 2, 2)
    params, adapter = jax.device_get(drawn())
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    placed = tiny.placed(kljax.Policy(narrow, jax.tree.map(np.ones_like, adapter)), MODEL, mesh)
    narrow, ones = placed.params, placed.adapter
    low = {"layers": {"self_attn": {"v_proj": ones["layers"]["self_attn"]["v_proj"]}}}
    merged = merge(MODEL, narrow, low)
    changed = merged["layers"]["self_attn"]["v_proj"].pop("kernel")
    before = narrow["layers"]["self_attn"]["v_proj"].pop("kernel")
    assert (changed.dtype, changed.sharding) == (before.dtype, before.sharding)
    # Rounded once: the product of ones, 4 x 3, is exact in bfloat16, the sum is not.
    chex.assert_trees_all_equal(changed, (before.astype(jnp.float32) + 12).astype(jnp.bfloat16))
    assert all(first is second for first, second in zip(jax.tree.leaves(merged), jax.tree.leaves(narrow), strict=True))


def test_unmergeable_adapters_are_named():
    params, adapter = build()
    with pytest.raises(ValueError, match="no lora section"):
        merge(Decoder(PLAIN), params, adapter)
    with pytest.raises(ValueError, match=r"adapter: layers\.moe is no part of the parameters"):
        merge(MODEL, params, {"layers": {"moe": adapter["layers"]["mlp"]}})
    wide = {"layers": {"mlp": {"up_proj": adapter["layers"]["mlp"]["down_proj"]}}}
    with pytest.raises(ValueError, match=r"layers\.mlp\.up_proj: got lora_A \(2, 24, 3\) x lora_B \(2, 3, 16\), exp"):
        merge(MODEL, params, wide)


def test_float32_adapter_on_bfloat16_base_rounds_once():
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((2, 5, 16), (16, 24)))
    lora_a, lora_b = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((16, 3), (3, 24)))
    linear, plain = (
        Linear(16, 24, ("embed", "heads"), key=InitKey(jax.random.key(0)), lora=lora, param_dtype="bfloat16")
        for lora in (LORA, None)
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(linear, nnx.LoRAParam))} == {jnp.dtype("float32")}
    nnx.update(linear, {"kernel": kernel, "lora_A": lora_a, "lora_B": lora_b})
    nnx.update(plain, {"kernel": kernel})
    y, alone = linear(x), plain(x)
    a, b, rows = (np.asarray(value, np.float64) for value in (lora_a, lora_b, x))
    expected = np.asarray(alone, np.float64) + 12 / 3 * rows @ a @ b
    # Half a unit in the last of bfloat16's 8 digits, and what float32 leaves of terms near 50 that cancel.
    assert np.all(np.abs(np.asarray(y, np.float64) - expected) <= 2.0**-8 * np.abs(expected) + 1e-5)
    twice = np.asarray(alone + (12 / 3 * x @ lora_a @ lora_b).astype(jnp.bfloat16), np.float64)
    assert np.any(np.abs(twice - expected) > 2.0**-8 * np.abs(expected) + 1e-5)
    assert y.dtype == jnp.bfloat16


def test_new_adapter_changes_neither_output_nor_base():
    key, mesh = jax.random.key(0), make_mesh()
    params, adapter = init_params(MODEL, key, mesh), init_adapter(MODEL, key, mesh)
    chex.assert_trees_all_equal(params, init_params(Decoder(PLAIN), key, mesh))
    on, off = (hidden_states(ScoredPolicy(MODEL, kljax.Policy(params, a)), SEQUENCES) for a in (adapter, None))
    chex.assert_trees_all_equal(on, off)
    low = adapter["layers"]["mlp"]["down_proj"]
    assert low["lora_A"].shape == (2, 24, 3)
    assert low["lora_B"].shape == (2, 3, 16)
    assert not low["lora_B"].any()
    assert 0.9 * 24**-0.5 < jnp.abs(low["lora_A"]).max() <= 24**-0.5
    assert jnp.abs(low["lora_A"][0] - low["lora_A"][1]).max() > 0


def test_disabled_adapter_compiles_the_plain_program():
    params, adapter = build()

    def program(model: Decoder, policy: kljax.Policy) -> str:
        return hidden_states.lower(ScoredPolicy(model, policy), SEQUENCES).as_text()

    off = program(MODEL, kljax.Policy(params))
    assert off == program(Decoder(PLAIN), kljax.Policy(params))
    assert program(MODEL, kljax.Policy(params, adapter)).count("dot_general") > off.count("dot_general")
    plain = hidden_states(ScoredPolicy(Decoder(PLAIN), kljax.Policy(params)), SEQUENCES)
    chex.assert_trees_all_equal(hidden_states(ScoredPolicy(MODEL, kljax.Policy(params)), SEQUENCES), plain)


def test_only_the_targets_have_an_adapter():
    lora = LoraConfig(rank=2, alpha=2.0, targets=("v_proj",))
    model = Decoder(dataclasses.replace(PLAIN, lora=lora))
    adapter = abstract_adapter(model, make_mesh())
    assert set(adapter["layers"]) == {"self_attn"}
    assert set(adapter["layers"]["self_attn"]) == {"v_proj"}


def test_mismatched_adapter_is_an_error():
    params, adapter = build()
    with pytest.raises(ValueError, match="no lora section"):
        hidden_states(ScoredPolicy(Decoder(PLAIN), kljax.Policy(params, adapter)), SEQUENCES)
    partly = {"layers": {"mlp": adapter["layers"]["mlp"]}}
    with pytest.raises(ValueError, match=r"layers\.self_attn\.k_proj\.lora_A: got None, expected \(2, 16, 3\)"):
        hidden_states(ScoredPolicy(MODEL, kljax.Policy(params, partly)), SEQUENCES)
    narrow = jax.tree.map(np.asarray, adapter)
    narrow["layers"]["mlp"]["up_proj"]["lora_B"] = np.zeros((2, 3, 5))
    with pytest.raises(ValueError, match=r"up_proj\.lora_B: got \(2, 3, 5\), expected \(2, 3, 24\)"):
        hidden_states(ScoredPolicy(MODEL, kljax.Policy(params, narrow)), SEQUENCES)


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match=r"lora\.rank: got 0"):
        LoraConfig(rank=0, alpha=1.0, targets=("q_proj",))
    with pytest.raises(ValueError, match=r"lora\.targets: got \['query'\], expected some of q_proj"):
        LoraConfig(rank=1, alpha=1.0, targets=("query",))
    with pytest.raises(ValueError, match=r"lora\.targets: got none"):
        LoraConfig(rank=1, alpha=1.0, targets=())
