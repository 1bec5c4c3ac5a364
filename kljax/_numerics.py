"""Elementary functions whose float32 accuracy or gradient differs from the obvious way of writing them."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kljax._typing import Array, Scalar

# A number as a sum: its first 12 bits, and a rest that is small beside them.
Parts = tuple[Array, Array]

# With |y| <= 1/2 and 15 terms the truncated tail is below the last bit of float64.
_SERIES_TERMS = 15
_SERIES_RADIUS = 0.5


def _exp_tail(y: Array, first: int) -> Array:
    """The series of `exp(y)` from its term `first` on, divided by that term."""
    series = jnp.full_like(y, math.factorial(first) / math.factorial(_SERIES_TERMS + 1))
    for n in range(_SERIES_TERMS, first - 1, -1):
        series = series * y + math.factorial(first) / math.factorial(n)
    return series


@jax.custom_jvp
def expm1_minus(y: Array) -> Array:
    """`exp(y) - 1 - y` with full relative accuracy: a power series near 0, where the direct form cancels to 0."""
    direct = jnp.where(y == jnp.inf, y, jnp.expm1(y) - y)
    return jnp.where(jnp.abs(y) <= _SERIES_RADIUS, 0.5 * y * y * _exp_tail(y, 2), direct)


@expm1_minus.defjvp
def _expm1_minus_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (y,), (dy,) = primals, tangents
    return expm1_minus(y), jnp.expm1(y) * dy


def bregman(p: Array, q: Array, y: Array) -> Array:
    """`p (exp(y) - 1 - y)` for `q = p exp(y)`: never negative, of full relative accuracy, and without overflow.

    Summed over a vocabulary for `y = log(q / p)` it is KL(p || q), whose terms `p log(p / q)` cancel near `p = q`.
    """
    near = jnp.abs(y) <= _SERIES_RADIUS
    close = jnp.where(near, y, 0)
    return jnp.where(near, p * (0.5 * close * close * _exp_tail(close, 2)), q - p * (1 + jnp.where(near, 0, y)))


def difference(first: Array, second: Array) -> Array:
    """`first - second`, 0 where both are the same infinity."""
    return jnp.where(first == second, 0, first - second)


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


# An exponent of -85 that is rounded to float32 makes its `exp` wrong by 5e-6. Exponents that large are therefore kept
# as a sum of parts. Each product of which the last bit counts has factors of 12 bits, so that it is exact, and the
# same where a compiler fuses it with the sum that it enters. float64 needs none of this and takes the plain path.


def exp_of_sum(parts: Sequence[Array]) -> Array:
    """`exp` of a sum whose parts may be larger than what they add up to, with the relative accuracy of `exp` itself."""
    leadings = [jnp.round(part * 256) / 256 for part in parts]  # multiples of 1/256 add up exactly
    high: Array = sum(leadings[1:], leadings[0])
    low = sum(part - leading for part, leading in zip(parts, leadings, strict=True))
    # Not `exp(high) * exp(low)`, which XLA makes one `exp` again. Far out the answer is 0 or inf whatever `low` is.
    return jnp.exp(high) * (1 + jnp.expm1(jnp.where(jnp.abs(high) < 1000, low, 0)))


def product_parts(factor: Parts, parts: Parts) -> Parts:
    """The product of two numbers in parts: that of their leading parts, without an error, and a small rest."""
    (leading, trailing), (high, low) = factor, parts
    return leading * high, leading * low + trailing * (high + low)


def split(x: Array) -> Parts:
    """`x` as its first 12 bits and the rest."""
    high = jax.lax.reduce_precision(x, 8, 11) if x.dtype == jnp.float32 else x
    return high, x - high


def scalar_parts(value: Scalar, dtype: jnp.dtype) -> Parts:
    """A coefficient in parts; a Python number keeps its precision beyond float32."""
    if dtype != jnp.float32 or not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
        return split(jnp.asarray(value, dtype))
    mantissa, exponent = math.frexp(value)
    leading = math.ldexp(round(mantissa * 2**12), exponent - 12)
    return jnp.asarray(leading, dtype), jnp.asarray(float(value) - leading, dtype)


def expm1_parts(x: Array) -> Parts:
    """`exp(x) - 1` in parts, to 5e-9 up to x = 16 and 4e-8 beyond; bounded so that a product with it is finite."""
    x = jnp.minimum(x, 0.5 * math.log(jnp.finfo(x.dtype).max))
    high, low = split(jnp.expm1(x))
    if x.dtype != jnp.float32:
        return high, low
    # exp(x) = 2^n exp(f + g), where f is exact and g small: the first constant has 9 bits, so `n` times it is exact.
    x = jnp.maximum(x, -80)
    n = jnp.round(x / math.log(2))
    power = jax.lax.bitcast_convert_type((n.astype(jnp.int32) + 127) << 23, jnp.float32)
    f = x - n * 0.693359375
    g = n * (0.693359375 - math.log(2))
    y = f + g
    leading, trailing = split(y)
    cubic = y * y * y / 6 * _exp_tail(y, 3)
    # Without rounding: the one as `power` is large or 1, the other as `high` is nearly -1.
    low = jnp.where(x < -1, power - (1 + high), power - 1 - high) + power * f + power * (0.5 * leading * leading)
    return high, low + power * (0.5 * trailing * (leading + y) + cubic + g)


@jax.custom_jvp
def sigmoid_expm1(scale: Parts, x: Array) -> Array:
    """`sigmoid(scale * (exp(x) - 1))`; it and its slope keep their relative accuracy where they are nearly 0."""
    high, low = expm1_parts(x)
    rising = (scale[0] < 0) == (x < 0)
    sign = jnp.where(rising, -1, 1).astype(x.dtype)
    tail = exp_of_sum(product_parts(scale, (sign * high, sign * low)))
    return jnp.where(rising, 1, tail) / (1 + tail)


@sigmoid_expm1.defjvp
def _sigmoid_expm1_jvp(primals: tuple[Parts, Array], tangents: tuple[Parts, Array]) -> tuple[Array, Array]:
    (scale, x), (dscale, dx) = primals, tangents
    gate = sigmoid_expm1(scale, x)
    # Not `1 - gate`, which has lost it where the gate is nearly 1.
    slope = gate * sigmoid_expm1((-scale[0], -scale[1]), x)
    return gate, slope * (sum(scale) * jnp.exp(x) * dx + jnp.expm1(x) * sum(dscale))


def floor_share(fraction: Scalar, count: Array, largest: int) -> Array:
    """`floor(fraction * count)` in int32, for counts from 0 to `largest`; at most `largest`.

    For a Python number the product is that of Python's floats, also without x64: float32 takes 0.29 * 100 for 29, where
    Python has 28. A `fraction` that is an array is multiplied in JAX's float type, and so is one of 2^25 or more.
    """
    if isinstance(fraction, jax.Array) or largest >= 2**25:
        product = jnp.floor(fraction * count.astype(jnp.result_type(float)))
        return jnp.minimum(product, largest).astype(jnp.int32)
    (above, below), raised = _python_floors(min(float(fraction), 1.0), largest)
    count = count.astype(jnp.int32)
    guess = (count.astype(jnp.float32) * np.float32(above / below)).astype(jnp.int32)
    # Either product may overflow, but not their difference, as the guess is off by a few at most.
    floors = guess + (count * above - guess * below) // below
    for first, last, step in raised:
        floors += ((count >= first) & (count <= last) & (count % step == 0)).astype(jnp.int32)
    return floors


@functools.lru_cache
def _python_floors(fraction: float, largest: int) -> tuple[tuple[int, int], list[tuple[int, int, int]]]:
    """`p, q` with `floor(p n / q)` the floor of the exact `fraction * n` for every `n` up to `largest`, and where the
    floor of the rounded one is 1 more: `n` from a first to a last in steps, one such range for each power of 2 at most.

    `p / q` is the largest `floor(n * fraction) / n`, so no floor is missed, and as it is not above `fraction` none is
    passed. A product that is rounded up to a whole number has `fraction` within 2^-53 of a quotient that small numbers
    have, of which there is one: its denominator is the step. Whether it is rounded that far depends on its mantissa.
    """
    n = np.arange(1, max(largest, 1) + 1)
    rounded = np.floor(fraction * n)
    leading = float(np.float32(fraction))  # with few enough bits for exact products; and so has the rest
    floors = rounded - ((leading * n - rounded) + (fraction - leading) * n < 0)
    best = int(np.argmax(floors / n))
    raised = n[rounded > floors]
    if not raised.size:
        return (int(floors[best]), best + 1), []
    step = math.gcd(*raised.tolist())
    ends = np.flatnonzero(np.diff(raised) > step)
    firsts = raised[np.r_[0, ends + 1]]
    lasts = raised[np.r_[ends, raised.size - 1]]
    return (int(floors[best]), best + 1), [(int(i), int(j), step) for i, j in zip(firsts, lasts, strict=True)]
