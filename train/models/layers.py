"""Projections, norms and embeddings, and the keys and logical axes of their parameters.

Shapes: T tokens (rows flattened), I and O inputs and outputs, D model width. An adapter of a projection is low-rank,
`y = x W + scale (x A) B`, with A and B a tree of their own, float32 on any base.

Narrow weights on one CPU device are read in pieces inside loops: a layer of the stack, rows of a table, columns of the
head. As a whole, each would get a float32 copy (`kljax._narrow`), which takes twice the bytes of bfloat16.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from kljax._narrow import narrow_on_cpu, read_with
from train.models.config import DecoderConfig, LoraConfig
from train.models.int8 import quantise
from train.models.sharding import axis_size, constrain, device_kind

Tree = TypeVar("Tree")
EMBEDDING_STD = 0.02
COLUMNS = 8192
"""Columns of the LM head that a decode step converts at once."""


@dataclasses.dataclass(frozen=True)
class InitKey:
    """The random key of a module.

    Attributes:
      key: the key of the whole tree, or of one layer of the stack.
      path: the names that lead to the module in the parameter tree.
      stacked: whether the module is inside the stack of layers.
    """

    key: jax.Array
    path: tuple[str, ...] = ()
    stacked: bool = False

    def child(self, name: str) -> "InitKey":
        """Returns the key of a submodule."""
        return dataclasses.replace(self, path=(*self.path, name))

    def draw(self, index: int, count: int) -> jax.Array:
        """Derives the key of parameter `index` (from 0) of the `count` parameters of this module.

        Hashes the path and a number. Numbers begin at 1, in the stack of layers after `count`: another numbering would
        draw other weights from the seeds of the recorded runs.
        """
        number = index + 1 + (count if self.stacked else 0)
        hashed = hashlib.sha1("".join(self.path).encode() + bytes([number]), usedforsecurity=False).digest()
        return jax.random.fold_in(self.key, jnp.uint32(int.from_bytes(hashed[:4], "big")))


def param(value: jax.Array, axes: tuple[str, ...], kind: type[nnx.Param] = nnx.Param) -> nnx.Param:
    """Makes a parameter with its logical axes, which `train.models.sharding` maps to mesh axes."""
    # nnx would place the value at once, and knows no logical axes.
    return kind(value, out_sharding=axes, eager_sharding=False)


def compute_cast(x: jax.Array, dtype: str) -> jax.Array:
    """Casts weights to the compute type; "float32" keeps float64."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32) if dtype == "float32" else dtype)


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes `x @ kernel` over the last axis, [..., I] to [..., O].

    Rows are flattened, which takes XLA's CPU backend two thirds of the time of a batched product.
    """
    tokens = jnp.einsum("...I,IO->...O", flat(x), kernel)
    return tokens.reshape(*x.shape[:-1], kernel.shape[-1])


def flat(x: jax.Array) -> jax.Array:
    """Flattens [..., D] to tokens [T, D], unless axis context splits the tokens of a row: XLA would gather them."""
    return x if axis_size("tokens") > 1 else x.reshape(-1, x.shape[-1])


def whole_along_embed(weights: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Gathers weights with these logical axes along the model width, since rows and the width share mesh axis fsdp."""
    return constrain(weights, *(None if axis == "embed" else axis for axis in axes))


def over_all_tokens(function: Callable[..., jax.Array], x: jax.Array, weight: jax.Array) -> jax.Array:
    """Computes `function(x, weight)` of tokens [..., D] and one weight [D], rounded once to the type of x.

    The result equals that of the narrow type. The gradient of the weight is a sum over tokens, which some compilers
    accumulate in the type of its terms: in bfloat16 a sum of ones stops at 256.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return function(x.astype(wide), weight.astype(wide)).astype(x.dtype)


def kaiming_uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draws a matrix [in, rank] from U(-1/sqrt(in), 1/sqrt(in)), as PEFT draws `lora_A` (Kaiming with a = sqrt(5))."""
    bound = shape[-2] ** -0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def add_low_rank(x: jax.Array, y: jax.Array, lora_a: jax.Array, lora_b: jax.Array, scale: float) -> jax.Array:
    """Computes `y + scale (x A) B`.

    Args:
      x: [..., I], input of the projection.
      y: [..., O], output of the projection.
      lora_a: [I, rank].
      lora_b: [rank, O].
      scale: `LoraConfig.scale`.
    """
    update = jnp.einsum("...R,RO->...O", jnp.einsum("...I,IR->...R", flat(x), lora_a), lora_b).reshape(y.shape)
    # Rounds once, after the sum, if the base computes in bfloat16.
    return (y + scale * update).astype(y.dtype)


