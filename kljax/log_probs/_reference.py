"""The oracle: the logits of all positions at once, in float32. For small vocabularies and for tests of the others."""

import jax
import jax.numpy as jnp

from kljax._typing import Array, Scalar


def reference_token_stats(
    hidden: Array, head: Array, targets: Array, *, temperature: Scalar, softcap: Scalar | None, entropy: bool
) -> tuple[Array, Array, Array | None]:
    """Log-prob of each target, logsumexp and, if asked, entropy; shapes and dtypes as `log_probs_from_hidden`."""
    wide = jnp.float64 if jnp.float64 in (hidden.dtype, head.dtype) else jnp.float32
    logits = jnp.einsum("...d,dv->...v", hidden.astype(wide), head.astype(wide))
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logits = logits / temperature
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    safe_targets = jnp.clip(targets, 0, head.shape[-1] - 1)
    chosen = jnp.take_along_axis(logits, safe_targets[..., None], axis=-1)[..., 0]
    if not entropy:
        return chosen - logsumexp, logsumexp, None
    log_probs = logits - logsumexp[..., None]
    # A logit of -infinity has probability 0 and adds nothing: 0 * -inf must not become NaN.
    possible = log_probs > -jnp.inf
    entropies = -jnp.where(possible, jnp.exp(log_probs) * jnp.where(possible, log_probs, 0), 0).sum(-1)
    return chosen - logsumexp, logsumexp, entropies
