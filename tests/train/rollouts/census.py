"""Collectives of a compiled program that move weights, told from those of activations by their shapes."""

import math
import re
from typing import Any

import jax
from jax.sharding import Mesh

from train.plan.compiler import hlo

MOVES = ("all-gather", "all-to-all", "collective-permute")
"""An all-reduce adds up products of activations; none is of weights."""


def weight_collectives(module: hlo.HloModule, params: Any, mesh: Mesh) -> list[str]:
    """Lists the collectives over arrays that have a part of a weight's shape.

    Activations have rows, so their numbers of rows and columns must be none of the sizes of weights.

    Args:
      module: the program.
      params: weights or their shapes, [..., in, out].
      mesh: of the update; its axes split weights.
    """
    parts = {math.prod(sizes) for sizes in _products(tuple(mesh.shape.values()))}
    weights = [leaf.shape for leaf in jax.tree.leaves(params) if len(leaf.shape) > 1]
    sizes = {size // part for shape in weights for size in shape[-2:] for part in parts if size % part == 0}
    layers = {size for shape in weights for size in shape[:-2]}

    def is_weight(shape: str) -> bool:
        dimensions = [int(size) for size in shape.split(",") if size and size != "1"]
        matrix = dimensions[-2:]
        return len(matrix) == 2 and set(matrix) <= sizes and set(dimensions[:-2]) <= layers

    return [
        f"{instruction.opcode} {instruction.shape}"
        for instructions in module.computations.values()
        for instruction in instructions
        if instruction.opcode.removesuffix("-start") in MOVES
        and any(is_weight(shape) for shape in re.findall(r"\b[a-z]\w*\[([\d,]*)\]", instruction.shape))
    ]


def _products(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [()] if not sizes else [(*item, *tail) for tail in _products(sizes[1:]) for item in ((), (sizes[0],))]
