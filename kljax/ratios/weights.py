"""Importance weights: what a token's loss is multiplied by because another policy drew it; `[..., T]`."""

from kljax._checks import check_at_least
from kljax._numerics import exp_capped
from kljax._typing import Array, ArrayLike, Scalar
from kljax.ratios.levels import level_log_ratios, level_to_tokens

__all__ = ["truncated_importance_weights"]


def truncated_importance_weights(
    log_probs: ArrayLike,
    behaviour_log_probs: ArrayLike,
    mask: ArrayLike,
    *,
    level: str = "token",
    max_weight: Scalar | None = 2.0,
) -> Array:
    """Truncated importance weights: `w = min(r, max_weight)` with the ratio `r` of a level, given to every token.

    Multiplied into a per-token loss they correct it for tokens that another policy drew, e.g. an inference engine
    whose numerics differ from the trainer's; the cap trades bias for variance.

    Args:
      log_probs: `[..., T]` log-probs of the policy the loss is about (usually the old policy), in nats; data.
      behaviour_log_probs: same shape, log-probs of the policy that drew the tokens (usually the rollout engine).
      mask: same shape, boolean.
      level: "token", "sequence" (product over the row) or "geometric" (its length-normalised form).
      max_weight: the cap; None does not truncate.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0. Sequence levels repeat one weight over the row.

    Gradient:
      Plain mathematics: that of `r` below the cap, 0 above it. Weights of recorded policies are data.

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
    log_ratio = level_log_ratios(log_probs, behaviour_log_probs, mask, level)
    return level_to_tokens(exp_capped(log_ratio, max_weight), mask, level)
