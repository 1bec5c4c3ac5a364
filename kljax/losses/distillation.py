"""Distillation: the distance to a teacher, from sampled tokens, over the whole vocabulary, or over its largest part.

Full vocabularies are log-probs `[..., T, V]`, each row of which sums to 1 (`jax.nn.log_softmax`); a temperature divides
the logits first. The teacher is a constant, whose producer stops its gradient.
"""

import jax
import jax.numpy as jnp
import numpy as np

from kljax._checks import NUMBER, as_float, check_at_least, check_at_most, check_mask, check_numbers, check_same_shape
from kljax._devices import auto_sharded
from kljax._numerics import bregman, clip, log_mix, times
from kljax._typing import Array, ArrayLike, Estimator, Float, Integer, KLGradient, Mask, MaskLike, Scalar
from kljax.losses.kl import reference_kl_loss

__all__ = ["append_tail", "distillation_loss", "generalized_jsd", "top_k_forward_kl", "top_k_with_tail"]


def distillation_loss(
    log_probs: Float[ArrayLike, "*b T"],
    teacher_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    estimator: Estimator = "k3",
    gradient: KLGradient = "k2",
    sampling_log_probs: Float[ArrayLike, "*b T"] | None = None,
    max_ratio: Scalar | None = None,
    log_ratio_clip: Scalar | None = None,
    value_clip: Scalar | None = None,
) -> Float[Array, "*b T"]:
    """The KL to a teacher from sampled tokens: `reference_kl_loss` with the teacher for the reference.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      teacher_log_probs: log-probs that the teacher gives the same tokens; a constant.
      estimator: the value, as in `estimate_kl`; "k1" with the gradient "k2" is TRL's sampled-token distillation.
      gradient: "k2" (default): the gradient of KL(pi || teacher) whatever the value; "value": that of the estimator, as
        in verl; "none": a constant.
      sampling_log_probs: importance-corrects for tokens that another policy drew.
      max_ratio: cap of that importance ratio.
      log_ratio_clip: bound of the log-ratio, in nats.
      value_clip: bound of the estimate, in nats; verl's `loss_max_clamp`.

    Returns:
      `[..., T]`, float32 or float64, in nats; masked positions hold 0.

    Gradient:
      As `reference_kl_loss`: by default `log pi - log teacher` to `log_probs`, which is in expectation over tokens
      drawn from pi the gradient of KL(pi || teacher).

    Raises:
      ValueError: as `reference_kl_loss`.

    References:
      Agarwal et al., "On-policy distillation of language models" (2024); verl 0.9.1, `distillation_loss`.

    Example:
      >>> import jax, jax.numpy as jnp, kljax
      >>> lp, teacher, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[-2.0, -1.0]]), jnp.array([[1, 1]])
      >>> print(kljax.distillation_loss(lp, teacher, mask, estimator="k1"))
      [[1. 0.]]
    """
    return reference_kl_loss(
        log_probs,
        teacher_log_probs,
        mask,
        estimator=estimator,
        gradient=gradient,
        sampling_log_probs=sampling_log_probs,
        max_ratio=max_ratio,
        log_ratio_clip=log_ratio_clip,
        value_clip=value_clip,
    )


