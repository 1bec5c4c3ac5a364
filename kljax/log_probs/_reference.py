"""The reference implementation: builds the logits of all positions and leaves the derivatives to JAX."""

import jax
import jax.numpy as jnp

from kljax._numerics import bregman
from kljax._typing import Array, HeadLayout
from kljax.log_probs._forward import INFINITE, log_mixture_ratios
from kljax.log_probs._head import embed_axis
from kljax.log_probs._inputs import Constants, Spec, Weights, scaled_logits, statistics_dtype
from kljax.log_probs._tiles import IMPOSSIBLE


def reference_stats(spec: Spec, weights: Weights, constants: Constants) -> dict[str, Array]:
    """Computes the requested statistics from the logits of all positions; 0 where the mask is 0."""
    options = constants.logit_scale, constants.softcap
    logits = _logits(spec, weights.hidden, (weights.head, spec.layout, weights.bias), constants, options)
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    log_probs = logits - logsumexp[..., None]
    stats = {"logsumexp": logsumexp}
    if constants.targets is not None:
        stats["log_prob"] = _take(log_probs, constants.targets)
    if constants.kept is not None and constants.targets is not None:
        stats["log_kept_mass"] = _log_kept_mass(log_probs, constants.kept, constants.targets)
        finite = jnp.isfinite(stats["log_kept_mass"])
        stats["log_prob"] = stats["log_prob"] - jnp.where(finite, stats["log_kept_mass"], 0)
    if spec.entropy:
        # A logit of -infinity has probability 0 and adds nothing: 0 * -inf must not become NaN.
        possible = log_probs > -jnp.inf
        stats["entropy"] = -jnp.where(possible, jnp.exp(log_probs) * jnp.where(possible, log_probs, 0), 0).sum(-1)
        if not spec.entropy_gradient:
            stats["entropy"] = jax.lax.stop_gradient(stats["entropy"])
    if spec.sum_squared_probs:
        stats["sum_squared_probs"] = jnp.square(jnp.exp(log_probs)).sum(-1)
    if spec.divergence is not None and weights.ref_hidden is not None:
        assert constants.ref_logit_scale is not None
        head = jax.lax.stop_gradient(weights.head) if weights.ref_head is None else weights.ref_head
        options = constants.ref_logit_scale, constants.ref_softcap
        ref = _logits(spec, weights.ref_hidden, (head, spec.ref_layout, weights.ref_bias), constants, options)
        stats["kl"] = _divergence(spec.divergence, logits, ref, constants.beta)
    if constants.mask is None:
        return stats
    return {name: jnp.where(constants.mask, value, 0) for name, value in stats.items()}


def _logits(
    spec: Spec,
    hidden: Array,
    head: tuple[Array, HeadLayout, Array | None],
    constants: Constants,
    options: tuple[Array, Array | None],
) -> Array:
    """Returns `[..., V]` logits of the tokens of the vocabulary, of zeros where the mask is 0."""
    weights, layout, bias = head
    wide = statistics_dtype(Weights(hidden, weights, bias))
    if constants.mask is not None:
        hidden = jnp.where(constants.mask[..., None], hidden, 0)
    weights = jax.lax.slice_in_dim(weights, 0, spec.vocab_size, axis=1 - embed_axis(layout))
    product = jnp.einsum(f"...d,{layout}->...v", hidden.astype(wide), weights.astype(wide))
    bias = None if bias is None else bias[: spec.vocab_size]
    return scaled_logits(product, bias, constants.inverse_temperature[..., None], *options)[0]


def _take(log_probs: Array, ids: Array) -> Array:
    return jnp.take_along_axis(log_probs, ids[..., None], axis=-1)[..., 0]


def _log_kept_mass(log_probs: Array, kept: Array, targets: Array) -> Array:
    """Returns the log of the mass of the kept tokens, the target among them; ids of -1 pad the lists."""
    ids = jnp.concatenate([kept, targets[..., None]], axis=-1)
    vocabulary = jax.lax.broadcasted_iota(ids.dtype, (*log_probs.shape, 1), log_probs.ndim - 1)
    listed = (ids[..., None, :] == vocabulary).any(-1)
    return jax.nn.logsumexp(log_probs, axis=-1, where=listed)


def _divergence(kind: str, policy: Array, ref: Array, beta: Array | None) -> Array:
    """Returns KL(first || other) or the JSD, from logits, as a sum of terms that are not negative."""
    first, other = (ref, policy) if kind == "forward" else (policy, ref)
    first = jnp.maximum(first, IMPOSSIBLE)
    other = jnp.maximum(other, IMPOSSIBLE)
    p = jax.nn.softmax(first)
    q = jax.nn.softmax(other)
    difference = other - first
    # The ratio of the normalisers has to be as accurate as the differences of the logits: near 1, as a mean ratio.
    near = jnp.abs(difference).max(-1) < 1
    ratio = (p * jnp.expm1(jnp.where(near[..., None], difference, 0))).sum(-1)
    far = jax.nn.logsumexp(other, axis=-1) - jax.nn.logsumexp(first, axis=-1)
    y = difference - jnp.where(near, jnp.log1p(ratio), far)[..., None]
    if kind == "jsd":
        assert beta is not None
        to_first, to_other = log_mixture_ratios(y, beta)
        mixed = (1 - beta) * p + beta * q
        return ((1 - beta) * bregman(p, mixed, to_first) + beta * bregman(q, mixed, to_other)).sum(-1)
    kl = bregman(p, q, y).sum(-1)
    return jnp.where(kl > INFINITE, jnp.inf, kl)
