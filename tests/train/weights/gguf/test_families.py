"""Imported models of every family: the golden folders and the configs of public models come back."""

import dataclasses
import json

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from safetensors.numpy import load_file

from tests.train.weights.gguf.maker import (
    GOLDENS,
    TOKENIZER,
    architecture,
    golden_tensors,
    rope_factors,
    shape_keys,
    write_gguf,
    write_golden,
)
from train.models.config import LinearScaling, Llama3Scaling
from train.weights.gguf import import_gguf
from train.weights.gguf.config import hf_mapping
from train.weights.gguf.header import GgufTensor, Header
from train.weights.huggingface.config import decoder_config

FOLDERS = ("qwen2", "qwen3", "qwen3_yarn", "mistral", "gemma2", "gemma3")
CONFIGS = sorted((GOLDENS / "models" / "configs").glob("*.json"))


def weights(folder):
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


def raw_config(name):
    raw = json.loads((GOLDENS / "models" / name / "config.json").read_text())
    # A file has no such key: llama.cpp takes the width of the head.
    return {**raw, "query_pre_attn_scalar": raw["head_dim"]} if "query_pre_attn_scalar" in raw else raw


@pytest.mark.parametrize("name", FOLDERS)
def test_golden_folder_comes_back_from_gguf(name, tmp_path):
    import_gguf(write_golden(tmp_path / "model.gguf", name), tmp_path / "folder")
    expected, actual = decoder_config(raw_config(name)), decoder_config(tmp_path / "folder")
    assert dataclasses.replace(actual, norm_eps=expected.norm_eps) == expected
    assert actual.norm_eps == np.float32(expected.norm_eps)
    before, after = weights(GOLDENS / "models" / name), weights(tmp_path / "folder")
    assert before.keys() == after.keys()
    gemma = name.startswith("gemma")
    for key, values in before.items():
        stored = values.astype(np.float32)
        stored = stored + np.float32(1) - np.float32(1) if gemma and "norm" in key else stored
        np.testing.assert_array_equal(after[key], stored, err_msg=key)


