"""The epsilons that the systems add to their divisors, undone exactly.

A mean over `n` tokens that a system divides by `n + eps` is this library's mean times `n / (n + eps)`. Applied before
the comparison, value and gradient are corrected alike and the tolerance stays what it is.
"""

import jax
import jax.numpy as jnp

import kljax

EPS = 1e-8


def factors(mask: jax.Array, over: str | None, eps: float = EPS) -> jax.Array:
    """`n / (n + eps)` as `[B, T]`, where `n` is the number of tokens of the "batch" or of the "row"; None is 1."""
    n = jnp.broadcast_to(mask.sum(-1 if over == "row" else None, keepdims=True), mask.shape).astype(jnp.float64)
    return jnp.ones_like(n) if over is None else n / (n + eps)


def whiten(values: jax.Array, mask: jax.Array, *, shift_mean: bool = True) -> jax.Array:
    """verl's `masked_whiten`, from this library's mean and variance: masked positions are whitened as well."""
    n = mask.sum().astype(jnp.float64)
    mean, var = (n / (n + EPS) * statistic(values, mask) for statistic in (kljax.masked_mean, kljax.masked_var))
    whitened = (values - mean) / jnp.sqrt(var + EPS)
    return whitened if shift_mean else whitened + mean
