"""The clipped surrogate that the policy losses are special cases of."""

import jax.numpy as jnp

from kljax._checks import as_float, check_at_least, check_same_shape
from kljax._typing import Array, ArrayLike, Scalar
from kljax.masking import masked


def clipped_surrogate(
    log_ratio: Array, advantages: Array, *, clip_low: Scalar, clip_high: Scalar, dual_clip: Scalar | None = None
) -> Array:
    """`max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))` with `r = exp(log_ratio)`.

    Written as `-A e` with the ratio that takes effect, `e = min(r, 1 + clip_high)` for `A >= 0` and
    `max(r, 1 - clip_low)`, at most `dual_clip` if that is given, for `A < 0`. A ratio beyond its bound is replaced
    before `exp`: an overflow that the clip removes from the value then leaves a gradient of 0 instead of `0 * inf`. On
    a bound the gradient is PyTorch's: whole on `1 - clip_low` and `1 + clip_high`, half on `dual_clip`, where two
    terms tie.
    """
    low, high = (jnp.asarray(bound, log_ratio.dtype) for bound in (1 - clip_low, 1 + clip_high))
    raised = advantages >= 0
    ratio = jnp.exp(log_ratio)
    outside = jnp.where(raised, ratio > high, ratio < low)
    bound = jnp.where(raised, high, low)
    if dual_clip is not None:
        cap = jnp.asarray(dual_clip, log_ratio.dtype)
        capped = ~raised & (ratio > cap)
        outside, bound = outside | capped, jnp.where(capped, cap, bound)
    inside_ratio = jnp.exp(jnp.where(outside, 0, log_ratio))
    if dual_clip is not None:
        inside_ratio = jnp.where(raised, inside_ratio, jnp.minimum(inside_ratio, cap))
    return -advantages * jnp.where(outside, bound, inside_ratio)


def check_clip(clip_low: Scalar, clip_high: Scalar, dual_clip: Scalar | None = None) -> None:
    """Raises `ValueError` for bounds that leave no room for a ratio of 1."""
    check_at_least("clip_low", clip_low, 0)
    check_at_least("clip_high", clip_high, 0)
    check_at_least("dual_clip", dual_clip, 1, strict=True)


def loss_inputs(
    log_probs: ArrayLike, old_log_probs: ArrayLike, advantages: ArrayLike, mask: ArrayLike
) -> tuple[Array, Array, Array]:
    """Log-probs, old log-probs and advantages in one float type, 0 under the mask."""
    shape = check_same_shape(log_probs=log_probs, old_log_probs=old_log_probs, mask=mask)
    if jnp.shape(advantages) != shape:
        raise ValueError(
            f"advantages: got shape {list(jnp.shape(advantages))}, expected {list(shape)}, one per token; "
            "broadcast_to_tokens(advantages, mask) gives each token the advantage of its row"
        )
    log_probs, old_log_probs, advantages = as_float(log_probs, old_log_probs, advantages)
    return masked(log_probs, mask), masked(old_log_probs, mask), masked(advantages, mask)
