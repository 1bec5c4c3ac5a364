"""Projections that read one input, in one product with their adapters.

Added behind a product, an update `scale (x A) B` is an array of its own in float32, larger than its bfloat16 output. A
product that is longer by the rank R makes none:

    several outputs  [y1, y2] = [x, x A] [[W1, W2]; B]
    one output       [u, x A] = x [W, A],  y = u + (x A) B

A has the columns of all adapters side by side. B has theirs along its diagonal, times their scales, and zeros elsewhere.

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
        ys = _project(Layout.of(linears), tokens, _weights(linears))
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
        linears[0].joined = nnx.data(Layout.of(linears).join(_weights(linears), dtype))


class Weights(NamedTuple):
    """The weights of a projection as they are stored: W [I, O], A [I, r] and B [r, O]; without an adapter W alone."""

    kernel: Array
    lora_a: Array | None
    lora_b: Array | None


def _weights(linears: Sequence[Linear]) -> tuple[Weights, ...]:
    return tuple(
        Weights(linear.kernel[...], None, None)
        if linear.lora_scale is None
        else Weights(linear.kernel[...], linear.lora_A[...], linear.lora_B[...])
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
class Layout:
    """How weights are joined: the logical axes of every kernel, and the scale of its adapter."""

    axes: tuple[tuple[str, str], ...]
    scales: tuple[float | None, ...]

    @classmethod
    def of(cls, linears: Sequence[Linear]) -> "Layout":
        """Reads it off the projections."""
        return cls(tuple(linear.axes for linear in linears), tuple(linear.lora_scale for linear in linears))

    def cast(self, weights: Sequence[Weights], dtype: Any) -> list[Weights]:
        """Casts weights to the compute type, B times its scale, and gathers what is split along the model width.

        Pieces of it side by side would have to be exchanged among the devices.
        """

        def whole(x: Array | None, *axes: str) -> Array | None:
            return None if x is None else whole_along_embed(x.astype(dtype), axes)

        return [
            Weights(
                whole(kernel, *axes),
                whole(lora_a, axes[0], "lora_rank"),
                whole(None if lora_b is None else scale * lora_b, "lora_rank", axes[1]),
            )
            for (kernel, lora_a, lora_b), axes, scale in zip(weights, self.axes, self.scales, strict=True)
        ]

    def join(self, weights: Sequence[Weights], dtype: Any) -> JoinedWeights:
        """Joins weights [I, O], [I, r] and [r, O], as they are stored."""
        cast = self.cast(weights, dtype)
        outputs = tuple(w.kernel.shape[1] for w in cast)
        several = is_several(cast)
        lora_a = jnp.concatenate([w.lora_a for w in cast if w.lora_a is not None], axis=1)
        if not several:
            (only,) = cast
            return JoinedWeights(jnp.concatenate([only.kernel, lora_a], axis=1), (only.lora_b,), outputs, several)
        ranks = [0 if w.lora_b is None else len(w.lora_b) for w in cast]
        rows = [
            jnp.zeros((sum(ranks), output), dtype)
            if w.lora_b is None
            else jnp.pad(w.lora_b, ((sum(ranks[:place]), sum(ranks[place + 1 :])), (0, 0)))
            for place, (w, output) in enumerate(zip(cast, outputs, strict=True))
        ]
        outer = [jnp.concatenate([w.kernel, b]) for w, b in zip(cast, rows, strict=True)]
        if all(axis_size(axis) == 1 for _, axis in self.axes):
            # Parts of split outputs would have to be exchanged as well: these have a product each.
            outer = [jnp.concatenate(outer, axis=1)]
        return JoinedWeights(lora_a, tuple(outer), outputs, several)


def is_several(weights: Sequence[Weights]) -> bool:
    """Whether weights are joined as those of several outputs: there are some, or the one is wider than its input."""
    inputs, outputs = weights[0].kernel.shape
    return len(weights) > 1 or outputs > inputs


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(layout: Layout, x: Array, weights: tuple[Weights, ...]) -> tuple[Array, ...]:
    """Computes the outputs [..., O] of x [..., I].

    Its gradient is written out: that of a cast to bfloat16 would round the gradients of the adapters.
    """
    return layout.join(weights, x.dtype).multiply(x)[0]


def _forward(layout: Layout, x: Array, weights: tuple[Weights, ...]) -> tuple[tuple[Array, ...], Any]:
    ys, xa = layout.join(weights, x.dtype).multiply(x)
    # A layer that is computed again seldom needs its single output, but would need x A: the gradient finds it from x.
    return ys, (x, xa if is_several(weights) else None, weights)


def _backward(layout: Layout, residuals: Any, dys: tuple[Array, ...]) -> tuple[Array, tuple[Weights, ...]]:
    x, xa, weights = residuals
    cast = layout.cast(weights, x.dtype)
    adapted = [w.lora_a for w in cast if w.lora_a is not None]
    lora_a = jnp.concatenate(adapted, axis=1)
    if is_several(weights):
        # A product each: outputs side by side would be one more array.
        parts = [
            _dot(dy, w.kernel if w.lora_b is None else jnp.concatenate([w.kernel, w.lora_b]), transposed=True)
            for dy, w in zip(dys, cast, strict=True)
        ]
        width = x.shape[-1]
        dxa = jnp.concatenate([part[..., width:] for part in parts], axis=-1)
        terms = [part[..., :width] for part in parts] + [_dot(dxa, lora_a, transposed=True)]
        dx = sum(term.astype(jnp.float32) for term in terms).astype(x.dtype)
    else:
        (dy,), (only,) = dys, cast
        xa, dxa = _dot(x, lora_a), _dot(dy, only.lora_b, transposed=True)
        inner = jnp.concatenate([only.kernel, lora_a], axis=1)
        dx = _dot(jnp.concatenate([dy, dxa], axis=-1), inner, transposed=True)
    das = iter(_split(_over_tokens(x, dxa), [a.shape[1] for a in adapted[:-1]]))
    xas = iter(_split(xa, [a.shape[1] for a in adapted[:-1]]))
    grads = []
    for (kernel, a, b), dy, scale in zip(weights, dys, layout.scales, strict=True):
        # Dropped by the compiler where the kernel is frozen.
        dw = _over_tokens(x, dy).astype(kernel.dtype)
        if a is None or b is None:
            grads.append(Weights(dw, None, None))
        else:
            grads.append(Weights(dw, next(das).astype(a.dtype), (scale * _over_tokens(next(xas), dy)).astype(b.dtype)))
    return dx, tuple(grads)


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