def in_pieces(x: jax.Array) -> bool:
    """Whether an array is read piece by piece. On a mesh a piece would be gathered."""
    alone = math.prod(jax.sharding.get_abstract_mesh().shape.values()) == 1
    return alone and narrow_on_cpu(x, device_kind())


def copies_layers(device_kind: str) -> bool:
    """Whether the compiler for a kind of device copies a layer out of a stack before a loop reads it."""
    return not device_kind.startswith("TPU")


def scanned_layers(stacked: Tree) -> tuple[Any, Callable[[Any], Tree]]:
    """Splits a stack of layers for a scan: its inputs, and the function from one of them to the layer."""
    leaves, structure = jax.tree.flatten(stacked)
    narrow = [in_pieces(x) for x in leaves]
    if not any(narrow):
        return stacked, lambda layer: layer
    wide = [None if is_narrow else x for x, is_narrow in zip(leaves, narrow, strict=True)]

    def layer_at(step: tuple[jax.Array, list[jax.Array | None]]) -> Tree:
        index, scanned = step
        parts = [_at(x, index) if part is None else part for x, part in zip(leaves, scanned, strict=True)]
        return jax.tree.unflatten(structure, parts)

    return (jnp.arange(len(leaves[0])), wide), layer_at


def nth_layer(stacked: Tree, number: int, *, after: jax.Array) -> Tree:
    """Returns a layer of a stack for a loop that contains all layers.

    A narrow layer is converted after `after` is known, its input. Otherwise the compiler converts all layers first.
    """
    # Never true, which the compiler does not know.
    index = number + (after.ravel()[0] > jnp.inf).astype(jnp.int32)
    return jax.tree.map(lambda x: _at(x, index) if in_pieces(x) else x[number], stacked)


def take_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the rows of a table [V, D] at `ids` [...], clipped, as [..., D]."""
    if in_pieces(table):
        table, ids = read_with(table, ids)
    return jnp.take(table, ids, axis=0, mode="clip")


def narrow_logits(hidden: jax.Array, stored: jax.Array, dtype: jnp.dtype, *, tied: bool) -> jax.Array:
    """Computes `hidden @ W`, [B, V], a few columns at a time.

    Args:
      hidden: [B, D].
      stored: W as [V, D] if `tied`, else [D, V].
      dtype: of the result.
      tied: whether the head is the table of embeddings.
    """
    axis = 0 if tied else 1
    count = stored.shape[axis]
    width = min(COLUMNS, stored.shape[axis])

    def add(number: jax.Array, logits: jax.Array) -> jax.Array:
        # The last piece overlaps the one before.
        weights, start = read_with(stored, jnp.minimum(number * width, count - width))
        piece = lax.dynamic_slice_in_dim(weights, start, width, axis)
        product = lax.dot_general(hidden, piece, (((1,), (1 - axis,)), ((), ())), preferred_element_type=dtype)
        return lax.dynamic_update_slice_in_dim(logits, product.astype(dtype), start, axis=1)

    return lax.fori_loop(0, -(-count // width), add, jnp.zeros((hidden.shape[0], count), dtype))


def _at(stack: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(*read_with(stack, index), keepdims=False)


class Int8Kernel(nnx.Module):
    """A kernel in int8: `qvalue` [..., in, out] and `scale` [..., out]."""

    def __init__(self, kernel: jax.Array, axes: tuple[str, ...]):
        quantised = quantise(kernel)
        self.qvalue = param(quantised["qvalue"], axes)
        self.scale = param(quantised["scale"], (*axes[:-2], axes[-1]))


def int8_matmul(x: jax.Array, kernel: Int8Kernel, axes: tuple[str, str]) -> jax.Array:
    """Computes `x @ (qvalue * scale)` over the last axis, in the type of x.

    Every int8 is exact in bfloat16: the product is scaled afterwards, in float32, so that no weight is rounded.
    """
    # As int8, before its cast.
    qvalue = whole_along_embed(kernel.qvalue[...], axes)
    return over_all_tokens(jnp.multiply, matmul(x, qvalue.astype(x.dtype)), kernel.scale[...])


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * scale` over the last axis, computed in float32 at least.

    With `offset` the factor is `1 + scale`, and the product is rounded to the type of x once, afterwards (Gemma),
    not before (Llama and Qwen).
    """

    def __init__(self, width: int, *, eps: float, offset: bool = False, param_dtype: str = "float32"):
        self.eps = eps
        self.offset = offset
        self.scale = param((jnp.zeros if offset else jnp.ones)(width, param_dtype), ("norm",))

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale[...]
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(variance + self.eps)
        if self.offset:
            return (normed * (1 + scale.astype(wide.dtype))).astype(x.dtype)
        return over_all_tokens(jnp.multiply, normed.astype(x.dtype), scale.astype(x.dtype))


