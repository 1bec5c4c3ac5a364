"""How far two policies are apart at one token, seen as a coin: this token (`exp(log_probs)`), or any other one.

Both divergences are constants, without a gradient. They keep their relative accuracy in float32 where the two
probabilities are close to each other, to 0 or to 1, where the formulas as printed cancel to nothing.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kljax._checks import as_float
from kljax._numerics import bregman, difference
from kljax._typing import Array, ArrayLike


def bernoulli_tv(log_probs: ArrayLike, other_log_probs: ArrayLike) -> Array:
    """Total variation of the two coins, `|p - q|`, with `p = exp(log_probs)`, `q = exp(other_log_probs)`."""
    first, second = jax.lax.stop_gradient(as_float(log_probs, other_log_probs))
    larger = jnp.maximum(first, second)
    smaller = jnp.minimum(first, second)
    return jnp.abs(jnp.exp(larger) * jnp.expm1(difference(smaller, larger)))


def bernoulli_kl(log_probs: ArrayLike, other_log_probs: ArrayLike) -> Array:
    """`KL(Bernoulli(p) || Bernoulli(q))`; infinite where `q` excludes what `p` allows, log-probs above 0 count as 0.

    As a sum of two terms that are at least 0, `p (q/p - 1 - log(q/p))` and the same of `1 - p` and `1 - q`, so that
    nothing cancels between them.
    """
    log_p, log_q = (jnp.minimum(x, 0) for x in jax.lax.stop_gradient(as_float(log_probs, other_log_probs)))
    not_p = -jnp.expm1(log_p)
    not_q = -jnp.expm1(log_q)
    gap = difference(log_q, log_p)
    # log((1 - q) / (1 - p)): from the difference of p and q if that is small, else from the two logarithms.
    close = jnp.abs(gap) <= 1
    change = -jnp.exp(log_p) * jnp.expm1(jnp.where(close, gap, 0)) / jnp.where(not_p == 0, 1, not_p)
    close &= (jnp.abs(change) <= 0.5) & (not_p > 0)
    not_gap = jnp.where(close, jnp.log1p(jnp.where(close, change, 0)), difference(_log1mexp(log_q), _log1mexp(log_p)))
    kl = _term(jnp.exp(log_p), jnp.exp(log_q), gap) + _term(not_p, not_q, not_gap)
    excluded = ((log_q == -jnp.inf) & (log_p > -jnp.inf)) | ((log_q == 0) & (log_p < 0))
    return jnp.where(excluded, jnp.inf, kl)


def _term(p: Array, q: Array, gap: Array) -> Array:
    """`p (q/p - 1 - gap)` with `gap = log(q/p)`, and `q` where `p` is 0."""
    return jnp.where(p == 0, q, bregman(p, q, jnp.where(p == 0, 0, gap)))


def _log1mexp(x: Array) -> Array:
    """`log(1 - exp(x))` for `x <= 0`."""
    return jnp.where(x > -math.log(2), jnp.log(-jnp.expm1(x)), jnp.log1p(-jnp.exp(x)))


DIVERGENCES: dict[str, Callable[[ArrayLike, ArrayLike], Array]] = {"tv": bernoulli_tv, "kl": bernoulli_kl}
