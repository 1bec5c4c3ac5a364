"""Statistics of a softmax whose logits come chunk by chunk: sums relative to the largest logit so far.

Every sum is over `exp(z - top)`, rescaled when `top` grows, so that nothing overflows and parts from several devices
merge. The entropy is summed as `exp(z - top) (z - top)`: where one token has nearly all probability, both it and the
logarithm of the total are small, and their difference keeps its digits.
"""

from typing import NamedTuple

import jax.numpy as jnp

from kljax._numerics import bregman, expm1_minus, log_mix
from kljax._typing import Array
from kljax.log_probs._columns import Columns, Mesh
from kljax.log_probs._options import Spec
from kljax.log_probs._shard import IMPOSSIBLE, Tokens, is_target

# Above this a KL is infinite: it has met `IMPOSSIBLE` where the first distribution has probability.
INFINITE = 1e6
# exp of this, times any vocabulary, is finite in float32 or becomes an infinity that is noticed.
_LARGEST_EXPONENT = 80.0
# How far the two normalisers may be apart, as a ratio less 1, for the form that does not cancel.
_NORMALISERS_CLOSE = (-0.5, 1.0)


class Softmax(NamedTuple):
    """`[rows]` largest logit so far and `sum exp(z - top)`."""

    top: Array
    total: Array

    def logsumexp(self) -> Array:
        return self.top + jnp.log(self.total)


class Sums(NamedTuple):
    """`[rows]` sums over the columns so far; None for what is not asked for.

    Attributes:
      policy, ref: of the two softmaxes.
      target: logit of the target, 0 until it was met.
      moment: `sum exp(z - top) (z - top)` of the policy.
      gap: `sum e d` and `excess`: `sum e (exp(-d) - 1 + d)`, where `e` is the exponential of the distribution that
        the mean is over and `d` the difference of its logits to those of the other.
    """

    policy: Softmax
    ref: Softmax | None = None
    target: Array | None = None
    moment: Array | None = None
    gap: Array | None = None
    excess: Array | None = None


def start(spec: Spec, tokens: Tokens, dtype: jnp.dtype) -> Sums:
    """The sums over nothing."""
    zero = jnp.zeros_like(tokens.inverse_temperature, dtype=dtype)
    nothing = Softmax(zero + IMPOSSIBLE, zero)
    kl = spec.divergence is not None
    return Sums(
        policy=nothing,
        ref=None if tokens.ref_hidden is None else nothing,
        target=None if tokens.targets is None else zero,
        moment=zero if spec.entropy else None,
        gap=zero if kl else None,
        excess=zero if kl else None,
    )


def _add(before: Softmax, logits: Array) -> tuple[Softmax, Array, Array]:
    """The softmax with more columns, their exponentials, and what the sums so far are to be rescaled by."""
    top = jnp.maximum(before.top, logits.max(-1))
    scale = jnp.exp(before.top - top)
    e = jnp.exp(logits - top[:, None])
    return Softmax(top, before.total * scale + e.sum(-1)), e, scale


def update(
    spec: Spec, sums: Sums, pair: tuple[Array, Array | None], columns: Columns, tokens: Tokens
) -> tuple[Sums, Array, Array]:
    """The sums with one more tile of logits, of policy and reference.

    Also returns the exponentials of the policy, and what its sums so far were rescaled by.
    """
    logits, ref = pair
    policy, e, scale = _add(sums.policy, logits)
    new = sums._replace(policy=policy)
    if sums.target is not None:
        new = new._replace(target=sums.target + jnp.where(is_target(columns, tokens), logits, 0).sum(-1))
    if sums.moment is not None:
        moment = sums.moment + (sums.policy.top - policy.top) * sums.policy.total
        new = new._replace(moment=moment * scale + (e * (logits - policy.top[:, None])).sum(-1))
    if sums.ref is None or ref is None:
        return new, e, scale
    reference, e_ref, scale_ref = _add(sums.ref, ref)
    new = new._replace(ref=reference)
    if sums.gap is not None and sums.excess is not None:
        reverse = spec.divergence != "forward"
        lower = reference.top - policy.top
        if reverse:
            first, second, rescale, difference = e, e_ref, scale, logits - ref
        else:
            first, second, rescale, difference, lower = e_ref, e, scale_ref, ref - logits, -lower
        # Both relative to the largest logit of the first; an overflow is noticed when the normalisers are compared.
        second = second * jnp.exp(jnp.minimum(lower, _LARGEST_EXPONENT))[:, None]
        new = new._replace(
            gap=sums.gap * rescale + (first * difference).sum(-1),
            excess=sums.excess * rescale + bregman(first, second, -difference).sum(-1),
        )
    return new, e, scale


