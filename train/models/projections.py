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
from train.models.sharding import axis_size, device_kind, is_nvidia_bfloat16

Array = jax.Array


def project(x: Array, *linears: Linear) -> tuple[Array, ...]:
    """Runs projections of one input [..., I]; those with adapters in one product where that is faster.

    The input may have `room` of zeros, [..., I + R]. Gradients of the adapters are summed and returned in float32, as
    without joining.
    """
    joined = getattr(linears[0], "joined", None)
    if joined is None and not joins(x, linears):
        return tuple(linear(x) for linear in linears)
    tokens = flat(x)
    if joined is None:
        ys = _project(Joining.of(linears, x), tokens, kernels_of(linears))
    else:
        ys, _ = joined.multiply(tokens)
    ys = tuple(y.reshape(*x.shape[:-1], -1) for y in ys)
    return tuple(
        over_all_tokens(jnp.add, y, linear.bias[...].astype(y.dtype)) if hasattr(linear, "bias") else y
        for y, linear in zip(ys, linears, strict=True)
    )


def project_together(x: Array, *linears: Linear) -> tuple[Array, ...]:
    """Runs projections of one input as `project`, with all outputs side by side in one array [..., O].

    Outputs that the mesh splits stay apart, as parts of them would have to be exchanged; and those of int8 kernels.
    """
    joined = getattr(linears[0], "joined", None)
    adapted = any(linear.lora_scale is not None for linear in linears)
    exact = any(isinstance(linear.kernel, Int8Kernel) for linear in linears)
    split = any(axis_size(linear.axes[1]) > 1 for linear in linears)
    pays = joined is not None or (joins(x, linears) if adapted else has_many_tokens(x, linears))
    if exact or split or not pays:
        return project(x, *linears)
    if joined is not None:
        ((y,), _) = joined.multiply(flat(x), together=True)
    elif adapted:
        (y,) = _project(dataclasses.replace(Joining.of(linears, x), together=True), flat(x), kernels_of(linears))
    else:
        kernels = [whole_along_embed(linear.kernel[...].astype(x.dtype), linear.axes) for linear in linears]
        y = _dot(flat(x), jnp.concatenate(kernels, axis=1))
    y = y.reshape(*x.shape[:-1], -1)
    biases = [linear.bias[...].astype(y.dtype) for linear in linears if hasattr(linear, "bias")]
    return (over_all_tokens(jnp.add, y, jnp.concatenate(biases)) if biases else y,)


def joins(x: Array, linears: Sequence[Linear]) -> bool:
    """Whether `project` joins the weights of projections whenever it runs."""
    adapted = [linear for linear in linears if linear.lora_scale is not None]
    return can_join(linears, x.dtype) and has_many_tokens(x, adapted)


def has_many_tokens(x: Array, linears: Sequence[Linear]) -> bool:
    """Whether an input [..., I] has more tokens than numbers of a token, so that joined weights pay for their copy."""
    tokens = math.prod(x.shape[:-1]) // (axis_size("rows") * axis_size("tokens"))
    kernels = [linear.kernel.qvalue if isinstance(linear.kernel, Int8Kernel) else linear.kernel for linear in linears]
    return tokens >= min(kernels[0].shape[0], sum(kernel.shape[1] for kernel in kernels))


def room(x: Array, linears: Sequence[Linear]) -> int:
    """Returns R, the columns for x A that `project` adds to this input [..., I]; 0 where it adds none."""
    return sum(linear.lora_A.shape[-1] for linear in linears if linear.lora_scale is not None) * joins(x, linears)


def can_join(linears: Sequence[Linear], dtype: Any) -> bool:
    """Whether the devices gain by joined weights: accelerators, whose products of bfloat16 are summed in float32."""
    adapted = any(linear.lora_scale is not None for linear in linears)
    exact = any(isinstance(linear.kernel, Int8Kernel) for linear in linears)
    return adapted and not exact and dtype == jnp.bfloat16 and device_kind() != "cpu"


