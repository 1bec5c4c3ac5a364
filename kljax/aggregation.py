"""Reductions as token weights.

The loss of a batch is `sum_t where(mask, loss_t, 0) * weight_t`, and a reduction is nothing but the `[B, T]` array of
weights. It is computed once, from the masks of the whole optimizer batch, before that batch is split; micro-batches,
devices and processes then only add, which is why the loss does not depend on how the batch was split.
"""

import dataclasses
from typing import Any, Self, get_args

import jax
import jax.numpy as jnp

from kljax._checks import (
    as_array,
    as_float,
    as_groups,
    check_at_least,
    check_choice,
    check_mask,
    check_only_with,
    check_same_shape,
)
from kljax._devices import auto_sharded, over_devices
from kljax._typing import Array, ArrayLike, AxisName, EmptyRows, Float, Integer, Mask, MaskLike, Real, Reduction, Scalar
from kljax.batches import Groups, Segments
from kljax.masking import masked
from kljax.rows import add_by_id, narrowed, row_any, row_count, segment_ids, take_by_id, to_tokens

__all__ = ["WeightedSum", "aggregate", "token_weights"]

MODES = get_args(Reduction)
EMPTY_ROWS = get_args(EmptyRows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightedSum:
    """A mean on its way: a sum and the weight to divide it by, so that parts of a batch can be added exactly.

    Sums of several means at once, e.g. one for each bucket of positions, are arrays of one shape.

    Attributes:
      sum: the weighted sum of the values, a scalar or an array.
      weight: the sum of the weights, same shape.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> a = kljax.WeightedSum.of(jnp.array([1.0, 3.0]), jnp.array([True, True]))
      >>> b = kljax.WeightedSum.of(jnp.array([8.0, 9.0]), jnp.array([True, False]))
      >>> print((a + b).value())
      4.0
    """

    sum: Array
    weight: Array

    @classmethod
    def of(cls, values: ArrayLike, mask: Mask, weights: ArrayLike | None = None) -> Self:
        """The weighted sum of the unmasked values: `(sum_t m_t w_t x_t, sum_t m_t w_t)`, detached.

        Args:
          values: array of any shape and float type.
          weights: the weight of each value; None weighs each 1.

        Returns:
          A `WeightedSum` of two scalars, float32 or float64; 0 and 0 where nothing is unmasked.
        """
        values = masked(values, mask)
        weights = masked(jnp.ones_like(values) if weights is None else weights, mask).astype(values.dtype)
        return cls(*jax.lax.stop_gradient(((values * weights).sum(), weights.sum())))

    @classmethod
    def zero(cls) -> Self:
        """The neutral element of addition, float32.

        Returns:
          A `WeightedSum` of two scalars 0.
        """
        return cls(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))

    def __float__(self) -> float:
        raise TypeError("WeightedSum: got float(), expected float(x.value()); add the parts of a batch first")

    def value(self) -> Array:
        """The mean `sum / weight`; 0 where the weight is 0.

        Returns:
          Array of the shape of `sum`, in the unit of the values.
        """
        return jnp.where(self.weight == 0, 0, self.sum / jnp.where(self.weight == 0, 1, self.weight))

    def reduce(self, axis: int = 0) -> Self:
        """Adds up parts that lie along an axis, such as the micro-batches of a scan.

        Args:
          axis: the axis of the parts, in `sum` and in `weight`.

        Returns:
          A `WeightedSum` without that axis.
        """
        return type(self)(self.sum.sum(axis), self.weight.sum(axis))

    def std(self, squares: Self) -> Array:
        """The population standard deviation of the values, given the `WeightedSum` of their squares.

        Args:
          squares: the sum of the squared values, with the mask and the weights of this one.

        Returns:
          Array of the shape of `sum`, in the unit of the values; 0 where the weight is 0.
        """
        variance = squares.value() - jnp.square(self.value())
        return jnp.sqrt(jnp.maximum(variance, 0))

    def __add__(self, other: Self) -> Self:
        return type(self)(self.sum + other.sum, self.weight + other.weight)


