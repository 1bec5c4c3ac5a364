"""Synthetic policies to audit: logits of language-model size at a known KL."""

import math

import jax
import jax.numpy as jnp

from kljax._checks import check_at_least, check_at_most
from kljax._typing import Array

__all__ = ["example_logits"]

# The KL is convex in the size of a perturbation: Newton's method converges from any size above 0.
_STEPS = 20
# Logits of standard deviation `s sqrt(2 log V)`: with s between these the entropy is about 1 nat on average whatever V,
# and a tenth of the positions each have less than 0.05 and more than 2.3 nats, as the positions of a text.
_SCALES = (1.0, 4.0)
MAX_KL = 100.0
"""In nats: a perturbation for more leaves float32."""


def example_logits(
    *,
    rows: int = 32,
    length: int = 16,
    vocabulary: int = 1000,
    kl: float = 0.1,
    staleness: float = 0.0,
    key: Array | None = None,
) -> tuple[Array, Array, Array | None]:
    """Draws logits of a policy, of a reference at a mean KL of `kl` per token, and of a stale behaviour policy.

    The policy's logits are normal, of a scale that differs between positions: some tokens are nearly certain, some are
    open, and the mean entropy is about 1 nat, as that of text. The reference is the policy with normal noise of one
    size added everywhere, found by Newton's method such that the mean KL(policy || reference) is `kl`. The behaviour
    policy is an earlier state of the policy, with a mean KL(policy || behaviour) of `staleness`: half the variance of
    its perturbation points towards the reference, half is its own.

    Args:
      rows: N, number of rows.
      length: T, positions of each.
      vocabulary: V, number of tokens, at least 2.
      kl: mean of KL(policy || reference) per position, in nats, 0 to 100.
      staleness: mean of KL(policy || behaviour) per position, in nats, 0 to 100; 0 returns no behaviour policy.
      key: PRNG key; None is `jax.random.key(0)`.

    Returns:
      `(logits, ref_logits, sampling_logits)`, each `[N, T, V]` float32; the last is None without staleness.

    Raises:
      ValueError: for a size below 1 or a KL out of range.

    Example:
      >>> import kljax
      >>> policy, ref, behaviour = kljax.audit.example_logits(rows=8, length=4, vocabulary=50, kl=0.1)
      >>> measured = kljax.audit.audit_logits(policy, ref, bootstrap=0).kl["token"]
      >>> print(policy.shape, behaviour, f"{measured.value:.3f}")
      (8, 4, 50) None 0.100
    """
    for name, size, least in (("rows", rows, 1), ("length", length, 1), ("vocabulary", vocabulary, 2)):
        check_at_least(name, size, least)
    for name, nats in (("kl", kl), ("staleness", staleness)):
        check_at_least(name, nats, 0)
        check_at_most(name, nats, MAX_KL)
    keys = jax.random.split(jax.random.key(0) if key is None else key, 4)
    low, high = (scale * math.sqrt(2 * math.log(vocabulary)) for scale in _SCALES)
    scales = jax.random.uniform(keys[3], (rows, length, 1), jnp.float32, low, high)
    logits = scales * jax.random.normal(keys[0], (rows, length, vocabulary), jnp.float32)
    towards_ref, independent = (jax.random.normal(key, logits.shape, logits.dtype) for key in keys[1:3])
    behaviour = _perturbed(logits, (towards_ref + independent) / 2**0.5, staleness) if staleness > 0 else None
    return logits, _perturbed(logits, towards_ref, kl), behaviour


@jax.jit
def _perturbed(logits: Array, noise: Array, mean_kl: float) -> Array:
    """Adds the noise at the size that makes the mean KL to the result `mean_kl`."""
    log_probs = jax.nn.log_softmax(logits)
    target = jnp.asarray(mean_kl, logits.dtype)

    def mean_kl_and_slope(size: Array) -> tuple[Array, Array]:
        log_other = jax.nn.log_softmax(logits + size * noise)
        current = (jnp.exp(log_probs) * (log_probs - log_other)).sum(-1).mean()
        return current, ((jnp.exp(log_other) - jnp.exp(log_probs)) * noise).sum(-1).mean()

    def improved(_: int, size: Array) -> Array:
        current, slope = mean_kl_and_slope(size)
        return size - (current - target) / slope

    size = jax.lax.fori_loop(0, _STEPS, improved, jnp.sqrt(2 * target))
    return logits + jnp.where(target > 0, size, 0) * noise
