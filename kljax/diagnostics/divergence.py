"""How far two policies are apart at the sampled tokens: means per token."""

from kljax._typing import ArrayLike, Scalar
from kljax.aggregation import WeightedSum
from kljax.kl import estimate_kl

__all__ = ["log_prob_abs_diff", "ppo_kl", "reference_kl", "rollout_kl"]


def ppo_kl(
    log_probs: ArrayLike, old_log_probs: ArrayLike, mask: ArrayLike, *, log_ratio_clip: Scalar | None = None
) -> WeightedSum:
    """How far an update has moved the policy: `E[log pi_old - log pi]`, k1 of KL(old || pi) over tokens of old.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: same shape, log-probs at the start of the update.
      mask: same shape, boolean.
      log_ratio_clip: bound of each token's log-ratio, in nats; None does not clip. verl uses 20.

    Returns:
      `WeightedSum` per token, in nats; can be negative on a sample.

    Gradient:
      None; metrics are data.

    Raises:
      ValueError: if the shapes differ.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.ppo_kl(jnp.array([-2.0, -1.0]), jnp.array([-1.0, -1.0]), jnp.array([1, 1])).value())
      0.5
    """
    kl = estimate_kl(old_log_probs, log_probs, mask, estimator="k1", log_ratio_clip=log_ratio_clip)
    return WeightedSum.of(kl, mask)


def reference_kl(
    log_probs: ArrayLike, ref_log_probs: ArrayLike, mask: ArrayLike, *, estimator: str = "k3"
) -> WeightedSum:
    """KL(pi || ref) per token, over tokens drawn from pi.

    Args:
      log_probs: `[..., T]` log-probs of the policy that drew the tokens, in nats.
      ref_log_probs: same shape, log-probs of the reference.
      mask: same shape, boolean.
      estimator: as in `estimate_kl`; "k1" and "k3" have the KL as their expectation, and "k3" varies less.

    Returns:
      `WeightedSum` per token, in nats.

    Gradient:
      None; metrics are data.

    Raises:
      ValueError: for an unknown estimator or differing shapes.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> kl = kljax.reference_kl(jnp.array([-1.0]), jnp.array([-2.0]), jnp.array([1]))
      >>> print(f"{kl.value():.4f}")
      0.3679
    """
    return WeightedSum.of(estimate_kl(log_probs, ref_log_probs, mask, estimator=estimator), mask)


def rollout_kl(
    log_probs: ArrayLike, rollout_log_probs: ArrayLike, mask: ArrayLike, *, estimator: str = "k3"
) -> WeightedSum:
    """KL(rollout || pi) per token: the mismatch between the sampler that drew the tokens and the trainer.

    The tokens come from the rollout, so this is the direction that they estimate without bias: "k1" is
    `log pi_rollout - log pi`, "k3" is `r - 1 - log r` with `r = pi / pi_rollout`.

    Args:
      log_probs: `[..., T]` log-probs of the trainer's policy, in nats.
      rollout_log_probs: same shape, log-probs recorded by the sampler.
      mask: same shape, boolean.
      estimator: as in `estimate_kl`.

    Returns:
      `WeightedSum` per token, in nats.

    Gradient:
      None; metrics are data.

    Raises:
      ValueError: for an unknown estimator or differing shapes.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.rollout_kl(jnp.array([-2.0]), jnp.array([-1.0]), jnp.array([1]), estimator="k1").value())
      1.0
    """
    return WeightedSum.of(estimate_kl(rollout_log_probs, log_probs, mask, estimator=estimator), mask)


def log_prob_abs_diff(log_probs: ArrayLike, other_log_probs: ArrayLike, mask: ArrayLike) -> WeightedSum:
    """Mean absolute difference of two log-probs: `E[|log pi - log pi_other|]`.

    Args:
      log_probs: `[..., T]` log-probs, in nats.
      other_log_probs: same shape, e.g. the ones the sampler recorded.
      mask: same shape, boolean.

    Returns:
      `WeightedSum` per token, in nats.

    Gradient:
      None; metrics are data.

    Raises:
      ValueError: if the shapes differ.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.log_prob_abs_diff(jnp.array([-2.0, -1.0]), jnp.array([-1.0, -2.0]), jnp.array([1, 1])).value())
      1.0
    """
    return WeightedSum.of(estimate_kl(log_probs, other_log_probs, mask, estimator="abs"), mask)
