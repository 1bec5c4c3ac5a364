"""A base in int8: kernels of the layers as whole numbers, with one scale for each output channel.

Only weights are quantised. What is computed with them, and every gradient through them, is what the weights
`qvalue * scale` give.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

Tree = Any
Int8Kernel: TypeAlias = Mapping[str, jax.Array]
"""`qvalue` int8 [..., in, out] and `scale` float32 [..., out]."""

LARGEST = 127


def is_int8(kernel: Any) -> bool:
    """Whether this part of the parameters is a kernel in int8."""
    return isinstance(kernel, Mapping) and "qvalue" in kernel


def quantise(kernel: jax.Array, *, axis_name: tuple[str, ...] = ()) -> dict[str, jax.Array]:
    """The nearest whole multiples of a scale that puts the largest weight of an output channel at 127.

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


def dequantise(kernel: Int8Kernel, dtype: Any = jnp.float32) -> jax.Array:
    """The weights [..., in, out] that a kernel stands for, rounded once to the type."""
    wide = jnp.promote_types(dtype, jnp.float32)
    return (kernel["qvalue"].astype(wide) * kernel["scale"].astype(wide)[..., None, :]).astype(dtype)


def int8_init(init: Callable[..., jax.Array], axes: tuple[str, str]) -> Callable[..., Tree]:
    """An initialiser of kernels in int8, with logical axes, from one of kernels."""

    def draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> Tree:
        drawn = quantise(init(key, shape, dtype))
        names = {"qvalue": axes, "scale": axes[1:]}
        return {name: nn.LogicallyPartitioned(value, names[name]) for name, value in drawn.items()}

    return draw


def quantise_params(params: Tree) -> Tree:
    """Parameters with the kernels of all layers in int8, one stacked kernel after the other.

    The kernels that are given are used up, so that there are never two copies of all of them. Embeddings, norms, biases
    and head are the arrays that were given.
    """

    def convert(path: Any, leaf: jax.Array) -> Tree:
        if path[-1].key != "kernel":
            return leaf
        made = jax.block_until_ready(_quantiser(leaf.sharding)(leaf))
        leaf.delete()
        return made

    return {**params, "layers": jax.tree_util.tree_map_with_path(convert, params["layers"])}


def dequantise_params(params: Tree, dtype: Any) -> Tree:
    """Parameters of a model without quantisation: the weights that kernels in int8 stand for, others as they are."""

    def convert(leaf: Any) -> Any:
        if not is_int8(leaf):
            return leaf
        return jax.jit(dequantise, static_argnums=1, out_shardings=leaf["qvalue"].sharding)(leaf, jnp.dtype(dtype))

    return jax.tree.map(convert, params, is_leaf=is_int8)


@functools.cache
def _quantiser(sharding: Any) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """`quantise` for kernels [layers, in, out] that lie like this."""
    if not isinstance(sharding, NamedSharding):
        return jax.jit(quantise)
    spec = (*sharding.spec, None, None, None)
    scale = NamedSharding(sharding.mesh, PartitionSpec(spec[0], spec[2]))
    return jax.jit(quantise, out_shardings={"qvalue": sharding, "scale": scale})
