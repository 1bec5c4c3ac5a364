"""Rejection by the second moment of the log-ratio: a budget for the batch in place of a bound for each token.

The masks are chosen over the whole batch and treated as constants; arrays are `[..., T]`.
"""

import jax
import jax.numpy as jnp

from kljax._checks import as_float, check_at_least, check_mask, check_same_shape
from kljax._devices import all_rows, auto_sharded
from kljax._typing import Array, ArrayLike, AxisName, Bool, Float, Mask, MaskLike, Real, Scalar
from kljax.masking import masked

__all__ = ["second_moment_mask"]


@auto_sharded
def second_moment_mask(
    log_probs: Float[ArrayLike, "*b T"],
    sampling_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    threshold: Scalar = 0.04,
    symmetric: bool = False,
    axis_name: AxisName = None,
) -> Bool[Array, "*b T"]:
    """M2PO's mask: drops the largest `d^2 = (log pi - log behaviour)^2` until the mean of the rest is `threshold`.

    The candidates are the tokens that have gone already where their advantage sends them: `A > 0` and `d > 0`, or
    `A < 0` and `d < 0`, the two cases that PPO clips. A squared log-ratio never cancels, as a mean of `d` does, so that
    the mean over the batch bounds the variance of the weights. Few tokens leave: only the outliers above the budget.

    The choice depends on all tokens at once. Made here over the whole batch, before it is split, it does not depend on
    micro-batches, devices or the order of rows; equal values of `d^2` are kept or dropped together.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, or of the one before the update, in nats.
      sampling_log_probs: log-probs of the policy that drew the tokens.
      advantages: per token; only their sign is read.
      threshold: the largest mean of `d^2` over the candidates that are kept, inclusive, at least 0, in squared nats.
      symmetric: every token is a candidate, whatever the sign of its advantage, as in AReaL.
      axis_name: mapped axes, as of `shard_map`, over whose parts the first axis is spread; the mean is that of the
        whole batch.

    Returns:
      `[..., T]` booleans, a subset of `mask`: tokens that are no candidates, and candidates that are kept. A log-ratio
      that is NaN is no candidate; an infinite one is dropped.

    Raises:
      ValueError: for differing shapes or a negative threshold.

    References:
      Zheng et al., "Prosperity before collapse: how far can off-policy RL reach with stale data on LLMs?" (M2PO, 2025),
      algorithm 1; AReaL's `m2_threshold` takes all tokens of a micro-batch.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, rollout = jnp.array([0.1, 0.2, 0.3, -0.9]), jnp.zeros(4)
      >>> print(kljax.second_moment_mask(lp, rollout, jnp.ones(4), jnp.array([1, 1, 1, 1])))
      [ True  True False  True]
    """
    check_at_least("threshold", threshold, 0)
    check_same_shape(log_probs=log_probs, sampling_log_probs=sampling_log_probs, advantages=advantages, mask=mask)
    arrays = as_float(log_probs, sampling_log_probs, advantages)
    log_probs, behaviour, advantages = (jax.lax.stop_gradient(masked(array, mask)) for array in arrays)
    log_ratio = log_probs - behaviour
    unmasked = check_mask(mask)
    square = jnp.square(log_ratio)
    candidates = unmasked & ~jnp.isnan(square)
    if not symmetric:
        candidates &= log_ratio * jnp.sign(advantages) > 0
    ordered = jnp.sort(jnp.where(*all_rows((candidates, square), axis_name), jnp.inf).ravel())
    # Of ascending values: their mean grows, and where it passes the threshold the first dropped one stands. Behind the
    # candidates stand infinities.
    counts = jnp.arange(1, ordered.size + 1, dtype=ordered.dtype)
    fits = jnp.cumsum(ordered) / counts <= jnp.asarray(threshold, ordered.dtype)
    first_dropped = jnp.where(fits, jnp.inf, ordered).min(initial=jnp.inf)
    return unmasked & ~(candidates & (square >= first_dropped))