def keep_joined(linears: Sequence[Linear], dtype: Any) -> None:
    """Joins the weights of projections once, for a loop that runs `project` in every step."""
    several = len(linears) > 1 and not any(isinstance(linear.kernel, Int8Kernel) for linear in linears)
    plain = several and is_nvidia_bfloat16(dtype)
    # Weights that are split along the model width would be whole in memory from then on.
    if (plain or can_join(linears, dtype)) and axis_size("embed") == 1:
        linears[0].joined = nnx.data(Joining.of(linears).join(kernels_of(linears), dtype))


class AdaptedKernel(NamedTuple):
    """Weights of a projection as they are stored: W [I, O], and A [I, r] with B [r, O] if there is an adapter."""

    kernel: Array
    adapter: tuple[Array, Array] | None


def kernels_of(linears: Sequence[Linear]) -> tuple[AdaptedKernel, ...]:
    """Reads the weights of projections."""
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

    def multiply(self, x: Array, *, together: bool = False) -> tuple[tuple[Array, ...], Array]:
        """Computes the outputs [..., O] of x [..., I], and what the gradients of the weights need.

        That is [x, x A] of several outputs, otherwise x A. `together` returns as few outputs as there are products.
        """
        if not self.several:
            u, xa = _split(_dot(x, self.inner), [self.outputs[0]])
            return (u + _dot(xa, *self.outer),), xa
        width, rank = self.inner.shape
        if not rank:
            extended = x
        elif x.shape[-1] == width:
            extended = jnp.concatenate([x, _dot(x, self.inner)], axis=-1)
        else:
            # In its place, where a slice of x would be copied.
            xa = _dot(x, jnp.pad(self.inner, ((0, rank), (0, 0))))
            extended = lax.dynamic_update_slice_in_dim(x, xa, width, axis=-1)
        ys = [_dot(extended, outer) for outer in self.outer]
        return tuple(ys) if together or len(ys) > 1 else tuple(_split(ys[0], self.outputs[:-1])), extended


@dataclasses.dataclass(frozen=True)
class Joining:
    """How weights are joined.

    Attributes:
      axes: the logical axes of every kernel.
      scales: of the adapter of every kernel.
      room: whether the input has `room`.
      together: whether outputs stay side by side in one array.
    """

    axes: tuple[tuple[str, str], ...]
    scales: tuple[float, ...]
    room: bool = False
    together: bool = False

    @classmethod
    def of(cls, linears: Sequence[Linear], x: Array | None = None) -> "Joining":
        """Reads it off the projections and their input; None: an input without room."""
        scales = tuple(linear.lora_scale or 1.0 for linear in linears)
        has_room = x is not None and x.shape[-1] > len(linears[0].kernel)
        return cls(tuple(linear.axes for linear in linears), scales, room=has_room)

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
        none = jnp.zeros((len(cast[0].kernel), 0), dtype)
        lora_a = jnp.concatenate([none, *(a for a, _ in adapters)], axis=1)
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


def multiply(plan: Joining, x: Array, kernels: Sequence[AdaptedKernel]) -> Array:
    """Computes the output [..., O] of one projection, as `project` does, without its gradient."""
    ((kernel, adapter),) = kernels
    if adapter is not None:
        return plan.join(kernels, x.dtype).multiply(x)[0][0]
    return _dot(x, whole_along_embed(kernel.astype(x.dtype), plan.axes[0]))


def is_several(kernels: Sequence[AdaptedKernel]) -> bool:
    """Whether weights are joined as those of several outputs: there are some, or the one is wider than its input."""
    inputs, outputs = kernels[0].kernel.shape
    return len(kernels) > 1 or outputs > inputs


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(plan: Joining, x: Array, kernels: tuple[AdaptedKernel, ...]) -> tuple[Array, ...]:
    """Computes the outputs [..., O] of x [..., I].

    Its gradient is written out: that of a cast to bfloat16 would round the gradients of the adapters.
    """
    return plan.join(kernels, x.dtype).multiply(x, together=plan.together)[0]


def _forward(plan: Joining, x: Array, kernels: tuple[AdaptedKernel, ...]) -> tuple[tuple[Array, ...], Any]:
    ys, extended = plan.join(kernels, x.dtype).multiply(x, together=plan.together)
    # A layer that is computed again seldom needs its single output, but would need x A: the gradient finds it from x.
    return ys, (extended if is_several(kernels) else x, kernels)