def token_weights(
    mask: MaskLike[Mask, "*b B T"],
    *,
    mode: Reduction,
    max_length: Scalar | None = None,
    group_ids: Integer[ArrayLike, "..."] | Groups | None = None,
    num_groups: int | None = None,
    empty_rows: EmptyRows = "drop",
    denominator: Scalar | None = None,
    axis_name: AxisName = None,
) -> Float[Array, "*b B T"]:
    """The weight of each token in the loss, for one of six reductions.

    With `n_i` tokens in row `i`, `N` tokens in all, `S` rows, `P` prompts, `n_p` tokens in all rows of prompt `p`:

        token_mean               1 / N
        token_sum                1
        seq_mean_token_sum       1 / S
        seq_mean_token_mean      1 / (S n_i)
        seq_mean_token_sum_norm  1 / (S max_length)
        prompt_mean              1 / (P n_p)

    A `denominator` takes the place of what is counted over the batch, `N`, `S` or `P`: the number of tokens or rows of
    a whole step, say, or 1 where a system sums. The ids of "prompt_mean" may be ids of anything whose rows share one
    mean: with the rollout of each row, several samples of one rollout share the divisor `n_p`, as in slime; with the
    micro-batch of each row, it is a mean of the means of micro-batches.

    Args:
      mask: `[..., B, T]` booleans of the whole optimizer batch (all micro-batches and devices), True on trained tokens;
        or `Segments`, with which every statement about a row holds for a segment.
      mode: one of the six names above.
      max_length: the constant length of "seq_mean_token_sum_norm", in tokens.
      group_ids: `[..., B]` integers below `num_groups`, the prompt of each row, `[..., B, T]` with `Segments`; or
        `Groups`. For "prompt_mean". A row whose id lies outside gets weight 0.
      num_groups: static number of prompts, unless they are `Groups`; for "prompt_mean".
      empty_rows: whether a row without a single token counts in `S` (and a prompt without one in `P`): "drop" does not
        count it, so that padding rows change nothing; "count" does, as Trinity-RFT and TRL do. A prompt counts only if
        a row names it. "count" is not invariant under added padding rows, by its meaning.
      denominator: a positive number in place of `N`, `S` or `P`, which are then not counted and to which `empty_rows`
        says nothing; None counts them. "token_sum" has none.
      axis_name: mapped axes, as of `shard_map`, over whose parts the batch is spread; None takes the mask as all of it.

    Returns:
      `[..., B, T]`, float32 (float64 under x64); masked positions hold 0. Nothing unmasked gives all zeros.

    Raises:
      ValueError: for an unknown mode or rule, an argument the mode needs and lacks, one it has no use for, or ids of
        another shape than the rows.
      TypeError: if the mask has a floating type.

    References:
      Shao et al., "DeepSeekMath" (2024), eq. 3 (seq_mean_token_mean); Yu et al., "DAPO" (2025), eq. 8 (token_mean);
      Liu et al., "Understanding R1-Zero-like training" (2025) (seq_mean_token_sum_norm).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> mask = jnp.array([[True, True, True], [True, False, False]])
      >>> print(kljax.token_weights(mask, mode="seq_mean_token_sum_norm", max_length=5))
      [[0.1 0.1 0.1]
       [0.1 0.  0. ]]
    """
    check_choice("mode", mode, MODES)
    check_choice("empty_rows", empty_rows, EMPTY_ROWS)
    _check_arguments(mode, max_length, group_ids, num_groups, denominator)
    per_row = row_count(mask).astype(jnp.result_type(float))
    explicit = None if denominator is None else jnp.asarray(denominator, per_row.dtype)
    rows = _count_rows(per_row, mask, empty_rows, axis_name) if explicit is None else explicit
    if mode == "token_mean":
        divisor = over_devices(per_row.sum((-2, -1), keepdims=True), axis_name) if explicit is None else explicit
    elif mode == "token_sum":
        divisor = jnp.ones_like(per_row[..., :1])
    elif mode == "seq_mean_token_sum":
        divisor = rows
    elif mode == "seq_mean_token_mean":
        divisor = rows * to_tokens(per_row, mask)
    elif mode == "seq_mean_token_sum_norm":
        divisor = rows * _needed("max_length", max_length, mode)
    else:
        groups = as_groups(_needed("group_ids", group_ids, mode), num_groups, unknown=True)
        if groups.axis_name not in (None, axis_name):
            raise ValueError(f"group_ids.axis_name: got {groups.axis_name!r}, expected axis_name = {axis_name!r}")
        prompts, tokens = _count_prompts(mask, per_row, groups, empty_rows, axis_name)
        divisor = (prompts if explicit is None else explicit) * tokens
    return jnp.where(check_mask(mask) & (divisor > 0), 1 / jnp.where(divisor > 0, divisor, 1), 0)