def test_llama_scaling_follows_from_rope_factors(tmp_path):
    folder = GOLDENS / "models" / "llama3"
    raw = json.loads((folder / "config.json").read_text())
    raw["rope_parameters"] |= {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
    config = decoder_config(raw)
    tensors = golden_tensors("llama3") | {"rope_freqs.weight": rope_factors(config)}
    keys = shape_keys(config, "llama") | TOKENIZER
    import_gguf(write_gguf(tmp_path / "model.gguf", keys, tensors), tmp_path / "folder")
    actual = decoder_config(tmp_path / "folder")
    assert actual.rope == config.rope
    assert isinstance(actual.rope.scaling, Llama3Scaling)
    before, after = weights(folder), weights(tmp_path / "folder")
    assert before.keys() == after.keys()
    for key, values in before.items():
        np.testing.assert_array_equal(after[key], values, err_msg=key)
    tensors["rope_freqs.weight"][3] *= 1.01
    with pytest.raises(ValueError, match=r"rope_freqs\.weight: the factors are not of the scaling of Llama 3"):
        import_gguf(write_gguf(tmp_path / "other.gguf", keys, tensors), tmp_path / "other")


def test_old_key_of_the_rope_alone_is_a_linear_scaling(tmp_path):
    """Files of before `rope.scaling.type` have a factor of 1 where nothing is scaled."""
    config = decoder_config(raw_config("qwen3"))
    keys = {"general.architecture": "qwen3", **shape_keys(config, "qwen3")} | TOKENIZER
    scalings = []
    for factor in (1.0, 4.0):
        file = write_gguf(tmp_path / "old.gguf", keys | {"qwen3.rope.scale_linear": factor}, golden_tensors("qwen3"))
        import_gguf(file, tmp_path / f"{factor}")
        scalings.append(decoder_config(tmp_path / f"{factor}").rope.scaling)
    assert scalings == [None, LinearScaling(4.0)]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_keys_of_public_models_give_their_config(path, tmp_path):
    raw = json.loads(path.read_text())
    raw = {**raw, **raw.get("text_config", {})} if "text_config" in raw else raw
    expected = decoder_config(json.loads(path.read_text()))
    kind = "gemma3_text" if raw["model_type"].startswith("gemma3") else raw["model_type"]
    arch = architecture(kind)
    keys = {"general.architecture": arch, **shape_keys(expected, kind, length=raw.get("max_position_embeddings", 8192))}
    names = ["token_embd.weight", *(f"blk.{layer}.attn_norm.weight" for layer in range(expected.layers))]
    names += [] if expected.tie_embeddings else ["output.weight"]
    shape = (expected.vocab_size, expected.width)
    tensors = {name: GgufTensor(path, name, GGMLQuantizationType.F32, shape, 0, 0) for name in names}
    factors = rope_factors(expected) if isinstance(expected.rope.scaling, Llama3Scaling) else None
    actual = decoder_config(hf_mapping(Header(path, keys, tensors), factors))
    assert actual == expected


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.attention.max_alibi_bias", 8.0, r"llama\.attention\.max_alibi_bias: not understood"),
        ("llama.expert_count", 8, r"llama\.expert_count: got 8, expected 0: not supported"),
        ("llama.rope.dimension_count", 8, r"llama\.rope\.dimension_count: got 8, expected 16: not supported"),
        ("llama.rope.scaling.type", "longrope", r"rope\.scaling\.type: got 'longrope', expected none, linear or yarn"),
        ("llama.rope.scaling.type", "yarn", r"llama\.rope\.scaling\.factor: missing"),
        ("llama.attention.causal", False, r"llama\.attention\.causal: got False, expected True"),
        ("llama.block_count", 2**31, r"llama\.block_count: got 2147483648, but there are tensors of 3"),
        ("llama.embedding_length", 64, r"llama\.embedding_length: got 64, but the embeddings have 32"),
        ("llama.vocab_size", 161, r"llama\.vocab_size: got 161, expected 160"),
        ("llama.feed_forward_length", 64, r"of another shape: .*blk\.0\.ffn_gate\.weight: got \[48, 32\], expected"),
        ("llama.attention.head_count_kv", [2, 2, 2], r"head_count_kv: got \[2, 2, 2\], expected an integer above 0"),
        ("llama.context_length", 0, r"llama\.context_length: got 0, expected an integer above 0"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), r"epsilon: got nan, expected a number above 0"),
        ("general.quantization_version", 1, r"general\.quantization_version: got 1, expected 2"),
        ("split.count", 3, r"split\.count: got one of 3 files; join them"),
        ("adapter.type", "lora", r"adapter\.type: not understood"),
    ],
)
def test_key_not_understood_is_an_error(key, value, message, tmp_path):
    path = write_golden(tmp_path / "model.gguf", "mistral", **{key: value})
    with pytest.raises(ValueError, match=message):
        import_gguf(path, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_tensors_must_fit_the_keys(tmp_path):
    config = decoder_config(raw_config("qwen3"))
    keys, tensors = shape_keys(config, "qwen3") | TOKENIZER, golden_tensors("qwen3")
    tensors["blk.0.attn_sinks.weight"] = tensors.pop("blk.0.attn_q_norm.weight")
    tensors["output_norm.weight"] = tensors["output_norm.weight"].astype(np.float64)
    with pytest.raises(ValueError, match="tensors do not fit") as caught:
        import_gguf(write_gguf(tmp_path / "model.gguf", keys, tensors, arch="qwen3"), tmp_path / "folder")
    for line in (
        "missing: blk.0.attn_q_norm.weight",
        "not understood: blk.0.attn_sinks.weight",
        "of a type that cannot be read: output_norm.weight: F64",
    ):
        assert line in str(caught.value)


@pytest.mark.parametrize("arch", ["mixtral", "phi3", "qwen2moe", "gemma4"])
def test_other_architecture_is_refused_by_name(arch, tmp_path):
    with pytest.raises(ValueError, match=rf"general\.architecture: got '{arch}', expected one of llama"):
        import_gguf(write_gguf(tmp_path / "model.gguf", {}, {}, arch=arch), tmp_path / "folder")
