"""The norm before a block beside the residual stream, in one pass over the data each way, on NVIDIA GPUs.

The compiler computes the gradient of a norm in two kernels that read all operands, and copies the norm where a product
needs it side by side with another array.

Shapes: R rows of W slots, D model width, E columns of room.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from train.models.layers import RMSNorm
from train.models.sharding import device_kind, divides, is_nvidia_bfloat16, split_by_hand

Array = jax.Array
ELEMENTS = 4096
"""Numbers of a block of tokens, which fit the registers of four warps in float32 several times."""
BLOCKS = 16
"""Blocks of a program of the gradient, which sums that of the scale over them."""
_ROWS = ("rows", "tokens")


def can_fuse(dtype: Any) -> bool:
    """Whether the devices have these kernels: NVIDIA GPUs in bfloat16."""
    return is_nvidia_bfloat16(dtype)


def fork(norm: RMSNorm, x: Array, *, room: int = 0) -> tuple[Array, Array]:
    """Returns `norm(x)` and x, for a block and for the residual stream around it.

    Args:
      norm: the norm.
      x: [R, W, D].
      room: zeros after the D numbers of a norm, where the devices write them at no cost: for `projections.project`.

    Returns:
      [R, W, D + E] with E = `room`, or 0 without the kernel; and x.

    Gradient:
      To x: that of the norm plus that of the residual stream.
    """
    if not can_fuse(x.dtype) or not (divides(len(x), "rows") and divides(x.shape[1], "tokens")):
        return norm(x), x
    statics = NormStatics(norm.eps, norm.offset, room, interpret=device_kind() == "cpu")
    return fork_by_kernel(statics, x, norm.scale[...].astype(jnp.float32))


class NormStatics(NamedTuple):
    """Arguments that are constants in the compiled kernels; `room`: see `fork`."""

    eps: float
    offset: bool
    room: int = 0
    interpret: bool = False


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fork_by_kernel(statics: NormStatics, x: Array, scale: Array) -> tuple[Array, Array]:
    """Computes `fork` with scale [D] float32; in float32, rounded once."""

    def local(x: Array, scale: Array) -> Array:
        shape = jax.ShapeDtypeStruct((x.shape[0] * x.shape[1], x.shape[2] + statics.room), x.dtype)
        normed = _call(statics, _forward_kernel, x, 1, shape, "norm")(x.reshape(-1, x.shape[2]), scale)
        return normed.reshape(*x.shape[:2], -1)

    return split_by_hand(local, (_ROWS, ()), _ROWS)(x, scale), x


def _forward(statics: NormStatics, x: Array, scale: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    return fork_by_kernel(statics, x, scale), (x, scale)


def _backward(statics: NormStatics, kept: tuple[Array, Array], gradients: tuple[Array, Array]) -> tuple[Array, Array]:
    x, scale = kept

    def local(x: Array, normed: Array, residual: Array, scale: Array) -> tuple[Array, Array]:
        tokens = x.shape[0] * x.shape[1]
        programs = pl.cdiv(tokens, BLOCKS * _tokens(x.shape[2]))
        shapes = (
            jax.ShapeDtypeStruct((tokens, x.shape[2]), x.dtype),
            jax.ShapeDtypeStruct((programs, x.shape[2]), jnp.float32),
        )
        call = _call(statics, _backward_kernel, x, BLOCKS, shapes, "norm_gradient")
        dx, d_scale = call(*(y.reshape(tokens, -1) for y in (x, normed, residual)), scale)
        return dx.reshape(x.shape), d_scale[None]

    dx, d_scale = split_by_hand(local, (_ROWS, _ROWS, _ROWS, ()), _ROWS)(x, *gradients, scale)
    return dx, d_scale.sum((0, 1))


fork_by_kernel.defvjp(_forward, _backward)


def _tokens(width: int) -> int:
    """Returns the tokens of a block."""
    return max(1, ELEMENTS // pl.next_power_of_2(width))


def _call(statics: NormStatics, kernel: Any, x: Array, blocks: int, shapes: Any, name: str) -> Any:
    count = x.shape[0] * x.shape[1]
    return pl.pallas_call(
        functools.partial(kernel, count, x.shape[2], statics),
        out_shape=shapes,
        # The only block of columns: Pallas refuses a constant slice that ends after them.
        grid=(pl.cdiv(count, blocks * _tokens(x.shape[2])), 1),
        interpret=statics.interpret,
        name=name,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
    )


class _Block(NamedTuple):
    """The blocks of a kernel: some of `total` tokens, with all columns from `start`, which is 0, to a power of 2."""

    total: int
    width: int
    statics: NormStatics
    start: Array

    def mask(self, first: Any) -> Array:
        """Returns which of the block from a token on is there, [tokens, columns]."""
        tokens = first + jnp.arange(_tokens(self.width)) < self.total
        return tokens[:, None] & (jnp.arange(pl.next_power_of_2(self.width)) < self.width)[None]

    def at(self, first: Any) -> tuple[Any, Any]:
        """Returns the place of the block from a token on."""
        return pl.ds(first, _tokens(self.width)), self.columns

    @property
    def columns(self) -> Any:
        """Returns the place of all columns."""
        return pl.ds(self.start, pl.next_power_of_2(self.width))

    def read(self, ref: Any, first: Any) -> Array:
        """Reads the block from a token on, in float32."""
        return triton.load(ref.at[self.at(first)], mask=self.mask(first), other=0).astype(jnp.float32)

    def write(self, ref: Any, first: Any, values: Array) -> None:
        """Writes the block from a token on."""
        triton.store(ref.at[self.at(first)], values.astype(ref.dtype), mask=self.mask(first))

    def factor(self, scale: Any) -> Array:
        """Reads the factor of the norm, [1, columns]."""
        real = jnp.arange(pl.next_power_of_2(self.width)) < self.width
        return triton.load(scale.at[self.columns], mask=real, other=0)[None] + int(self.statics.offset)

    def normed(self, x: Array) -> tuple[Array, Array]:
        """Returns x over its root mean square, and the inverse of that."""
        inverse = lax.rsqrt(jnp.sum(x * x, -1) / self.width + self.statics.eps)[:, None]
        return x * inverse, inverse


def _forward_kernel(count: int, width: int, statics: NormStatics, x: Any, scale: Any, normed: Any) -> None:
    block = _Block(count, width, statics, pl.program_id(1))
    tokens = _tokens(width)
    first = pl.program_id(0) * tokens
    values, _ = block.normed(block.read(x, first))
    block.write(normed, first, values * block.factor(scale))
    if statics.room:
        columns = pl.next_power_of_2(statics.room)
        real = (first + jnp.arange(tokens) < count)[:, None] & (jnp.arange(columns) < statics.room)[None]
        at = normed.at[pl.ds(first, tokens), pl.ds(width + block.start, columns)]
        triton.store(at, jnp.zeros((tokens, columns), normed.dtype), mask=real)


def _backward_kernel(
    count: int,
    width: int,
    statics: NormStatics,
    x: Any,
    normed: Any,
    residual: Any,
    scale: Any,
    dx: Any,
    d_scale: Any,
) -> None:
    block = _Block(count, width, statics, pl.program_id(1))
    tokens = _tokens(width)
    program = pl.program_id(0)
    factor = block.factor(scale)

    def add(number: Any, total: Array) -> Array:
        first = (program * BLOCKS + number) * tokens
        values, inverse = block.normed(block.read(x, first))
        given = block.read(normed, first)
        scaled = given * factor
        mean = (jnp.sum(scaled * values, -1) / width)[:, None]
        block.write(dx, first, inverse * (scaled - values * mean) + block.read(residual, first))
        return total + jnp.sum(given * values, 0)

    columns = pl.next_power_of_2(width)
    total = lax.fori_loop(jnp.int32(0), jnp.int32(BLOCKS), add, jnp.zeros((columns,), jnp.float32))
    triton.store(d_scale.at[program, block.columns], total, mask=jnp.arange(columns) < width)
