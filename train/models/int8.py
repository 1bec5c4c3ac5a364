"""A base in int8: the kernels of the layers as integers, with one float scale per output channel.

Only weights are quantised. Values, and every gradient through them, equal the results of the weights `qvalue * scale`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

Tree = Any
Int8Arrays: TypeAlias = Mapping[str, jax.Array]
"""`qvalue` int8 [..., in, out] and `scale` float32 [..., out]."""

LARGEST = 127
NOT_QUANTISED = ("gate", "shared_expert_gate")
"""Modules whose kernels stay floats: a router decides by small differences, and is small itself."""


def is_int8(kernel: Any) -> bool:
    """Tells whether a subtree of the parameters is a kernel in int8."""
    return isinstance(kernel, Mapping) and "qvalue" in kernel


def quantise(kernel: jax.Array, *, axis_name: tuple[str, ...] = ()) -> dict[str, jax.Array]:
    """Rounds to multiples of a scale that puts the largest weight of an output channel at 127.

    No weight moves by more than half a scale. A channel of zeros has scale 1.

    Args:
      kernel: [..., in, out] of any float type.
      axis_name: mesh axes over which `in` is split, inside `shard_map`.
    """
    wide = kernel.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-2)
    scale = (lax.pmax(largest, axis_name) if axis_name else largest) / LARGEST
    scale = jnp.where(scale == 0, 1, scale)
    return {"qvalue": jnp.round(wide / scale[..., None, :]).astype(jnp.int8), "scale": scale}


def dequantise(kernel: Int8Arrays, dtype: Any = jnp.float32) -> jax.Array:
    """Computes the weights [..., in, out] of an int8 kernel, rounded once to the type."""
    wide = jnp.promote_types(dtype, jnp.float32)
    return (kernel["qvalue"].astype(wide) * kernel["scale"].astype(wide)[..., None, :]).astype(dtype)


def quantise_params(params: Tree) -> Tree:
    """Quantises the kernels of all layers, one stacked kernel after the other.

    Donates the kernels of its argument, so that there are never two copies of all of them. Embeddings, norms, biases
    and head stay the same arrays.
    """

    def convert(path: Any, leaf: jax.Array) -> Tree:
        if path[-1].key != "kernel" or path[-2].key in NOT_QUANTISED:
            return leaf
        made = jax.block_until_ready(_quantiser(leaf.sharding, leaf.ndim)(leaf))
        leaf.delete()
        return made

    return {**params, "layers": jax.tree_util.tree_map_with_path(convert, params["layers"])}


def dequantise_params(params: Tree, dtype: Any) -> Tree:
    """Converts int8 kernels back to floats of `dtype`; other parameters stay the same arrays."""

    def convert(leaf: Any) -> Any:
        if not is_int8(leaf):
            return leaf
        return jax.jit(dequantise, static_argnums=1, out_shardings=leaf["qvalue"].sharding)(leaf, jnp.dtype(dtype))

    return jax.tree.map(convert, params, is_leaf=is_int8)


@functools.cache
def _quantiser(sharding: Any, axes: int) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """Compiles `quantise` for kernels [layers, ..., in, out] of a sharding, with so many axes."""
    if not isinstance(sharding, NamedSharding):
        return jax.jit(quantise)
    spec = (*sharding.spec, *(None,) * (axes - len(sharding.spec)))
    scale = NamedSharding(sharding.mesh, PartitionSpec(*spec[:-2], spec[-1]))
    return jax.jit(quantise, out_shardings={"qvalue": sharding, "scale": scale})
