"""`config.json` to and from the decoder's config: public models, both forms of the keys, and what is refused."""

import dataclasses
import json
import math
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.train.weights.parameters import parameter_count
from train.config.adapter import with_adapter
from train.models import Decoder, DecoderConfig, LinearScaling, Llama3Scaling, Rope, YarnScaling
from train.models.rope import frequencies
from train.weights.huggingface.config import decoder_config, hf_config
from train.weights.huggingface.families import FAMILIES
from train.weights.peft_config import read_config

CONFIGS = Path(__file__).parents[2] / "goldens" / "models" / "configs"

# Number of parameters as the model cards give it, tied heads counted once; of Gemma 3 4B the text part.
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b-v0.3": 7_248_023_552,
    "gemma-3-1b-it": 999_885_952,
    "gemma-3-4b-it": 3_880_263_168,
}
COMMON = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Of transformers 5.23, `ROPE_INIT_FUNCTIONS`, for heads of width 16; see `test_scaled_frequencies_are_their_formulas`.
LLAMA = [1.0, 0.079403013, 0.0047007538, 0.00091158313, 0.00017677668, 3.4281024e-05, 6.6478697e-06, 1.2891732e-06]
YARN = [1.0, 0.23717082, 0.049999997, 0.0079056947, 0.0024999999, 0.00079056947, 0.00025000001, 7.9056947e-05]
SMOOTH = [1.0, 0.16058916, 0.025, 0.0079056947, 0.0024999999, 0.00079056947, 0.00025000001, 7.9056947e-05]


def tiny(family: str, **more: object) -> dict:
    return {**COMMON, "model_type": family, **more}


def attention_of(config: DecoderConfig) -> tuple[str, ...]:
    return tuple(kind.attention for kind in config.kinds)


