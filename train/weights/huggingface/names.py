"""The mapping of parameter leaves to tensors of a Hugging Face checkpoint: one rule for every family.

Paths of the parameters follow the names of transformers, with two differences: a kernel is `[in, out]`, its tensor
`[out, in]`; and a leaf stacks layers along a leading axis, while the checkpoint has one tensor per layer.
"""

import dataclasses
import functools
from typing import Any

import jax

from train.models.blocks import split_path
from train.models.config import DecoderConfig
from train.models.decoder import Decoder

Tree = Any

ENDINGS = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}
EMBEDDINGS = "embed_tokens.weight"
HEAD = "lm_head.weight"
# Prefixes of the body: causal model, bare model, text part of a multimodal model (two conventions).
PREFIXES = ("model.", "", "language_model.model.", "model.language_model.")


@dataclasses.dataclass(frozen=True)
class LeafMapping:
    """One leaf of the parameters and its tensors.

    Attributes:
      path: path of the leaf.
      names: names of the tensors without the prefix: one per layer of a stack, else a single name.
      shape: shape of each tensor in the file.
      layers: numbers of the layers that the leaf stacks; None: it is no part of a layer.
      transposed: whether the leaf is the transpose of the tensor.
    """

    path: tuple[str, ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]
    layers: range | None
    transposed: bool

    @property
    def stacked(self) -> bool:
        """Whether the leaf stacks layers."""
        return self.layers is not None


def layout(model: Decoder) -> Tree:
    """Returns the shapes and dtypes of the unquantized base parameters, without initializing them."""
    return Decoder(dataclasses.replace(model.config, quantization=None)).structure().params


@functools.cache
def leaf_mappings(model: Decoder) -> tuple[LeafMapping, ...]:
    """Lists the mapping of every leaf of the base parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(layout(model))
    return tuple(_leaf_mapping(model.config, tuple(key.key for key in path), leaf.shape) for path, leaf in leaves)


def _leaf_mapping(config: DecoderConfig, path: tuple[str, ...], shape: tuple[int, ...]) -> LeafMapping:
    stack, (*modules, kind) = split_path(config, path)
    last, transposed = f"{'.'.join(modules)}.{ENDINGS[kind]}", kind == "kernel"
    names = (last,) if stack is None else tuple(f"layers.{layer}.{last}" for layer in stack.layers)
    layer_shape = shape if stack is None else shape[1:]
    layers = None if stack is None else stack.layers
    return LeafMapping(path, names, layer_shape[::-1] if transposed else layer_shape, layers, transposed)


def full_name(name: str, prefix: str) -> str:
    """Adds the prefix of the body to a name; the LM head is outside the body."""
    if name == HEAD:
        return f"language_model.{name}" if prefix == "language_model.model." else name
    return f"{prefix}{name}"


def find_prefix(names: frozenset[str]) -> str:
    """Finds the prefix of the body; defaults to the prefix of a causal model, whose names are then reported missing."""
    return next((prefix for prefix in PREFIXES if f"{prefix}{EMBEDDINGS}" in names), PREFIXES[0])
