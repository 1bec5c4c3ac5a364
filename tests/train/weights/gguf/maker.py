"""GGUF files made with the writer of the package `gguf`, as the converter of llama.cpp writes the families."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from train.models.config import DecoderConfig, LinearScaling, Llama3Scaling, YarnScaling
from train.weights.huggingface.config import decoder_config

GOLDENS = Path(__file__).parents[3] / "goldens"
ARCHITECTURES = {"gemma3_text": "gemma3", "mistral": "llama"}
# A byte-level vocabulary without merges that a file of a few kilobytes can have.
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*"!abcdefghijklmnopqrstuvwxyz", "ab", "<end>"],
    "tokenizer.ggml.token_type": [1] * 28 + [3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 28,
}


def architecture(kind: str) -> str:
    """Returns the architecture that llama.cpp gives a `model_type`."""
    return ARCHITECTURES.get(kind, kind)


def shape_keys(config: DecoderConfig, kind: str, length: int = 64) -> dict[str, Any]:
    """Lists the keys of a decoder."""
    arch = architecture(kind)
    keys: dict[str, Any] = {
        "block_count": config.layers,
        "context_length": length,
        "embedding_length": config.width,
        "feed_forward_length": config.mlp_width,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.freq_base": config.rope.theta,
        "vocab_size": config.vocab_size,
    }
    if arch == "llama":
        keys["rope.dimension_count"] = config.head_dim
    if config.sliding_window is not None:
        keys["attention.sliding_window"] = config.sliding_window
    if arch == "gemma2":
        keys["attn_logit_softcapping"] = config.attention_softcap
        keys["final_logit_softcapping"] = config.final_softcap
    scaling = config.rope.scaling
    if isinstance(scaling, LinearScaling):
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling.factor}
    elif isinstance(scaling, YarnScaling):
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": scaling.factor}
        keys["rope.scaling.original_context_length"] = scaling.original_length
    return {f"{arch}.{name}": value for name, value in keys.items()}


def rope_factors(config: DecoderConfig) -> np.ndarray:
    """Computes `rope_freqs.weight` of the scaling of Llama 3, one frequency after the other."""
    scaling = config.rope.scaling
    assert isinstance(scaling, Llama3Scaling)
    factors = []
    for index in range(config.head_dim // 2):
        wavelength = 2 * np.pi * config.rope.theta ** (2 * index / config.head_dim)
        if wavelength < scaling.original_length / scaling.high_frequency_factor:
            factors.append(1.0)
        elif wavelength > scaling.original_length / scaling.low_frequency_factor:
            factors.append(scaling.factor)
        else:
            low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
            smooth = (scaling.original_length / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array(factors, np.float32)


def write_gguf(path: Path, keys: Mapping[str, Any], tensors: Mapping[str, Any], *, arch: str = "llama") -> Path:
    """Writes a file; a tensor is an array of floats, or a pair of the bytes of quantized rows and their type."""
    writer = gguf.GGUFWriter(path, arch)
    for name, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def golden_tensors(name: str) -> dict[str, np.ndarray]:
    """Converts the tensors of a golden folder as llama.cpp does, with the names that the package has for them."""
    folder = GOLDENS / "models" / name
    raw = json.loads((folder / "config.json").read_text())
    arch = architecture(raw["model_type"])
    numbers = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[arch], raw["num_hidden_layers"])
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        for full, values in load_file(file).items():
            stored = names.get_name(full, try_suffixes=(".weight", ".bias"))
            assert stored is not None, full
            tensors[stored] = _converted(stored, values.astype(np.float32), arch, raw)
    return tensors


def _converted(name: str, values: np.ndarray, arch: str, raw: Mapping[str, Any]) -> np.ndarray:
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return values + np.float32(1)
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
    if arch != "llama" or heads is None:
        return values
    out = np.empty_like(values)
    size = len(values) // raw[heads]
    for head in range(raw[heads]):
        for channel in range(size // 2):
            out[head * size + 2 * channel] = values[head * size + channel]
            out[head * size + 2 * channel + 1] = values[head * size + size // 2 + channel]
    return out


def write_golden(path: Path, name: str, *, tensors: Mapping[str, Any] | None = None, **keys: Any) -> Path:
    """Writes a golden folder as a GGUF file with a small tokenizer, and other keys, or tensors, on top."""
    raw = json.loads((GOLDENS / "models" / name / "config.json").read_text())
    config, arch = decoder_config(raw), architecture(raw["model_type"])
    all_keys = {**shape_keys(config, raw["model_type"]), **TOKENIZER, **keys}
    return write_gguf(path, all_keys, {**golden_tensors(name), **(tensors or {})}, arch=arch)