def public(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def test_every_public_config_is_listed():
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_public_models_have_the_published_number_of_parameters(name):
    config = decoder_config(CONFIGS / f"{name}.json")
    assert parameter_count(config) == PUBLISHED[name]
    assert decoder_config(hf_config(config)) == config
    selected = hf_config(config, like=public(name))
    assert decoder_config(selected) == config
    assert selected["eos_token_id"] == public(name)["eos_token_id"]


def test_public_configs_are_read():
    llama = decoder_config(public("llama-3.1-8b"))
    assert llama.rope == Rope(500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    assert (llama.head_dim, llama.norm_eps, llama.qkv_bias, llama.qk_norm) == (128, 1e-5, False, False)
    qwen2, qwen3 = decoder_config(public("qwen2.5-0.5b")), decoder_config(public("qwen3-0.6b"))
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.tie_embeddings, qwen2.sliding_window) == (True, False, True, None)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim, qwen3.rope) == (False, True, 128, Rope(1e6))
    gemma = decoder_config(public("gemma-3-1b-it"))
    assert (gemma.rope, gemma.local_rope, gemma.sliding_window) == (Rope(1e6), Rope(1e4), 512)
    assert [i for i, kind in enumerate(attention_of(gemma)) if kind == "full"] == [5, 11, 17, 23]
    assert (gemma.activation, gemma.norm_offset, gemma.post_norms, gemma.qk_norm) == ("gelu_tanh", True, True, True)
    assert (gemma.embed_scale, gemma.attention_scale, gemma.final_softcap) == (1152**0.5, None, None)
    vision = decoder_config(public("gemma-3-4b-it"))
    assert (vision.rope, vision.local_rope) == (Rope(1e6, LinearScaling(8.0)), Rope(1e4))
    written = hf_config(vision, like=public("gemma-3-4b-it"))
    assert (written["model_type"], written["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert not written.keys() & {"vision_config", "text_config", "image_token_index"}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameter_counts_equal_the_tree(family):
    bias = {"attention_bias": True} if "attention_bias" in FAMILIES[family].defaults else {}
    bias |= {"mlp_bias": True} if family == "llama" else {}
    config = decoder_config(tiny(family, **bias))
    shapes = Decoder(config).structure().params
    assert parameter_count(config) == sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert decoder_config(hf_config(config)) == config
    assert hf_config(config, like=tiny(family, **bias, eos_token_id=3))["eos_token_id"] == 3


def test_new_and_old_rope_forms_are_equal():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    old = tiny("llama", rope_theta=5e5, rope_scaling=scaling)
    new = tiny("llama", rope_parameters={**scaling, "rope_theta": 5e5})
    assert decoder_config(old) == decoder_config(new) == decoder_config({**old, **new})
    gemma_old = tiny(
        "gemma3_text", rope_theta=2e6, rope_local_base_freq=3e3, rope_scaling={"type": "linear", "factor": 8}
    )
    layers = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
    }
    gemma_new = tiny("gemma3_text", rope_parameters=layers, sliding_window_pattern=6)
    assert decoder_config(gemma_old) == decoder_config(gemma_new)
    with pytest.raises(ValueError, match=r"rope_scaling: got .* differs from rope_parameters"):
        decoder_config({**new, "rope_scaling": {"rope_type": "linear", "factor": 2.0}})


def test_keys_choosing_a_transformers_kernel_are_ignored():
    for key, value in (("attn_implementation", "sdpa"), ("_flash_attn_2_enabled", True)):
        assert decoder_config(tiny("llama", **{key: value})) == decoder_config(tiny("llama"))


def test_windows_follow_the_keys_of_the_family():
    kinds = ["full_attention", "sliding_attention"] * 2
    assert attention_of(decoder_config(tiny("mistral", sliding_window=7))) == ("sliding",) * 4
    assert attention_of(decoder_config(tiny("mistral", sliding_window=None))) == ("full",) * 4
    qwen = tiny("qwen3", sliding_window=7, max_window_layers=3)
    assert decoder_config(qwen).sliding_window is None
    assert attention_of(decoder_config({**qwen, "use_sliding_window": True})) == ("full", "full", "full", "sliding")
    assert attention_of(decoder_config({**qwen, "use_sliding_window": True, "layer_types": kinds}))[1] == "sliding"
    assert attention_of(decoder_config(tiny("gemma2"))) == ("sliding", "full") * 2
    assert attention_of(decoder_config(tiny("gemma2", sliding_window_pattern=3))) == ("sliding", "full") * 2
    # transformers never reads the key with the underscore, which it writes beside `layer_types`.
    assert attention_of(decoder_config(tiny("gemma3_text", _sliding_window_pattern=2))) == ("sliding",) * 4
    both = tiny("gemma3_text", sliding_window_pattern=2, _sliding_window_pattern=3, query_pre_attn_scalar=64)
    config = decoder_config(both)
    assert attention_of(config) == ("sliding", "full") * 2
    assert config.attention_scale == 1 / 8
    with pytest.raises(ValueError, match="sliding_window: got null, or use_sliding_window is off"):
        decoder_config({**qwen, "layer_types": kinds})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parallel_residual": True}, "parallel_residual: not understood in a config of llama"),
        ({"sliding_window": 4096}, "sliding_window: not understood in a config of llama"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: got .* not supported"),
        ({"rope_interleaved": True}, "rope_interleaved: got True, expected False"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5"),
        (
            {"model_type": "qwen3_next"},
            "model_type: got 'qwen3_next', expected one of qwen3, qwen2, llama, mistral, .*gemma3",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures: got .*'LlamaForCausalLM'"),
        ({"architectures": True}, r"architectures: got True, expected \['LlamaForCausalLM'\]"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected one of silu"),
        ({"hidden_act": ["silu"]}, r"hidden_act: got \['silu'\], expected one of silu"),
        (
            {"rope_scaling": {"type": ["linear"], "factor": 2.0}},
            r"rope_type: got \['linear'\], expected one of",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": "64"}},
            "original_max_position_embeddings: got '64', expected a number of tokens",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope_scaling\.rope_type: got 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor: missing"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "speed": 1}}, "'linear' is not known to read speed"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "original_max_position_embeddings: missing"),
        ({"hidden_size": "16"}, "hidden_size: got '16', expected an integer"),
        ({"hidden_size": None}, "hidden_size: missing in a config of llama"),
        ({"num_key_value_heads": 3}, "kv_heads: got 3"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: got 1, expected true or false"),
        ({"attention_bias": "no"}, "attention_bias: got 'no', expected true or false"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, r"rope_scaling\.factor: got 0, expected at least 1"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, r"rope_scaling\.factor: got -2, expected at least 1"),
    ],
)
def test_unknown_settings_are_errors_naming_them(change, message):
    with pytest.raises(ValueError, match=message):
        decoder_config({**tiny("llama"), **change})


@pytest.mark.parametrize("wrong", ["x", ["full_attention"], -1, 1.5, None, True])
@pytest.mark.parametrize("sliding", [True, False])
def test_sliding_layers_are_given_by_an_integer(wrong, sliding):
    """Whether or not it is read; all layers slide from layer 0 on."""
    qwen = tiny("qwen2", sliding_window=8, use_sliding_window=sliding)
    with pytest.raises(ValueError, match=r"^max_window_layers: got .*, expected an integer >= 0$"):
        decoder_config({**qwen, "max_window_layers": wrong})
    assert set(attention_of(decoder_config({**qwen, "max_window_layers": 0}))) == {"sliding" if sliding else "full"}


@pytest.mark.parametrize("wrong", [[["x"]], [{}] * 4, "full_attention", 4])
def test_layer_kinds_are_names(wrong):
    with pytest.raises(ValueError, match=r"^layer_types: got .*, expected 4 of "):
        decoder_config(tiny("qwen3", layer_types=wrong))


def test_keys_without_effect_are_ignored():
    more = {"rope_interleaved": False, "is_llama_config": True, "unsloth_fixed": True, "pad_token_id": 3}
    # transformers writes the second for a model that it read from a GGUF file.
    more |= {"_name_or_path": "SmolLM2", "_model_name_or_path": "SmolLM2"}
    assert decoder_config(tiny("llama", **more)) == decoder_config(tiny("llama"))


def test_a_folder_without_a_config_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        decoder_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        decoder_config(tmp_path)


def test_a_shape_of_no_family_is_not_written():
    config = DecoderConfig(vocab_size=24, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=24)
    assert hf_config(config)["model_type"] == "llama"
    assert hf_config(dataclasses.replace(config, vocab_size=30), like=hf_config(config))["vocab_size"] == 30
    with pytest.raises(ValueError, match=r"no model of qwen3, qwen2, .* has this shape"):
        hf_config(dataclasses.replace(config, norm_offset=True))
    with pytest.raises(ValueError, match="no model of llama in transformers"):
        hf_config(dataclasses.replace(config, qk_norm=True), like=hf_config(config))


def test_scaled_frequencies_are_their_formulas():
    plain = frequencies(Rope(1e4), 16)
    np.testing.assert_allclose(plain, [10.0 ** (-i / 2) for i in range(8)], rtol=1e-12)
    np.testing.assert_allclose(frequencies(Rope(1e4, LinearScaling(4.0)), 16), plain / 4)
    llama = frequencies(Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 64)), 16)
    np.testing.assert_allclose(llama, LLAMA, rtol=2e-6)
    yarn = YarnScaling(4.0, 64, 0.1 * math.log(4.0) + 1)
    np.testing.assert_allclose(frequencies(Rope(1e4, yarn), 16), YARN, rtol=2e-6)
    smooth = dataclasses.replace(yarn, truncate=False, beta_fast=8.0, beta_slow=2.0)
    np.testing.assert_allclose(frequencies(Rope(1e4, smooth), 16), SMOOTH, rtol=2e-6)
    read = decoder_config(tiny("qwen2", rope_scaling={"type": "yarn", "factor": 4.0}, max_position_embeddings=64))
    assert read.rope.scaling == yarn


@pytest.mark.parametrize("read", [decoder_config, read_config])
def test_pipe_in_place_of_a_config_is_named(tmp_path, read):
    for name in ("config.json", "adapter_config.json"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=r"config\.json: cannot be read: .*it is no regular file"):
        read(tmp_path)
    raw = {"lora": {"path": str(tmp_path)}}
    assert with_adapter(raw) == raw
