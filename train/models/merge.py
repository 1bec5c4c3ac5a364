"""Merging an adapter into the base parameters."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from train.models.decoder import Decoder
from train.models.int8 import dequantise, dequantise_params, is_int8

Tree = Any


def merge(model: Decoder, params: Tree, adapter: Tree) -> Tree:
    """Adds the adapter to the kernels, `W + scale A B`.

    Args:
      model: the decoder, whose `config.lora` gives the scale.
      params: base parameters.
      adapter: A [layers, in, rank] and B [layers, rank, out] of each target.

    Returns:
      Parameters of the same structure, dtypes and shardings; parameters without an adapter stay the same arrays. The
      sum is rounded once if kernels are bfloat16, which an unmerged adapter is not. Kernels in int8 become floats of
      the model's `param_dtype`.

    Raises:
      ValueError: an adapter for a name that is no kernel, or of another shape; a model without lora.
    """
    if model.config.lora is None:
        raise ValueError("adapter: the model has no lora section; set `model.lora`")
    dtype = jnp.dtype(model.config.param_dtype)
    return dequantise_params(_merged(params, adapter, model.config.lora.scale, dtype, ()), dtype)


def rounded_away(model: Decoder, kernel: Tree, adapter: Mapping[str, jax.Array], merged: jax.Array) -> jax.Array:
    """Measures how far a merged kernel is from the sum of base and adapter, which rounding to its dtype changes.

    Args:
      model: the decoder, whose `config.lora` gives the scale.
      kernel: base kernel [layers, in, out].
      adapter: `lora_A` and `lora_B` of the kernel.
      merged: the merged kernel.

    Returns:
      [2]: the sums over all weights of the squared error, and of the squared update `scale A B`; float32.
    """
    assert model.config.lora is not None
    scale = model.config.lora.scale

    def measure(layer: tuple[Tree, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        base, a, b, rounded = layer
        update = scale * jnp.matmul(a, b, precision="highest")
        wide = dequantise(base, update.dtype) if is_int8(base) else base.astype(update.dtype)
        error = (rounded.astype(update.dtype) - wide) - update
        return jnp.stack([jnp.sum(error**2), jnp.sum(update**2)])

    return jax.lax.map(measure, (kernel, adapter["lora_A"], adapter["lora_B"], merged)).sum(0)


def _add_products(kernels: Tree, lora_a: jax.Array, lora_b: jax.Array, scale: float, dtype: Any) -> jax.Array:
    """Adds `scale A B` layer by layer, so that there is never a float32 copy of the whole stack."""

    def add(layer: tuple[Tree, jax.Array, jax.Array]) -> jax.Array:
        kernel, a, b = layer
        product = jnp.matmul(a, b, precision="highest")
        wide = dequantise(kernel, product.dtype) if is_int8(kernel) else kernel.astype(product.dtype)
        return (wide + scale * product).astype(dtype)

    return jax.lax.map(add, (kernels, lora_a, lora_b))


def _merged(params: Tree, adapter: Tree, scale: float, dtype: Any, path: tuple[str, ...]) -> Tree:
    """Adds the subtree `adapter`; subtrees without an adapter stay the same objects."""
    if "lora_A" in adapter:
        kernel = params["kernel"]
        like = kernel["qvalue"] if is_int8(kernel) else kernel
        shapes = adapter["lora_A"].shape[:-1], adapter["lora_B"].shape[-1:]
        if (*shapes[0], *shapes[1]) != like.shape:
            got = f"lora_A {adapter['lora_A'].shape} x lora_B {adapter['lora_B'].shape}"
            raise ValueError(f"adapter: {'.'.join(path)}: got {got}, expected the product to be {like.shape}")
        add = jax.jit(_add_products, static_argnums=4, out_shardings=like.sharding)
        merged_dtype = dtype if is_int8(kernel) else kernel.dtype
        return {**params, "kernel": add(kernel, adapter["lora_A"], adapter["lora_B"], scale, merged_dtype)}
    unknown = sorted(name for name in adapter if not isinstance(params.get(name), Mapping))
    if unknown:
        raise ValueError(f"adapter: {'.'.join((*path, unknown[0]))} is no part of the parameters")
    return {
        name: _merged(value, adapter[name], scale, dtype, (*path, name)) if name in adapter else value
        for name, value in params.items()
    }
