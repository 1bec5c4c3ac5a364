"""Which tensors of a Hugging Face checkpoint a leaf of the parameters is: one rule for every family.

A path of the parameters is the name that transformers gives, but that kernels are `[in, out]` there and weights
`[out, in]` here, and that all layers are stacked along a leading axis there and numbered here.
"""

import dataclasses
import functools
from typing import Any

import jax

from train.models.decoder import Decoder

Tree = Any

ENDINGS = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}
EMBEDDINGS = "embed_tokens.weight"
HEAD = "lm_head.weight"
# What the body's names begin with, as they are saved: a causal model, a bare one, the text part of a multimodal one.
PREFIXES = ("model.", "", "language_model.model.", "model.language_model.")


@dataclasses.dataclass(frozen=True)
class Slot:
    """One leaf of the parameters and the tensors it is made of.

    Attributes:
      path: of the leaf.
      names: of the tensors without the prefix; one per layer if `stacked`, else one.
      shape: of each tensor, in the file.
      transposed: whether the leaf holds its matrix the other way round.
    """

    path: tuple[str, ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]
    stacked: bool
    transposed: bool


def layout(model: Decoder) -> Tree:
    """Shapes and dtypes of the base parameters before any of them is quantised; nothing is drawn."""
    return Decoder(dataclasses.replace(model.config, quantization=None)).structure().params


@functools.cache
def slots(model: Decoder) -> tuple[Slot, ...]:
    """Every leaf of the base parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(layout(model))
    return tuple(_slot(tuple(key.key for key in path), leaf.shape, model.config.layers) for path, leaf in leaves)


def _slot(path: tuple[str, ...], shape: tuple[int, ...], layers: int) -> Slot:
    *modules, kind = path
    stacked, transposed = path[0] == "layers", kind == "kernel"
    last = f"{'.'.join(modules[1:] if stacked else modules)}.{ENDINGS[kind]}"
    names = tuple(f"layers.{layer}.{last}" for layer in range(layers)) if stacked else (last,)
    own = shape[1:] if stacked else shape
    return Slot(path, names, own[::-1] if transposed else own, stacked, transposed)


def full_name(name: str, prefix: str) -> str:
    """A name with the prefix of the body; the head stands beside the body, not in it."""
    if name == HEAD:
        return f"language_model.{name}" if prefix == "language_model.model." else name
    return f"{prefix}{name}"


def find_prefix(names: frozenset[str]) -> str:
    """What the names of the body begin with; that of a causal model if none fits, whose names are then missing."""
    return next((prefix for prefix in PREFIXES if f"{prefix}{EMBEDDINGS}" in names), PREFIXES[0])
