"""Low-rank adapters: `y = x W + scale (x A) B`, with A and B in the variable collection "lora", float32 on any base."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from train.models.int8 import dequantise, dequantise_params, is_int8

Tree = Any

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def kaiming_uniform(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """U(-1/sqrt(in), 1/sqrt(in)) for a matrix [in, rank]: what PEFT draws `lora_A` from (Kaiming with a = sqrt(5))."""
    bound = shape[-2] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Rank, numerator of the scale and the projections that get an adapter.

    Attributes:
      rslora: divide by sqrt(rank) in place of rank (rank-stabilised LoRA, `use_rslora` of PEFT).

    Raises:
      ValueError: rank below 1, no target, or a target that is not a projection of the decoder.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank: got {self.rank}, expected at least 1")
        unknown = sorted(set(self.targets) - set(PROJECTIONS))
        if unknown or not self.targets:
            raise ValueError(f"lora.targets: got {unknown or 'none'}, expected some of {', '.join(PROJECTIONS)}")

    @property
    def scale(self) -> float:
        """What the product of the two matrices is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def add_update(module: nn.Module, x: jax.Array, y: jax.Array, axes: tuple[str, str], config: LoraConfig) -> jax.Array:
    """Add the adapter's update to `y = x W`; `y` itself, with nothing traced, when no adapter is given.

    Args:
      module: the projection that owns `lora_A` [in, rank] and `lora_B` [rank, out] (B starts at zero).
      x: [..., in]; y: [..., out].
      axes: logical axes of the projection's kernel.
      config: rank and alpha.
    """
    if not (module.is_mutable_collection("lora") or module.has_variable("lora", "lora_A")):
        return y
    shape_a, shape_b = (x.shape[-1], config.rank), (config.rank, y.shape[-1])
    init_a = nn.with_logical_partitioning(kaiming_uniform, (axes[0], "lora_rank"))
    init_b = nn.with_logical_partitioning(nn.initializers.zeros_init(), ("lora_rank", axes[1]))
    lora_a = module.variable("lora", "lora_A", lambda: init_a(module.make_rng("lora"), shape_a, jnp.float32))
    lora_b = module.variable("lora", "lora_B", lambda: init_b(module.make_rng("lora"), shape_b, jnp.float32))
    rows = x.reshape(-1, x.shape[-1])
    update = ((rows @ lora_a.value) @ lora_b.value).reshape(y.shape)
    # One rounding, of the sum, where the base computes in bfloat16.
    return (y + config.scale * update).astype(y.dtype)


def merge(model: nn.Module, params: Tree, adapter: Tree) -> Tree:
    """Base parameters with the adapter added to its kernels, `W + scale A B`, so that no adapter is needed.

    Args:
      model: the decoder, whose `config.lora` gives the scale.
      params: base parameters; adapter: A [layers, in, rank] and B [layers, rank, out] of each target.

    Returns:
      Parameters of the same structure, dtypes and shardings; what has no adapter is the array that was given. The sum
      is rounded once where kernels are bfloat16, which an adapter that runs beside them is not. Kernels in int8 become
      the weights that they stand for, in the model's `param_dtype`.

    Raises:
      ValueError: an adapter for what is not a kernel of the parameters, or of another shape; a model without lora.
    """
    if model.config.lora is None:
        raise ValueError("adapter: the model has no lora section, so there is no scale to merge it with")
    dtype = jnp.dtype(model.config.param_dtype)
    return dequantise_params(_merged(params, adapter, model.config.lora.scale, dtype, ()), dtype)


def _add_products(kernels: Tree, lora_a: jax.Array, lora_b: jax.Array, scale: float, dtype: Any) -> jax.Array:
    """One layer at a time, so that there is never a second copy of all of them in float32."""

    def add(layer: tuple[Tree, jax.Array, jax.Array]) -> jax.Array:
        kernel, a, b = layer
        product = jnp.matmul(a, b, precision="highest")
        wide = dequantise(kernel, product.dtype) if is_int8(kernel) else kernel.astype(product.dtype)
        return (wide + scale * product).astype(dtype)

    return jax.lax.map(add, (kernels, lora_a, lora_b))


def _merged(params: Tree, adapter: Tree, scale: float, dtype: Any, path: tuple[str, ...]) -> Tree:
    """`params` with the subtree `adapter` added; parts of it that have none stay the same objects."""
    if "lora_A" in adapter:
        kernel = params["kernel"]
        like = kernel["qvalue"] if is_int8(kernel) else kernel
        shapes = adapter["lora_A"].shape[:-1], adapter["lora_B"].shape[-1:]
        if (*shapes[0], *shapes[1]) != like.shape:
            got = f"lora_A {adapter['lora_A'].shape} x lora_B {adapter['lora_B'].shape}"
            raise ValueError(f"adapter: {'.'.join(path)}: got {got}, expected the product to be {like.shape}")
        add = jax.jit(_add_products, static_argnums=4, out_shardings=like.sharding)
        own = dtype if is_int8(kernel) else kernel.dtype
        return {**params, "kernel": add(kernel, adapter["lora_A"], adapter["lora_B"], scale, own)}
    unknown = sorted(name for name in adapter if not isinstance(params.get(name), Mapping))
    if unknown:
        raise ValueError(f"adapter: {'.'.join((*path, unknown[0]))} is no part of the parameters")
    return {
        name: _merged(value, adapter[name], scale, dtype, (*path, name)) if name in adapter else value
        for name, value in params.items()
    }
