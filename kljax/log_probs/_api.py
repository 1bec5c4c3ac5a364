"""Log-probs, entropies and divergences of tokens from hidden states and the LM head."""

import dataclasses
from typing import Literal

import jax

from kljax._checks import refuses
from kljax._typing import Array, ArrayLike, Direction, HeadImplementation, Mask, Scalar
from kljax.log_probs._backward import tiled_stats
from kljax.log_probs._head import Head
from kljax.log_probs._inputs import CheckedCall, Function, ReferenceStates, as_reference, prepare, run
from kljax.log_probs._reference import reference_stats

Reference = ReferenceStates | tuple[ArrayLike, ArrayLike | Head | None]
_FUNCTIONS: dict[HeadImplementation, Function] = {
    "tile": tiled_stats,
    "xla": tiled_stats,
    "reference": reference_stats,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenStats:
    """Statistics of each target token from one pass over the vocabulary; None where not requested.

    Attributes:
      log_prob: `[...]` log-prob of the target, in nats.
      entropy: `[...]` entropy of the whole distribution, in nats.
      logsumexp: `[...]` log of the normaliser of the scaled logits.
      kl: `[...]` exact KL to a reference distribution over the whole vocabulary, in nats.
      sum_squared_probs: `[...]` sum over the vocabulary of the squared probabilities.
      log_kept_mass: `[...]` log of the probability of the kept tokens, in nats.
    """

    log_prob: Array
    entropy: Array | None = None
    logsumexp: Array | None = None
    kl: Array | None = None
    sum_squared_probs: Array | None = None
    log_kept_mass: Array | None = None


def log_probs_from_hidden(
    hidden: ArrayLike,
    head: ArrayLike | Head,
    targets: ArrayLike,
    *,
    mask: Mask | None = None,
    temperature: Scalar = 1.0,
    entropy: bool | Literal["constant"] = False,
    sum_squared_probs: bool = False,
    reference: Reference | None = None,
) -> TokenStats:
    """Computes log-probs of target tokens from hidden states and the LM head, with one tile of logits at a time.

    With `z = logit_scale * hidden @ W + bias`, capped to `softcap * tanh(z / softcap)` if the head has a cap, then
    divided by `temperature`, `p = softmax(z)`, and `q` the same of the reference with its own head:

        log_prob = z[target] - logsumexp(z)        entropy = -sum_v p_v log p_v        sum_squared_probs = sum_v p_v^2
        kl = sum_v p_v log(p_v / q_v), or with the direction "forward" sum_v q_v log(q_v / p_v)

    Args:
      hidden: `[..., D]` final hidden states, any float type.
      head: a `kljax.Head`, or its weights `[D, V]` where it has no other fields. Where their type differs from that of
        `hidden`, the products are taken in the wider of the two. They are accumulated in float32, as everything after
        them is computed.
      targets: `[...]` integer ids in `[0, vocab_size)` of the tokens to score; an unmasked target outside is an
        error, under `jit` clamped into the range. Only the mask says which positions to ignore.
      mask: `[...]` boolean; positions where it is 0 cost nothing and may hold anything, NaN too.
      temperature: divides the logits; the value the tokens were sampled with. A scalar or `[...]`, may be traced.
      entropy: whether to compute the entropy as well; "constant" computes it without a gradient. Without a gradient of
        the entropy, and without a KL, a head that needs no gradient (LoRA) takes 4 N D V operations for value and
        gradient instead of 6.
      sum_squared_probs: whether to compute the sum of the squared probabilities, which `kljax.otb_advantages` takes.
      reference: the distribution of the exact KL: a `kljax.ReferenceStates`, or a pair `(ref_hidden, ref_head)` for the
        reverse KL, KL(policy || reference). A `ref_head` of None is `head`, as a constant.

    Returns:
      `TokenStats` with `log_prob`, `logsumexp` and the requested fields, each `[...]`, float32, or float64 if an input
      is. Masked positions hold 0. Aligned with `hidden` and `targets`: `kljax.token_log_probs` does the next-token
      shift.

    Gradient:
      Of every field to `hidden`, and to the weights and biases of `head` and of the reference; 0 from masked positions,
      and from a `kl` that is infinite. Temperature, cap and scale are constants. "tile" has no `jvp`; its gradient has
      one (a product with the Hessian).

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
    ref = as_reference(reference)
    call = prepare(
        hidden,
        head,
        targets=targets,
        mask=mask,
        temperature=temperature,
        entropy=entropy,
        sum_squared_probs=sum_squared_probs,
        reference=ref,
        divergence=None if ref is None else ref.direction,
    )
    return TokenStats(**_run(call))


def token_log_probs(
    hidden: ArrayLike,
    head: ArrayLike | Head,
    tokens: ArrayLike,
    mask: Mask | None = None,
    *,
    temperature: Scalar = 1.0,
    entropy: bool | Literal["constant"] = False,
    sum_squared_probs: bool = False,
    reference: Reference | None = None,
) -> TokenStats:
    """Computes the statistics of every token of whole sequences, each given the tokens before it.

    `log_prob[t] = log p(tokens[t] | tokens[0], ..., tokens[t - 1])` comes from `hidden[t - 1]`: the shift by one
    position is done here, and every result is aligned with `tokens`.

    Args:
      hidden: `[..., T, D]` hidden states of the sequences, `hidden[t]` after reading `tokens[t]`.
      head: as in `log_probs_from_hidden`.
      tokens: `[..., T]` integer ids.
      mask: `[..., T]` boolean, aligned with `tokens`: the tokens to score. The others cost nothing; None scores all.
        Position 0 has no prediction and is never scored.
      temperature: as in `log_probs_from_hidden`; a scalar or `[..., T]`, aligned with `tokens`.
      entropy: as in `log_probs_from_hidden`.
      sum_squared_probs: as in `log_probs_from_hidden`.
      reference: as in `log_probs_from_hidden`, with hidden states `[..., T, D]` of the same sequences.

    Returns:
      `TokenStats` as of `log_probs_from_hidden`, each field `[..., T]`, with position `t` for token `t`. Masked
      positions and position 0 hold 0.

    Gradient:
      As `log_probs_from_hidden`.

    Raises:
      ValueError: as `log_probs_from_hidden`, and for hidden states without an axis of positions.

    References:
      Wijmans et al., "Cut your losses in large-vocabulary language models" (2025).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> tokens, mask = jnp.array([[0, 2, 1]]), jnp.array([[0, 1, 1]])
      >>> print(kljax.token_log_probs(jnp.zeros((1, 3, 2)), jnp.ones((2, 4)), tokens, mask).log_prob)
      [[ 0.        -1.3862944 -1.3862944]]
    """
    ref = as_reference(reference)
    call = prepare(
        hidden,
        head,
        targets=tokens,
        mask=mask,
        temperature=temperature,
        entropy=entropy,
        sum_squared_probs=sum_squared_probs,
        reference=ref,
        divergence=None if ref is None else ref.direction,
        targets_name="tokens",
    )
    _check_positions(call)
    return TokenStats(**_run(call, shifted=True))


def renormalized_log_probs(
    hidden: ArrayLike,
    head: ArrayLike | Head,
    targets: ArrayLike,
    kept_ids: ArrayLike,
    *,
    mask: Mask | None = None,
    temperature: Scalar = 1.0,
    entropy: bool | Literal["constant"] = False,
    reference: Reference | None = None,
) -> TokenStats:
    """Computes log-probs renormalised over the tokens that a sampler kept (top-k, top-p, min-p).

    A sampler that cuts the vocabulary draws from `p(v) / sum_{u in S} p(u)` on its set `S` of kept tokens. With the
    same set for every policy, importance ratios compare the distributions that were sampled from:

        log_prob = z[target] - logsumexp_{v in S}(z_v)        log_kept_mass = log sum_{v in S} p_v

    `log_prob + log_kept_mass` is the log-prob over the whole vocabulary.

    Args:
      hidden: `[..., D]` final hidden states, any float type.
      head: as in `log_probs_from_hidden`.
      targets: `[...]` integer ids of the sampled tokens. A target belongs to `S`, listed or not.
      kept_ids: `[..., K]` integer ids of the tokens in `S`: the sampler's set, for every policy that is compared. Ids
        outside `[0, vocab_size)`, such as -1, pad the list; an id may be listed twice.
      mask: `[...]` boolean; positions where it is 0 cost nothing and may hold anything, NaN too.
      temperature: as in `log_probs_from_hidden`.
      entropy: as in `log_probs_from_hidden`; of the whole vocabulary.
      reference: as in `log_probs_from_hidden`; the KL is over the whole vocabulary.

    Returns:
      `TokenStats` with the renormalised `log_prob`, `log_kept_mass`, both at most 0, the `logsumexp` of the whole
      vocabulary and the requested fields. Masked positions hold 0.

    Gradient:
      As `log_probs_from_hidden`; of the log-prob, 0 to the logits outside `S`.

    Raises:
      ValueError: as `log_probs_from_hidden`.
      TypeError: if `kept_ids` does not hold integers.

    References:
      Holtzman et al., "The curious case of neural text degeneration" (2020), for top-p; Nguyen et al., "Turning up the
      heat: min-p sampling" (2025).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> logits = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
      >>> stats = kljax.renormalized_log_probs(logits, jnp.eye(3), jnp.array([1]), jnp.array([[0, 1]]))
      >>> print(f"{jnp.exp(stats.log_prob[0]):.4f} {jnp.exp(stats.log_kept_mass[0]):.4f}")
      0.3750 0.8000
    """
    ref = as_reference(reference)
    call = prepare(
        hidden,
        head,
        targets=targets,
        mask=mask,
        temperature=temperature,
        entropy=entropy,
        kept_ids=kept_ids,
        reference=ref,
        divergence=None if ref is None else ref.direction,
    )
    return TokenStats(**_run(call))


TOKEN_MASK = (
    "got a mask, but hidden states predict the next token, so that a mask of tokens is one position off; call "
    "kljax.{function} for the values of tokens, or pass `hidden_mask`, True at the hidden states that count"
)


def token_kl(
    hidden: ArrayLike,
    head: ArrayLike | Head,
    ref_hidden: ArrayLike,
    ref_head: ArrayLike | Head | None = None,
    mask: Mask | None = None,
    *,
    direction: Direction = "reverse",
    temperature: Scalar = 1.0,
) -> Array:
    """Computes the exact KL over the vocabulary at every token of whole sequences, each given the tokens before it.

    With `p` and `q` the distributions of token `t` by policy and reference, from `hidden[t - 1]` and
    `ref_hidden[t - 1]`, it is `kl_from_hidden` there: aligned with the tokens, as `kljax.token_log_probs`, whose `kl`
    it equals.

    Args:
      hidden: `[..., T, D]` final hidden states of the policy, `hidden[t]` after reading token `t`.
      head: its `kljax.Head`, or its weights `[D, V]`, as in `log_probs_from_hidden`.
      ref_hidden: `[..., T, D]` hidden states of the reference after the same tokens; `D` may differ.
      ref_head: its head, as in `kl_from_hidden`; None is `head` itself, as a constant.
      mask: `[..., T]` boolean, aligned with the tokens: the tokens that count. The others cost nothing; None takes all.
        Position 0 has no prediction and never counts.
      direction: "reverse" for KL(policy || reference) or "forward" for KL(reference || policy).
      temperature: divides the logits of both; a scalar or `[..., T]`, aligned with the tokens; may be traced.

    Returns:
      `[..., T]`, in nats, float32 or float64, never negative, with position `t` for token `t`. Masked positions and
      position 0 hold 0.

    Gradient:
      As `kl_from_hidden`.

    Raises:
      ValueError: as `log_probs_from_hidden`, and for hidden states without an axis of positions.
      TypeError: for a pair of hidden states and head in place of `ref_hidden`.

    References:
      Kullback and Leibler, "On information and sufficiency" (1951).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> policy, reference = jnp.zeros((1, 3, 2)), jnp.log(jnp.array([[[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]]]))
      >>> kl = kljax.token_kl(policy, jnp.eye(2), reference, mask=jnp.array([[0, 1, 1]]))
      >>> [f"{x:.4f}" for x in kl[0]]
      ['0.0000', '0.1438', '0.0000']
    """
    arguments = hidden, head, ref_hidden, ref_head
    return _divergence(*arguments, mask=mask, kind=direction, temperature=temperature, shifted=True)


@refuses(mask=TOKEN_MASK.format(function="token_kl"))
def kl_from_hidden(
    hidden: ArrayLike,
    head: ArrayLike | Head,
    ref_hidden: ArrayLike,
    ref_head: ArrayLike | Head | None = None,
    *,
    hidden_mask: Mask | None = None,
    direction: Direction = "reverse",
    temperature: Scalar = 1.0,
) -> Array:
    """Computes the exact KL over the vocabulary between the predictions of two policies, from their hidden states.

    With `p` and `q` the distributions of policy and reference that two hidden states predict, as in
    `log_probs_from_hidden`:

        "reverse": sum_v p_v log(p_v / q_v)        "forward": sum_v q_v log(q_v / p_v)

    It is computed as `sum_v p_v (exp(y_v) - 1 - y_v)` with `y = log(q / p)` up to a constant that is put back. No term
    is negative: a KL of 1e-6 nats keeps its digits, and that of a policy to itself is exactly 0.

    Args:
      hidden: `[..., D]` final hidden states of the policy, any float type.
      head: its `kljax.Head`, or its weights `[D, V]`, as in `log_probs_from_hidden`.
      ref_hidden: `[..., D]` hidden states of the reference; `D` may differ. Store these rather than log-probs over the
        vocabulary, which take `V / D` times the memory.
      ref_head: its `kljax.Head`, with its own bias, cap, scale, layout and padding. An array stands for `head` with
        other weights, its bias a constant; None is `head` itself, as a constant.
      hidden_mask: `[...]` boolean, aligned with `hidden`, which predicts the next token; positions where it is 0 cost
        nothing and may hold anything, NaN too. For a mask of tokens see `kljax.token_kl`.
      direction: "reverse" or "forward".
      temperature: divides the logits of both, as in `log_probs_from_hidden`; a scalar or `[...]`, may be traced.

    Returns:
      `[...]`, in nats, float32 or float64, never negative; masked positions hold 0. Aligned with `hidden`. Infinite
      where one of the two rules out a token that the other, over which the mean is taken, does not.

    Gradient:
      Of the KL to both hidden states and to the weights and biases of both heads. Apply `stop_gradient` to the
      reference if it is a constant held by a tree that is differentiated.

    Raises:
      ValueError: as `log_probs_from_hidden`.
      TypeError: for an argument `mask`, or a pair of hidden states and head in place of `ref_hidden`.

    References:
      Kullback and Leibler, "On information and sufficiency" (1951).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> policy, reference = jnp.array([[0.0, 0.0]]), jnp.log(jnp.array([[0.25, 0.75]]))
      >>> print(f"{kljax.kl_from_hidden(policy, jnp.eye(2), reference).item():.4f}")
      0.1438
    """
    arguments = hidden, head, ref_hidden, ref_head
    return _divergence(*arguments, mask=hidden_mask, kind=direction, temperature=temperature)


def token_jsd(
    hidden: ArrayLike,
    head: ArrayLike | Head,
    ref_hidden: ArrayLike,
    ref_head: ArrayLike | Head | None = None,
    mask: Mask | None = None,
    *,
    beta: Scalar = 0.5,
    temperature: Scalar = 1.0,
) -> Array:
    """Computes `jsd_from_hidden` at every token of whole sequences, each given the tokens before it.

    With `P` and `Q` the distributions of token `t` by policy and teacher, from `hidden[t - 1]` and `ref_hidden[t - 1]`,
    and `M = (1 - beta) P + beta Q`, it is `beta KL(Q || M) + (1 - beta) KL(P || M)`, aligned with the tokens.

    Args:
      hidden: `[..., T, D]` final hidden states of the policy, `hidden[t]` after reading token `t`.
      head: its `kljax.Head`, or its weights `[D, V]`, as in `log_probs_from_hidden`.
      ref_hidden: `[..., T, D]` hidden states of the teacher after the same tokens; `D` may differ.
      ref_head: its head, as in `kl_from_hidden`; None is `head` itself, as a constant.
      mask: `[..., T]` boolean, aligned with the tokens, as in `kljax.token_kl`.
      beta: weight of the teacher in the mixture, strictly between 0 and 1, as in `jsd_from_hidden`.
      temperature: divides the logits of both; a scalar or `[..., T]`, aligned with the tokens; may be traced.

    Returns:
      `[..., T]`, in nats, float32 or float64, never negative and never above `log 2`, with position `t` for token `t`.
      Masked positions and position 0 hold 0.

    Gradient:
      As `jsd_from_hidden`.

    Raises:
      ValueError: as `jsd_from_hidden`, and for hidden states without an axis of positions.
      TypeError: for a pair of hidden states and head in place of `ref_hidden`.

    References:
      Agarwal et al., "On-policy distillation of language models" (2024), eq. 1.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> policy, teacher = jnp.zeros((1, 2, 2)), jnp.array([[[50.0, -50.0], [0.0, 0.0]]])
      >>> [f"{x:.4f}" for x in kljax.token_jsd(policy, jnp.eye(2), teacher)[0]]
      ['0.0000', '0.2158']
    """
    arguments = hidden, head, ref_hidden, ref_head
    return _divergence(*arguments, mask=mask, kind="jsd", beta=beta, temperature=temperature, shifted=True)


@refuses(mask=TOKEN_MASK.format(function="token_jsd"))
def jsd_from_hidden(
    hidden: ArrayLike,
    head: ArrayLike | Head,
    ref_hidden: ArrayLike,
    ref_head: ArrayLike | Head | None = None,
    *,
    hidden_mask: Mask | None = None,
    beta: Scalar = 0.5,
    temperature: Scalar = 1.0,
) -> Array:
    """Computes a divergence of two policies from their hidden states: `beta KL(Q || M) + (1 - beta) KL(P || M)`.

    `P` is the policy, `Q` the reference or teacher, and `M = (1 - beta) P + beta Q`, as in `kljax.generalized_jsd`. The
    mixture needs both normalisers, so the vocabulary is passed over twice.

    Args:
      hidden: `[..., D]` final hidden states of the policy, any float type.
      head: its `kljax.Head`, or its weights `[D, V]`, as in `log_probs_from_hidden`.
      ref_hidden: `[..., D]` hidden states of the teacher; `D` may differ.
      ref_head: its head, as in `kl_from_hidden`; None is `head` itself, as a constant.
      hidden_mask: `[...]` boolean, aligned with `hidden`, as in `kl_from_hidden`.
      beta: weight of the teacher in the mixture; strictly between 0 and 1, as the ends are KLs (`kl_from_hidden`).
      temperature: divides the logits of both, as in `log_probs_from_hidden`; a scalar or `[...]`, may be traced.

    Returns:
      `[...]`, in nats, float32 or float64, never negative and never above `log 2`; masked positions hold 0. Aligned
      with `hidden`.

    Gradient:
      Of the divergence to both hidden states and to the weights and biases of both heads.

    Raises:
      ValueError: as `log_probs_from_hidden`, and for a `beta` that is not between 0 and 1.
      TypeError: for an argument `mask`, or a pair of hidden states and head in place of `ref_hidden`.

    References:
      Agarwal et al., "On-policy distillation of language models" (2024), eq. 1.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> policy, teacher = jnp.array([[0.0, 0.0]]), jnp.array([[50.0, -50.0]])
      >>> print(f"{kljax.jsd_from_hidden(policy, jnp.eye(2), teacher).item():.4f}")
      0.2158
    """
    arguments = hidden, head, ref_hidden, ref_head
    return _divergence(*arguments, mask=hidden_mask, kind="jsd", beta=beta, temperature=temperature)


def _divergence(
    hidden: ArrayLike,
    head: ArrayLike | Head,
    ref_hidden: ArrayLike,
    ref_head: ArrayLike | Head | None,
    *,
    mask: Mask | None,
    kind: str,
    temperature: Scalar,
    beta: Scalar | None = None,
    shifted: bool = False,
) -> Array:
    call = prepare(
        hidden,
        head,
        mask=mask,
        temperature=temperature,
        reference=ReferenceStates(ref_hidden, ref_head),
        divergence=kind,
        beta=beta,
        ref_names=("ref_hidden", "ref_head"),
        mask_name="mask" if shifted else "hidden_mask",
    )
    if shifted:
        _check_positions(call)
    return _run(call, shifted=shifted)["kl"]


def _check_positions(call: CheckedCall) -> None:
    if not call.weights.hidden.shape[:-1]:
        raise ValueError(f"hidden: got shape {list(call.weights.hidden.shape)}, expected [..., T, D]")


def _run(call: CheckedCall, *, shifted: bool = False) -> dict[str, Array]:
    """Runs the implementation that the head names."""
    return run(call, _FUNCTIONS[call.implementation], shifted=shifted)
