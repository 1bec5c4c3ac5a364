"""How many tokens a loss clips, and how many ratios are beyond bounds."""

from typing import get_args

import jax
import jax.numpy as jnp

from kljax._checks import as_float, check_choice, check_mask
from kljax._typing import Array, ArrayLike, Bool, ClipSide, Float, Level, Mask, MaskLike, Real, Scalar
from kljax.aggregation import WeightedSum
from kljax.losses._surrogate import beyond_clip, check_clip, loss_inputs
from kljax.losses.value import value_errors
from kljax.ratios import level_log_ratios, level_mask
from kljax.ratios.levels import check_bounds, within
from kljax.rows import to_tokens

__all__ = ["clip_fraction", "clipped_tokens", "dual_clip_fraction", "ratio_fraction", "value_clip_fraction"]

SIDES = get_args(ClipSide)


def clipped_tokens(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    side: ClipSide = "both",
    level: Level = "token",
) -> Bool[Array, "*b T"]:
    """The tokens whose clip is active: `r > 1 + clip_high` where `A > 0`, `r < 1 - clip_low` where `A < 0`.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs at the start of the update.
      advantages: a token of advantage 0 is never clipped.
      mask: boolean or `Segments`.
      clip_low: as in the loss.
      clip_high: as in the loss.
      side: "low" and "high" have one of the two conditions only.
      level: whose ratio: "token" for PPO, "geometric" for GSPO, or "sequence".

    Returns:
      `[..., T]` booleans, False at masked positions.

    Raises:
      ValueError: for differing shapes, a negative clip, or an unknown name.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, old, ones = jnp.array([0.0, -1.0]), jnp.array([-1.0, -1.0]), jnp.ones(2)
      >>> print(kljax.clipped_tokens(lp, old, ones, jnp.array([1, 1])))
      [ True False]
    """
    check_clip(clip_low, clip_high)
    check_choice("side", side, SIDES)
    ratio, advantages = _ratios(log_probs, old_log_probs, advantages, mask, level)
    below, above = beyond_clip(ratio, advantages, clip_low, clip_high)
    return check_mask(mask) & {"both": below | above, "low": below, "high": above}[side]


def clip_fraction(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    side: ClipSide = "both",
    level: Level = "token",
) -> WeightedSum:
    """Fraction of tokens whose clip is active: `r > 1 + clip_high` where `A > 0`, `r < 1 - clip_low` where `A < 0`.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs at the start of the update.
      advantages: a token of advantage 0 is never counted.
      mask: boolean or `Segments`.
      clip_low: as in the loss.
      clip_high: as in the loss.
      side: "low" and "high" count one of the two conditions only.
      level: whose ratio: "token" for PPO, "geometric" for GSPO, or "sequence".

    Returns:
      `WeightedSum` of zeros and ones per token.

    Raises:
      ValueError: for differing shapes, a negative clip, or an unknown name.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, old, ones = jnp.array([0.0, -1.0]), jnp.array([-1.0, -1.0]), jnp.ones(2)
      >>> print(kljax.clip_fraction(lp, old, ones, jnp.array([1, 1])).value())
      0.5
    """
    clips = {"clip_low": clip_low, "clip_high": clip_high}
    clipped = clipped_tokens(log_probs, old_log_probs, advantages, mask, **clips, side=side, level=level)
    return WeightedSum.of(clipped.astype(as_float(log_probs, old_log_probs, advantages)[0].dtype), mask)


