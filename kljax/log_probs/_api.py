"""The entries to log-probs, entropies and divergences from hidden states, whatever computes them."""

import dataclasses

import jax

from kljax._typing import Array, ArrayLike, Scalar
from kljax.log_probs._options import HeadSharding, Tile
from kljax.log_probs._prepare import prepare, run

DIRECTIONS = ("reverse", "forward")
Reference = tuple[ArrayLike, ArrayLike | None]


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
    mask: ArrayLike | None = None,
    temperature: Scalar = 1.0,
    softcap: Scalar | None = None,
    logit_scale: Scalar = 1.0,
    bias: ArrayLike | None = None,
    vocab_size: int | None = None,
    entropy: bool = False,
    entropy_gradient: bool = True,
    reference: Reference | None = None,
    direction: str = "reverse",
    head_layout: str = "dv",
    sharding: HeadSharding | None = None,
    tile: Tile | None = None,
    implementation: str | None = None,
) -> TokenStats:
    """Log-probs of target tokens from hidden states and the LM head, without the logits of more than one tile.

    With `z = logit_scale * hidden @ head + bias`, capped to `softcap * tanh(z / softcap)` if asked, then divided by
    `temperature`, `p = softmax(z)`, and `q` the same of the reference:

        log_prob = z[target] - logsumexp(z)        entropy = -sum_v p_v log p_v
        kl = sum_v p_v log(p_v / q_v), or with the direction "forward" sum_v q_v log(q_v / p_v)

    Args:
      hidden: `[..., D]` final hidden states, any float type.
      head: `[D, V]` weights of the LM head, or `[V, D]`; where its type differs from that of `hidden`, the products
        are taken in the wider of the two. They are accumulated in float32, as everything after them is computed.
      targets: `[...]` integer ids in `[0, vocab_size)` of the tokens to score; a target outside is clamped into the
        range. What is to be ignored is said by the mask alone.
      mask: `[...]` boolean; positions where it is 0 cost nothing and may hold anything, NaN too.
      temperature: divides the logits; the value the tokens were sampled with. A scalar or `[...]`, may be traced.
      softcap: bound of the logits before the temperature; None does not cap.
      logit_scale: multiplies the products, before the bias.
      bias: `[V]` added to the logits.
      vocab_size: number of tokens, where the head is padded to more columns; those after never enter anything.
      entropy: whether to compute the entropy as well.
      entropy_gradient: whether it will be differentiated. Without it, and without a KL, a head that needs no gradient
        (LoRA) takes 4 N D V operations for value and gradient instead of 6.
      reference: `(ref_hidden, ref_head)` of the distribution that the exact KL is taken to, shaped as `hidden` and
        `head`; a `ref_head` of None is this head, as data. Bias, scale, cap and temperature are those of the policy.
      direction: "reverse", KL(policy || reference), or "forward", KL(reference || policy).
      head_layout: "dv" for a head `[D, V]`, "vd" for `[V, D]`.
      sharding: where tokens and head live on a mesh; None leaves that to the compiler.
      tile: how much of the logits exists at a time; None takes the row of the table for this kind of device.
      implementation: "tile", or "reference", which builds the logits of all positions; None is "tile".

    Returns:
      `TokenStats` with `log_prob`, `logsumexp` and, if asked, `entropy` and `kl`, each `[...]`, float32, or float64 if
      an input is. Masked positions hold 0. Alignment is that of `hidden` and `targets`; see `kljax.shift_right` for the
      next-token shift.

    Gradient:
      Of every field to `hidden`, `head` and `bias`, and of `kl` to `ref_hidden` and `ref_head`, for which the bias is
      data; 0 from masked positions, and from a `kl` that is infinite. Temperature, cap and scale are data. Of "tile"
      there is no `jvp`; one of its gradient (a product with the Hessian) there is.

    Raises:
      ValueError: if the shapes do not fit, a name is unknown, or a bound is not positive.

    References:
      Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Wijmans et al., "Cut your losses in
      large-vocabulary language models" (2025); Gemma Team, "Gemma 2" (2024), section 2, for the cap.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> stats = kljax.log_probs_from_hidden(jnp.zeros((2, 3)), jnp.ones((3, 4)), jnp.array([0, 1]), entropy=True)
      >>> print(stats.log_prob, stats.entropy)
      [-1.3862944 -1.3862944] [1.3862944 1.3862944]
    """
    call = prepare(
        hidden, head, targets=targets, mask=mask, temperature=temperature, softcap=softcap, logit_scale=logit_scale,
        bias=bias, vocab_size=vocab_size, entropy=entropy, entropy_gradient=entropy_gradient, reference=reference,
        divergence=("direction", direction, DIRECTIONS), head_layout=head_layout,
        sharding=sharding, tile=tile, implementation=implementation,
    )  # fmt: skip
    return TokenStats(**run(call))


