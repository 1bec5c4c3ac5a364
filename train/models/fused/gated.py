"""The second half of an MLP, `down(act(gate) * up)`, with the gradient of its product in one pass over the data.

The compiler of GPUs makes a kernel for each of the two gradients, which reads all operands and computes the activation
anew, and a third one for the product, from which the gradients of the next weights follow. A Pallas kernel writes all.

Shapes: F hidden width, D model width.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from train.models.config import Activation
from train.models.layers import Int8Kernel, Linear, flat, over_all_tokens
from train.models.projections import AdaptedKernel, Joining, input_gradient, kernels_of, multiply, weight_gradients
from train.models.sharding import device_kind, is_nvidia_bfloat16, split_by_hand

Array = jax.Array
TOKENS = 16
"""Tokens of the block of a program."""
COLUMNS = 256
"""Columns of this block: eleven numbers for each of its elements fit the registers of four warps."""
_HIDDEN = ("rows", "tokens", "mlp")


def can_fuse(linear: Linear, dtype: Any) -> bool:
    """Whether the devices run `project_gated` with this projection, neither quantised nor joined for decoding."""
    plain = not isinstance(linear.kernel, Int8Kernel) and getattr(linear, "joined", None) is None
    return plain and is_nvidia_bfloat16(dtype)


def project_gated(activation: Activation, projected: tuple[Array, ...], linear: Linear) -> Array:
    """Computes `down(act(gate) * up)`, [..., D], as `project` of that product, which is rounded once.

    Args:
      activation: of the gate.
      projected: gate and up [..., F]; or one array [..., 2 F] of both, side by side.
      linear: the last projection.
    """
    y = _project_gated((activation, Joining.of([linear])), projected, kernels_of([linear]))
    return over_all_tokens(jnp.add, y, linear.bias[...].astype(y.dtype)) if hasattr(linear, "bias") else y


def _gated(activation: Activation, projected: Sequence[Array]) -> Array:
    gate, up = projected if len(projected) == 2 else jnp.split(projected[0], 2, axis=-1)
    value, _ = _with_slope(activation, gate.astype(jnp.float32))
    return (value * up.astype(jnp.float32)).astype(gate.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project_gated(
    statics: tuple[Activation, Joining], projected: tuple[Array, ...], kernels: tuple[AdaptedKernel, ...]
) -> Array:
    activation, plan = statics
    x = _gated(activation, projected)
    return multiply(plan, flat(x), kernels).reshape(*x.shape[:-1], -1)


def _forward(statics: tuple[Activation, Joining], *arguments: Any) -> tuple[Array, Any]:
    return _project_gated(statics, *arguments), arguments


def _backward(statics: tuple[Activation, Joining], kept: Any, dy: Array) -> tuple[Any, ...]:
    activation, plan = statics
    projected, kernels = kept
    dy_tokens = flat(dy)
    dx, dxa = input_gradient(plan, kernels, [dy_tokens])
    dx = dx.reshape(*dy.shape[:-1], -1)
    x, d_projected = gated_gradient(activation, projected, dx, interpret=device_kind() == "cpu")
    return d_projected, weight_gradients(plan, kernels, flat(x), [dy_tokens], dxa)


_project_gated.defvjp(_forward, _backward)


def gated_gradient(
    activation: Activation, projected: Sequence[Array], cotangent: Array, *, interpret: bool = False
) -> tuple[Array, tuple[Array, ...]]:
    """Computes `act(gate) * up` again, and the gradient of its sum times a cotangent, in float32, rounded once.

    Args:
      activation: of the gate.
      projected: gate and up [..., F]; or one array [..., 2 F] of both, side by side.
      cotangent: [..., F], of the product.
      interpret: runs the kernel anywhere, slowly.

    Returns:
      The product [..., F], and the gradients to `projected`.
    """

    def local(projected: tuple[Array, ...], cotangent: Array) -> tuple[Array, tuple[Array, ...]]:
        width = cotangent.shape[-1]
        flat = tuple(x.reshape(-1, x.shape[-1]) for x in projected)
        tokens = len(flat[0])
        call = pl.pallas_call(
            functools.partial(_kernel, activation, tokens, width),
            out_shape=[
                jax.ShapeDtypeStruct((tokens, width), cotangent.dtype),
                [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat],
            ],
            grid=(pl.cdiv(tokens, TOKENS), pl.cdiv(width, COLUMNS)),
            interpret=interpret,
            name="gated_gradient",
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        )
        product, gradients = call(flat, cotangent.reshape(-1, width))
        shaped = tuple(x.reshape(like.shape) for x, like in zip(gradients, projected, strict=True))
        return product.reshape(cotangent.shape), shaped

    return split_by_hand(local, (_HIDDEN, _HIDDEN), _HIDDEN)(tuple(projected), cotangent)


def _kernel(
    activation: Activation, tokens: int, width: int, projected: Any, cotangent: Any, product: Any, gradients: Any
) -> None:
    rows = pl.ds(pl.program_id(0) * TOKENS, TOKENS)
    first = pl.program_id(1) * COLUMNS
    real = (pl.program_id(0) * TOKENS + jnp.arange(TOKENS) < tokens)[:, None]
    real &= (first + jnp.arange(COLUMNS) < width)[None]
    after_gate = width if len(projected) == 1 else 0
    gate_at = rows, pl.ds(first, COLUMNS)
    up_at = rows, pl.ds(after_gate + first, COLUMNS)

    def read(ref: Any, at: Any) -> Array:
        return triton.load(ref.at[at], mask=real, other=0).astype(jnp.float32)

    def write(ref: Any, at: Any, values: Array) -> None:
        triton.store(ref.at[at], values.astype(ref.dtype), mask=real)

    gate = read(projected[0], gate_at)
    up = read(projected[-1], up_at)
    given = read(cotangent, gate_at)
    value, slope = _with_slope(activation, gate)
    write(product, gate_at, value * up)
    write(gradients[0], gate_at, given * up * slope)
    write(gradients[-1], up_at, given * value)


def _with_slope(activation: Activation, x: Array) -> tuple[Array, Array]:
    """Computes an activation and its derivative, without the hyperbolic tangent, which not every GPU has here."""
    if activation == "silu":
        share = jax.nn.sigmoid(x)
        return x * share, share * (1 + x * (1 - share))
    # The cube of `jax.nn.gelu(approximate=True)`, whose tanh(y) is 2 sigmoid(2 y) - 1.
    factor = 2 * (2 / jnp.pi) ** 0.5
    share = jax.nn.sigmoid(factor * (x + 0.044715 * x * x * x))
    return x * share, share + x * share * (1 - share) * factor * (1 + 3 * 0.044715 * x * x)
