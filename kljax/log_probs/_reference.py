"""The oracle: the logits of all positions at once, and JAX's own derivatives. For small vocabularies and for tests."""

import jax
import jax.numpy as jnp

from kljax._numerics import bregman
from kljax._typing import Array
from kljax.log_probs._inputs import Data, Weights, scaled_logits, statistics_dtype
from kljax.log_probs._online import INFINITE, mixture_slopes
from kljax.log_probs._options import Spec
from kljax.log_probs._shard import IMPOSSIBLE


def reference_stats(spec: Spec, weights: Weights, data: Data) -> dict[str, Array]:
    """Log-prob of each target, logsumexp and, if asked, entropy and divergence; 0 where the mask is 0."""
    logits = _logits(spec, weights.hidden, weights.head, weights.bias, data)
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    log_probs = logits - logsumexp[..., None]
    stats = {"logsumexp": logsumexp}
    if data.targets is not None:
        stats["log_prob"] = jnp.take_along_axis(log_probs, data.targets[..., None], axis=-1)[..., 0]
    if spec.entropy:
        # A logit of -infinity has probability 0 and adds nothing: 0 * -inf must not become NaN.
        possible = log_probs > -jnp.inf
        stats["entropy"] = -jnp.where(possible, jnp.exp(log_probs) * jnp.where(possible, log_probs, 0), 0).sum(-1)
        if not spec.entropy_gradient:
            stats["entropy"] = jax.lax.stop_gradient(stats["entropy"])
    if spec.divergence is not None and weights.ref_hidden is not None:
        head = jax.lax.stop_gradient(weights.head) if weights.ref_head is None else weights.ref_head
        bias = None if weights.bias is None else jax.lax.stop_gradient(weights.bias)
        stats["kl"] = _divergence(
            spec.divergence, logits, _logits(spec, weights.ref_hidden, head, bias, data), data.beta
        )
    if data.mask is None:
        return stats
    return {name: jnp.where(data.mask, value, 0) for name, value in stats.items()}


def _logits(spec: Spec, hidden: Array, head: Array, bias: Array | None, data: Data) -> Array:
    """`[..., V]` logits of the tokens of the vocabulary; of zeros under the mask."""
    wide = statistics_dtype(Weights(hidden, head, bias))
    if data.mask is not None:
        hidden = jnp.where(data.mask[..., None], hidden, 0)
    head = jax.lax.slice_in_dim(head, 0, spec.vocab_size, axis=spec.vocab_axis)
    product = jnp.einsum(f"...d,{spec.layout}->...v", hidden.astype(wide), head.astype(wide))
    cut = None if bias is None else bias[: spec.vocab_size]
    return scaled_logits(product, cut, data.inverse_temperature[..., None], data)[0]


def _divergence(kind: str, policy: Array, ref: Array, beta: Array | None) -> Array:
    """From logits: KL(first || other), or the JSD, from terms that are not negative."""
    first, other = (ref, policy) if kind == "forward" else (policy, ref)
    first, other = jnp.maximum(first, IMPOSSIBLE), jnp.maximum(other, IMPOSSIBLE)
    p, q, gap = jax.nn.softmax(first), jax.nn.softmax(other), other - first
    # The difference of the normalisers has to be as accurate as that of the logits: the log of a mean ratio, near 1.
    near = jnp.abs(gap).max(-1) < 1
    ratio = (p * jnp.expm1(jnp.where(near[..., None], gap, 0))).sum(-1)
    far = jax.nn.logsumexp(other, axis=-1) - jax.nn.logsumexp(first, axis=-1)
    y = gap - jnp.where(near, jnp.log1p(ratio), far)[..., None]
    if kind == "jsd":
        assert beta is not None
        to_first, to_other = mixture_slopes(y, beta)
        mixed = (1 - beta) * p + beta * q
        return ((1 - beta) * bregman(p, mixed, to_first) + beta * bregman(q, mixed, to_other)).sum(-1)
    kl = bregman(p, q, y).sum(-1)
    return jnp.where(kl > INFINITE, jnp.inf, kl)