def generalized_jsd(
    vocab_log_probs: Float[ArrayLike, "*b T V"],
    teacher_vocab_log_probs: Float[ArrayLike, "*b T V"],
    mask: MaskLike[Mask, "*b T"],
    *,
    beta: Scalar = 0.5,
) -> Float[Array, "*b T"]:
    """Divergence of the policy P and the teacher Q: `beta KL(Q || M) + (1 - beta) KL(P || M)`.

    The mixture is `M = (1 - beta) P + beta Q`. At `beta` 0 it is KL(Q || P), which spreads the policy over all that the
    teacher does, and at `beta` 1 KL(P || Q), which keeps the policy to what the teacher does most, as TRL defines the
    two. They are not the limits of what is in between, which goes to 0 at both ends, as `beta` and `1 - beta` do.

    Every term of a KL is computed as `p (exp(y) - 1 - y)`, `y = log q - log p`, which is not negative. Near P = Q the
    terms `p (log p - log q)` are larger than their sum by orders of magnitude, and in float32 nothing of it is left.

    Args:
      vocab_log_probs: `[..., T, V]` log-probs of the policy over the vocabulary, in nats; each row sums to 1. `-inf` is
        a token without probability.
      teacher_vocab_log_probs: log-probs of the teacher; a constant.
      mask: `[..., T]`, boolean.
      beta: weight of the teacher in the mixture, between 0 and 1.

    Returns:
      `[..., T]`, float32 or float64, in nats, never negative; masked positions hold 0. Finite with `-inf` among the
      log-probs, except where a KL itself is infinite (`beta` 0 or 1, and no probability where the other has some).

    Gradient:
      To the logits, through `log_softmax`, that of the divergence. (To the log-probs themselves it differs from that of
      the sum above by `p` at `beta` 1, which `log_softmax` removes.) 0 to a log-prob of `-inf`.

    Raises:
      ValueError: for shapes that do not fit, or a `beta` outside of [0, 1].

    References:
      Agarwal et al., "On-policy distillation of language models" (2024), eq. 1; TRL 1.16, `generalized_jsd_loss`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> policy, teacher = jnp.log(jnp.array([[[0.5, 0.5]]])), jnp.log(jnp.array([[[1.0, 0.0]]]))
      >>> print(f"{kljax.generalized_jsd(policy, teacher, jnp.array([[1]])).item():.4f}")
      0.2158
    """
    check_at_least("beta", beta, 0)
    check_at_most("beta", beta, 1)
    policy, teacher, keep = _vocabularies(
        "vocab_log_probs", vocab_log_probs, "teacher_vocab_log_probs", teacher_vocab_log_probs, mask
    )
    if isinstance(beta, NUMBER) and 0 < beta < 1:
        terms = _mixture_terms(policy, teacher, jnp.asarray(beta, policy.dtype))
    else:
        beta = jnp.asarray(beta, policy.dtype)
        inside = (beta > 0) & (beta < 1)
        between = _mixture_terms(policy, teacher, jnp.where(inside, beta, 0.5))
        ends = jnp.where(beta == 0, _kl_terms(teacher, policy), _kl_terms(policy, teacher))
        terms = jnp.where(inside, between, ends)
    return jnp.where(keep, terms.sum(-1), 0)


@auto_sharded
def top_k_with_tail(vocab_log_probs: Float[ArrayLike, "*b T V"], indices: Integer[ArrayLike, "*b T K"]) -> Array:
    """The log-probs of some tokens and of all others together: `[log p_i for i in indices] + [log sum_{v not in} p_v]`.

    Two such rows over the same tokens, the teacher's largest, are distributions that `generalized_jsd` compares: a
    lower bound of the divergence over the vocabulary. The tail is the sum of what is in it. One minus the rest, in
    float32, would be off by a tenth at a tail of 1e-6.

    Args:
      vocab_log_probs: `[..., T, V]` log-probs over the vocabulary, in nats; each row sums to 1.
      indices: `[..., T, K]` integers from 0 to V - 1, distinct in each row.

    Returns:
      `[..., T, K + 1]`, float32 or float64, in nats, the tail last; `-inf` for a tail that is empty.

    Gradient:
      To `vocab_log_probs`: 1 to each of the chosen, and to tokens of the tail their share of it. 0 where it is empty.

    Raises:
      ValueError: if the leading axes differ.
      TypeError: if the indices are not integers.

    References:
      TRL 1.16, `add_tail_bucket`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> log_probs = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]]))
      >>> print(jnp.exp(kljax.top_k_with_tail(log_probs, jnp.array([[0, 2]]))))
      [[0.5   0.125 0.375]]
    """
    (log_probs,) = as_float(vocab_log_probs)
    indices = jnp.asarray(indices)
    if indices.shape[:-1] != log_probs.shape[:-1]:
        raise ValueError(
            f"indices: got shape {list(indices.shape)}, expected {list(log_probs.shape[:-1])} and an axis of tokens"
        )
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"indices: got dtype {indices.dtype}, expected an integer type")
    indices = indices.astype(int)
    chosen = jnp.take_along_axis(log_probs, indices, -1)
    is_chosen = jnp.put_along_axis(jnp.zeros(log_probs.shape, bool), indices, True, -1, inplace=False)
    rest = jnp.where(is_chosen, -jnp.inf, log_probs)
    top = jax.lax.stop_gradient(rest.max(-1, keepdims=True))
    empty = top == -jnp.inf
    there = rest > -jnp.inf
    sums = jnp.where(there, jnp.exp(jnp.where(there, rest - jnp.where(empty, 0, top), 0)), 0).sum(-1, keepdims=True)
    tail = jnp.where(empty, -jnp.inf, jnp.log(jnp.where(empty, 1, sums)) + top)
    return jnp.concatenate([chosen, tail], -1)


