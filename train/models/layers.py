"""Projections, norms and embeddings of the decoder."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from train.models.int8 import int8_init, is_int8
from train.models.lora import LoraConfig, add_update
from train.models.sharding import constrain

EMBEDDING_STD = 0.02


def compute(x: jax.Array, dtype: str) -> jax.Array:
    """An array of weights in the type that the decoder computes in: float32 keeps float64 as it is."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32) if dtype == "float32" else dtype)


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x @ kernel` over the last axis; on flattened rows, where XLA's CPU backend takes two thirds of the time."""
    return (x.reshape(-1, x.shape[-1]) @ kernel).reshape(*x.shape[:-1], kernel.shape[-1])


def over_all_tokens(function: Callable[..., jax.Array], x: jax.Array, weight: jax.Array) -> jax.Array:
    """`function(x, weight)`, rounded once to the type of x, of tokens [..., D] and one weight [D] for all of them.

    The result is that of the narrow type. The gradient of the weight is a sum over the tokens, which some compilers add
    up in the type of its terms: in bfloat16 a sum of ones stops at 256.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return function(x.astype(wide), weight.astype(wide)).astype(x.dtype)


def product(x: jax.Array, kernel: Any, axes: tuple[str, str]) -> jax.Array:
    """`x @ kernel` over the last axis, in the type of x; the kernel is an array, or one in int8.

    Every whole number of an int8 kernel is one of bfloat16 too: the product is scaled after it, in float32, so that no
    weight is rounded.
    """
    if not is_int8(kernel):
        return matmul(x, kernel.astype(x.dtype))
    # Rows and the embedding axis share mesh axis fsdp: the kernel is gathered, and as int8, not as what it becomes.
    qvalue = constrain(kernel["qvalue"], *(None if axis == "embed" else axis for axis in axes))
    return over_all_tokens(jnp.multiply, matmul(x, qvalue.astype(x.dtype)), kernel["scale"])


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * scale` over the last axis, computed in float32 at least.

    With `offset` it is `1 + scale`, and the product is rounded to the type of x once, after it (Gemma) instead of
    before (Llama and Qwen).
    """

    eps: float
    offset: bool = False
    param_dtype: str = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        start = nn.initializers.zeros_init() if self.offset else nn.initializers.ones_init()
        init = nn.with_logical_partitioning(start, ("norm",))
        scale = self.param("scale", init, (x.shape[-1],), jnp.dtype(self.param_dtype))
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(variance + self.eps)
        if self.offset:
            return (normed * (1 + scale.astype(wide.dtype))).astype(x.dtype)
        return over_all_tokens(jnp.multiply, normed.astype(x.dtype), scale.astype(x.dtype))


class Linear(nn.Module):
    """`x @ kernel (+ bias)`, plus the low-rank update when `lora` names this projection and an adapter is given.

    With `quantization` "int8" the kernel is one in int8.
    """

    features: int
    axes: tuple[str, str]
    use_bias: bool = False
    init_scale: float = 1.0
    lora: LoraConfig | None = None
    param_dtype: str = "float32"
    quantization: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        normal = nn.initializers.normal(self.init_scale * x.shape[-1] ** -0.5)
        init = nn.with_logical_partitioning if self.quantization is None else int8_init
        dtype = jnp.dtype(self.param_dtype)
        y = product(x, self.param("kernel", init(normal, self.axes), (x.shape[-1], self.features), dtype), self.axes)
        if self.use_bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), self.axes[1:])
            y = over_all_tokens(jnp.add, y, self.param("bias", zeros, (self.features,), dtype).astype(x.dtype))
        if self.lora is not None and self.name in self.lora.targets:
            y = add_update(self, x, y, self.axes, self.lora)
        return y


class Embed(nn.Module):
    """Token embeddings, `embedding` [V, D], in the type that is computed in."""

    vocab_size: int
    width: int
    dtype: str = "float32"
    param_dtype: str = "float32"

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        init = nn.with_logical_partitioning(nn.initializers.normal(EMBEDDING_STD), ("vocab", "embed"))
        embedding = self.param("embedding", init, (self.vocab_size, self.width), jnp.dtype(self.param_dtype))
        # Rows and the embedding axis share mesh axis fsdp: gather from a table that is whole along it.
        return compute(jnp.take(constrain(embedding, "vocab", None), tokens, axis=0, mode="clip"), self.dtype)