def kl_from_hidden(
    hidden: ArrayLike,
    head: ArrayLike,
    ref_hidden: ArrayLike,
    ref_head: ArrayLike | None = None,
    *,
    mask: ArrayLike | None = None,
    direction: str = "reverse",
    temperature: Scalar = 1.0,
    softcap: Scalar | None = None,
    logit_scale: Scalar = 1.0,
    bias: ArrayLike | None = None,
    vocab_size: int | None = None,
    head_layout: str = "dv",
    sharding: HeadSharding | None = None,
    tile: Tile | None = None,
    implementation: str | None = None,
) -> Array:
    """The exact KL over the vocabulary between two policies, from their hidden states; never their logits.

    With `p` and `q` the distributions of policy and reference at a position, as in `log_probs_from_hidden`:

        "reverse": sum_v p_v log(p_v / q_v)        "forward": sum_v q_v log(q_v / p_v)

    It is computed as `sum_v p_v (exp(y_v) - 1 - y_v)` with `y = log(q / p)` up to a constant that is put back, none of
    whose terms is negative: a KL of 1e-6 nats keeps its digits, and that of a policy to itself is exactly 0.

    Args:
      hidden: `[..., D]` hidden states of the policy.
      head: `[D, V]` its LM head, or `[V, D]`.
      ref_hidden: `[..., D]` hidden states of the reference. They are what to keep of a reference: its log-probs would
        take `V / D` times the memory.
      ref_head: its LM head, shaped as `head`; None is the same head, as data.
      mask: `[...]` boolean; positions where it is 0 cost nothing.
      direction: "reverse" or "forward".
      temperature: as in `log_probs_from_hidden`, for both.
      softcap: the same.
      logit_scale: the same.
      bias: the same.
      vocab_size: the same.
      head_layout: the same.
      sharding: the same.
      tile: the same.
      implementation: the same.

    Returns:
      `[...]`, in nats, float32 or float64, never negative; masked positions hold 0. Infinite where one of the two rules
      out a token that the other, over which the mean is taken, does not.

    Gradient:
      Of the KL to `hidden`, `head` and `bias`, and to `ref_hidden` and `ref_head`: stop it there if the reference is
      data and held by something that is differentiated.

    Raises:
      ValueError: as `log_probs_from_hidden`.

    References:
      Kullback and Leibler, "On information and sufficiency" (1951).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> policy, reference = jnp.array([[0.0, 0.0]]), jnp.log(jnp.array([[0.25, 0.75]]))
      >>> print(f"{kljax.kl_from_hidden(policy, jnp.eye(2), reference).item():.4f}")
      0.1438
    """
    call = prepare(
        hidden, head, mask=mask, temperature=temperature, softcap=softcap, logit_scale=logit_scale, bias=bias,
        vocab_size=vocab_size, reference=(ref_hidden, ref_head), divergence=("direction", direction, DIRECTIONS),
        head_layout=head_layout, sharding=sharding, tile=tile, implementation=implementation,
    )  # fmt: skip
    return run(call)["kl"]


def jsd_from_hidden(
    hidden: ArrayLike,
    head: ArrayLike,
    ref_hidden: ArrayLike,
    ref_head: ArrayLike | None = None,
    *,
    mask: ArrayLike | None = None,
    beta: Scalar = 0.5,
    temperature: Scalar = 1.0,
    softcap: Scalar | None = None,
    logit_scale: Scalar = 1.0,
    bias: ArrayLike | None = None,
    vocab_size: int | None = None,
    head_layout: str = "dv",
    sharding: HeadSharding | None = None,
    tile: Tile | None = None,
    implementation: str | None = None,
) -> Array:
    """Divergence of two policies from their hidden states: `beta KL(Q || M) + (1 - beta) KL(P || M)`.

    `P` is the policy, `Q` the reference or teacher, and `M = (1 - beta) P + beta Q`, as in `kljax.generalized_jsd`. The
    mixture needs both normalisers, so the vocabulary is passed over twice.

    Args:
      hidden: `[..., D]` hidden states of the policy.
      head: `[D, V]` its LM head, or `[V, D]`.
      ref_hidden: `[..., D]` hidden states of the teacher.
      ref_head: its LM head, shaped as `head`; None is the same head, as data.
      mask: `[...]` boolean; positions where it is 0 cost nothing.
      beta: weight of the teacher in the mixture; strictly between 0 and 1, as the ends are KLs (`kl_from_hidden`).
      temperature: as in `log_probs_from_hidden`, for both.
      softcap: the same.
      logit_scale: the same.
      bias: the same.
      vocab_size: the same.
      head_layout: the same.
      sharding: the same.
      tile: the same.
      implementation: the same.

    Returns:
      `[...]`, in nats, float32 or float64, never negative and never above `log 2`; masked positions hold 0.

    Gradient:
      Of the divergence to `hidden`, `head` and `bias`, and to `ref_hidden` and `ref_head`.

    Raises:
      ValueError: as `log_probs_from_hidden`, and for a `beta` that is not between 0 and 1.

    References:
      Agarwal et al., "On-policy distillation of language models" (2024), eq. 1.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> policy, teacher = jnp.array([[0.0, 0.0]]), jnp.array([[50.0, -50.0]])
      >>> print(f"{kljax.jsd_from_hidden(policy, jnp.eye(2), teacher).item():.4f}")
      0.2158
    """
    call = prepare(
        hidden, head, mask=mask, temperature=temperature, softcap=softcap, logit_scale=logit_scale, bias=bias,
        vocab_size=vocab_size, reference=(ref_hidden, ref_head), divergence=("divergence", "jsd", ("jsd",)), beta=beta,
        head_layout=head_layout, sharding=sharding, tile=tile, implementation=implementation,
    )  # fmt: skip
    return run(call)["kl"]
