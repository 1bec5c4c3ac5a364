"""Draws of the next token: an inverse CDF of two uniform numbers, over the tokens that top-k, top-p and min-p keep."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from train.sequences.token_fields import TokenFields

CHUNK = 128


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The sampling distribution. Filters apply in this order, as in transformers, and keep or drop ties together.

    Attributes:
      temperature: divides the logits, for the draw and for every log-prob.
      top_k: keeps the k most probable tokens; 0 keeps all.
      top_p: of these, keeps the smallest set of the most probable tokens whose share is at least p; 1 keeps all.
      min_p: of these, keeps the tokens at least this share as probable as the most probable token; 0 keeps all.
      greedy: whether to take the most probable token (the first of several) instead of drawing.
      record_kept_tokens: whether to record the ids of the tokens that the filters keep, at most `top_k`. Ties for the
        last place then go to the lowest ids, so that the list holds the whole set.
      record_routes: whether to record the experts of every token, of prompts too; only for a model that has some.

    Raises:
      ValueError: a number out of range, naming the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    greedy: bool = False
    record_kept_tokens: bool = False
    record_routes: bool = False

    def __post_init__(self) -> None:
        for name, allowed, is_valid in (
            ("temperature", "a number > 0", self.temperature > 0),
            ("top_k", "0 or more", self.top_k >= 0),
            ("top_p", "0 < p <= 1", 0 < self.top_p <= 1),
            ("min_p", "0 <= p <= 1", 0 <= self.min_p <= 1),
        ):
            if not is_valid:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected {allowed}")
        if self.record_kept_tokens and (self.top_k == 0 or self.greedy):
            got = "greedy" if self.greedy else "top_k = 0"
            raise ValueError(f"record_kept_tokens: got True and {got}, expected draws with a positive top_k; set top_k")


def draw(logits: jax.Array, uniforms: jax.Array, sampling: Sampling) -> TokenFields:
    """Draws the next tokens.

    Args:
      logits: [B, V], float32 at least, already divided by the temperature.
      uniforms: [B, 2] in [0, 1); unused if greedy.
      sampling: the filters; its temperature is not applied again.

    Returns:
      `tokens` [B] int32, and fields of `TOKEN_FIELDS`, [B, ...]. `rollout_log_probs` [B] are under the full softmax at
      the temperature; the filters do not change them. If recorded, `kept_ids` [B, K] int32 are the tokens that the
      filters kept, the most probable first, padded with -1; and `rollout_log_probs - log_kept_mass` are the log-probs
      of the distribution that the tokens were drawn from.
    """
    fields: TokenFields = {}
    top = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - top)
    if sampling.greedy:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
        kept_weights = filter_weights(weights, sampling)
        if sampling.record_kept_tokens:
            kept_weights, fields["kept_ids"] = _list_kept(kept_weights, min(sampling.top_k, weights.shape[-1]))
            kept_mass = jnp.log(jnp.sum(kept_weights, axis=-1))
            fields["log_kept_mass"] = kept_mass - jnp.log(jnp.sum(weights, axis=-1))
        tokens = draw_index(kept_weights, uniforms)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1) - top
    log_probs = (chosen - jnp.log(jnp.sum(weights, axis=-1, keepdims=True)))[:, 0]
    return {"tokens": tokens, "rollout_log_probs": log_probs, **fields}


def describe_draws(sampling: Sampling, vocab_size: int, dtype: DTypeLike = jnp.float32) -> TokenFields:
    """Describes the results of `draw` for one row of logits [1, V] of a dtype: shapes and dtypes."""
    logits, uniforms = (jax.ShapeDtypeStruct((1, size), dtype) for size in (vocab_size, 2))
    return jax.eval_shape(functools.partial(draw, sampling=sampling), logits, uniforms)


def _list_kept(weights: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Lists the tokens of positive weight, at most K; of ties for the last place, the lowest ids.

    Args:
      weights: [B, V], 0 for the tokens that the filters drop.
      count: K.

    Returns:
      Weights [B, V] of the listed tokens, 0 for the others; ids [B, K] int32, the largest weight first, padded with -1.
    """
    values, ids = lax.top_k(weights, count)
    # `lax.top_k` lists ties in the order of their ids, so the last entry tells which of them are on the list.
    index = lax.broadcasted_iota(ids.dtype, weights.shape, 1)
    is_listed = (weights > values[:, -1:]) | ((weights == values[:, -1:]) & (index <= ids[:, -1:]))
    return jnp.where(is_listed, weights, 0), jnp.where(values > 0, ids, -1).astype(jnp.int32)


