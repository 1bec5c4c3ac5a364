"""The mapping of parameter leaves to tensors of a Hugging Face checkpoint: one rule for every family.

Paths of the parameters follow the names of transformers, with two differences: a kernel is `[in, out]`, its tensor
`[out, in]`; and a leaf stacks layers, and experts, along leading axes, while the checkpoint has one tensor for each.

Mixtral and GPT-OSS have names of their own for experts or router: `canonical_name` reads them, `family_name` writes
them. GPT-OSS fuses experts (`train.weights.huggingface.fused`).
"""

import dataclasses
import functools
import itertools
import re
from typing import Any

import jax

from train.models.blocks import split_path
from train.models.config import DecoderConfig
from train.models.decoder import Decoder
from train.models.experts import CHOICE_BIAS

Tree = Any

ENDINGS = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias", "sinks": "sinks"}
EMBEDDINGS = "embed_tokens.weight"
HEAD = "lm_head.weight"
EXPERTS = "experts"
"""The module below which a leaf stacks experts, and a checkpoint has a number."""
MIXTRAL = "mixtral"
GPT_OSS = "gpt_oss"
_GATE = ".mlp.gate."
_ROUTER = ".mlp.router."
_MIXTRAL_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
# Prefixes of the body: causal model, bare model, text part of a multimodal model (two conventions).
PREFIXES = ("model.", "", "language_model.model.", "model.language_model.")


@dataclasses.dataclass(frozen=True)
class LeafMapping:
    """One leaf of the parameters and its tensors.

    Attributes:
      path: path of the leaf.
      names: names of the tensors without the prefix: one per layer of a stack, and per expert of each layer, else a
        single name.
      shape: shape of each tensor in the file.
      layers: numbers of the layers that the leaf stacks; None: it is no part of a layer.
      experts: the number of experts that it stacks in each layer; None: it has no such axis.
      transposed: whether the leaf is the transpose of the tensor.
    """

    path: tuple[str, ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]
    layers: range | None
    transposed: bool
    experts: int | None = None

    @property
    def stacked(self) -> bool:
        """Whether the leaf stacks layers."""
        return self.layers is not None

    @property
    def lead(self) -> tuple[int, ...]:
        """Sizes of the leading axes, over layers and experts; `names` has an entry for each index, in C order."""
        sizes = (None if self.layers is None else len(self.layers), self.experts)
        return tuple(size for size in sizes if size is not None)

    def indices(self) -> list[tuple[int, ...]]:
        """Lists the index in the leading axes of each of `names`."""
        return list(itertools.product(*map(range, self.lead)))


def layout(model: Decoder) -> Tree:
    """Returns the shapes and dtypes of the unquantized base parameters, without initializing them."""
    return Decoder(dataclasses.replace(model.config, quantization=None)).structure().params


@functools.cache
def leaf_mappings(model: Decoder) -> tuple[LeafMapping, ...]:
    """Lists the mapping of every leaf of the base parameters but `CHOICE_BIAS`, which no family here has in a file."""
    leaves = jax.tree_util.tree_leaves_with_path(layout(model))
    named = [(tuple(key.key for key in path), leaf) for path, leaf in leaves]
    return tuple(_leaf_mapping(model.config, path, leaf.shape) for path, leaf in named if path[-1] != CHOICE_BIAS)


def _leaf_mapping(config: DecoderConfig, path: tuple[str, ...], shape: tuple[int, ...]) -> LeafMapping:
    stack, (*modules, kind) = split_path(config, path)
    ending = ENDINGS[kind]
    transposed = kind == "kernel"
    if stack is None:
        name = ".".join((*modules, ending))
        return LeafMapping(path, (name,), shape[::-1] if transposed else shape, None, transposed)
    experts = shape[1] if EXPERTS in modules else None
    names = tuple(
        f"layers.{layer}.{'.'.join((*numbered, ending))}"
        for layer in stack.layers
        for numbered in _numbered(modules, experts)
    )
    matrix = shape[1:] if experts is None else shape[2:]
    return LeafMapping(path, names, matrix[::-1] if transposed else matrix, stack.layers, transposed, experts)


def _numbered(modules: list[str], experts: int | None) -> list[list[str]]:
    """Lists the modules of the tensors of a layer: with the number of each expert after `EXPERTS`, if it has some."""
    if experts is None:
        return [modules]
    after = modules.index(EXPERTS) + 1
    return [[*modules[:after], str(expert), *modules[after:]] for expert in range(experts)]


def canonical_name(name: str) -> str:
    """Returns the name of a tensor as most families have it.

    Example:
      >>> canonical_name("model.layers.0.block_sparse_moe.experts.7.w1.weight")
      'model.layers.0.mlp.experts.7.gate_proj.weight'
    """
    originals = {short: projection for projection, short in _MIXTRAL_NAMES.items()}
    if ".block_sparse_moe." not in name:
        return name.replace(_ROUTER, _GATE)
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return re.sub(r"\.(w[123])\.weight$", lambda match: f".{originals[match[1]]}.weight", name)


def family_name(name: str, model_type: str) -> str:
    """Returns the name of a tensor in the files of a family: the inverse of `canonical_name`."""
    if model_type == GPT_OSS:
        return name.replace(_GATE, _ROUTER)
    if model_type != MIXTRAL or ".mlp." not in name:
        return name
    name = name.replace(".mlp.", ".block_sparse_moe.")
    return re.sub(r"\.(\w+_proj)\.weight$", lambda match: f".{_MIXTRAL_NAMES[match[1]]}.weight", name)


def full_name(name: str, prefix: str) -> str:
    """Adds the prefix of the body to a name; the LM head is outside the body."""
    if name == HEAD:
        return f"language_model.{name}" if prefix == "language_model.model." else name
    return f"{prefix}{name}"


def find_prefix(names: frozenset[str]) -> str:
    """Finds the prefix of the body; defaults to the prefix of a causal model, whose names are then reported missing."""
    return next((prefix for prefix in PREFIXES if f"{prefix}{EMBEDDINGS}" in names), PREFIXES[0])
