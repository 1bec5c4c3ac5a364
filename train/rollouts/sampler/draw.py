"""How the next token is drawn: two uniform numbers and an inverse CDF, over the tokens that the cuts leave."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 128


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are drawn from. Cuts apply in order, as in transformers; ties stay together.

    Attributes:
      temperature: divides the logits, for the draw and for every log-prob.
      top_k: only the k most probable tokens; 0: all.
      top_p: of those, the smallest set of the most probable ones whose share is at least p; 1: all.
      min_p: of those, the ones at least this share as probable as the most probable token; 0: all.
      greedy: the most probable token (the first of several) in place of a draw.

    Raises:
      ValueError: names the field, what was got and what is allowed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    greedy: bool = False

    def __post_init__(self) -> None:
        for name, allowed, good in (
            ("temperature", "a number > 0", self.temperature > 0),
            ("top_k", "0 or more", self.top_k >= 0),
            ("top_p", "0 < p <= 1", 0 < self.top_p <= 1),
            ("min_p", "0 <= p <= 1", 0 <= self.min_p <= 1),
        ):
            if not good:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected {allowed}")


def _cut(weights: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest weight [B, 1] such that `enough` holds for the tokens that weigh at least as much.

    Bisection over the bits of the floats, which are ordered as the floats are where these are not negative: exact, and
    without the sort of a vocabulary.

    Args:
      weights: [B, V], >= 0.
      enough: [B, V] bool, the tokens kept -> [B] bool; it stays True where more are kept, and is True for all.
    """
    bits = 64 if weights.dtype == jnp.float64 else 32
    integer = jnp.int64 if bits == 64 else jnp.int32

    def value(code: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(code, weights.dtype)[:, None]

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        holds = enough(weights >= value(middle))
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle)

    top = lax.bitcast_convert_type(jnp.max(weights, axis=-1), integer)
    low, _ = lax.fori_loop(0, bits, halve, (jnp.zeros_like(top), top + 1))
    return value(low)


def kept_weights(weights: jax.Array, sampling: Sampling) -> jax.Array:
    """`weights` [B, V] with 0 where a cut leaves the token out; only what is asked for is computed.

    Args:
      weights: probabilities up to a factor, 1 at the most probable token.
    """
    if 0 < sampling.top_k < weights.shape[-1]:
        k = sampling.top_k
        weights = jnp.where(weights >= _cut(weights, lambda kept: jnp.sum(kept, axis=-1) >= k), weights, 0)
    if sampling.top_p < 1:
        share = sampling.top_p * jnp.sum(weights, axis=-1)
        cut = _cut(weights, lambda kept: jnp.sum(jnp.where(kept, weights, 0), axis=-1) >= share)
        weights = jnp.where(weights >= cut, weights, 0)
    if sampling.min_p > 0:
        weights = jnp.where(weights >= sampling.min_p, weights, 0)
    return weights


def _first_above(masses: jax.Array, uniform: jax.Array) -> jax.Array:
    """[B] the first of the last axis at which the running sum passes `uniform` [B] x its total; never one of mass 0."""
    # Rounding may let the running sum of a parallel scan grow over an entry of mass 0: such entries are left out.
    running = jnp.where(masses > 0, jnp.cumsum(masses, axis=-1), 0)
    total = jnp.max(running, axis=-1, keepdims=True)
    index = lax.broadcasted_iota(jnp.int32, masses.shape, masses.ndim - 1)
    last = masses.shape[-1] - 1
    return jnp.min(jnp.where(running > uniform[:, None] * total, index, last), axis=-1)


def draw_index(masses: jax.Array, uniforms: jax.Array) -> jax.Array:
    """[B] int32 indices drawn with probabilities `masses` [B, V] / their sums, from `uniforms` [B, 2] in [0, 1).

    The first number chooses a chunk of the vocabulary, the second a token of it: sums of a few hundred numbers each, so
    that rounding moves the borders between tokens by parts in 1e7 of a chunk, not of a running sum over them all.
    """
    rows, size = masses.shape
    chunk = min(CHUNK, size)
    masses = jnp.pad(masses, ((0, 0), (0, -size % chunk))).reshape(rows, -1, chunk)
    which = _first_above(jnp.sum(masses, axis=-1), uniforms[:, 0])
    inside = jnp.take_along_axis(masses, which[:, None, None], axis=1)[:, 0]
    return which * chunk + _first_above(inside, uniforms[:, 1])


def token_uniforms(key: jax.Array, ids: jax.Array, count: int, dtype: jnp.dtype) -> jax.Array:
    """[B, C, 2] in [0, 1): token n of row r is drawn with the two numbers of `fold_in(fold_in(key, ids[r]), n)`.

    All at once, as a loop of one hash at a time takes longer than the rest of a draw.

    Args:
      ids: [B]; count: C.
    """

    def one(row: jax.Array, token: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, row), token), (2,), dtype)

    return jax.vmap(jax.vmap(one, (None, 0)), (0, None))(ids, jnp.arange(count))


def draw(logits: jax.Array, uniforms: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """The next tokens and their log-probs.

    Args:
      logits: [B, V], float32 at least, already divided by the temperature.
      uniforms: [B, 2] in [0, 1); greedy tokens need none.
      sampling: the cuts; its temperature is not applied again.

    Returns:
      Tokens [B] int32; log-probs [B] under the full softmax of `logits`, which is what the trainer computes, whatever
      is cut from the draw.
    """
    top = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - top)
    if sampling.greedy:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
        tokens = draw_index(kept_weights(weights, sampling), uniforms)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1) - top
    return tokens, (chosen - jnp.log(jnp.sum(weights, axis=-1, keepdims=True)))[:, 0]