def filter_weights(weights: jax.Array, sampling: Sampling) -> jax.Array:
    """Sets the weights of the tokens that the filters drop to 0; filters that are off cost nothing.

    Args:
      weights: [B, V], probabilities up to a factor, 1 at the most probable token.
      sampling: the filters.
    """
    if 0 < sampling.top_k < weights.shape[-1]:
        k = sampling.top_k
        weights = jnp.where(weights >= _threshold(weights, lambda kept: jnp.sum(kept, axis=-1) >= k), weights, 0)
    if sampling.top_p < 1:
        share = sampling.top_p * jnp.sum(weights, axis=-1)
        threshold = _threshold(weights, lambda kept: jnp.sum(jnp.where(kept, weights, 0), axis=-1) >= share)
        weights = jnp.where(weights >= threshold, weights, 0)
    if sampling.min_p > 0:
        weights = jnp.where(weights >= sampling.min_p, weights, 0)
    return weights


def _threshold(weights: jax.Array, is_enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Finds the largest weight [B, 1] such that the tokens that weigh at least as much are enough.

    The search bisects the bits of the floats, which for floats >= 0 have the order of the floats. It is exact and does
    not sort the vocabulary.

    Args:
      weights: [B, V], >= 0.
      is_enough: maps the kept tokens, [B, V] bool, to [B] bool; True for all tokens, and for every superset of a set
        for which it is True.
    """
    bits = 64 if weights.dtype == jnp.float64 else 32
    integer = jnp.int64 if bits == 64 else jnp.int32

    def to_float(code: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(code, weights.dtype)[:, None]

    def bisect(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        holds = is_enough(weights >= to_float(middle))
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle)

    top = lax.bitcast_convert_type(jnp.max(weights, axis=-1), integer)
    low, _ = lax.fori_loop(0, bits, bisect, (jnp.zeros_like(top), top + 1))
    return to_float(low)


def draw_index(masses: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Draws indices with probabilities proportional to `masses`.

    The first number chooses a chunk of the vocabulary, the second a token of it. Each sum has a few hundred terms, so
    rounding moves the borders between tokens by parts in 1e7 of a chunk, not of a running sum over the vocabulary.

    Args:
      masses: [B, V], >= 0; an index of mass 0 is never drawn.
      uniforms: [B, 2] in [0, 1).

    Returns:
      [B] int32.
    """
    rows, size = masses.shape
    chunk = min(CHUNK, size)
    masses = jnp.pad(masses, ((0, 0), (0, -size % chunk))).reshape(rows, -1, chunk)
    chunk_index = _inverse_cdf(jnp.sum(masses, axis=-1), uniforms[:, 0])
    chunk_masses = jnp.take_along_axis(masses, chunk_index[:, None, None], axis=1)[:, 0]
    return chunk_index * chunk + _inverse_cdf(chunk_masses, uniforms[:, 1])


def _inverse_cdf(masses: jax.Array, uniform: jax.Array) -> jax.Array:
    """Finds the first index [B] at which the running sum of `masses` [B, N] exceeds `uniform` [B] x its total."""
    # Rounding may let the running sum of a parallel scan grow at an entry of mass 0: these entries are left out.
    running = jnp.where(masses > 0, jnp.cumsum(masses, axis=-1), 0)
    total = jnp.max(running, axis=-1, keepdims=True)
    index = lax.broadcasted_iota(jnp.int32, masses.shape, masses.ndim - 1)
    last = masses.shape[-1] - 1
    return jnp.min(jnp.where(running > uniform[:, None] * total, index, last), axis=-1)


def token_uniforms(key: jax.Array, row_ids: jax.Array, first: int, count: int, dtype: jnp.dtype) -> jax.Array:
    """Generates two uniform numbers for each token, [B, C, 2] in [0, 1).

    Token n of row r gets the numbers of `fold_in(fold_in(key, row_ids[r]), n)`. All are generated at once: hashing one
    token at a time would take longer than the rest of its draw.

    Args:
      key: the random key.
      row_ids: [B] int32.
      first: n of the first token.
      count: C, the number of tokens of each row.
      dtype: float32 or float64.
    """

    def uniforms_of(row_id: jax.Array, index: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, row_id), index), (2,), dtype)

    return jax.vmap(jax.vmap(uniforms_of, (None, 0)), (0, None))(row_ids, first + jnp.arange(count))
