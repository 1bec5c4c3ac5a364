"""The one entry to log-probs from hidden states, whatever computes them."""

import dataclasses

import jax
import jax.numpy as jnp

from kljax._checks import check_at_least, check_choice
from kljax._typing import Array, ArrayLike, Scalar
from kljax.log_probs._reference import reference_token_stats

IMPLEMENTATIONS = ("reference",)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenStats:
    """What one pass over the vocabulary yields for each target token; fields that were not asked for are None.

    Attributes:
      log_prob: `[...]` log-prob of the target, in nats.
      entropy: `[...]` entropy of the whole distribution, in nats.
      logsumexp: `[...]` log of the normaliser of the scaled logits.
      kl: `[...]` exact KL to a reference distribution over the whole vocabulary, in nats.
    """

    log_prob: Array
    entropy: Array | None = None
    logsumexp: Array | None = None
    kl: Array | None = None


def log_probs_from_hidden(
    hidden: ArrayLike,
    head: ArrayLike,
    targets: ArrayLike,
    *,
    temperature: Scalar = 1.0,
    softcap: Scalar | None = None,
    entropy: bool = False,
    implementation: str | None = None,
) -> TokenStats:
    """Log-probs of target tokens from hidden states and the LM head.

    With `z = hidden @ head`, capped to `softcap * tanh(z / softcap)` if asked, then divided by `temperature`:

        log_prob = z[target] - logsumexp(z)        entropy = logsumexp(z) - sum_v softmax(z)_v z_v

    Args:
      hidden: `[..., D]` final hidden states, any float type; the products are accumulated in float32.
      head: `[D, V]` weights of the LM head.
      targets: `[...]` integer ids in `[0, V)` of the tokens to score; a target outside is clamped into the range, so
        masked positions may hold anything.
      temperature: divides the logits; the value the tokens were sampled with. A scalar, may be traced.
      softcap: bound of the logits before the temperature; None does not cap.
      entropy: whether to compute the entropy as well.
      implementation: "reference" builds the logits of all positions; None chooses.

    Returns:
      `TokenStats` with `log_prob`, `logsumexp` and, if asked, `entropy`, each `[...]`, float32 or float64. Alignment is
      that of `hidden` and `targets`; nothing is masked here, see `kljax.shift_right` for the next-token shift.

    Gradient:
      Of every field to `hidden` and `head`.

    Raises:
      ValueError: if the shapes do not fit, the implementation is unknown, or a bound is not positive.

    References:
      Ackley, Hinton and Sejnowski (1985) for the temperature; Gemma Team, "Gemma 2" (2024), section 2, for the cap.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> stats = kljax.log_probs_from_hidden(jnp.zeros((2, 3)), jnp.ones((3, 4)), jnp.array([0, 1]), entropy=True)
      >>> print(stats.log_prob, stats.entropy)
      [-1.3862944 -1.3862944] [1.3862944 1.3862944]
    """
    if implementation is not None:
        check_choice("implementation", implementation, IMPLEMENTATIONS)
    check_at_least("temperature", temperature, 0, strict=True)
    check_at_least("softcap", softcap, 0, strict=True)
    hidden, head, targets = jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(targets)
    if head.ndim != 2 or hidden.shape[-1:] != head.shape[:1]:
        raise ValueError(
            f"head: got shape {list(head.shape)}, expected [D, V] with hidden {list(hidden.shape)} [..., D]"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(f"targets: got shape {list(targets.shape)}, expected {list(hidden.shape[:-1])} as hidden has")
    log_prob, logsumexp, entropies = reference_token_stats(
        hidden, head, targets, temperature=temperature, softcap=softcap, entropy=entropy
    )
    return TokenStats(log_prob=log_prob, logsumexp=logsumexp, entropy=entropies)
