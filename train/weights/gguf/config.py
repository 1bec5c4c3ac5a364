"""Conversion of the keys of a GGUF file to `config.json`. A key that is not understood is an error.

Keys and their defaults follow llama.cpp, whose converters write the files.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from train.weights.gguf.header import Header
from train.weights.huggingface.families import FAMILIES

# The architecture of a file -> `model_type`. Files of Mistral are of the architecture llama.
MODEL_TYPES: Mapping[str, str] = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
# Keys that do not change the model: origin, licence, suggested sampling, and the data that guided the quantization.
IGNORED_PREFIXES = ("general.", "quantize.imatrix.", "imatrix.", "tokenizer.")
# Keys of an architecture that are supported only at these values.
ALLOWED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.finetuned": (True, False),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (True, False),  # llama.cpp reads it for GPT-NeoX alone
}
QUANTIZATION_VERSION = 2
ROPE_FACTORS = "rope_freqs.weight"
# The scaling of Llama 3.1 and later, of which a file has the factors alone.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# The models whose attention divides by the width of an equal share of the residual stream, in place of the head.
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def hf_mapping(header: Header, rope_factors: np.ndarray | None = None) -> dict[str, Any]:
    """Builds the `config.json` of a file.

    Args:
      header: the header of the file.
      rope_factors: values of `rope_freqs.weight`, if there is such a tensor.

    Raises:
      ValueError: the architecture is not supported, or a key is missing, not understood, or contradicts the tensors.
    """
    keys = _Keys(header)
    arch = keys.arch
    kind = MODEL_TYPES[arch]
    if arch == "llama" and keys.has("attention.sliding_window"):
        kind = "mistral"
    width = keys.count("embedding_length")
    layers = keys.count("block_count")
    heads = keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", width // heads)
    keys.equal("attention.value_length", head_dim)
    keys.equal("rope.dimension_count", head_dim)
    rows = _check_tensors(header, arch, layers=layers, width=width)
    keys.equal("vocab_size", rows)
    mapping: dict[str, Any] = {
        "architectures": [FAMILIES[kind].architecture],
        "model_type": kind,
        "vocab_size": rows,
        "hidden_size": width,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.count("context_length"),
        "rope_theta": keys.number("rope.freq_base", FAMILIES[kind].theta),
        "rope_scaling": _scaling(keys),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    if kind == "mistral":
        mapping["sliding_window"] = keys.count("attention.sliding_window", None)
    if kind in ("llama", "qwen3"):
        mapping["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if kind == "llama":
        mapping["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    if arch in GEMMA_27B_LAYERS:
        mapping |= _gemma(keys, arch, layers=layers, equal_share=width // heads, head_dim=head_dim)
    if rope_factors is not None:
        mapping["rope_scaling"] = _llama3_scaling(mapping, rope_factors, header)
    keys.check_all_read()
    return {name: value for name, value in mapping.items() if value is not None or name == "sliding_window"}


class _Keys:
    """The keys of the architecture, which remembers the keys that were read."""

    def __init__(self, header: Header) -> None:
        self._header = header
        arch = header.keys.get("general.architecture")
        if not isinstance(arch, str) or arch not in MODEL_TYPES:
            raise self.error("general.architecture", f"got {arch!r}, expected one of {', '.join(MODEL_TYPES)}")
        self.arch = arch
        version = header.keys.get("general.quantization_version", QUANTIZATION_VERSION)
        if version != QUANTIZATION_VERSION:
            raise self.error("general.quantization_version", f"got {version!r}, expected {QUANTIZATION_VERSION}")
        parts = header.keys.get("split.count", 1)
        if parts not in (0, 1):
            raise self.error("split.count", f"got one of {parts} files; join them with llama-gguf-split --merge")
        self._read = {"split.no", "split.count", "split.tensors.count"}

    def error(self, name: str, problem: str) -> ValueError:
        return ValueError(f"{self._header.file}: {name}: {problem}")

    def has(self, name: str) -> bool:
        return f"{self.arch}.{name}" in self._header.keys

    def value(self, name: str, *default: Any) -> Any:
        """Reads a key of the architecture; raises ValueError if it is missing and has no default."""
        full = f"{self.arch}.{name}"
        self._read.add(full)
        if full not in self._header.keys and not default:
            raise self.error(full, "missing")
        return self._header.keys.get(full, *default)

    def count(self, name: str, *default: Any) -> Any:
        value = self.value(name, *default)
        if self.has(name) and (type(value) is not int or value < 1):
            raise self.error(f"{self.arch}.{name}", f"got {_short(value)}, expected an integer above 0")
        return value

    def number(self, name: str, *default: Any) -> Any:
        value = self.value(name, *default)
        if self.has(name) and (type(value) not in (int, float) or not (math.isfinite(value) and value > 0)):
            raise self.error(f"{self.arch}.{name}", f"got {_short(value)}, expected a number above 0")
        return value

    def equal(self, name: str, expected: int) -> None:
        if self.count(name, expected) != expected:
            raise self.error(f"{self.arch}.{name}", f"got {self.value(name)}, expected {expected}: not supported")

    def check_all_read(self) -> None:
        """Raises ValueError for keys that are not understood, and for unsupported values."""
        for name, allowed in ALLOWED_VALUES.items():
            value = self.value(name, allowed[0])
            if not any(value == choice for choice in allowed):
                choices = " or ".join(map(str, allowed))
                raise self.error(f"{self.arch}.{name}", f"got {_short(value)}, expected {choices}: not supported")
        unknown = [name for name in self._header.keys.keys() - self._read if not name.startswith(IGNORED_PREFIXES)]
        if unknown:
            raise self.error(", ".join(sorted(unknown)), "not understood; an unknown key may change the model")


def _short(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, np.ndarray) else value) if np.size(value) < 20 else "an array"
    return text if len(text) < 80 else f"{text[:80]}..."


def _check_tensors(header: Header, arch: str, *, layers: int, width: int) -> int:
    """Compares the numbers of layers and of channels with the tensors, before anything of their size is made.

    Returns:
      The rows of the embeddings.
    """
    numbers = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if len(numbers) != layers:
        raise ValueError(f"{header.file}: {arch}.block_count: got {layers}, but there are tensors of {len(numbers)}")
    embeddings = header.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise ValueError(f"{header.file}: token_embd.weight: missing, or no matrix")
    rows, channels = embeddings.shape
    if channels != width:
        raise ValueError(f"{header.file}: {arch}.embedding_length: got {width}, but the embeddings have {channels}")
    return rows


def _scaling(keys: _Keys) -> dict[str, Any] | None:
    """Reads the scaling of the rope; an old key means a linear one."""
    old = keys.number("rope.scale_linear", None)
    kind = keys.value("rope.scaling.type", "none" if old in (None, 1.0) else "linear")
    factor = keys.number("rope.scaling.factor", old)
    original = keys.count("rope.scaling.original_context_length", None)
    fast, slow = (keys.number(f"rope.scaling.yarn_beta_{name}", None) for name in ("fast", "slow"))
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise keys.error(f"{keys.arch}.rope.scaling.type", f"got {_short(kind)}, expected none, linear or yarn")
    if factor is None:
        raise keys.error(f"{keys.arch}.rope.scaling.factor", f"missing, as rope.scaling.type is {kind!r}")
    scaling = {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        yarn = {"original_max_position_embeddings": original, "beta_fast": fast, "beta_slow": slow}
        scaling |= {name: value for name, value in yarn.items() if value is not None}
    return scaling


def _llama3_scaling(mapping: Mapping[str, Any], factors: np.ndarray, header: Header) -> dict[str, Any]:
    """Finds the scaling of Llama 3 that gives these factors of the frequencies."""
    scaling = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3}
    dim = mapping["head_dim"]
    wavelengths = 2 * np.pi * mapping["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high, original = LLAMA3.values()
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-5, atol=0):
        known = ", ".join(f"{name} {value:g}" for name, value in LLAMA3.items())
        raise ValueError(f"{header.file}: {ROPE_FACTORS}: the factors are not of the scaling of Llama 3 with {known}")
    if mapping["rope_scaling"] is not None:
        raise ValueError(f"{header.file}: {ROPE_FACTORS}: there is rope.scaling.type as well; only one can be read")
    return scaling


def _gemma(keys: _Keys, arch: str, *, layers: int, equal_share: int, head_dim: int) -> dict[str, Any]:
    """Reads windows, soft caps and the scale of attention, of which a file says nothing."""
    fields = {
        "sliding_window": keys.count("attention.sliding_window", 4096),
        "query_pre_attn_scalar": equal_share if layers == GEMMA_27B_LAYERS[arch] else head_dim,
    }
    caps = (50.0, 30.0) if arch == "gemma2" else (None, None)
    for name, cap in zip(("attn_logit_softcapping", "final_logit_softcapping"), caps, strict=True):
        value = keys.number(name, cap)
        fields[name] = value
    if arch == "gemma3":
        fields["sliding_window_pattern"] = keys.count("attention.sliding_window_pattern", 6)
        fields["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10_000.0)
    return fields
