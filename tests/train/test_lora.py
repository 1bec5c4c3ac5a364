"""Adapters: the update, the parameters they leave alone, and nothing at all when off."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from train.models import Decoder, DecoderConfig, LoraConfig
from train.models.lora import PROJECTIONS
from train.policy import abstract_adapter, init_adapter, init_params
from train.policy import hidden_states as eager_hidden_states
from train.sharding import make_mesh

LORA = LoraConfig(rank=3, alpha=12.0, targets=PROJECTIONS)
PLAIN = DecoderConfig(vocab_size=24, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=24)
MODEL = Decoder(dataclasses.replace(PLAIN, lora=LORA))
TOKENS = jax.random.randint(jax.random.key(5), (2, 4), 0, 24)
MASK = jnp.ones((2, 4), bool)
hidden_states = jax.jit(eager_hidden_states, static_argnums=0)


def build() -> tuple[dict, dict]:
    key, mesh = jax.random.key(0), make_mesh()
    adapter = init_adapter(MODEL, key, mesh)
    keys = iter(jax.random.split(key, 20))
    filled = jax.tree.map(lambda x: x if x.any() else 0.3 * jax.random.normal(next(keys), x.shape), adapter)
    return init_params(MODEL, key, mesh), filled


def test_an_adapted_model_equals_one_with_the_update_merged_into_its_weights():
    params, adapter = build()
    merged = jax.tree.map(lambda x: x, params)
    for block, name in [("self_attn", n) for n in PROJECTIONS[:4]] + [("mlp", n) for n in PROJECTIONS[4:]]:
        low = adapter["layers"][block][name]
        update = 12.0 / 3 * jnp.einsum("lir,lro->lio", low["lora_A"], low["lora_B"])
        merged["layers"][block][name]["kernel"] += update
    adapted = hidden_states(MODEL, kljax.Policy(params, adapter), TOKENS, MASK)
    chex.assert_trees_all_close(adapted, hidden_states(MODEL, kljax.Policy(merged), TOKENS, MASK), atol=2e-5)
    assert jnp.abs(adapted - hidden_states(MODEL, kljax.Policy(params), TOKENS, MASK)).max() > 0.1


def test_a_new_adapter_changes_nothing_and_leaves_the_base_parameters_as_they_are():
    key, mesh = jax.random.key(0), make_mesh()
    params, adapter = init_params(MODEL, key, mesh), init_adapter(MODEL, key, mesh)
    chex.assert_trees_all_equal(params, init_params(Decoder(PLAIN), key, mesh))
    on, off = (hidden_states(MODEL, kljax.Policy(params, a), TOKENS, MASK) for a in (adapter, None))
    chex.assert_trees_all_equal(on, off)
    low = adapter["layers"]["mlp"]["down_proj"]
    assert low["lora_A"].shape == (2, 24, 3)
    assert low["lora_B"].shape == (2, 3, 16)
    assert not low["lora_B"].any()
    assert 0.9 * 24**-0.5 < jnp.abs(low["lora_A"]).max() <= 24**-0.5
    assert jnp.abs(low["lora_A"][0] - low["lora_A"][1]).max() > 0


def test_off_is_the_very_program_of_a_model_without_lora():
    params, adapter = build()

    def program(model: Decoder, policy: kljax.Policy) -> str:
        return hidden_states.lower(model, policy, TOKENS, MASK).as_text()

    off = program(MODEL, kljax.Policy(params))
    assert off == program(Decoder(PLAIN), kljax.Policy(params))
    assert program(MODEL, kljax.Policy(params, adapter)).count("dot_general") > off.count("dot_general")
    plain = hidden_states(Decoder(PLAIN), kljax.Policy(params), TOKENS, MASK)
    chex.assert_trees_all_equal(hidden_states(MODEL, kljax.Policy(params), TOKENS, MASK), plain)


def test_only_the_targets_have_an_adapter():
    lora = LoraConfig(rank=2, alpha=2.0, targets=("v_proj",))
    model = Decoder(dataclasses.replace(PLAIN, lora=lora))
    adapter = abstract_adapter(model, make_mesh())
    assert set(adapter["layers"]) == {"self_attn"}
    assert set(adapter["layers"]["self_attn"]) == {"v_proj"}


def test_an_adapter_that_does_not_fit_is_an_error():
    params, adapter = build()
    with pytest.raises(ValueError, match="no lora section"):
        hidden_states(Decoder(PLAIN), kljax.Policy(params, adapter), TOKENS, MASK)
    partly = {"layers": {"mlp": adapter["layers"]["mlp"]}}
    with pytest.raises(ValueError, match=r"layers\.self_attn\.k_proj\.lora_A: got None, expected \(2, 16, 3\)"):
        hidden_states(MODEL, kljax.Policy(params, partly), TOKENS, MASK)
    narrow = jax.tree.map(np.asarray, adapter)
    narrow["layers"]["mlp"]["up_proj"]["lora_B"] = np.zeros((2, 3, 5))
    with pytest.raises(ValueError, match=r"up_proj\.lora_B: got \(2, 3, 5\), expected \(2, 3, 24\)"):
        hidden_states(MODEL, kljax.Policy(params, narrow), TOKENS, MASK)


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match=r"lora\.rank: got 0"):
        LoraConfig(rank=0, alpha=1.0, targets=("q_proj",))
    with pytest.raises(ValueError, match=r"lora\.targets: got \['query'\], expected some of q_proj"):
        LoraConfig(rank=1, alpha=1.0, targets=("query",))
    with pytest.raises(ValueError, match=r"lora\.targets: got none"):
        LoraConfig(rank=1, alpha=1.0, targets=())
