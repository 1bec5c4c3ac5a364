"""Masked statistics, completion masks and the one next-token shift.

Every function selects with `where`, never by multiplying, so NaN or infinity at a masked position reaches neither a
value nor a gradient. Arrays are `[..., T]`; masks are boolean (or 0/1 integers) of the same shape. In `shard_map`,
where each device holds a part of a batch, `axis_name` makes a statistic that of the whole. Without it a statistic is
that of the part, and nothing warns. `jit` needs no such help.
"""

import jax.numpy as jnp

from kljax._checks import as_float, check_at_least, check_mask, check_numbers, check_same_shape
from kljax._devices import auto_sharded, over_devices
from kljax._typing import Array, ArrayLike, AxisName, Bool, Integer, Mask, MaskLike, Real, Scalar, Shaped
from kljax.rows import row_last

__all__ = [
    "completion_mask",
    "last_token_mask",
    "masked",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "shift_right",
]

Axis = int | tuple[int, ...] | None


def masked(values: Real[ArrayLike, "*b"], mask: MaskLike[Mask, "*b"] | None) -> Array:
    """Values where the mask is set, exact zeros elsewhere: `where(mask, values, 0)` in float32 (float64 is kept).

    Args:
      values: array of any shape and float type.
      mask: None keeps everything.

    Returns:
      Array of the shape of `values`, float32 or float64; masked positions hold 0.

    Gradient:
      To `values` at unmasked positions, exactly 0 at the others.

    Raises:
      ValueError: if the shapes differ.
      TypeError: if the mask has a floating type.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.masked(jnp.array([1.0, jnp.nan]), jnp.array([True, False])))
      [1. 0.]
    """
    (values,) = as_float(values)
    if mask is None:
        return values
    check_same_shape(values=values, mask=mask)
    return jnp.where(check_mask(mask), values, 0)


def masked_sum(
    values: Real[ArrayLike, "*b T"], mask: MaskLike[Mask, "*b T"], *, axis: Axis = None, axis_name: AxisName = None
) -> Array:
    """Sum over the unmasked positions: `sum_t m_t x_t`.

    Args:
      values: `[..., T]`, any float type.
      axis: the axes to reduce; None reduces all.
      axis_name: mapped axes, as of `shard_map`, over whose parts the statistic is taken as well.

    Returns:
      The sum, float32 or float64; 0 where nothing is unmasked.

    Gradient:
      To `values`: 1 at unmasked positions, 0 at masked ones.

    Raises:
      ValueError: if the shapes differ.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.masked_sum(jnp.array([1.0, 2.0, 4.0]), jnp.array([True, False, True])))
      5.0
    """
    return over_devices(masked(values, mask).sum(axis), axis_name)


def masked_mean(
    values: Real[ArrayLike, "*b T"], mask: MaskLike[Mask, "*b T"], *, axis: Axis = None, axis_name: AxisName = None
) -> Array:
    """Mean over the unmasked positions: `sum_t m_t x_t / sum_t m_t`, and 0 where nothing is unmasked.

    No epsilon enters the divisor, so the mean of a constant is that constant.

    Args:
      values: `[..., T]`, any float type.
      axis: the axes to reduce; None reduces all.
      axis_name: mapped axes, as of `shard_map`, over whose parts the statistic is taken as well.

    Returns:
      The mean, float32 or float64; 0 where nothing is unmasked.

    Gradient:
      To `values`: `m_t / sum m`; 0 everywhere when nothing is unmasked.

    Raises:
      ValueError: if the shapes differ.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.masked_mean(jnp.array([1.0, 9.0, 3.0]), jnp.array([True, False, True])))
      2.0
    """
    total = masked_sum(values, mask, axis=axis, axis_name=axis_name)
    return total / jnp.maximum(_count(mask, axis, axis_name, total.dtype), 1)


def masked_var(
    values: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    axis: Axis = None,
    ddof: int = 1,
    axis_name: AxisName = None,
) -> Array:
    """Variance over the unmasked positions, by two passes: `sum_t m_t (x_t - mean)^2 / (n - ddof)`.

    Args:
      values: `[..., T]`, any float type.
      axis: the axes to reduce; None reduces all.
      ddof: 1 for Bessel's correction (the default of `torch.var`), 0 for the population variance.
      axis_name: mapped axes, as of `shard_map`, over whose parts the statistic is taken as well.

    Returns:
      The variance, float32 or float64; 0 where `n <= ddof`.

    Gradient:
      To `values` at unmasked positions: `2 (x_t - mean) / (n - ddof)`.

    Raises:
      ValueError: if the shapes differ, or `ddof` is negative.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.masked_var(jnp.array([1.0, 3.0, 99.0]), jnp.array([True, True, False])))
      2.0
    """
    check_at_least("ddof", ddof, 0)
    values = masked(values, mask)
    mean = jnp.expand_dims(masked_mean(values, mask, axis=axis, axis_name=axis_name), _all_axes(values, axis))
    squares = masked_sum(jnp.square(values - mean), mask, axis=axis, axis_name=axis_name)
    count = _count(mask, axis, axis_name, values.dtype)
    return jnp.where(count > ddof, squares / jnp.maximum(count - ddof, 1), 0)