def dual_clip_fraction(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    dual_clip: Scalar,
    level: Level = "token",
) -> WeightedSum:
    """Fraction of tokens that the dual clip bounds: `A < 0` and `r > dual_clip`.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs at the start of the update.
      advantages: per token; only their sign is read.
      mask: boolean or `Segments`.
      dual_clip: as in the loss, above 1.
      level: whose ratio: "token", "geometric" or "sequence".

    Returns:
      `WeightedSum` of zeros and ones per token.

    Raises:
      ValueError: for differing shapes, `dual_clip <= 1`, or an unknown level.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, old = jnp.array([0.0, 0.0]), jnp.array([-2.0, -2.0])
      >>> print(kljax.dual_clip_fraction(lp, old, jnp.array([1.0, -1.0]), jnp.array([1, 1]), dual_clip=3.0).value())
      0.5
    """
    check_clip(0, 0, dual_clip)
    ratio, advantages = _ratios(log_probs, old_log_probs, advantages, mask, level)
    bounded = (advantages < 0) & (ratio > jnp.asarray(dual_clip, ratio.dtype))
    return WeightedSum.of(bounded.astype(ratio.dtype), mask)


def ratio_fraction(
    log_probs: Float[ArrayLike, "*b T"],
    sampling_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    lower: Scalar | None = None,
    upper: Scalar | None = None,
    level: Level = "token",
) -> WeightedSum:
    """Fraction of the ratios outside bounds: `r < lower` or `r > upper`, whatever the advantage.

    Args:
      log_probs: `[..., T]` log-probs of the numerator policy, in nats.
      sampling_log_probs: log-probs of the denominator policy, usually the one that drew the tokens.
      mask: boolean or `Segments`.
      lower: lowest ratio inside, inclusive; None has no lower bound.
      upper: highest ratio inside, inclusive; None has no upper bound.
      level: "token", "sequence" (product over the row) or "geometric" (its length-normalised form).

    Returns:
      `WeightedSum` of zeros and ones per token, or per row that has one. A NaN ratio is outside.

    Raises:
      ValueError: for an unknown level, differing shapes, no bound at all, a negative bound, or `lower > upper`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, rollout = jnp.array([0.0, -1.0]), jnp.array([-1.0, -1.0])
      >>> print(kljax.ratio_fraction(lp, rollout, jnp.array([1, 1]), upper=2.0).value())
      0.5
    """
    check_bounds(lower, upper, low=0)
    ratio = jnp.exp(level_log_ratios(log_probs, sampling_log_probs, mask, level))
    return WeightedSum.of((~within(ratio, lower, upper)).astype(ratio.dtype), level_mask(mask, level))


def value_clip_fraction(
    values: Real[ArrayLike, "*b T"],
    old_values: Real[ArrayLike, "*b T"],
    returns: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    clip: Scalar,
) -> WeightedSum:
    """Counts the values whose clip is active: `(clip(V, V_old - c, V_old + c) - R)^2 > (V - R)^2`.

    Args:
      values: `[..., T]` values `V` being trained, in the unit of the rewards.
      old_values: the values at the start of the update.
      returns: the targets `R`.
      clip: how far `c` the value may move from the old one, positive; as in `value_loss`.

    Returns:
      `WeightedSum` of zeros and ones per token. The gradient of `value_loss` is 0 at the tokens counted.

    Raises:
      ValueError: for differing shapes, or a `clip` that is not positive.

    References:
      verl `compute_value_loss`, `vf_clipfrac`; SkyRL `ppo_critic_loss`, `clipfrac`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> values, old, returns = jnp.array([2.0, 1.0]), jnp.array([0.0, 1.0]), jnp.array([2.0, 3.0])
      >>> print(kljax.value_clip_fraction(values, old, returns, jnp.array([1, 1]), clip=0.5).value())
      0.5
    """
    error, clipped_error = value_errors(values, old_values, returns, mask, clip)
    return WeightedSum.of((clipped_error > error).astype(error.dtype), mask)


def _ratios(
    log_probs: ArrayLike, old_log_probs: ArrayLike, advantages: ArrayLike, mask: Mask, level: Level
) -> tuple[Array, Array]:
    """The ratios of a level and the advantages, both `[..., T]` and detached."""
    log_probs, old_log_probs, advantages = loss_inputs(log_probs, old_log_probs, advantages, mask)
    ratio = jnp.exp(level_log_ratios(log_probs, old_log_probs, mask, level))
    if level != "token":
        ratio = to_tokens(ratio, mask)
    return jax.lax.stop_gradient((ratio, advantages))
