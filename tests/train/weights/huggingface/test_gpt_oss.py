"""Folders of GPT-OSS: the keys of the published files, and experts in mxfp4."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from train.models import ClampedSwiglu, Decoder, ExpertsConfig, Rope, YarnScaling
from train.models.sharding import make_mesh
from train.weights.huggingface import load_params
from train.weights.huggingface.config import decoder_config, hf_config
from train.weights.huggingface.contents import check_folder
from train.weights.huggingface.mxfp4 import dequantise_mxfp4

FOLDER = Path(__file__).parents[3] / "goldens" / "models" / "gpt_oss"
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
# The keys of gpt-oss-20b on the hub.
PUBLIC = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-5,
    "rope_scaling": YARN | {"original_max_position_embeddings": 4096},
    "rope_theta": 150_000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201_088,
}


def test_public_config_has_the_published_shape():
    config = decoder_config(PUBLIC)
    swiglu = ClampedSwiglu(1.702, 7.0)
    assert config.experts == ExpertsConfig(count=32, active=4, width=2880, bias=True, swiglu=swiglu)
    # The attention factor is 0.1 ln(32) + 1.
    assert config.rope == Rope(150_000.0, YarnScaling(32.0, 4096, 1.3465735902799727, truncate=False))
    assert (config.sinks, config.qkv_bias, config.output_bias, config.sliding_window) == (True, True, True, 128)
    # 20.91 and 116.83 billion parameters on the model card.
    assert sum(leaf.size for leaf in jax.tree.leaves(Decoder(config).structure().params)) == 20_914_757_184
    defaults = decoder_config({"model_type": "gpt_oss"})
    assert sum(leaf.size for leaf in jax.tree.leaves(Decoder(defaults).structure().params)) == 116_829_156_672
    assert (defaults.rope, defaults.pattern) == (config.rope, config.pattern)
    # What is written has floats.
    for written in (hf_config(config), hf_config(config, like=PUBLIC)):
        assert decoder_config(written) == config
        assert (written["model_type"], written.get("quantization_config")) == ("gpt_oss", None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts_per_token": 2}, "experts_per_token: got 2, but num_experts_per_tok = 4"),
        ({"initial_context_length": 8192}, "initial_context_length: got 8192, expected original_max_position"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: got .*fp8.* not supported"),
        ({"quantization_config": {"quant_method": "mxfp4", "bits": 6}}, "quantization_config: bits: not understood"),
        ({"swiglu_limit": None}, "swiglu_limit: got None, expected a number > 0"),
        ({"rope_scaling_factor": 32.0}, "rope_scaling_factor: not understood in a config of gpt_oss"),
        ({"sliding_window": None}, "sliding_window: got null"),
    ],
)
def test_other_gpt_oss_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        decoder_config({**PUBLIC, **change})


def test_mxfp4_has_its_published_values():
    """All 16 values, the lower half of a byte first, and the ends of the scale; no value is rounded."""
    blocks = np.arange(16, dtype=np.uint8)[None, :] * np.uint8(16) + np.arange(16, dtype=np.uint8)[::-1]
    positive = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([positive, -positive])
    pairs = np.stack([values[::-1], values], -1).ravel()
    for exponent in (-127, -3, 0, 125):
        got = dequantise_mxfp4(blocks, np.array([127 + exponent], np.uint8))
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got.astype(np.float64), pairs * 2.0**exponent)
    largest = dequantise_mxfp4(blocks, np.array([255], np.uint8)).astype(np.float32)
    np.testing.assert_array_equal(np.isfinite(largest), np.abs(pairs) < 1)


@pytest.fixture
def packed(tmp_path) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder whose experts are in mxfp4, in the names of the hub."""
    raw = json.loads((FOLDER / "config.json").read_text())
    raw |= {"quantization_config": PUBLIC["quantization_config"], "intermediate_size": 32, "num_local_experts": 3}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    random, arrays = np.random.default_rng(0), load_file(FOLDER / "model.safetensors")
    for name, array in dict(arrays).items():
        if ".mlp." in name:
            del arrays[name]
            base, _, last = name.rpartition(".")
            rows = {"gate_up_proj": 64, "gate_up_proj_bias": 64}.get(last, 32)
            if last in ("gate_up_proj", "down_proj"):
                arrays[f"{name}_blocks"] = random.integers(0, 256, (3, rows, 1, 16), np.uint8)
                arrays[f"{name}_scales"] = random.integers(118, 122, (3, rows, 1), np.uint8)
            else:
                shape = (3, rows) if base.endswith("experts") else array[:3].shape
                arrays[name] = random.normal(size=shape).astype(np.float32)
    save_file(arrays, tmp_path / "model.safetensors")
    return tmp_path, arrays


def test_experts_in_mxfp4_are_read(packed):
    """Rows are output channels, gates at even ones, read a few at a time."""
    folder, arrays = packed
    params = load_params(folder, Decoder(decoder_config(folder)), make_mesh(fsdp=2), chunk_bytes=300)
    experts = params["layers"]["mlp"]["experts"]
    for layer in range(2):
        base = f"model.layers.{layer}.mlp.experts"
        values = {
            name: dequantise_mxfp4(arrays[f"{base}.{name}_blocks"], arrays[f"{base}.{name}_scales"])
            for name in ("gate_up_proj", "down_proj")
        }
        fused = values["gate_up_proj"].astype(np.float32).swapaxes(1, 2)
        np.testing.assert_array_equal(experts["gate_proj"]["kernel"][layer], fused[..., ::2])
        np.testing.assert_array_equal(experts["up_proj"]["kernel"][layer], fused[..., 1::2])
        np.testing.assert_array_equal(
            experts["down_proj"]["kernel"][layer], values["down_proj"].astype(np.float32).swapaxes(1, 2)
        )
        np.testing.assert_array_equal(experts["up_proj"]["bias"][layer], arrays[f"{base}.gate_up_proj_bias"][:, 1::2])


def test_damaged_mxfp4_is_refused_by_name(packed):
    folder, arrays = packed
    model, name = Decoder(decoder_config(folder)), "model.layers.1.mlp.experts.down_proj"
    scales = arrays[f"{name}_scales"]
    for change, message in (
        (
            {f"{name}_scales": scales[:, :5]},
            rf"{name}_blocks and {name}_scales: got U8\[3, 32, 1, 16\] and U8\[3, 5, 1\]",
        ),
        ({f"{name}_scales": scales.astype(np.float32)}, "got U8.* and F32"),
        ({f"{name}_scales": None}, f"{name}_blocks has no {name}_scales"),
        ({f"{name}_blocks": None}, rf"left over: {name}_scales"),
    ):
        changed = {key: array for key, array in {**arrays, **change}.items() if array is not None}
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            check_folder(folder, model)
    scales[1, 4] = 255
    save_file(arrays, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name}_blocks has values that are not finite"):
        load_params(folder, model, make_mesh())
