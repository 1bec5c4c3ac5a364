"""Tensors of a GGUF file with the names, shapes and values of a Hugging Face folder.

llama.cpp interleaves the two halves of each head of Llama's queries and keys, and adds 1 to the norms of Gemma; both
are undone.
"""

import functools
from collections.abc import Iterator, Mapping

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kljax.checkpoint import first_five
from train.models.config import DecoderConfig
from train.models.decoder import Decoder
from train.weights.gguf.config import ROPE_FACTORS
from train.weights.gguf.header import GgufTensor, Header
from train.weights.huggingface.names import leaf_mappings

PIECE_BYTES = 4 * 2**20
# Modules of transformers -> names in the file, inside a layer and outside.
IN_LAYER: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Where norms follow attention and MLP as well, the norm of the MLP's input has another name.
WITH_POST_NORMS: Mapping[str, str] = {
    **IN_LAYER,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTSIDE: Mapping[str, str] = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str, *, post_norms: bool) -> str:
    """Returns the name in a GGUF file of a tensor of transformers, which is without the prefix of the body.

    Example:
        >>> gguf_name("layers.3.self_attn.q_proj.weight", post_norms=False)
        'blk.3.attn_q.weight'
    """
    module, _, ending = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{OUTSIDE[module]}.{ending}"
    _, layer, inside = module.split(".", maxsplit=2)
    return f"blk.{layer}.{(WITH_POST_NORMS if post_norms else IN_LAYER)[inside]}.{ending}"


def match_tensors(header: Header, model: Decoder) -> dict[str, GgufTensor]:
    """Finds the tensor of each name of transformers.

    Raises:
      ValueError: tensors are missing, left over, of another shape, or of a type that cannot be read; names them.
    """
    shapes = {name: mapping.shape for mapping in leaf_mappings(model) for name in mapping.names}
    names = {name: gguf_name(name, post_norms=model.config.post_norms) for name in shapes}
    missing = sorted(set(names.values()) - header.tensors.keys())
    extra = sorted(header.tensors.keys() - set(names.values()) - {ROPE_FACTORS})
    tensors = {name: header.tensors[stored] for name, stored in names.items() if stored in header.tensors}
    shaped = [
        f"{tensor.name}: got {list(tensor.shape)}, expected {list(shapes[name])}"
        for name, tensor in tensors.items()
        if tensor.shape != shapes[name]
    ]
    typed = [f"{tensor.name}: {tensor.kind.name}" for tensor in tensors.values() if not is_readable(tensor.kind)]
    problems = {
        "missing": missing,
        "not understood": extra,
        "of another shape": shaped,
        "of a type that cannot be read": typed,
    }
    lines = [f"{what}: {first_five(names, separator=', ')}" for what, names in problems.items() if names]
    if lines:
        raise ValueError(f"{header.file}: the tensors do not fit the keys: {'; '.join(lines)}")
    return tensors


@functools.cache
def is_readable(kind: GGMLQuantizationType) -> bool:
    """Asks the package whether it dequantizes a type."""
    block = np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8)
    try:
        with np.errstate(all="ignore"):
            dequantize(block, kind)
    except NotImplementedError:
        return False
    return True


def read_values(tensor: GgufTensor) -> np.ndarray:
    """Reads a tensor in float32, dequantized a few rows at a time."""
    data = tensor.data()
    out = np.empty((data.shape[0], tensor.shape[-1]), np.float32)
    step = max(1, PIECE_BYTES // (4 * tensor.shape[-1]))
    # Blocks of a damaged file may have scales that are infinite or no number; the import refuses the values.
    with np.errstate(all="ignore"):
        for start in range(0, len(out), step):
            out[start : start + step] = dequantize(np.array(data[start : start + step]), tensor.kind)
    return out.reshape(tensor.shape)


def hf_arrays(tensors: Mapping[str, GgufTensor], config: DecoderConfig, *, interleaved: bool) -> Iterator[np.ndarray]:
    """Yields the values of each tensor in float32, as transformers has them.

    Args:
      tensors: name of transformers -> tensor of the file.
      config: the decoder.
      interleaved: whether the halves of the heads of queries and keys are interleaved, as in files of Llama.
    """
    heads = {"q_proj": config.heads, "k_proj": config.kv_heads}
    for name, tensor in tensors.items():
        values = read_values(tensor)
        module = name.split(".")[-2]
        if interleaved and module in heads:
            yield _deinterleaved(values, heads[module])
        elif config.norm_offset and module.endswith("norm"):
            yield values - np.float32(1)
        else:
            yield values


def _deinterleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Moves channels 0, 2, 4, ... of each head before channels 1, 3, 5, ..."""
    pairs = values.reshape(heads, len(values) // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
