"""Order statistics: extremes, which merge like sums do, and quantiles, which need the whole batch."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp

from kljax._checks import check_mask
from kljax._devices import all_rows, auto_sharded, greatest, least, same_everywhere
from kljax._typing import Array, ArrayLike, AxisName, Float, Level, Mask, MaskLike
from kljax.masking import masked
from kljax.ratios import level_log_ratios, level_mask

__all__ = ["Extremes", "log_prob_diff_extremes", "ratio_quantiles"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extremes:
    """The smallest and the largest value so far; extremes of parts of a batch are merged by `+`.

    Attributes:
      min: the smallest value, a scalar; infinite if there was none.
      max: the largest value, a scalar; negative infinity if there was none.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> a = kljax.Extremes.of(jnp.array([1.0, 3.0]), jnp.array([True, True]))
      >>> b = kljax.Extremes.of(jnp.array([2.0, 9.0]), jnp.array([True, False]))
      >>> print((a + b).min, (a + b).max)
      1.0 3.0
    """

    min: Array
    max: Array

    @classmethod
    def of(cls, values: ArrayLike, mask: Mask) -> Self:
        """The extremes of the unmasked values, detached. A NaN among them makes both NaN.

        Args:
          values: array of any shape and float type.

        Returns:
          `Extremes` of two scalars, float32 or float64; infinity and negative infinity where nothing is unmasked.
        """
        values = jax.lax.stop_gradient(masked(values, mask))
        unmasked = check_mask(mask)
        lowest = jnp.where(unmasked, values, jnp.inf).min(initial=jnp.inf)
        return cls(lowest, jnp.where(unmasked, values, -jnp.inf).max(initial=-jnp.inf))

    def __add__(self, other: Self) -> Self:
        return type(self)(jnp.minimum(self.min, other.min), jnp.maximum(self.max, other.max))

    def reduce(self, axis: int = 0) -> Self:
        """Merges parts that lie along an axis, such as the micro-batches of a scan.

        Args:
          axis: the axis of the parts, in `min` and in `max`.

        Returns:
          `Extremes` without that axis.
        """
        return type(self)(self.min.min(axis), self.max.max(axis))

    def value(self) -> Array:
        """The largest value; 0 if there was none.

        Returns:
          Array of the shape of `max`, in the unit of the values.
        """
        return jnp.where(self.max == -jnp.inf, 0, self.max)


def log_prob_diff_extremes(
    log_probs: Float[ArrayLike, "*b T"],
    rollout_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    level: Level = "token",
    absolute: bool = False,
    axis_name: AxisName = None,
) -> Extremes:
    """The smallest and the largest difference of two log-probs; `exp` of them is that of the ratios.

    Args:
      log_probs: `[..., T]` log-probs, in nats.
      rollout_log_probs: log-probs recorded by the sampler, or of any other policy.
      mask: boolean or `Segments`.
      level: "token", "sequence" (sum over the row) or "geometric" (mean over the row).
      absolute: takes the absolute difference.
      axis_name: mapped axes, as of `shard_map`, over whose parts the extremes are taken as well.

    Returns:
      `Extremes` over the unmasked tokens, or over the rows that have one, in nats.

    Raises:
      ValueError: for an unknown level or differing shapes.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, rollout = jnp.array([-2.0, -1.0, -1.0]), jnp.array([-1.0, -3.0, -1.0])
      >>> print(kljax.log_prob_diff_extremes(lp, rollout, jnp.array([1, 1, 1])).max)
      2.0
    """
    difference = level_log_ratios(log_probs, rollout_log_probs, mask, level)
    extremes = Extremes.of(jnp.abs(difference) if absolute else difference, level_mask(mask, level))
    return Extremes(least(extremes.min, axis_name), greatest(extremes.max, axis_name))


@auto_sharded
def ratio_quantiles(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    quantiles: Sequence[float] = (0.0, 0.01, 0.5, 0.99, 1.0),
    level: Level = "token",
    axis_name: AxisName = None,
) -> Float[Array, " Q"]:
    """Quantiles of the importance ratios of a whole batch, interpolated linearly between their logarithms.

    An order statistic: statistics of micro-batches do not add up, so it is taken before the batch is split.

    Args:
      log_probs: `[..., T]` log-probs of the numerator policy, in nats.
      old_log_probs: log-probs of the denominator policy.
      mask: boolean or `Segments`.
      quantiles: numbers between 0 and 1; 0 is the minimum, 1 the maximum.
      level: "token", "sequence" (product over the row) or "geometric" (its length-normalised form).
      axis_name: mapped axes, as of `shard_map`, over whose parts the batch is spread; their ratios are gathered.

    Returns:
      `[Q]`, float32 or float64: the quantiles over the unmasked tokens, or over the rows that have one. 1 if there is
      none, NaN if one of them is.

    Raises:
      ValueError: for an unknown level, differing shapes, or a quantile that is not between 0 and 1.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, old = jnp.log(jnp.array([0.1, 0.4, 0.2])), jnp.log(jnp.array([0.2, 0.2, 0.2]))
      >>> print(kljax.ratio_quantiles(lp, old, jnp.array([1, 1, 1]), quantiles=(0.0, 0.5, 1.0)).round(4))
      [0.5 1.  2. ]
    """
    if not all(0 <= quantile <= 1 for quantile in quantiles):
        raise ValueError(f"quantiles: got {tuple(quantiles)!r}, expected numbers between 0 and 1")
    log_ratio = level_log_ratios(log_probs, old_log_probs, mask, level)
    values = jax.lax.stop_gradient(log_ratio).ravel()
    unmasked = level_mask(mask, level).ravel()
    values, unmasked = all_rows((values, unmasked), axis_name)
    # What is masked goes behind everything else; one more, as a batch without rows has nothing to index.
    ordered = jnp.sort(jnp.pad(jnp.where(unmasked, values, jnp.inf), (0, 1), constant_values=jnp.inf))
    rank = jnp.asarray(quantiles, values.dtype) * jnp.maximum(unmasked.sum() - 1, 0).astype(values.dtype)
    below = jnp.floor(rank)
    low, high = (ordered[at.astype(int)] for at in (below, jnp.ceil(rank)))
    share = rank - below
    # A share of 0, two equal values and an infinite one below are exact: no difference of infinities.
    exact = (share == 0) | (low == high) | jnp.isinf(low)
    between = jnp.where(exact, low, low + share * (high - low))
    between = jnp.where((unmasked & jnp.isnan(values)).any(), jnp.nan, between)
    return same_everywhere(jnp.where(unmasked.any(), jnp.exp(between), 1), axis_name)
