"""Means of values per token that are there already: over tokens, over rows, over buckets of positions."""

from typing import get_args

import jax
import jax.numpy as jnp

from kljax._checks import check_at_least, check_choice, check_mask, check_same_shape
from kljax._typing import Array, ArrayLike, Mask, MaskLike, MetricMode, Real, Scalar, Shaped
from kljax.aggregation import WeightedSum
from kljax.masking import masked
from kljax.rows import positions, row_any, row_first, row_max, row_mean, row_sum, to_tokens

__all__ = ["masked_fraction", "mean_by_position", "mean_metric"]

MODES = get_args(MetricMode)


def mean_metric(
    values: Shaped[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    mode: MetricMode = "token_mean",
) -> WeightedSum:
    """The mean of values per token, or of a statistic of each row, as a `WeightedSum`.

    With `n_i` tokens in row `i` and `S` rows that have one:

        token_mean           sum of all tokens / number of all tokens
        seq_mean_token_mean  1/S sum_i (sum_t x_it / n_i)
        seq_mean_token_sum   1/S sum_i sum_t x_it
        seq_mean_token_max   1/S sum_i max_t |x_it|

    Args:
      values: `[..., T]`, any float type or booleans.
      mask: boolean or `Segments`.
      mode: one of the four names above; the systems disagree about which one a metric called "kl" is.

    Returns:
      `WeightedSum`; its weight is the number of tokens, or of rows that have one.

    Raises:
      ValueError: for an unknown mode or differing shapes.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> values, mask = jnp.array([[1.0, 2.0], [6.0, 0.0]]), jnp.array([[True, True], [True, False]])
      >>> for mode in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_max"):
      ...     print(mode, kljax.mean_metric(values, mask, mode=mode).value())
      token_mean 3.0
      seq_mean_token_mean 3.75
      seq_mean_token_sum 4.5
      seq_mean_token_max 4.0
    """
    check_choice("mode", mode, MODES)
    values = masked(values, mask)
    if mode == "token_mean":
        return WeightedSum.of(values, mask)
    if mode == "seq_mean_token_mean":
        rows = row_mean(values, mask)
    elif mode == "seq_mean_token_sum":
        rows = row_sum(values, mask)
    else:
        rows = row_max(jnp.abs(values), mask, initial=0)
    return WeightedSum.of(rows, row_any(mask))


def masked_fraction(
    kept: MaskLike[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    mode: MetricMode = "token_mean",
) -> WeightedSum:
    """The fraction of the unmasked tokens that a further mask drops: of a rejection, a veto, a divergence mask.

    Args:
      kept: `[..., T]` booleans, the tokens kept; what they are outside `mask` does not matter.
      mask: boolean or `Segments`, the tokens there were.
      mode: as in `mean_metric`. "seq_mean_token_mean" weighs rows equally; "seq_mean_token_max" is the fraction of rows
        that lose a token.

    Returns:
      `WeightedSum` of zeros and ones.

    Raises:
      ValueError: for an unknown mode or differing shapes.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> kept, mask = jnp.array([True, False, False]), jnp.array([True, True, False])
      >>> print(kljax.masked_fraction(kept, mask).value())
      0.5
    """
    check_same_shape(kept=kept, mask=mask)
    return mean_metric(~check_mask(kept, "kept"), mask, mode=mode)


def mean_by_position(
    values: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    num_buckets: int,
    max_length: Scalar | None = None,
) -> WeightedSum:
    """The mean of values per token in each of a number of equal ranges of positions.

    A position is counted from the first unmasked token of its row, so prompts and padding on the left do not shift it.

    Args:
      values: `[..., T]`, any float type.
      mask: boolean or `Segments`.
      num_buckets: static number `K` of ranges, each of `max_length / K` positions.
      max_length: the length that the ranges divide, in tokens; None is T. Parts of a batch that are padded to
        different lengths need one common number. Later positions belong to the last range.

    Returns:
      `WeightedSum` with `[K]` arrays; a range without a token has weight 0.

    Raises:
      ValueError: if the shapes differ, or a number is not positive.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> values, mask = jnp.array([[9.0, 1.0, 2.0, 3.0]]), jnp.array([[False, True, True, True]])
      >>> print(kljax.mean_by_position(values, mask, num_buckets=2).value())
      [1.5 3. ]
    """
    check_at_least("num_buckets", num_buckets, 1)
    check_at_least("max_length", max_length, 0, strict=True)
    values = jax.lax.stop_gradient(masked(values, mask))
    unmasked = check_mask(mask)
    length = jnp.asarray(unmasked.shape[-1] if max_length is None else max_length, values.dtype)
    position = positions(unmasked) - to_tokens(row_first(mask), mask)
    bucket = jnp.floor(position.astype(values.dtype) * num_buckets / length).clip(0, num_buckets - 1)

    def of_bucket(number: Array) -> WeightedSum:
        return WeightedSum.of(values, unmasked & (bucket == number))

    return jax.vmap(of_bucket)(jnp.arange(num_buckets, dtype=values.dtype))
