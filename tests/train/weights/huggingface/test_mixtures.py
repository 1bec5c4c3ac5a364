"""Folders of mixtures of experts: their keys, and the forms and names of their tensors."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from train.models import Decoder, ExpertsConfig
from train.models.sharding import make_mesh
from train.weights.huggingface import load_params
from train.weights.huggingface.config import decoder_config, hf_config
from train.weights.huggingface.contents import check_folder

GOLDENS = Path(__file__).parents[3] / "goldens" / "models"
# The keys of Qwen3-30B-A3B on the hub that differ from the defaults of transformers, and one that is not read.
PUBLIC = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "max_window_layers": 48,
    "sliding_window": None,
    "use_sliding_window": False,
    "rope_theta": 1_000_000.0,
    "router_aux_loss_coef": 0.001,
}
TINY = PUBLIC | {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 4, "head_dim": 4, "num_experts": 16}


def mlps(raw: dict) -> list[str]:
    return [kind.mlp for kind in decoder_config(raw).kinds]


def test_public_mixture_has_the_published_number_of_parameters():
    config = decoder_config(PUBLIC)
    assert config.experts == ExpertsConfig(count=128, active=8, width=768)
    shapes = Decoder(config).structure().params
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 30_532_122_624
    assert decoder_config(hf_config(config)) == config
    assert hf_config(config)["model_type"] == "qwen3_moe"


def test_fields_of_training_are_in_no_folder():
    """A run writes the `config.json` that it has read, whatever it trains in it."""
    config = decoder_config(TINY)
    biased = dataclasses.replace(config.experts, choice_bias=True)
    trained = dataclasses.replace(config, experts=biased, replay_threshold=0.5, constant_embedding=3)
    assert hf_config(trained, like=TINY) == hf_config(config, like=TINY)


def test_either_key_counts_the_experts():
    other = {**TINY, "num_local_experts": TINY["num_experts"]}
    assert decoder_config(other) == decoder_config(TINY)
    del other["num_experts"]
    assert decoder_config(other) == decoder_config(TINY)
    with pytest.raises(ValueError, match="num_experts: got num_experts = 16 and num_local_experts = 8, expected one"):
        decoder_config({**TINY, "num_local_experts": 8})


def test_layers_without_experts_follow_the_keys():
    assert mlps(TINY) == ["experts"] * 4
    assert mlps({**TINY, "decoder_sparse_step": 2}) == ["dense", "experts"] * 2
    assert mlps({**TINY, "mlp_only_layers": [0, 3]}) == ["dense", "experts", "experts", "dense"]
    assert mlps({**TINY, "decoder_sparse_step": 2, "mlp_only_layers": [1]}) == ["dense", "dense", "dense", "experts"]
    assert hf_config(decoder_config({**TINY, "decoder_sparse_step": 2}))["mlp_only_layers"] == [0, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"router_jitter_noise": 0.1}, "router_jitter_noise: got 0.1, expected 0 or 0.0"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: not understood in a config of qwen3_moe"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types: not understood in a config of qwen3_moe"),
        ({"mlp_only_layers": 2}, "mlp_only_layers: got 2, expected a list of numbers of layers"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok: got 0, expected an integer >= 1"),
        ({"num_experts_per_tok": 17}, "experts.active: got 17, expected at most experts.count = 16"),
    ],
)
def test_other_mixtures_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        decoder_config({**TINY, **change})


def test_switched_off_window_may_be_zero():
    raw = json.loads((GOLDENS / "qwen2_moe" / "config.json").read_text())
    assert (raw["sliding_window"], decoder_config(raw).sliding_window) == (0, None)
    mixtral = json.loads((GOLDENS / "mixtral" / "config.json").read_text())
    assert {kind.attention for kind in decoder_config(mixtral).kinds} == {"sliding"}


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_experts_are_loaded_onto_their_devices(quantization):
    folder = GOLDENS / "qwen3_moe"
    model = Decoder(dataclasses.replace(decoder_config(folder), quantization=quantization))
    expected, split = (load_params(folder, model, mesh) for mesh in (make_mesh(), make_mesh(fsdp=2, expert=2)))
    jax.tree.map(np.testing.assert_array_equal, split, expected)
    specs = [x.sharding.spec for path, x in jax.tree_util.tree_leaves_with_path(split) if "'experts'" in str(path)]
    assert specs
    assert all("expert" in spec for spec in specs)


def test_fused_experts_are_read_as_separate_ones(tmp_path):
    """As transformers 5 has them in memory."""
    folder, model = GOLDENS / "qwen3_moe", Decoder(decoder_config(GOLDENS / "qwen3_moe"))
    arrays, fused = load_file(folder / "model.safetensors"), dict[str, np.ndarray]()
    for number in model.config.expert_layers:
        base = f"model.layers.{number}.mlp.experts"
        gate, up, down = (
            np.stack([arrays.pop(f"{base}.{expert}.{name}_proj.weight") for expert in range(6)])
            for name in ("gate", "up", "down")
        )
        fused |= {f"{base}.gate_up_proj": np.concatenate([gate, up], 1), f"{base}.down_proj": down}
    save_file(arrays | fused, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    expected = load_params(folder, model, make_mesh())
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path, model, make_mesh(), chunk_bytes=200), expected)
    name = "model.layers.0.mlp.experts.down_proj"
    save_file(arrays | fused | {name: fused[name][:5]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: model\.layers\.0\.mlp\.experts\.5\.down_proj\.weight"):
        check_folder(tmp_path, model)
