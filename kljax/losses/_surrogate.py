"""Shared parts of the policy losses: clipped surrogate, ratio at a level, importance-weighted advantage."""

import math
import warnings
from typing import get_args

import jax.numpy as jnp

from kljax._checks import NUMBER, as_float, check_at_least, check_choice, check_log_probs, check_same_shape
from kljax._numerics import clip_symmetric, difference, exp_capped
from kljax._typing import Array, ArrayLike, Mask, Scalar, SurrogateLevel
from kljax.masking import masked
from kljax.ratios import level_log_ratios
from kljax.rows import to_tokens

# ART mixes the ratio of the token with that of its row: the mean of the two, and their geometric mean.
LEVELS = get_args(SurrogateLevel)


def clipped_surrogate(
    log_ratio: Array,
    advantages: Array,
    *,
    clip_low: Scalar,
    clip_high: Scalar,
    dual_clip: Scalar | None = None,
    max_ratio: Scalar | None = None,
) -> Array:
    """`max(-A min(r, max_ratio), -A clip(r, 1 - clip_low, 1 + clip_high))` with `r = exp(log_ratio)`.

    Written as `-A e` with the ratio that takes effect, `e = min(r, 1 + clip_high, max_ratio)` for `A >= 0` and
    `max(min(r, max(1 + clip_high, max_ratio)), 1 - clip_low)`, at most `dual_clip` if that is given, for `A < 0`. A
    ratio beyond its bound is replaced before `exp`: an overflow that the clip removes from the value then leaves a
    gradient of 0 instead of `0 * inf`. On a bound the gradient is PyTorch's: whole on all of them, but half on
    `dual_clip`, where two terms tie.
    """
    low, high = (jnp.asarray(bound, log_ratio.dtype) for bound in (1 - clip_low, 1 + clip_high))
    raised = advantages >= 0
    ratio = jnp.exp(log_ratio)
    top = jnp.where(raised, high, jnp.inf)
    if max_ratio is not None:
        largest = jnp.asarray(max_ratio, log_ratio.dtype)
        top = jnp.where(raised, jnp.minimum(high, largest), jnp.maximum(high, largest))
    if dual_clip is not None:
        cap = jnp.asarray(dual_clip, log_ratio.dtype)
        top = jnp.where(raised, top, jnp.minimum(top, cap))
    above = ratio > top
    outside = above | (~raised & (ratio < low))
    inside_ratio = jnp.exp(jnp.where(outside, 0, log_ratio))
    if dual_clip is not None:
        inside_ratio = jnp.where(raised, inside_ratio, jnp.minimum(inside_ratio, cap))
    return -advantages * jnp.where(outside, jnp.where(above, top, low), inside_ratio)


def beyond_clip(ratio: Array, advantages: Array, clip_low: Scalar, clip_high: Scalar) -> tuple[Array, Array]:
    """Where the clip is active: `r < 1 - clip_low` at `A < 0`, and `r > 1 + clip_high` at `A > 0`."""
    low, high = (jnp.asarray(bound, ratio.dtype) for bound in (1 - clip_low, 1 + clip_high))
    return (advantages < 0) & (ratio < low), (advantages > 0) & (ratio > high)


def importance_weighted(
    advantages: Array, log_ratio: Array, *, kept: Array | None = None, max_ratio: Scalar | None = None
) -> Array:
    """`A min(r, max_ratio)`; 0 where `A = 0` or a token is not kept, even where `r` overflows there."""
    used = advantages != 0 if kept is None else kept & (advantages != 0)
    return jnp.where(used, advantages, 0) * exp_capped(jnp.where(used, log_ratio, 0), max_ratio)


def log_ratios_of(
    log_probs: Array,
    old_log_probs: Array,
    mask: Mask,
    *,
    level: SurrogateLevel,
    log_ratio_clip: Scalar | None = None,
) -> Array:
    """Computes the log-ratio that each token has at a level, `[..., T]`, clipped last."""
    check_choice("level", level, LEVELS)
    check_at_least("log_ratio_clip", log_ratio_clip, 0, strict=True)
    if level in ("token", "sequence", "geometric"):
        log_ratio = level_log_ratios(log_probs, old_log_probs, mask, level, log_ratio_clip)
        return log_ratio if level == "token" else to_tokens(log_ratio, mask)
    token = level_log_ratios(log_probs, old_log_probs, mask, "token")
    row = to_tokens(level_log_ratios(log_probs, old_log_probs, mask, "geometric"), mask)
    mixed = (token + row) / 2 if level == "geometric_average" else _log_mean(token, row)
    return clip_symmetric(mixed, log_ratio_clip)


def _log_mean(first: Array, second: Array) -> Array:
    """`log((exp(a) + exp(b)) / 2)`, with a gradient also where both are minus infinity."""
    high = jnp.maximum(first, second)
    low = jnp.minimum(first, second)
    return high + (jnp.log1p(jnp.exp(difference(low, high))) - math.log(2))


def check_clip(
    clip_low: Scalar, clip_high: Scalar, dual_clip: Scalar | None = None, max_ratio: Scalar | None = None
) -> None:
    """Raises `ValueError` for bounds that leave no room for a ratio of 1, or for a cap that is not positive."""
    check_at_least("clip_low", clip_low, 0)
    check_at_least("clip_high", clip_high, 0)
    check_at_least("dual_clip", dual_clip, 1, strict=True)
    check_at_least("max_ratio", max_ratio, 0, strict=True)
    if isinstance(clip_high, NUMBER) and 1 < clip_high < 2:
        warnings.warn(
            f"clip_high: got {clip_high:g}, which bounds the ratio by {1 + clip_high:g}; for a bound of {clip_high:g} "
            f"pass {clip_high - 1:g}",
            stacklevel=3,
        )


def loss_inputs(
    log_probs: ArrayLike, old_log_probs: ArrayLike, advantages: ArrayLike, mask: Mask
) -> tuple[Array, Array, Array]:
    """Log-probs, old log-probs and advantages in one float type, 0 under the mask."""
    shape = check_same_shape(log_probs=log_probs, old_log_probs=old_log_probs, mask=mask)
    check_per_token(advantages, shape)
    log_probs, old_log_probs, advantages = as_float(log_probs, old_log_probs, advantages)
    log_probs = masked(log_probs, mask)
    old_log_probs = masked(old_log_probs, mask)
    check_log_probs(log_probs=log_probs, old_log_probs=old_log_probs)
    return log_probs, old_log_probs, masked(advantages, mask)


def check_per_token(advantages: ArrayLike, shape: tuple[int, ...]) -> None:
    """Raises `ValueError` unless there is one advantage per token."""
    if jnp.shape(advantages) != shape:
        raise ValueError(
            f"advantages: got shape {list(jnp.shape(advantages))}, expected {list(shape)}, one per token; "
            "broadcast_to_tokens(advantages, mask) gives each token the advantage of its row"
        )