def append_tail(top_log_probs: Float[ArrayLike, "*b K"], *, min_mass: Scalar = 1e-7) -> Array:
    """The log-probs of some tokens and of what they leave to all others, `max(1 - sum_i p_i, min_mass)`.

    For a teacher of whom only the largest log-probs are known. Where the vocabulary is, `top_k_with_tail` is exact;
    here a tail much smaller than the second largest probability is mostly rounding.

    Args:
      top_log_probs: `[..., K]` log-probs of distinct tokens, in nats; `-inf` marks an entry that is not used.
      min_mass: lower bound of the tail, positive: the sum may reach 1 by rounding, and its tail has a logarithm still.

    Returns:
      `[..., K + 1]`, float32 or float64, in nats, the tail last.

    Gradient:
      To `top_log_probs`: 1 to each, and `-p_i / tail` from the tail, or nothing where `min_mass` bounds it.

    Raises:
      ValueError: if `min_mass` is not positive.

    References:
      TRL 1.16, `add_tail_bucket`, which bounds the tail by 1e-7.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(jnp.exp(kljax.append_tail(jnp.log(jnp.array([0.5, 0.25])))))
      [0.5  0.25 0.25]
    """
    check_at_least("min_mass", min_mass, 0, strict=True)
    (log_probs,) = as_float(top_log_probs)
    # One minus the largest is exact where it is near 1, and all that remains to be taken from it is small there.
    at = jnp.argmax(log_probs, -1, keepdims=True)
    is_largest = jnp.arange(log_probs.shape[-1]).reshape((1,) * (log_probs.ndim - 1) + (-1,)) == at
    largest = jnp.take_along_axis(log_probs, at, -1)
    others = jnp.where(is_largest, 0, jnp.exp(jnp.where(is_largest, 0, log_probs))).sum(-1, keepdims=True)
    mass = -jnp.expm1(largest) - others
    tail = jnp.log(clip(mass, jnp.asarray(min_mass, mass.dtype), None))
    return jnp.concatenate([log_probs, tail], -1)