def aggregate(
    values: Real[ArrayLike, "B T"],
    mask: MaskLike[Mask, "B T"],
    *,
    mode: Reduction,
    max_length: Scalar | None = None,
    group_ids: ArrayLike | Groups | None = None,
    num_groups: int | None = None,
    empty_rows: EmptyRows = "drop",
    denominator: Scalar | None = None,
    axis_name: AxisName = None,
) -> Float[Array, ""]:
    """Reduces per-token values of a whole batch to a scalar: `sum(where(mask, values, 0) * token_weights(mask, ...))`.

    Args:
      values: `[B, T]` per-token values, any float type.
      mask: `[B, T]` booleans, True on trained tokens; or `Segments`.
      mode: the reduction, see `token_weights`.
      max_length: see `token_weights`.
      group_ids: `[B]` integers, or `[B, T]` with `Segments`, see `token_weights`.
      num_groups: see `token_weights`.
      empty_rows: see `token_weights`.
      denominator: see `token_weights`.
      axis_name: see `token_weights`.

    Returns:
      A scalar, float32 or float64, in the unit of `values`; 0 where nothing is unmasked.

    Gradient:
      To `values`: the token weights; exactly 0 at masked positions.

    Raises:
      ValueError: if the shapes differ, or as `token_weights`.

    References:
      As `token_weights`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> values, mask = jnp.array([[1.0, 3.0], [5.0, jnp.nan]]), jnp.array([[True, True], [True, False]])
      >>> print(kljax.aggregate(values, mask, mode="token_mean"))
      3.0
      >>> print(kljax.aggregate(values, mask, mode="seq_mean_token_mean"))
      3.5
    """
    check_same_shape(values=values, mask=mask)
    weights = token_weights(
        mask,
        mode=mode,
        max_length=max_length,
        group_ids=group_ids,
        num_groups=num_groups,
        empty_rows=empty_rows,
        denominator=denominator,
        axis_name=axis_name,
    )
    (values,) = as_float(values)
    return over_devices((masked(values, mask) * weights.astype(values.dtype)).sum(), axis_name)


def _check_arguments(
    mode: Reduction, max_length: object, group_ids: object, num_groups: object, denominator: object
) -> None:
    check_only_with(
        mode == "seq_mean_token_sum_norm",
        f"has no meaning in mode {mode!r}, only in 'seq_mean_token_sum_norm'",
        {"max_length": max_length},
    )
    check_only_with(
        mode == "prompt_mean",
        f"has no meaning in mode {mode!r}, only in 'prompt_mean'",
        {"group_ids": group_ids, "num_groups": num_groups},
    )
    check_only_with(
        mode != "token_sum", "has no meaning in mode 'token_sum', which divides by 1", {"denominator": denominator}
    )
    check_at_least("max_length", max_length, 0, strict=True)
    check_at_least("denominator", denominator, 0, strict=True)


def _needed(name: str, value: Any, mode: Reduction) -> Any:
    if value is None:
        raise ValueError(f"{name}: got None, but mode {mode!r} needs it")
    return value


def _count_rows(per_row: Array, mask: Mask, empty_rows: EmptyRows, axis_name: AxisName) -> Array:
    """`[..., 1, 1]`: how many rows, or segments, a mean over sequences divides by."""
    counted = per_row > 0
    if empty_rows == "count":
        ids = segment_ids(mask)
        counted = jnp.ones_like(counted) if ids is None else row_any(narrowed(mask, ids >= 0))
    return over_devices(counted.sum((-2, -1), keepdims=True), axis_name).astype(per_row.dtype)


@auto_sharded
def _count_prompts(
    mask: Mask, per_row: Array, groups: Groups, empty_rows: EmptyRows, axis_name: AxisName
) -> tuple[Array, Array]:
    """`[..., 1, 1]`: how many prompts a mean over them divides by; and how many tokens the prompt of each row has.

    The latter is `[..., B, 1]`, or `[..., B, T]` with `Segments`, which may have a prompt for each token.
    """
    ids = as_array(groups.ids)
    if isinstance(mask, Segments):
        check_same_shape(group_ids=ids, mask=mask)
        counted = check_mask(mask)
        there = as_array(mask.ids) >= 0
    else:
        counted = per_row[..., 0]
        there = ids >= 0
        check_same_shape(group_ids=ids, rows=counted)
    batch = per_row.shape[:-2]
    flat = jnp.where(there & (ids < groups.count), ids, -1).reshape(*batch, -1)

    def per_prompt(values: Array) -> Array:
        return over_devices(add_by_id(values.reshape(flat.shape).astype(int), flat, groups.count), axis_name)

    tokens = per_prompt(counted)
    present = (tokens if empty_rows == "drop" else per_prompt(there)) > 0
    of_ids = take_by_id(tokens, flat).reshape(ids.shape if isinstance(mask, Segments) else per_row.shape)
    return present.sum(-1)[..., None, None].astype(per_row.dtype), of_ids.astype(per_row.dtype)
