"""The oracle: the logits of all positions at once, and JAX's own derivatives. For small vocabularies and for tests."""

import jax
import jax.numpy as jnp

from kljax._numerics import expm1_minus, log_mix
from kljax._typing import Array
from kljax.log_probs._inputs import Data, Weights, scaled_logits, statistics_dtype
from kljax.log_probs._options import Spec


def reference_stats(spec: Spec, weights: Weights, data: Data) -> dict[str, Array]:
    """Log-prob of each target, logsumexp and, if asked, entropy and divergence; 0 where the mask is 0."""
    keep = data.mask
    log_probs, logsumexp = _log_softmax(spec, weights.hidden, weights.head, weights.bias, data)
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
        ref, _ = _log_softmax(spec, weights.ref_hidden, head, bias, data)
        stats["kl"] = _divergence(spec.divergence, log_probs, ref, data.beta)
    if keep is None:
        return stats
    return {name: jnp.where(keep, value, 0) for name, value in stats.items()}


def _log_softmax(spec: Spec, hidden: Array, head: Array, bias: Array | None, data: Data) -> tuple[Array, Array]:
    """`[..., V]` log-probs and `[...]` logsumexp over the tokens of the vocabulary."""
    wide = statistics_dtype(Weights(hidden, head, bias))
    if data.mask is not None:
        hidden = jnp.where(data.mask[..., None], hidden, 0)
    head = jax.lax.slice_in_dim(head, 0, spec.vocab_size, axis=spec.vocab_axis)
    product = jnp.einsum(f"...d,{spec.layout}->...v", hidden.astype(wide), head.astype(wide))
    cut = None if bias is None else bias[: spec.vocab_size]
    logits, _ = scaled_logits(product, cut, data.inverse_temperature[..., None], data)
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    return logits - logsumexp[..., None], logsumexp


def _divergence(kind: str, policy: Array, ref: Array, beta: Array | None) -> Array:
    if kind == "jsd":
        assert beta is not None
        to_policy, to_ref = log_mix(beta, ref - policy), log_mix(1 - beta, policy - ref)
        terms = beta * jnp.exp(ref) * expm1_minus(to_ref) + (1 - beta) * jnp.exp(policy) * expm1_minus(to_policy)
        return terms.sum(-1)
    p, q = (policy, ref) if kind == "reverse" else (ref, policy)
    possible = p > -jnp.inf
    # No term is negative and their sum is KL(p || q), as both are distributions; p (log p - log q) would cancel. Where
    # the ratio may overflow the same term is q - p - p log(q / p).
    y = jnp.where(possible, q - jnp.where(possible, p, 0), 0)
    near = jnp.abs(y) <= 1
    close = jnp.exp(p) * expm1_minus(jnp.where(near, y, 0))
    far = jnp.exp(q) - jnp.exp(p) * (1 + jnp.where(near, 0, y))
    return jnp.where(possible, jnp.where(near, close, far), jnp.exp(q)).sum(-1)