class Linear(nnx.Module):
    """`x W (+ bias)`, plus the update `scale (x A) B` of an adapter if there is one.

    Args:
      inputs: I.
      outputs: O.
      axes: logical axes of the kernel [I, O].
      key: random key of this projection.
      bias: whether there is a bias [O].
      init_scale: factor of the standard deviation `I ** -0.5` of new weights.
      lora: adapter of this projection; None: no adapter.
      param_dtype: type of kernel and bias.
      quantization: "int8" keeps the kernel in int8; None: in `param_dtype`.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        axes: tuple[str, str],
        *,
        key: InitKey,
        bias: bool = False,
        init_scale: float = 1.0,
        lora: LoraConfig | None = None,
        param_dtype: str = "float32",
        quantization: str | None = None,
    ):
        self.axes = axes
        dtype = jnp.dtype(param_dtype)
        normal = jax.nn.initializers.normal(init_scale * inputs**-0.5)
        kernel = normal(key.draw(0, 2 if bias else 1), (inputs, outputs), dtype)
        self.kernel = param(kernel, axes) if quantization is None else Int8Kernel(kernel, axes)
        if bias:
            self.bias = param(jnp.zeros(outputs, dtype), axes[1:])
        self.lora_scale = None if lora is None else lora.scale
        if lora is not None:
            lora_a = kaiming_uniform(key.draw(0, 2), (inputs, lora.rank))
            self.lora_A = param(lora_a, (axes[0], "lora_rank"), nnx.LoRAParam)
            self.lora_B = param(jnp.zeros((lora.rank, outputs)), ("lora_rank", axes[1]), nnx.LoRAParam)

    def __call__(self, x: jax.Array) -> jax.Array:
        if isinstance(self.kernel, Int8Kernel):
            y = int8_matmul(x, self.kernel, self.axes)
        else:
            y = matmul(x, self.kernel[...].astype(x.dtype))
        if hasattr(self, "bias"):
            y = over_all_tokens(jnp.add, y, self.bias[...].astype(x.dtype))
        if self.lora_scale is not None:
            y = add_low_rank(x, y, self.lora_A[...], self.lora_B[...], self.lora_scale)
        return y


def norm(config: DecoderConfig, width: int | None = None) -> RMSNorm:
    """Makes the norm of a decoder, over its model width unless another is given."""
    return RMSNorm(
        config.width if width is None else width,
        eps=config.norm_eps,
        offset=config.norm_offset,
        param_dtype=config.param_dtype,
    )


def projection(
    config: DecoderConfig, name: str, sizes: tuple[int, int], axes: tuple[str, str], key: InitKey, **options: Any
) -> Linear:
    """Makes a projection of a layer, with an adapter if its name is a target."""
    lora = config.lora if config.lora is not None and name in config.lora.targets else None
    return Linear(
        *sizes,
        axes,
        key=key.child(name),
        lora=lora,
        param_dtype=config.param_dtype,
        quantization=config.quantization,
        **options,
    )


def residual_scale(config: DecoderConfig) -> float:
    """Returns the init scale of projections that write to the residual stream: its size does not grow with depth."""
    return float((2 * config.layers) ** -0.5)


class Embed(nnx.Module):
    """Token embeddings, `embedding` [V, D], returned in the compute type."""

    def __init__(
        self, vocab_size: int, width: int, *, key: InitKey, dtype: str = "float32", param_dtype: str = "float32"
    ):
        self.dtype = dtype
        drawn = jax.nn.initializers.normal(EMBEDDING_STD)(key.draw(0, 1), (vocab_size, width), jnp.dtype(param_dtype))
        self.embedding = param(drawn, ("vocab", "embed"))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        # Rows and the embedding axis share mesh axis fsdp: gather from a table that is whole along it.
        table = constrain(self.embedding[...], "vocab", None)
        return compute_cast(take_rows(table, tokens), self.dtype)


class ValueHead(nnx.Module):
    """Values `h w + b` of hidden states [..., D]; small initial weights keep the first values near 0."""

    def __init__(self, width: int, *, key: jax.Array):
        self.kernel = param(jax.random.normal(key, (width,)) / (width + 1), ("embed",))
        self.bias = param(jnp.zeros(()), ())

    def __call__(self, hidden: jax.Array) -> jax.Array:
        return hidden @ self.kernel[...] + self.bias[...]
