"""The loss of pairs of sequences, of which one is preferred."""

import jax
import jax.numpy as jnp

from kljax._checks import as_float, check_at_least, check_same_shape
from kljax._numerics import times
from kljax._typing import Array, ArrayLike, Float, Mask, MaskLike, Scalar
from kljax.batches import Segments
from kljax.masking import masked
from kljax.rows import row_sum, to_tokens

__all__ = ["dpo_loss"]


def dpo_loss(
    log_probs: Float[ArrayLike, "*b T"],
    ref_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    rejected_log_probs: Float[ArrayLike, "*b T"],
    rejected_ref_log_probs: Float[ArrayLike, "*b T"],
    rejected_mask: MaskLike[Mask, "*b T"],
    coef: Scalar = 0.1,
    label_smoothing: Scalar = 0.0,
) -> Array:
    """DPO: `L = -(1 - s) log sigmoid(coef h) - s log sigmoid(-coef h)` of a preferred sequence and a rejected one.

    `h` is the sum of `log pi - log pi_ref` over the tokens of the preferred sequence, less that over the rejected one:
    of the reward of which the policy is the optimum under a penalty of `coef * KL(pi || pi_ref)`, the difference
    divided by `coef`.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained on the preferred sequences, in nats.
      ref_log_probs: same shape, log-probs of the reference; a constant.
      mask: same shape, boolean or `Segments`.
      rejected_log_probs: `[..., T]` log-probs of the policy on the rejected sequences, a row for each preferred one;
        they may have another length.
      rejected_ref_log_probs: same shape, log-probs of the reference; a constant.
      rejected_mask: same shape, boolean; `Segments` if the mask is: the segments of two rows that share an id are a
        pair.
      coef: strength of the KL penalty, above 0; the papers' beta.
      label_smoothing: the probability `s` that a label is wrong, at least 0 and below 1/2.

    Returns:
      `[...]`, one loss per pair, float32 or float64. A pair without tokens has `log 2`. With `Segments` `[..., T]`:
      each unmasked token of a preferred sequence has the loss of its pair, and masked positions hold 0.

    Gradient:
      To `log_probs`: `-coef ((1 - s) sigmoid(-coef h) - s sigmoid(coef h))` at every token; to `rejected_log_probs`
      the opposite. With `Segments`, times the sum of the weights with which the tokens of the preferred sequence
      enter the total.

    Raises:
      ValueError: for differing shapes, pairs that do not match, `Segments` for only one of the two masks, or a `coef`
        that is not positive.

    References:
      Rafailov et al., "Direct preference optimization" (2023), eq. 7. Trinity-RFT 0.6.0 `dpo` sums over all pairs of a
      micro-batch before the sigmoid: this loss of their rows joined into a single one.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> ref, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[1, 1]])
      >>> rejected = {"rejected_log_probs": ref - 1.0, "rejected_ref_log_probs": ref, "rejected_mask": mask}
      >>> print(kljax.dpo_loss(ref + 1.0, ref, mask, **rejected, coef=1.0).round(4))
      [0.0181]
    """
    check_at_least("coef", coef, 0, strict=True)
    check_at_least("label_smoothing", label_smoothing, 0)
    check_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs, mask=mask)
    check_same_shape(
        rejected_log_probs=rejected_log_probs,
        rejected_ref_log_probs=rejected_ref_log_probs,
        rejected_mask=rejected_mask,
    )
    if jnp.shape(log_probs)[:-1] != jnp.shape(rejected_log_probs)[:-1]:
        raise ValueError(
            f"rejected_log_probs: got shape {list(jnp.shape(rejected_log_probs))}, expected the rows of log_probs, "
            f"{list(jnp.shape(log_probs)[:-1])}, one for each preferred sequence"
        )
    packed = isinstance(mask, Segments)
    if packed != isinstance(rejected_mask, Segments):
        raise ValueError("mask, rejected_mask: got kljax.Segments for one of the two, expected them for both or none")
    log_probs, ref, rejected, rejected_ref = as_float(
        log_probs, ref_log_probs, rejected_log_probs, rejected_ref_log_probs
    )
    pairs = max(log_probs.shape[-1], rejected.shape[-1])
    preferred = _drift(log_probs, ref, mask, pairs)
    drift = preferred - _drift(rejected, rejected_ref, rejected_mask, pairs)
    margin = jnp.asarray(coef, log_probs.dtype) * drift
    smoothing = jnp.asarray(label_smoothing, log_probs.dtype)
    # An infinite margin leaves nothing of the other term, if a smoothing of 0 is not multiplied with its infinity.
    loss = -times(1 - smoothing, jax.nn.log_sigmoid(margin)) - times(smoothing, jax.nn.log_sigmoid(-margin))
    return masked(to_tokens(loss, mask), mask) if packed else loss[..., 0]


def _drift(log_probs: Array, ref_log_probs: Array, mask: Mask, pairs: int) -> Array:
    """`sum_t m_t (log pi - log pi_ref)` of each sequence, `[..., S]`."""
    return row_sum(log_probs, mask, num_segments=pairs) - row_sum(ref_log_probs, mask, num_segments=pairs)
