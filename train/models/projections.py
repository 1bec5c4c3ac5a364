"""Projections that read one input, in one product with their adapters.

Added behind a product, an update `scale (x A) B` is an array of its own in float32, larger than its bfloat16 output. A
product that is longer by the rank R makes none:

    several outputs  [y1, y2] = [x, x A] [[W1, W2]; B]
    one output       [u, x A] = x [W, A],  y = u + (x A) B

A has the columns of all adapters side by side; B theirs along its diagonal, times their scales, and zeros elsewhere.

Shapes: I inputs, O outputs of a projection, r its rank, R the sum of the ranks.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from train.models.layers import Int8Kernel, Linear, flat, over_all_tokens, whole_along_embed
from train.models.sharding import axis_size, device_kind

Array = jax.Array


def project(x: Array, *linears: Linear) -> tuple[Array, ...]:
    """Runs projections of one input [..., I]; those with adapters in one product where that is faster.

    Gradients of the adapters are summed and returned in float32, as without joining.
    """
    joined = getattr(linears[0], "joined", None)
    if joined is None and not joins(x, linears):
        return tuple(linear(x) for linear in linears)
    tokens = flat(x)
    if joined is None:
        ys = _project(Joining.of(linears), tokens, _kernels(linears))
    else:
        ys, _ = joined.multiply(tokens)
    ys = tuple(y.reshape(*x.shape[:-1], -1) for y in ys)
    return tuple(
        over_all_tokens(jnp.add, y, linear.bias[...].astype(y.dtype)) if hasattr(linear, "bias") else y
        for y, linear in zip(ys, linears, strict=True)
    )


def joins(x: Array, linears: Sequence[Linear]) -> bool:
    """Whether `project` joins the weights of projections whenever it runs.

    This reads and writes them once more, which pays where there are more tokens than numbers of a token.
    """
    tokens = math.prod(x.shape[:-1]) // (axis_size("rows") * axis_size("tokens"))
    outputs = sum(linear.lora_B.shape[-1] for linear in linears if linear.lora_scale is not None)
    return can_join(linears, x.dtype) and tokens >= min(x.shape[-1], outputs)


def can_join(linears: Sequence[Linear], dtype: Any) -> bool:
    """Whether the devices gain by joined weights: accelerators, whose products of bfloat16 are summed in float32."""
    adapted = any(linear.lora_scale is not None for linear in linears)
    exact = any(isinstance(linear.kernel, Int8Kernel) for linear in linears)
    return adapted and not exact and dtype == jnp.bfloat16 and device_kind() != "cpu"


def keep_joined(linears: Sequence[Linear], dtype: Any) -> None:
    """Joins the weights of projections once, for a loop that runs `project` in every step."""
    # Weights that are split along the model width would be whole in memory from then on.
    if can_join(linears, dtype) and axis_size("embed") == 1:
        linears[0].joined = nnx.data(Joining.of(linears).join(_kernels(linears), dtype))


class AdaptedKernel(NamedTuple):
    """Weights of a projection as they are stored: W [I, O], and A [I, r] with B [r, O] if there is an adapter."""

    kernel: Array
    adapter: tuple[Array, Array] | None


def _kernels(linears: Sequence[Linear]) -> tuple[AdaptedKernel, ...]:
    return tuple(
        AdaptedKernel(
            linear.kernel[...],
            None if linear.lora_scale is None else (linear.lora_A[...], linear.lora_B[...]),
        )
        for linear in linears
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JoinedWeights:
    """Weights of projections in the compute type.

    Attributes:
      inner: A [I, R]; of one output [W, A], [I, O + R].
      outer: [W; B], [I + R, O], of every product; of one output B [R, O] alone.
      outputs: O of every projection.
      several: whether there are several outputs, or one that is wider than its input.
    """

    inner: Array
    outer: tuple[Array, ...]
    outputs: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    several: bool = dataclasses.field(metadata={"static": True})

    def multiply(self, x: Array) -> tuple[tuple[Array, ...], Array]:
        """Computes the outputs [..., O] of x [..., I], and x A [..., R]."""
        if not self.several:
            u, xa = _split(_dot(x, self.inner), [self.outputs[0]])
            return (u + _dot(xa, *self.outer),), xa
        xa = _dot(x, self.inner)
        extended = jnp.concatenate([x, xa], axis=-1)
        ys = [_dot(extended, outer) for outer in self.outer]
        return tuple(ys) if len(ys) > 1 else tuple(_split(ys[0], self.outputs[:-1])), xa


@dataclasses.dataclass(frozen=True)
class Joining:
    """How weights are joined: the logical axes of every kernel, and the scale of its adapter."""

    axes: tuple[tuple[str, str], ...]
    scales: tuple[float, ...]

    @classmethod
    def of(cls, linears: Sequence[Linear]) -> "Joining":
        """Reads it off the projections."""
        return cls(tuple(linear.axes for linear in linears), tuple(linear.lora_scale or 1.0 for linear in linears))

    def cast(self, kernels: Sequence[AdaptedKernel], dtype: Any) -> list[AdaptedKernel]:
        """Casts weights to the compute type, B times its scale, and gathers what is split along the model width.

        Pieces of it side by side would have to be exchanged among the devices.
        """

        def whole(x: Array, *axes: str) -> Array:
            return whole_along_embed(x.astype(dtype), axes)

        return [
            AdaptedKernel(
                whole(kernel, *axes),
                None
                if adapter is None
                else (whole(adapter[0], axes[0], "lora_rank"), whole(scale * adapter[1], "lora_rank", axes[1])),
            )
            for (kernel, adapter), axes, scale in zip(kernels, self.axes, self.scales, strict=True)
        ]

    def join(self, kernels: Sequence[AdaptedKernel], dtype: Any) -> JoinedWeights:
        """Joins weights as they are stored."""
        cast = self.cast(kernels, dtype)
        outputs = tuple(kernel.shape[1] for kernel, _ in cast)
        adapters = [adapter for _, adapter in cast if adapter is not None]
        lora_a = jnp.concatenate([a for a, _ in adapters], axis=1)
        if not is_several(kernels):
            inner = jnp.concatenate([cast[0].kernel, lora_a], axis=1)
            return JoinedWeights(inner, (adapters[0][1],), outputs, several=False)
        rank = lora_a.shape[1]
        before = 0
        outer = []
        for kernel, adapter in cast:
            b = jnp.zeros((0, kernel.shape[1]), dtype) if adapter is None else adapter[1]
            rows = jnp.pad(b, ((before, rank - before - len(b)), (0, 0)))
            outer.append(jnp.concatenate([kernel, rows]))
            before += len(b)
        if all(axis_size(axis) == 1 for _, axis in self.axes):
            # Parts of split outputs would have to be exchanged as well: these have a product each.
            outer = [jnp.concatenate(outer, axis=1)]
        return JoinedWeights(lora_a, tuple(outer), outputs, several=True)


def is_several(kernels: Sequence[AdaptedKernel]) -> bool:
    """Whether weights are joined as those of several outputs: there are some, or the one is wider than its input."""
    inputs, outputs = kernels[0].kernel.shape
    return len(kernels) > 1 or outputs > inputs


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(plan: Joining, x: Array, kernels: tuple[AdaptedKernel, ...]) -> tuple[Array, ...]:
    """Computes the outputs [..., O] of x [..., I].

    Its gradient is written out: that of a cast to bfloat16 would round the gradients of the adapters.
    """
    return plan.join(kernels, x.dtype).multiply(x)[0]


def _forward(plan: Joining, x: Array, kernels: tuple[AdaptedKernel, ...]) -> tuple[tuple[Array, ...], Any]:
    ys, xa = plan.join(kernels, x.dtype).multiply(x)
    # A layer that is computed again seldom needs its single output, but would need x A: the gradient finds it from x.
    return ys, (x, xa if is_several(kernels) else None, kernels)


def _backward(plan: Joining, residuals: Any, dys: tuple[Array, ...]) -> tuple[Array, tuple[AdaptedKernel, ...]]:
    x, xa, kernels = residuals
    cast = plan.cast(kernels, x.dtype)
    adapters = [adapter for _, adapter in cast if adapter is not None]
    ranks = [len(b) for _, b in adapters]
    lora_a = jnp.concatenate([a for a, _ in adapters], axis=1)
    if is_several(kernels):
        # A product each: outputs side by side would be one more array.
        parts = [
            _dot(dy, kernel if adapter is None else jnp.concatenate([kernel, adapter[1]]), transposed=True)
            for dy, (kernel, adapter) in zip(dys, cast, strict=True)
        ]
        width = x.shape[-1]
        dxa = jnp.concatenate([part[..., width:] for part in parts], axis=-1)
        dx = _dot(dxa, lora_a, transposed=True).astype(jnp.float32)
        for part in parts:
            dx += part[..., :width].astype(jnp.float32)
        dx = dx.astype(x.dtype)
    else:
        xa = _dot(x, lora_a)
        dxa = _dot(dys[0], adapters[0][1], transposed=True)
        inner = jnp.concatenate([cast[0].kernel, lora_a], axis=1)
        dx = _dot(jnp.concatenate([dys[0], dxa], axis=-1), inner, transposed=True)
    das = iter(_split(_over_tokens(x, dxa), ranks[:-1]))
    xas = iter(_split(xa, ranks[:-1]))
    gradients = []
    for (kernel, adapter), dy, scale in zip(kernels, dys, plan.scales, strict=True):
        # Dropped by the compiler where the kernel is frozen.
        dw = _over_tokens(x, dy).astype(kernel.dtype)
        if adapter is None:
            gradients.append(AdaptedKernel(dw, None))
        else:
            a = next(das)
            b = scale * _over_tokens(next(xas), dy)
            gradients.append(AdaptedKernel(dw, (a.astype(adapter[0].dtype), b.astype(adapter[1].dtype))))
    return dx, tuple(gradients)


_project.defvjp(_forward, _backward)


def _dot(x: Array, weight: Array, *, transposed: bool = False) -> Array:
    """Computes `x @ weight`, or `x @ weight.T`, over the last axis of x [..., I]."""
    return lax.dot_general(x, weight, (((x.ndim - 1,), (int(transposed),)), ((), ())))


def _over_tokens(x: Array, dy: Array) -> Array:
    """Sums the products of x [..., I] and dy [..., O] over all tokens, in float32."""
    tokens = tuple(range(x.ndim - 1))
    return lax.dot_general(x, dy, ((tokens, tokens), ((), ())), preferred_element_type=jnp.float32)


def _split(x: Array, sizes: Sequence[int]) -> list[Array]:
    """Splits the last axis into parts of these sizes and the rest."""
    return jnp.split(x, [sum(sizes[: place + 1]) for place in range(len(sizes))], axis=-1)