def masked_whiten(
    values: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    axis: Axis = None,
    shift_mean: bool = True,
    ddof: int = 1,
    eps: Scalar = 1e-8,
    axis_name: AxisName = None,
) -> Array:
    """Values with mean 0 and variance 1 over the unmasked positions: `(x - mean) / sqrt(var + eps)`.

    Args:
      values: `[..., T]`, any float type.
      axis: the axes to whiten over; None takes the statistics over everything.
      shift_mean: False adds the mean back, so that only the scale changes.
      ddof: degrees of freedom of the variance; 1 as in verl and slime, 0 as in OpenRLHF.
      eps: added to the variance, in squared units of `values`.
      axis_name: mapped axes, as of `shard_map`, over whose parts the statistic is taken as well.

    Returns:
      Same shape, float32 or float64; masked positions hold 0. With `shift_mean`, a constant becomes 0.

    Gradient:
      To `values` through mean and variance alike.

    Raises:
      ValueError: if the shapes differ, or `ddof` is negative.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.masked_whiten(jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False]), ddof=0))
      [-1.  1.  0.]
    """
    check_numbers(eps=eps)
    values = masked(values, mask)
    eps = jnp.asarray(eps, values.dtype)
    axes = _all_axes(values, axis)
    mean = jnp.expand_dims(masked_mean(values, mask, axis=axis, axis_name=axis_name), axes)
    var = jnp.expand_dims(masked_var(values, mask, axis=axis, ddof=ddof, axis_name=axis_name), axes)
    # A variance of 0 with eps 0 would be 0/0: everything then equals the mean, and whitened it is 0.
    scale = jnp.where(var + eps > 0, 1 / jnp.sqrt(jnp.where(var + eps > 0, var + eps, 1)), 0)
    whitened = (values - mean) * scale
    return masked(whitened if shift_mean else whitened + mean, mask)


def completion_mask(
    prompt_lengths: Integer[ArrayLike, "*b"], completion_lengths: Integer[ArrayLike, "*b"], length: int
) -> Bool[Array, "*b T"]:
    """The positions of the sampled tokens: `prompt <= t < prompt + completion`.

    Masks come from lengths and never from comparing tokens with a padding id, which a model may sample itself.

    Args:
      prompt_lengths: `[...]` integers, tokens before the first sampled one (left padding included, if there is any).
      completion_lengths: `[...]` integers, number of sampled tokens.
      length: T, the number of positions.

    Returns:
      `[..., T]` booleans.

    Raises:
      ValueError: if the shapes of the two lengths differ.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.completion_mask(jnp.array([1, 2]), jnp.array([2, 1]), 4).astype(int))
      [[0 1 1 0]
       [0 0 1 0]]
    """
    check_numbers(length=length)
    check_same_shape(prompt_lengths=prompt_lengths, completion_lengths=completion_lengths)
    start = jnp.asarray(prompt_lengths).astype(int)[..., None]
    stop = start + jnp.asarray(completion_lengths).astype(int)[..., None]
    position = jnp.arange(length).reshape((1,) * (start.ndim - 1) + (length,))
    return (position >= start) & (position < stop)


def last_token_mask(mask: MaskLike[Mask, "*b T"]) -> Bool[Array, "*b T"]:
    """The last unmasked position of each row, and nothing in a row without one.

    Args:
      mask: `[..., T]`, boolean or `Segments`.

    Returns:
      `[..., T]` booleans with at most one position set per row, or per segment.

    Raises:
      TypeError: if the mask has a floating type.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.last_token_mask(jnp.array([[1, 0, 1, 0], [0, 0, 0, 0]])).astype(int))
      [[0 0 1 0]
       [0 0 0 0]]
    """
    return row_last(mask)


@auto_sharded
def shift_right(values: Shaped[ArrayLike, "*b T"], fill: Scalar = 0) -> Shaped[Array, "*b T"]:
    """The next-token shift: what position `t - 1` predicts becomes the value of token `t`, `y_t = x_{t-1}`.

    A model's output at position `t - 1` scores token `t`; after this shift every array of the library holds at
    position `t` the value of token `t` itself. Position 0 has no prediction and is never trained.

    Args:
      values: `[..., T]`, any type; position `t` belongs to the prediction of token `t + 1`.
      fill: the value of position 0.

    Returns:
      `[..., T]`, the type of `values`; the last prediction, whose token is not there, is dropped.

    Gradient:
      To `values`, shifted back; the last position gets 0.

    Raises:
      Nothing.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.shift_right(jnp.array([[1.0, 2.0, 3.0]])))
      [[0. 1. 2.]]
    """
    values = jnp.asarray(values)
    return jnp.concatenate([jnp.full_like(values[..., :1], fill), values[..., :-1]], axis=-1)


def highest(scores: Array, candidates: Array, number: Array) -> Array:
    """Chooses the candidates that have the highest scores of the whole array.

    Args:
      scores: numbers of any shape.
      candidates: boolean.
      number: how many to choose; may be traced.

    Returns:
      Booleans in the shape of `scores`, a subset of the candidates; of equal scores the earlier is chosen.
    """
    flat = jnp.where(candidates, -scores, jnp.inf).ravel()
    order = jnp.argsort(flat, stable=True)
    rank = jnp.zeros(flat.shape, jnp.int32).at[order].set(jnp.arange(flat.size, dtype=jnp.int32))
    return candidates & (rank < number).reshape(candidates.shape)


def _count(mask: Mask, axis: Axis, axis_name: AxisName, dtype: jnp.dtype) -> Array:
    return over_devices(check_mask(mask).sum(axis), axis_name).astype(dtype)


def _all_axes(values: Array, axis: Axis) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(values.ndim))
    return axis if isinstance(axis, tuple) else (axis,)