def top_k_forward_kl(
    top_log_probs: Float[ArrayLike, "*b T K"],
    teacher_top_log_probs: Float[ArrayLike, "*b T K"],
    mask: MaskLike[Mask, "*b T"],
    *,
    min_log_prob: Scalar | None = None,
) -> Float[Array, "*b T"]:
    """KL(teacher || pi) over the teacher's largest tokens alone: `max(sum_k q_k (log q_k - log p_k), 0)`.

    The rest of the vocabulary is left out and nothing is renormalised: the sum can be negative, where it counts as 0,
    and it is least where the policy has more than the teacher in every one of the tokens. `generalized_jsd` of rows
    with a tail has neither fault.

    Args:
      top_log_probs: `[..., T, K]` log-probs of the policy for the tokens, in nats.
      teacher_top_log_probs: log-probs of the teacher for the same tokens; a constant.
      mask: `[..., T]`, boolean.
      min_log_prob: lower bound of both log-probs, in nats; None has none. verl's `log_prob_min_clamp`.

    Returns:
      `[..., T]`, float32 or float64, in nats; masked positions hold 0.

    Gradient:
      To `top_log_probs`: `-q_k` where the sum is at least 0 and the log-prob at least `min_log_prob`, else 0.

    Raises:
      ValueError: for shapes that do not fit.

    References:
      verl 0.9.1, distillation loss `forward_kl_topk`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> policy, teacher = jnp.log(jnp.array([[[0.25, 0.5]]])), jnp.log(jnp.array([[[0.5, 0.25]]]))
      >>> print(f"{kljax.top_k_forward_kl(policy, teacher, jnp.array([[1]])).item():.4f}")
      0.1733
    """
    check_numbers(min_log_prob=min_log_prob)
    policy, teacher, keep = _vocabularies(
        "top_log_probs", top_log_probs, "teacher_top_log_probs", teacher_top_log_probs, mask
    )
    if min_log_prob is not None:
        policy, teacher = (clip(x, jnp.asarray(min_log_prob, x.dtype), None) for x in (policy, teacher))
    there = teacher != -jnp.inf
    terms = times(jnp.exp(teacher), jnp.where(there, teacher, 0) - jnp.where(there, policy, 0))
    return jnp.where(keep, clip(jnp.where(there, terms, 0).sum(-1), 0.0, None), 0)


def _vocabularies(
    name: str, log_probs: ArrayLike, other_name: str, other_log_probs: ArrayLike, mask: Mask
) -> tuple[Array, Array, Array]:
    """Both `[..., T, V]` arrays, 0 under the mask, and the mask as booleans."""
    shape = check_same_shape(**{name: log_probs, other_name: other_log_probs})
    if np.shape(mask) != shape[:-1]:
        raise ValueError(
            f"mask: got shape {list(np.shape(mask))}, expected {list(shape[:-1])}, {name} without its last"
        )
    keep = check_mask(mask)
    log_probs, other_log_probs = as_float(log_probs, other_log_probs)
    return jnp.where(keep[..., None], log_probs, 0), jnp.where(keep[..., None], other_log_probs, 0), keep


def _kl_terms(p: Array, q: Array) -> Array:
    """`p (exp(y) - 1 - y)` with `y = log q - log p`, of which the sum over the vocabulary is KL(p || q)."""
    p_gone = p == -jnp.inf
    q_gone = q == -jnp.inf
    both = ~p_gone & ~q_gone
    log_p = jnp.where(both, p, 0)
    log_q = jnp.where(both, q, 0)
    finite = bregman(jnp.exp(log_p), jnp.exp(log_q), log_q - log_p)
    return jnp.where(both, finite, jnp.where(q_gone & ~p_gone, jnp.inf, jnp.exp(jnp.where(q_gone, -jnp.inf, q))))


def _mixture_terms(policy: Array, teacher: Array, beta: Array) -> Array:
    """`beta KL(Q || M) + (1 - beta) KL(P || M)` before the sum over the vocabulary, for a `beta` between 0 and 1."""
    no_p = policy == -jnp.inf
    no_q = teacher == -jnp.inf
    both = ~no_p & ~no_q
    p = jnp.where(both, policy, 0)
    q = jnp.where(both, teacher, 0)
    to_p = log_mix(beta, q - p)
    to_q = log_mix(1 - beta, p - q)
    mixed = jnp.where(p > q, p + to_p, q + to_q)
    m = jnp.exp(mixed)
    terms = beta * bregman(jnp.exp(q), m, to_q) + (1 - beta) * bregman(jnp.exp(p), m, to_p)
    # What one of the two leaves out is the other's, whose share of the mixture is known.
    alone = jnp.where(no_p, -beta * jnp.log(beta), -(1 - beta) * jnp.log1p(-beta))
    lone = jnp.exp(jnp.where(both, 0, jnp.where(no_p, teacher, policy)))
    return jnp.where(both, terms, alone * lone)
