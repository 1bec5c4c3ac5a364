"""The proximal policy, between the sampler and the policy being trained, without a pass of its own."""

import jax
import jax.numpy as jnp

from kljax._checks import as_array, as_float, check_numbers, check_same_shape
from kljax._typing import Array, ArrayLike, Float, Integer, Mask, MaskLike
from kljax.masking import masked

__all__ = ["loglinear_log_probs"]


def loglinear_log_probs(
    log_probs: Float[ArrayLike, "*b T"],
    rollout_log_probs: Float[ArrayLike, "*b T"],
    versions: Integer[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    version: int | Array,
) -> Float[Array, "*b T"]:
    """Log-probs of the policy one update ago, log-linear in its age: `log mu + a (log pi - log mu)`.

    `a = (version - 1 - v) / (version - v)` for a token that version `v` sampled: 0 for tokens of the last version, and
    towards 1 for old ones. They stand in for `old_log_probs` in a decoupled loss, whose ratio and clip are about the
    last update and whose importance weight `old / mu` is about all earlier ones, and cost no forward pass.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats; a constant here.
      rollout_log_probs: log-probs of the sampler.
      versions: integers, the number of updates of the policy that sampled each token.
      version: the number of updates of the policy being trained, at least 1; a traced one is not checked.

    Returns:
      `[..., T]`, float32 or float64, in nats; masked positions hold 0. A token that the current version sampled has
      its own `rollout_log_probs`.

    Gradient:
      Nothing flows to the log-probs: the result is treated as a constant.

    Raises:
      ValueError: for differing shapes.
      TypeError: for a `version` that is no number.

    References:
      AReaL 1.0.4, `prox_logp_method=loglinear`; Hilton et al., "Batch size-invariance for policy optimization" (2021)
      for the decoupled loss.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, rollout, versions = jnp.array([-1.0, -1.0]), jnp.array([-2.0, -2.0]), jnp.array([9, 6])
      >>> print(kljax.loglinear_log_probs(lp, rollout, versions, jnp.array([1, 1]), version=10))
      [-2.   -1.25]
    """
    check_same_shape(log_probs=log_probs, rollout_log_probs=rollout_log_probs, versions=versions, mask=mask)
    check_numbers(version=version)
    log_probs, sampler = (masked(array, mask) for array in as_float(log_probs, rollout_log_probs))
    age = (jnp.asarray(version) - as_array(versions).astype(int)).astype(log_probs.dtype)
    share = jnp.where(age >= 1, (age - 1) / jnp.maximum(age, 1), 0)
    # Without the `where`, a share of 0 would make NaN of an infinite difference.
    moved = jnp.where(share > 0, share * (log_probs - sampler), 0)
    return masked(jax.lax.stop_gradient(sampler + moved), mask)
