"""Moments of every estimator at each position, value and gradient, over the vocabulary or over drawn tokens.

A position has three distributions over the vocabulary: the policy pi, the reference and the behaviour q that draws the
token (pi itself on-policy). In a loss or in a reward, one drawn token `v` has the gradient `c(v) u(v)` with respect to
the policy's logits, with a coefficient `c(v)` and the score `u(v) = onehot(v) - pi`. The audit compares a few moments
of the value `e(v)` and of `c(v) u(v)` under q with the exact KL and its exact gradient `g = pi (x - KL)`, where
`x = log pi - log ref`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kljax._numerics import expm1_minus
from kljax._typing import Array, Estimator, KLGradient
from kljax.kl import estimate_kl

# The estimator "none" has neither a value nor a gradient to measure.
MEASURED: tuple[Estimator, ...] = ("k1", "abs", "k2", "k3", "low_var_kl")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moments:
    """Expectations under q of one token, the last axis over positions: `[C]`, `[K, C]`, `[K, E, C]`.

    K counts corrections, E estimators; the loss has one column more, the straight-through gradient. `mean_squared`,
    each `norm` and each `bias` are squares of expectations. Their estimates from drawn tokens are unbiased, so they can
    be negative.

    Attributes:
      kl: `[C]` exact KL(pi || ref).
      exact_norm: `[C]` squared norm of its gradient g.
      mean: `[K, E, C]` of the value e.
      square: `[K, E, C]` of e^2.
      mean_squared: `[K, E, C]` square of the mean.
      loss_bias: `[K, E + 1, C]` squared norm of the expected gradient of the estimator as a loss, less g.
      loss_norm: `[K, E + 1, C]` squared norm of that expected gradient itself.
      loss_inner: `[K, E + 1, C]` its inner product with g.
      loss_second: `[K, E + 1, C]` expected squared norm.
      reward_bias: `[K, E, C]` the same four of the estimator as a reward, `c = e`.
      reward_norm: `[K, E, C]`.
      reward_inner: `[K, E, C]`.
      reward_second: `[K, E, C]`.
      reward_drift: `[K, E, C]` inner product of its expected gradient with the expected weighted score.
      reward_cross: `[K, E, C]` expectation of `w c |u|^2`.
      score_norm: `[K, C]` squared norm of the expected weighted score `E[w u]`, zero without a mismatch.
      score_inner: `[K, C]` its inner product with g.
      score_second: `[K, C]` expectation of `w^2 |u|^2`.
    """

    kl: Array
    exact_norm: Array
    mean: Array
    square: Array
    mean_squared: Array
    loss_bias: Array
    loss_norm: Array
    loss_inner: Array
    loss_second: Array
    reward_bias: Array
    reward_norm: Array
    reward_inner: Array
    reward_second: Array
    reward_drift: Array
    reward_cross: Array
    score_norm: Array
    score_inner: Array
    score_second: Array


class Position(NamedTuple):
    """The three distributions `[C, V]`, and their exact KL `[C, 1]` and its gradient `[C, V]`."""

    log_probs: Array
    ref_log_probs: Array
    sampling_log_probs: Array
    pi: Array
    drawn: Array
    kl: Array
    gradient: Array


class Events(NamedTuple):
    """The tokens `[C, L]` of an expectation: the vocabulary with its probabilities, or drawn tokens.

    Attributes:
      at: selects the values `[..., L]` of these tokens from `[..., V]`.
      probability: `[C, L]` weight of each token.
      squared_norms: maps coefficients to the squared norms of expected gradient less g, and of the expected gradient.
      squared_mean: maps values to the square of their expectation.
    """

    at: Callable[[Array], Array]
    probability: Array
    squared_norms: Callable[[Array, Array], tuple[Array, Array]]
    squared_mean: Callable[[Array], Array]


@jax.jit
def exact_moments(
    logits: Array, ref_logits: Array, sampling_logits: Array, caps: Array | None, kl: Array | None = None
) -> Moments:
    """Computes the moments of positions by sums over the vocabulary.

    Args:
      logits: `[C, V]` of the policy.
      ref_logits: `[C, V]` of the reference.
      sampling_logits: `[C, V]` of the policy that draws the tokens.
      caps: `[K]` bounds of the importance ratios, which may be infinite; None: one column without a correction.
      kl: `[C]` exact KL(policy || reference) in nats; None computes it from the logits.
    """
    position = _position(logits, ref_logits, sampling_logits, kl)
    return _collect(_vocabulary(position), position, caps)


@functools.partial(jax.jit, static_argnames="draws")
def sampled_moments(
    logits: Array,
    ref_logits: Array,
    sampling_logits: Array,
    caps: Array | None,
    kl: Array | None = None,
    *,
    keys: Array,
    draws: int,
) -> Moments:
    """Computes the moments from `draws` tokens, drawn at each position with its own key.

    Args:
      logits: `[C, V]` of the policy.
      ref_logits: `[C, V]` of the reference.
      sampling_logits: `[C, V]` of the behaviour, which draws.
      caps: `[K]` bounds of the importance ratios; None: uncorrected.
      kl: `[C]` exact KL; None computes it from the logits.
      keys: `[C]` random keys.
      draws: at least 2.
    """
    position = _position(logits, ref_logits, sampling_logits, kl)
    return _collect(_draws(position, keys, draws), position, caps)


def _sum(values: Array) -> Array:
    return values.sum(-1, keepdims=True)


def _position(logits: Array, ref_logits: Array, sampling_logits: Array, known_kl: Array | None) -> Position:
    log_probs, ref, behaviour = map(jax.nn.log_softmax, (logits, ref_logits, sampling_logits))
    # NaN counts as support, so that the KL shows it.
    pi = jnp.exp(log_probs)
    support = log_probs != -jnp.inf
    x = jnp.where(support, log_probs - ref, 0)
    if known_kl is not None:
        kl = known_kl[:, None]
        return Position(log_probs, ref, behaviour, pi, jnp.exp(behaviour), kl, pi * (x - kl))
    # The sum of pi k3(x) has no cancellation near x = 0, unlike the sum of pi x; far below 0 k3 would overflow.
    near = x >= -1
    terms = jnp.where(near, pi * expm1_minus(-jnp.where(near, x, 0)), jnp.exp(ref) - pi + pi * x)
    kl = _sum(jnp.where(support, terms, jnp.exp(ref)))
    return Position(log_probs, ref, behaviour, pi, jnp.exp(behaviour), kl, pi * (x - kl))


def _vocabulary(position: Position) -> Events:
    pi = position.pi
    drawn = position.drawn

    def squared_norms(coefficients: Array, _: Array) -> tuple[Array, Array]:
        weighted = drawn[None] * coefficients
        expected = weighted - pi[None] * _sum(weighted)
        # Subtracted before squaring: the difference of squares would leave the root of the rounding error.
        return jnp.square(expected - position.gradient[None]).sum(-1), jnp.square(expected).sum(-1)

    def squared_mean(values: Array) -> Array:
        return jnp.square((drawn[None] * values).sum(-1))

    return Events(lambda values: values, drawn, squared_norms, squared_mean)


def _draws(position: Position, keys: Array, draws: int) -> Events:
    tokens = jax.vmap(functools.partial(_draw, draws=draws))(keys, position.drawn)
    pairs = draws * (draws - 1)

    def at(values: Array) -> Array:
        return jnp.take_along_axis(values, tokens, axis=-1)

    pi = at(position.pi)[None]
    square = jnp.square(position.pi).sum(-1)[None]
    score_square = _score_square(position, at)[None]
    exact_norm = jnp.square(position.gradient).sum(-1)[None]
    add_up = functools.partial(jax.ops.segment_sum, num_segments=position.pi.shape[-1])

    def squared_norms(coefficients: Array, inner: Array) -> tuple[Array, Array]:
        # |sum_j c_j u_j|^2 with u = onehot - pi: coefficients of equal tokens add up before the square.
        sums = jax.vmap(jax.vmap(add_up), (0, None))(coefficients, tokens)
        total = coefficients.sum(-1)
        along_pi = (coefficients * pi).sum(-1)
        squared = jnp.square(sums).sum(-1) - 2 * total * along_pi + jnp.square(total) * square
        norm = (squared - (jnp.square(coefficients) * score_square).sum(-1)) / pairs
        return norm - 2 * inner + exact_norm, norm

    def squared_mean(values: Array) -> Array:
        return (jnp.square(values.sum(-1)) - jnp.square(values).sum(-1)) / pairs

    return Events(at, jnp.full(tokens.shape, 1 / draws, position.pi.dtype), squared_norms, squared_mean)


def _draw(key: Array, probabilities: Array, *, draws: int) -> Array:
    """Draws tokens by inverting the cumulative distribution, one pass over the vocabulary for any number of draws."""
    cumulative = jnp.cumsum(probabilities)
    uniform = jax.random.uniform(key, (draws,), probabilities.dtype) * cumulative[-1]
    tokens = jnp.searchsorted(cumulative, uniform, side="right")
    # Rounding can reach the total itself, past the last token of positive probability.
    last = probabilities.shape[-1] - 1 - jnp.argmax(jnp.flip(probabilities) > 0)
    return jnp.minimum(tokens, last.astype(tokens.dtype))


def _score_square(position: Position, at: Callable[[Array], Array]) -> Array:
    return at(1 - 2 * position.pi + _sum(jnp.square(position.pi)))


def _collect(events: Events, position: Position, caps: Array | None) -> Moments:
    exact = (position.kl[..., 0], jnp.square(position.gradient).sum(-1))
    collect = functools.partial(_one_correction, events, position)
    if caps is None:
        return Moments(*exact, *(moment[None] for moment in collect(None)))
    return Moments(*exact, *jax.vmap(collect)(caps))


def _one_correction(events: Events, position: Position, cap: Array | None) -> tuple[Array, ...]:
    """Computes all moments but the exact ones, `[E, C]` or `[C]`."""
    weight = _weight(position, cap)
    mean_score = position.drawn * weight - position.pi * _sum(position.drawn * weight)
    weight = events.at(weight)[None]
    score_square = _score_square(position, events.at)[None]
    log_probs, ref, behaviour = map(
        events.at, (position.log_probs, position.ref_log_probs, position.sampling_log_probs)
    )
    values, coefficients = estimates(log_probs, ref, behaviour, events.at(position.drawn > 0), cap)

    def mean(moment: Array) -> Array:
        return (events.probability[None] * moment).sum(-1)

    def along(direction: Array) -> Array:
        return events.at(direction - _sum(position.pi * direction))[None]

    def gradient(coefficients: Array) -> tuple[Array, ...]:
        inner = mean(coefficients * along(position.gradient))
        second = mean(jnp.square(coefficients) * score_square)
        return (*events.squared_norms(coefficients, inner), inner, second)

    return (
        mean(values),
        mean(jnp.square(values)),
        events.squared_mean(values),
        *gradient(coefficients),
        *gradient(values),
        mean(values * along(mean_score)),
        mean(weight * values * score_square),
        jnp.square(mean_score).sum(-1),
        (mean_score * position.gradient).sum(-1),
        mean(jnp.square(weight) * score_square)[0],
    )


def _weight(position: Position, cap: Array | None) -> Array:
    """Computes the importance ratio; 1 without a correction and where q is 0."""
    if cap is None:
        return jnp.ones_like(position.pi)
    possible = position.drawn > 0
    log_ratio = jnp.where(possible, position.log_probs - position.sampling_log_probs, 0)
    return jnp.minimum(jnp.exp(log_ratio), cap)


def estimates(
    log_probs: Array, ref_log_probs: Array, sampling_log_probs: Array, possible: Array, cap: Array | None
) -> tuple[Array, Array]:
    """Computes the estimators and their derivatives at single tokens.

    Args:
      log_probs: `[...]` of the tokens under the policy, in nats.
      ref_log_probs: `[...]` under the reference.
      sampling_log_probs: `[...]` under the policy that draws the tokens; not read without a cap.
      possible: `[...]` bool; both results are 0 where it is False.
      cap: bound of the importance ratios that correct every estimator, which may be infinite; None corrects none.

    Returns:
      The values `[E, ...]`, and the derivatives by `log_probs` `[E + 1, ...]`, the straight-through one last.
    """

    def stacked(log_probs: Array) -> Array:
        columns: list[tuple[Estimator, KLGradient]] = [*((name, "value") for name in MEASURED), ("k1", "k2")]
        return jnp.stack(
            [
                estimate_kl(
                    log_probs,
                    ref_log_probs,
                    possible,
                    estimator=name,
                    gradient=gradient,
                    sampling_log_probs=None if cap is None else sampling_log_probs,
                    max_ratio=cap,
                )
                for name, gradient in columns
            ]
        )

    # Each estimate depends on its own log-prob alone, so the direction of ones gives every derivative.
    values, derivatives = jax.jvp(stacked, (log_probs,), (jnp.ones_like(log_probs),))
    return values[:-1], derivatives
