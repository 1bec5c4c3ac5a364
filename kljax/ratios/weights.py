"""Importance weights: what a token's loss is multiplied by because another policy drew it; `[..., T]`."""

from typing import get_args

import jax.numpy as jnp

from kljax._checks import check_at_least, check_choice, check_only_with
from kljax._numerics import clip, exp_capped
from kljax._typing import (
    Array,
    ArrayLike,
    AxisName,
    Float,
    Level,
    Mask,
    MaskLike,
    Scalar,
    WeightMode,
    WeightNormalization,
)
from kljax.masking import masked, masked_mean
from kljax.ratios.levels import check_bounds, largest, level_log_ratios, level_mask, level_to_tokens, within
from kljax.rows import row_any, row_mean

__all__ = ["importance_weights", "truncated_importance_weights"]

MODES = get_args(WeightMode)
NORMALIZE = get_args(WeightNormalization)


def importance_weights(
    log_probs: Float[ArrayLike, "*b T"],
    sampling_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    level: Level = "token",
    mode: WeightMode = "truncate",
    lower: Scalar | None = None,
    upper: Scalar | None = None,
    log_ratio_clip: Scalar | None = None,
    normalize: WeightNormalization = "none",
    axis_name: AxisName = None,
) -> Float[Array, "*b T"]:
    """Importance weights: the ratio `r` of a level, kept within bounds in one of three ways, given to every token.

        truncate  min(r, upper)
        mask      r where lower <= r <= upper, else 0   (IcePop)
        clip      min(max(r, lower), upper)

    Multiplied into a per-token loss they correct it for tokens that another policy drew, e.g. an inference engine
    whose numerics differ from the trainer's; the bounds trade bias for variance. A token whose behaviour log-prob is
    not known has the ratio 1 if it is given the one in `log_probs`.

    Args:
      log_probs: `[..., T]` log-probs of the policy the loss is about (usually the old policy), in nats; a constant.
      sampling_log_probs: log-probs of the policy that drew the tokens (usually the rollout engine).
      mask: boolean or `Segments`.
      level: "token", "sequence" (product over the row) or "geometric" (its length-normalised form).
      mode: "truncate", "mask" or "clip".
      lower: lowest ratio, inclusive; for "mask" and "clip". None has no lower bound.
      upper: highest ratio, inclusive; None has no upper bound.
      log_ratio_clip: bound of the level's log-ratio before `exp`, in nats; None does not clip. verl and SkyRL use 20.
      normalize: "none"; "tokens" divides the weights by their mean over all tokens, "rows" by the mean over all rows
        (with a token) of the row's mean weight. Weights that are all 0 stay.
      axis_name: mapped axes, as of `shard_map`, over whose parts the mean of `normalize` is taken as well.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0. Sequence levels repeat one weight over the row. With
      `normalize`, finite even where a ratio alone would overflow. A NaN ratio is masked by "mask", else stays NaN.

    Gradient:
      Plain mathematics: that of `r` within the bounds, 0 beyond them. Weights of recorded policies are constants.

    Raises:
      ValueError: for an unknown name, differing shapes, `lower` with "truncate", no bound for the other modes, a
        bound that is negative (`upper`: not positive), or `lower > upper`.

    References:
      Ionides, "Truncated importance sampling" (2008); Yao et al., "Your efficient RL framework secretly brings you
      off-policy RL training" (2025); Ling Team, "Every step evolves" (2025) (IcePop).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, rollout, mask = jnp.log(jnp.array([0.9, 0.1])), jnp.log(jnp.array([0.3, 0.2])), jnp.array([1, 1])
      >>> for mode in ("truncate", "mask", "clip"):
      ...     lower = None if mode == "truncate" else 0.8
      ...     print(kljax.importance_weights(lp, rollout, mask, mode=mode, lower=lower, upper=2.0))
      [2.  0.5]
      [0. 0.]
      [2.  0.8]
    """
    check_choice("mode", mode, MODES)
    check_choice("normalize", normalize, NORMALIZE)
    check_only_with(mode != "truncate", "has no meaning in mode 'truncate'", {"lower": lower})
    check_bounds(lower, upper, needed=mode != "truncate", low=0)
    check_at_least("upper", upper, 0, strict=True)
    log_ratio = level_log_ratios(log_probs, sampling_log_probs, mask, level, log_ratio_clip)
    accepted = within(jnp.exp(log_ratio), lower, upper) if mode == "mask" else jnp.ones(log_ratio.shape, bool)
    # Replaced before `exp`: an overflow that is masked then leaves a gradient of 0 instead of `0 * inf`.
    log_ratio = jnp.where(accepted, log_ratio, 0)
    bounds = (None, None) if mode == "mask" else (lower, upper)
    if normalize == "none":
        return level_to_tokens(jnp.where(accepted, _exp_clipped(log_ratio, *bounds), 0), mask, level)
    counted = level_mask(mask, level)
    log_weight = clip(log_ratio, *(None if x is None else jnp.log(jnp.asarray(x, log_ratio.dtype)) for x in bounds))
    log_weight = log_weight - largest(log_weight, accepted & counted, axis_name)
    weights = level_to_tokens(jnp.where(accepted & counted, jnp.exp(log_weight), 0), mask, level)
    return weights / _mean_weight(weights, mask, normalize, axis_name)


def truncated_importance_weights(
    log_probs: Float[ArrayLike, "*b T"],
    sampling_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    level: Level = "token",
    max_weight: Scalar | None = 2.0,
) -> Float[Array, "*b T"]:
    """Truncated importance weights: `w = min(r, max_weight)` with the ratio `r` of a level, given to every token.

    The mode "truncate" of `importance_weights`, with the cap that is common.

    Args:
      log_probs: `[..., T]` log-probs of the policy the loss is about (usually the old policy), in nats; a constant.
      sampling_log_probs: log-probs of the policy that drew the tokens (usually the rollout engine).
      mask: boolean or `Segments`.
      level: "token", "sequence" (product over the row) or "geometric" (its length-normalised form).
      max_weight: the cap; None does not truncate.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0. Sequence levels repeat one weight over the row.

    Gradient:
      Plain mathematics: that of `r` below the cap, 0 above it. Weights of recorded policies are constants.

    Raises:
      ValueError: for an unknown level, differing shapes, or a cap that is not positive.

    References:
      Ionides, "Truncated importance sampling" (2008); Yao et al., "Your efficient RL framework secretly brings you
      off-policy RL training" (2025).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, rollout = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.0, -3.0]])
      >>> print(kljax.truncated_importance_weights(lp, rollout, jnp.array([[1, 1]])))
      [[1. 2.]]
    """
    check_at_least("max_weight", max_weight, 0, strict=True)
    return importance_weights(log_probs, sampling_log_probs, mask, level=level, upper=max_weight)


def _exp_clipped(log_values: Array, low: Scalar | None, high: Scalar | None) -> Array:
    """`min(max(exp(x), low), high)` with a gradient of 0 beyond the bounds, also where `exp` would overflow."""
    values = exp_capped(log_values, high)
    if low is None:
        return values
    low = jnp.asarray(low, values.dtype)
    return jnp.where(log_values < jnp.log(low), low, values)


def _mean_weight(weights: Array, mask: Mask, normalize: WeightNormalization, axis_name: AxisName) -> Array:
    """The mean of the weights over tokens or sequences; 1 where it is 0."""
    if normalize == "rows":
        weights = row_mean(weights, mask)
        mask = row_any(mask)
    mean = masked_mean(masked(weights, mask), mask, axis_name=axis_name)
    return jnp.where(mean == 0, 1, mean)
