"""The loss of pairs of sequences, of which one is preferred."""

import jax
import jax.numpy as jnp

from kljax._checks import as_float, check_at_least, check_same_shape
from kljax._numerics import times
from kljax._typing import (
    Array,
    ArrayLike,
    Float,
    Integer,
    MaskLike,
    Scalar,
)
from kljax.masking import masked
from kljax.rows import check_segments, row_sum, to_tokens

__all__ = ["dpo_loss"]


def dpo_loss(
    log_probs: Float[ArrayLike, "*b T"],
    ref_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[ArrayLike, "*b T"],
    *,
    rejected_log_probs: Float[ArrayLike, "*b T"],
    rejected_ref_log_probs: Float[ArrayLike, "*b T"],
    rejected_mask: MaskLike[ArrayLike, "*b T"],
    coef: Scalar = 0.1,
    label_smoothing: Scalar = 0.0,
    segment_ids: Integer[ArrayLike, "..."] | None = None,
    rejected_segment_ids: Integer[ArrayLike, "..."] | None = None,
) -> Array:
    """DPO: `L = -(1 - s) log sigmoid(coef h) - s log sigmoid(-coef h)` of a preferred sequence and a rejected one.

    `h` is the sum of `log pi - log pi_ref` over the tokens of the preferred sequence, less that over the rejected one:
    of the reward of which the policy is the optimum under a penalty of `coef * KL(pi || pi_ref)`, the difference
    divided by `coef`.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained on the preferred sequences, in nats.
      ref_log_probs: same shape, those of the reference; a constant.
      mask: same shape, boolean.
      rejected_log_probs: `[..., T]` log-probs of the policy on the rejected sequences, a row for each preferred one;
        they may have another length.
      rejected_ref_log_probs: same shape, those of the reference; a constant.
      rejected_mask: same shape, boolean.
      coef: strength of the KL penalty, above 0; the papers' beta.
      label_smoothing: the probability `s` that a label is wrong, at least 0 and below 1/2.
      segment_ids: `[..., T]` integers, the sequence of each token where rows are packed, as in `last_token_mask`; None
        takes each row as one sequence.
      rejected_segment_ids: same shape as the rejected_mask, those of the rejected sequences; the segments of two rows
        that share an id are a pair. Needed with `segment_ids`, and only then.

    Returns:
      `[...]`, one loss per pair, float32 or float64. A pair without tokens has `log 2`. With `segment_ids` `[..., T]`:
      each unmasked token of a preferred sequence has the loss of its pair, and masked positions hold 0.

    Gradient:
      To `log_probs`: `-coef ((1 - s) sigmoid(-coef h) - s sigmoid(coef h))` at every token; to `rejected_log_probs`
      the opposite. With `segment_ids`, times the sum of the weights with which the tokens of the preferred sequence
      enter the total.

    Raises:
      ValueError: for differing shapes, pairs that do not match, ids of only one of the two, or a `coef` that is
        not positive.

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
    if (segment_ids is None) != (rejected_segment_ids is None):
        raise ValueError("segment_ids, rejected_segment_ids: got one of the two, expected both or none")
    mask, ids = check_segments(segment_ids, mask)
    rejected_mask, rejected_ids = check_segments(rejected_segment_ids, rejected_mask)
    log_probs, ref, rejected, rejected_ref = as_float(
        log_probs, ref_log_probs, rejected_log_probs, rejected_ref_log_probs
    )
    pairs = max(mask.shape[-1], rejected_mask.shape[-1])
    preferred = _drift(log_probs, ref, mask, ids, pairs)
    drift = preferred - _drift(rejected, rejected_ref, rejected_mask, rejected_ids, pairs)
    margin = jnp.asarray(coef, log_probs.dtype) * drift
    smoothing = jnp.asarray(label_smoothing, log_probs.dtype)
    # An infinite margin leaves nothing of the other term, if a smoothing of 0 is not multiplied with its infinity.
    loss = -times(1 - smoothing, jax.nn.log_sigmoid(margin)) - times(smoothing, jax.nn.log_sigmoid(-margin))
    return loss[..., 0] if ids is None else masked(to_tokens(loss, mask.shape[-1], segment_ids=ids), mask)


def _drift(log_probs: Array, ref_log_probs: Array, mask: Array, segment_ids: Array | None, pairs: int) -> Array:
    """`sum_t m_t (log pi - log pi_ref)` of each sequence, `[..., S]`."""
    total = row_sum(log_probs, mask, segment_ids=segment_ids, num_segments=pairs)
    return total - row_sum(ref_log_probs, mask, segment_ids=segment_ids, num_segments=pairs)
