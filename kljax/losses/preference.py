"""Losses of preferences: pairs of sequences of which one is preferred, and sequences that are wanted or not.

All of them are functions of one number for each sequence, its score: the log-ratio to the reference, summed over the
tokens or averaged, or without a reference the log-prob itself.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kljax._checks import (
    as_float,
    check_at_least,
    check_at_most,
    check_choice,
    check_mask,
    check_numbers,
    check_same_shape,
)
from kljax._devices import all_rows, auto_sharded, local_rows
from kljax._numerics import times
from kljax._typing import Array, ArrayLike, AxisName, Bool, Float, Mask, MaskLike, Preference, Scalar
from kljax.batches import Segments
from kljax.masking import masked
from kljax.rows import row_sum, to_tokens

__all__ = ["dpo_loss", "kto_loss", "preference_loss"]


@auto_sharded
def preference_loss(
    preferred: Float[ArrayLike, " B"],
    rejected: Float[ArrayLike, " B"],
    *,
    loss: Preference = "sigmoid",
    coef: Scalar = 0.1,
    label_smoothing: Scalar = 0.0,
    margin: Scalar = 0.0,
    tau: Scalar = 0.05,
    axis_name: AxisName = None,
) -> Float[Array, " B"]:
    """A loss of pairs as a function of two scores, `w` of the preferred sequence and `l` of the rejected one.

    With `b = coef`, `s = label_smoothing`, `m = b (w - l) - margin` and `S` the logistic function:

        sigmoid     -(1 - s) log S(m) - s log S(-m)
        hinge       max(1 - m, 0)
        ipo         (w - l - 1 / (2 b))^2
        exo_pair    KL(p || q) of the coins p = S(m) and q = 1 - s
        nca_pair    -log S(b w) - log S(-b w) / 2 - log S(-b l) / 2
        robust      (-(1 - s) log S(m) + s log S(-m)) / (1 - 2 s)
        bco_pair    -log S(b w) - log S(-b l)
        sppo_hard   (w - 1 / (2 b))^2 + (l + 1 / (2 b))^2
        aot         sigmoid of the k-th smallest w and the k-th smallest l of the batch
        apo_zero    1 - S(b w) + S(b l)
        apo_down    S(b w) + 1 - S(b (w - l))
        discopop    -(1 - S(m / tau)) log S(m) + S(m / tau) exp(-m)
        odds_ratio  -b log S(logit(w) - logit(l)), scores being log-probs, logit(x) = x - log(1 - exp(x))

    The score is `masked_sum(log_probs - ref_log_probs, mask, axis=-1)` for DPO and the losses beside it; the mean over
    the tokens, `masked_mean`, for TRL's "ipo" and "sigmoid_norm". Without a reference it is the sum of the log-probs
    (CPO and TPO: "sigmoid", "hinge", "ipo") or their mean (SimPO and TPO-L: "sigmoid" with a `margin`; ORPO:
    "odds_ratio"). "aot" of `(preferred - rejected)` under the policy and under the reference is TRL's `aot`, of the
    log-ratios its `aot_unpaired`. TRL's `sft` is the `cross_entropy_loss` of the preferred sequences.

    Args:
      preferred: `[B]` scores of the preferred sequences, in nats.
      rejected: scores of the rejected sequences, a pair with each.
      loss: one of the names above.
      coef: strength of the KL penalty, above 0; the papers' beta (tau of IPO).
      label_smoothing: the probability that a label is wrong, at least 0 and below 1/2; above 0 for "exo_pair".
      margin: by how much `b (w - l)` is to be above 0, in "sigmoid", "hinge", "robust", "exo_pair" and "discopop";
        SimPO's gamma.
      tau: for "discopop", how sharply the two parts are separated, above 0.
      axis_name: for "aot", mapped axes, as of `shard_map`, over whose parts the pairs are spread; they are sorted in
        the whole batch.

    Returns:
      `[B]`, one loss per pair, float32 or float64; of "aot" one per rank.

    Gradient:
      To both scores, that of the formula; "hinge" has none at `m = 1`.

    Raises:
      ValueError: for an unknown name, differing shapes, or a number out of its range.

    References:
      TRL 1.16, `DPOConfig.loss_type`, `CPOTrainer`, `ORPOTrainer`, `TPOTrainer`; among the papers Rafailov et al.,
      "Direct preference optimization" (2023), eq. 7; Azar et al., "A general theoretical paradigm to understand
      learning from human preferences" (IPO, 2023), eq. 17; D'Oosterlinck et al., "Anchored preference optimization"
      (APO, 2024), eq. 7 and 8; Lu et al., "Discovering preference optimization algorithms" (DiscoPOP, 2024), eq. 5;
      Meng et al., "SimPO" (2024), eq. 6; Hong et al., "ORPO" (2024), eq. 4 and 7.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> w, l = jnp.array([2.0]), jnp.array([-2.0])
      >>> for loss in ("sigmoid", "hinge", "ipo"):
      ...     print(kljax.preference_loss(w, l, loss=loss, coef=0.5).round(4))
      [0.1269]
      [0.]
      [9.]
    """
    check_numbers(margin=margin)
    check_choice("loss", loss, _LOSSES)
    check_at_least("coef", coef, 0, strict=True)
    check_at_least("tau", tau, 0, strict=True)
    check_at_least("label_smoothing", label_smoothing, 0, strict=loss == "exo_pair")
    check_at_most("label_smoothing", label_smoothing, 0.5, strict=True)
    check_same_shape(preferred=preferred, rejected=rejected)
    scores = as_float(preferred, rejected)
    options = _PairOptions(*(jnp.asarray(number, scores[0].dtype) for number in (coef, label_smoothing, margin, tau)))
    if loss != "aot":
        return _LOSSES[loss](scores[0], scores[1], options)
    first, second = (jnp.sort(all_rows(score, axis_name)) for score in scores)
    return local_rows(_sigmoid(first, second, options), axis_name)


class _PairOptions(NamedTuple):
    """The numbers of a preference loss."""

    coef: Array
    smoothing: Array
    margin: Array
    tau: Array

    def margins(self, preferred: Array, rejected: Array) -> Array:
        return self.coef * (preferred - rejected) - self.margin


def _sigmoid(preferred: Array, rejected: Array, options: _PairOptions) -> Array:
    return _log_loss(options.margins(preferred, rejected), options.smoothing)


def _hinge(preferred: Array, rejected: Array, options: _PairOptions) -> Array:
    missing = 1 - options.margins(preferred, rejected)
    return jnp.where(missing <= 0, 0, missing)


def _ipo(preferred: Array, rejected: Array, options: _PairOptions) -> Array:
    return jnp.square(preferred - rejected - 1 / (2 * options.coef))


def _exo_pair(preferred: Array, rejected: Array, options: _PairOptions) -> Array:
    margin = options.margins(preferred, rejected)
    wrong = options.smoothing
    first = times(jax.nn.sigmoid(margin), jax.nn.log_sigmoid(margin) - jnp.log1p(-wrong))
    return first + times(jax.nn.sigmoid(-margin), jax.nn.log_sigmoid(-margin) - jnp.log(wrong))


def _nca_pair(preferred: Array, rejected: Array, options: _PairOptions) -> Array:
    win = options.coef * preferred
    loss = options.coef * rejected
    return -jax.nn.log_sigmoid(win) - (jax.nn.log_sigmoid(-win) + jax.nn.log_sigmoid(-loss)) / 2


def _robust(preferred: Array, rejected: Array, options: _PairOptions) -> Array:
    margin = options.margins(preferred, rejected)
    wrong = options.smoothing
    right = times(wrong - 1, jax.nn.log_sigmoid(margin))
    return (right + times(wrong, jax.nn.log_sigmoid(-margin))) / (1 - 2 * wrong)


def _bco_pair(preferred: Array, rejected: Array, options: _PairOptions) -> Array:
    return -jax.nn.log_sigmoid(options.coef * preferred) - jax.nn.log_sigmoid(-options.coef * rejected)


def _sppo_hard(preferred: Array, rejected: Array, options: _PairOptions) -> Array:
    return jnp.square(preferred - 0.5 / options.coef) + jnp.square(rejected + 0.5 / options.coef)


def _apo_zero(preferred: Array, rejected: Array, options: _PairOptions) -> Array:
    return jax.nn.sigmoid(-options.coef * preferred) + jax.nn.sigmoid(options.coef * rejected)


def _apo_down(preferred: Array, rejected: Array, options: _PairOptions) -> Array:
    return jax.nn.sigmoid(options.coef * preferred) + jax.nn.sigmoid(options.coef * (rejected - preferred))


def _discopop(preferred: Array, rejected: Array, options: _PairOptions) -> Array:
    margin = options.margins(preferred, rejected)
    sharp = margin / options.tau
    # The factor of the exponential vanishes faster than that grows.
    return -jax.nn.sigmoid(-sharp) * jax.nn.log_sigmoid(margin) + jnp.exp(jax.nn.log_sigmoid(sharp) - margin)


def _odds_ratio(preferred: Array, rejected: Array, options: _PairOptions) -> Array:
    log_odds = _logit(preferred) - _logit(rejected)
    return -options.coef * jax.nn.log_sigmoid(log_odds)


def _logit(log_prob: Array) -> Array:
    """`x - log(1 - exp(x))`, accurate near 0 and far below it."""
    near = log_prob > -0.7
    rest = jnp.where(
        near, jnp.log(-jnp.expm1(jnp.where(near, log_prob, -1))), jnp.log1p(-jnp.exp(jnp.where(near, -1, log_prob)))
    )
    return log_prob - rest


_LOSSES: Mapping[str, Callable[[Array, Array, _PairOptions], Array]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _sigmoid,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "odds_ratio": _odds_ratio,
}


def kto_loss(
    scores: Float[ArrayLike, " B"],
    desirable: Bool[ArrayLike, " B"],
    *,
    coef: Scalar = 0.1,
    kl: Scalar = 0.0,
    desirable_weight: Scalar = 1.0,
    undesirable_weight: Scalar = 1.0,
) -> Float[Array, " B"]:
    """KTO: `L = w (1 - S(coef (h - kl)))` of a sequence that is wanted, `w (1 - S(coef (kl - h)))` of others.

    `h = sum_t (log pi - log ref)`, `S` is the logistic function, `w` the weight of its kind, and `kl` the point that
    gains and losses are measured from: the mean of `h` over completions of other prompts, at least 0. With 0 it is the
    unpaired form of APO's "apo_zero".

    Args:
      scores: `[B]` log-ratios `h` of the sequences, in nats.
      desirable: boolean, whether a sequence is wanted.
      coef: strength of the KL penalty, above 0; the paper's beta.
      kl: the estimate of KL(pi || ref), in nats; a constant of the whole batch.
      desirable_weight: weight of sequences that are wanted, at least 0.
      undesirable_weight: weight of sequences that are not, at least 0.

    Returns:
      `[B]`, one loss per sequence, float32 or float64.

    Gradient:
      To `scores`: `-w coef S'(coef (h - kl))` of wanted sequences, the opposite of others.

    Raises:
      ValueError: for differing shapes, a `coef` that is not positive, or a negative weight.

    References:
      Ethayarajh et al., "KTO: model alignment as prospect theoretic optimization" (2024), eq. 7; TRL 1.16, `KTOTrainer`
      (`kto`, `apo_zero_unpaired`).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> first, second = kljax.kto_loss(jnp.array([2.0, 2.0]), jnp.array([True, False]), coef=0.5)
      >>> print(f"{first:.2f} {second:.2f}")
      0.27 0.73
    """
    check_numbers(kl=kl)
    check_at_least("coef", coef, 0, strict=True)
    check_at_least("desirable_weight", desirable_weight, 0)
    check_at_least("undesirable_weight", undesirable_weight, 0)
    check_same_shape(scores=scores, desirable=desirable)
    (scores,) = as_float(scores)
    wanted = check_mask(desirable, "desirable")
    gain = jnp.asarray(coef, scores.dtype) * (scores - jax.lax.stop_gradient(jnp.asarray(kl, scores.dtype)))
    gained, lost = (jnp.asarray(weight, scores.dtype) for weight in (desirable_weight, undesirable_weight))
    return jnp.where(wanted, gained, lost) * jax.nn.sigmoid(jnp.where(wanted, -gain, gain))


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
      ref_log_probs: log-probs of the reference; a constant.
      mask: boolean or `Segments`.
      rejected_log_probs: `[..., T]` log-probs of the policy on the rejected sequences, a row for each preferred one;
        they may have another length.
      rejected_ref_log_probs: log-probs of the reference; a constant.
      rejected_mask: `Segments` if the mask is: the segments of two rows that share an id are a
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
        or `label_smoothing` out of range.

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
    check_at_most("label_smoothing", label_smoothing, 0.5, strict=True)
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
    loss = _log_loss(margin, jnp.asarray(label_smoothing, log_probs.dtype))
    return masked(to_tokens(loss, mask), mask) if packed else loss[..., 0]


def _drift(log_probs: Array, ref_log_probs: Array, mask: Mask, pairs: int) -> Array:
    """`sum_t m_t (log pi - log pi_ref)` of each sequence, `[..., S]`."""
    return row_sum(log_probs, mask, num_segments=pairs) - row_sum(ref_log_probs, mask, num_segments=pairs)


def _log_loss(margin: Array, smoothing: Array) -> Array:
    """`-(1 - s) log S(m) - s log S(-m)`; of an infinite margin nothing is left of the other term where `s` is 0."""
    return -times(1 - smoothing, jax.nn.log_sigmoid(margin)) - times(smoothing, jax.nn.log_sigmoid(-margin))