def merge(spec: Spec, sums: Sums, mesh: Mesh) -> tuple[Sums, Array]:
    """The sums over the whole vocabulary, from those of every device's part; and what the policy's were rescaled by."""
    if not mesh.vocab:
        return sums, jnp.ones_like(sums.policy.top)
    top = mesh.max_over_vocab(sums.policy.top)
    lower = sums.policy.top - top
    scale = rescale = jnp.exp(lower)
    ref, top_ref = sums.ref, None
    if ref is not None:
        top_ref = mesh.max_over_vocab(ref.top)
        scale_ref = jnp.exp(ref.top - top_ref)
        ref = Softmax(jnp.zeros_like(top_ref), ref.total * scale_ref)
        rescale = scale_ref if spec.divergence == "forward" else scale
    parts = Sums(
        policy=Softmax(jnp.zeros_like(top), sums.policy.total * scale),
        ref=ref,
        target=sums.target,
        moment=None if sums.moment is None else (sums.moment + lower * sums.policy.total) * scale,
        gap=None if sums.gap is None else sums.gap * rescale,
        excess=None if sums.excess is None else sums.excess * rescale,
    )
    whole: Sums = mesh.sum_over_vocab(parts)
    whole = whole._replace(policy=whole.policy._replace(top=top))
    if whole.ref is not None and top_ref is not None:
        whole = whole._replace(ref=whole.ref._replace(top=top_ref))
    return whole, scale


def impossible_to_infinite(logits: Array) -> Array:
    """The logit itself, and -infinity for one that was replaced."""
    return jnp.where(logits <= IMPOSSIBLE, -jnp.inf, logits)


class Gap(NamedTuple):
    """`[rows]` how far the other distribution is from the first.

    Attributes:
      shift: log of its normaliser over the first's.
      mean: mean of the difference of the first's logits to its, which the gradient of the KL is about.
      close: whether the shift has the relative accuracy of the logits' difference.
    """

    shift: Array
    mean: Array
    close: Array


def gap_of(spec: Spec, sums: Sums) -> Gap:
    """The gap from the sums.

    The shift is the logarithm of a mean of ratios where these are nearly 1, instead of a difference of two numbers that
    are large beside it.
    """
    assert sums.ref is not None
    assert sums.gap is not None
    assert sums.excess is not None
    first, other = (sums.ref, sums.policy) if spec.divergence == "forward" else (sums.policy, sums.ref)
    mean = sums.gap / first.total
    ratio = sums.excess / first.total - mean
    low, high = _NORMALISERS_CLOSE
    # A mean difference that is large means that they are far apart, or that a token is impossible for one of them.
    close = (ratio > low) & (ratio < high) & (jnp.abs(mean) < 1)
    near = jnp.log1p(jnp.where(close, ratio, 0))
    return Gap(jnp.where(close, near, other.logsumexp() - first.logsumexp()), mean, close)


def kl_of(spec: Spec, sums: Sums) -> tuple[Array, Gap]:
    """The KL from the sums, and the gap."""
    assert sums.ref is not None
    assert sums.excess is not None
    gap = gap_of(spec, sums)
    first = sums.ref if spec.divergence == "forward" else sums.policy
    # kl = mean + shift, whose terms cancel; the excess and exp(shift) - 1 - shift are of the order of the KL.
    precise = sums.excess / first.total - expm1_minus(gap.shift)
    kl = jnp.where(gap.close, precise, gap.mean + gap.shift)
    return jnp.where(kl > INFINITE, jnp.inf, jnp.maximum(kl, 0)), gap


class Mixture(NamedTuple):
    """`[rows]` sums of the second pass of the JSD: its value, and the means of its two slopes."""

    value: Array
    policy_mean: Array
    ref_mean: Array


def mixture_slopes(y: Array, beta: Array) -> tuple[Array, Array]:
    """From `y = log(Q / P)`: `log(M / P)` and `log(M / Q)` for the mixture `M = (1 - beta) P + beta Q`."""
    return log_mix(beta, y), log_mix(1 - beta, -y)


def add_mixture(sums: Mixture, p: Array, q: Array, y: Array, beta: Array) -> Mixture:
    """The sums with one more tile of probabilities, with `y = log(q / p)`."""
    to_policy, to_ref = mixture_slopes(y, beta)
    mixed = (1 - beta) * p + beta * q
    value = (1 - beta) * bregman(p, mixed, to_policy) + beta * bregman(q, mixed, to_ref)
    return Mixture(
        sums.value + value.sum(-1),
        sums.policy_mean - (1 - beta) * (p * to_policy).sum(-1),
        sums.ref_mean - beta * (q * to_ref).sum(-1),
    )
