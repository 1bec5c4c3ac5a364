"""Elementary functions whose float32 accuracy or gradient differs from the obvious way of writing them."""

import math

import jax
import jax.numpy as jnp

from kljax._typing import Array, Scalar

# With |y| <= 1/2 and 15 terms the truncated tail is below the last bit of float64.
_SERIES_TERMS = 15
_SERIES_RADIUS = 0.5


@jax.custom_jvp
def expm1_minus(y: Array) -> Array:
    """`exp(y) - 1 - y` with full relative accuracy: a power series near 0, where the direct form cancels to 0."""
    series = jnp.full_like(y, 2 / math.factorial(_SERIES_TERMS + 1))
    for n in range(_SERIES_TERMS, 1, -1):
        series = series * y + 2 / math.factorial(n)
    direct = jnp.where(y == jnp.inf, y, jnp.expm1(y) - y)
    return jnp.where(jnp.abs(y) <= _SERIES_RADIUS, 0.5 * y * y * series, direct)


@expm1_minus.defjvp
def _expm1_minus_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (y,), (dy,) = primals, tangents
    return expm1_minus(y), jnp.expm1(y) * dy


def clip(values: Array, low: Scalar | None, high: Scalar | None) -> Array:
    """Clips with PyTorch's gradient: 1 inside and on both bounds, 0 outside (`jnp.clip` gives 0.5 on a bound)."""
    if low is not None:
        values = jnp.where(values < low, low, values)
    if high is not None:
        values = jnp.where(values > high, high, values)
    return values


def clip_symmetric(values: Array, bound: Scalar | None) -> Array:
    """Clips to `[-bound, bound]` with PyTorch's gradient; None does not clip."""
    if bound is None:
        return values
    bound = jnp.asarray(bound, values.dtype)
    return clip(values, -bound, bound)


def exp_capped(log_values: Array, cap: Scalar | None) -> Array:
    """`min(exp(x), cap)` whose gradient is 0, not NaN, where `exp(x)` alone would overflow."""
    if cap is None:
        return jnp.exp(log_values)
    cap = jnp.asarray(cap, log_values.dtype)
    above = log_values > jnp.log(cap)
    return jnp.where(above, cap, jnp.exp(jnp.where(above, 0, log_values)))


def log_mix(weight: Array, y: Array) -> Array:
    """`log(1 - weight + weight * exp(y))`, the log of a mixture over its first part; exact near 0 and far from it."""
    far = y > 1
    near = jnp.log1p(weight * jnp.expm1(jnp.where(far, 0, y)))
    return jnp.where(far, y + jnp.log1p((1 - weight) * jnp.expm1(-jnp.where(far, y, 1))), near)


@jax.custom_jvp
def with_gradient_of(value: Array, surrogate: Array) -> Array:
    """`value` with the gradient of `surrogate`, also where either is infinite and `value + s - s` would be NaN."""
    return value


@with_gradient_of.defjvp
def _with_gradient_of_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return with_gradient_of(*primals), tangents[1]


def times(weights: Array, values: Array) -> Array:
    """`weights * values`, where a weight of 0 makes 0 of an infinity as well, with gradients of 0."""
    return weights * jnp.where((weights == 0) & jnp.isinf(values), 0, values)


@jax.custom_jvp
def sigmoid(x: Array) -> Array:
    """`1 / (1 + exp(-x))`, whose slope keeps its relative accuracy: `s (1 - s)` has lost it where `s` is near 1."""
    return jax.nn.sigmoid(x)


@sigmoid.defjvp
def _sigmoid_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    return sigmoid(x), sigmoid(x) * sigmoid(-x) * dx