def _backward(plan: Joining, residuals: Any, dys: tuple[Array, ...]) -> tuple[Array, tuple[AdaptedKernel, ...]]:
    x, kernels = residuals
    dx, dxa = input_gradient(plan, kernels, dys)
    return dx, weight_gradients(plan, kernels, x, dys, dxa)


def input_gradient(plan: Joining, kernels: Sequence[AdaptedKernel], dys: Sequence[Array]) -> tuple[Array, Array | None]:
    """Computes the gradients to x [..., I] and to x A [..., R] of those to the outputs; None without an adapter.

    The gradient to the room of an input is any number.
    """
    dtype = dys[0].dtype
    cast = plan.cast(kernels, dtype)
    adapters = [adapter for _, adapter in cast if adapter is not None]
    if not adapters:
        return _dot(dys[0], cast[0].kernel, transposed=True), None
    lora_a = jnp.concatenate([a for a, _ in adapters], axis=1)
    if not is_several(kernels):
        dxa = _dot(dys[0], adapters[0][1], transposed=True)
        inner = jnp.concatenate([cast[0].kernel, lora_a], axis=1)
        return _dot(jnp.concatenate([dys[0], dxa], axis=-1), inner, transposed=True), dxa
    width = len(cast[0].kernel)
    rank = lora_a.shape[1]
    if plan.together:
        (outer,) = plan.join(kernels, dtype).outer
        both = _dot(dys[0], outer, transposed=True)
        dxa = both[..., width:]
        parts = [both]
    else:
        # A product each: outputs side by side would be one more array.
        parts = [
            _dot(dy, kernel if adapter is None else jnp.concatenate([kernel, adapter[1]]), transposed=True)
            for dy, (kernel, adapter) in zip(dys, cast, strict=True)
        ]
        dxa = jnp.concatenate([part[..., width:] for part in parts], axis=-1)
    if plan.room and plan.together:
        width += rank
        lora_a = jnp.pad(lora_a, ((0, rank), (0, 0)))
    total = _dot(dxa, lora_a, transposed=True).astype(jnp.float32)
    for part in parts:
        total += part[..., :width].astype(jnp.float32)
    dx = total.astype(dtype)
    if plan.room and not plan.together:
        dx = jnp.pad(dx, [(0, 0)] * (dx.ndim - 1) + [(0, rank)])
    return dx, dxa


def weight_gradients(
    plan: Joining,
    kernels: Sequence[AdaptedKernel],
    x: Array,
    dys: Sequence[Array],
    dxa: Array | None,
) -> tuple[AdaptedKernel, ...]:
    """Computes the gradients to all weights from `input_gradient`, and from x [..., I] or [x, x A] [..., I + R]."""
    ranks = [len(adapter[1]) for _, adapter in kernels if adapter is not None]
    width = len(kernels[0].kernel)
    xa = x[..., width:]
    if ranks and x.shape[-1] == width:
        columns = [adapter[0] for _, adapter in plan.cast(kernels, x.dtype) if adapter is not None]
        xa = _dot(x, jnp.concatenate(columns, axis=1))
    das = iter([] if dxa is None else _split(_over_tokens(x, dxa)[:width], ranks[:-1]))
    # Of frozen kernels dropped by the compiler.
    dws = [_over_tokens(x, dy)[:width] for dy in dys]
    outputs = [kernel.shape[1] for kernel, _ in kernels]
    if plan.together:
        dws = _split(dws[0], outputs[:-1])
        of_all = _split(_over_tokens(xa, dys[0]), outputs[:-1])
    before = 0
    gradients = []
    for place, ((kernel, adapter), dw, scale) in enumerate(zip(kernels, dws, plan.scales, strict=True)):
        if adapter is None:
            gradients.append(AdaptedKernel(dw.astype(kernel.dtype), None))
            continue
        lora_a, lora_b = adapter
        rows = slice(before, before + len(lora_b))
        db = of_all[place][rows] if plan.together else _over_tokens(xa[..., rows], dys[place])
        gradient = next(das).astype(lora_a.dtype), (scale * db).astype(lora_b.dtype)
        gradients.append(AdaptedKernel(dw.astype(kernel.dtype), gradient))
        before += len(lora_b)
    return tuple(gradients)


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
