"""The terms of a loss that the LM head computes, and the weight of each token in them.

A term adds `coef * sum_t weight_t * value_t` to the loss. Its weights come from the masks of all rows of an update, by
the reduction of the loss or by one of its own.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import jax

import kljax
from kljax.typing import Estimator
from train.config.kl import LossKL, RolloutKL
from train.config.loss import Loss
from train.config.plan import Plan
from train.config.types import Aggregation, EmptyRows
from train.rl.algorithms import PolicyLoss, make_policy_loss
from train.sequences.batch import Batch, required

Array = jax.Array
Coefficients = dict[str, Array]
TokenWeights = Callable[..., Array]
TermValues = Callable[[kljax.TokenStats, Batch, Coefficients], Array]

OF_ESTIMATE = {"gradient", "log_ratio_clip", "max_ratio", "value_clip"}
"""Fields of `kl.loss` that are options of `kljax.reference_kl_loss`."""


class TokenReduction(NamedTuple):
    """How the tokens of an update are reduced, as in `kljax.token_weights`."""

    mode: Aggregation
    empty_rows: EmptyRows


class Term(NamedTuple):
    """A term of a loss.

    Attributes:
      values: `(statistics, batch, coefficients) -> [B, T]`. The mask of the batch is that of the loss, its old
        log-probs are filled in; tokens that are not kept may have any value.
      coef: the name of its coefficient; None: 1.
      reduction: its own; None: that of the loss.
    """

    values: TermValues
    coef: str | None = None
    reduction: TokenReduction | None = None


def make_terms(plan: Plan) -> dict[str, Term]:
    """Makes the terms whose coefficient is above 0, or can come there, by name."""
    loss = plan.config.loss
    kl = plan.config.kl
    terms = dict[str, Term]()
    if plan.loss is not None:
        terms["policy"] = Term(functools.partial(_corrected_loss, make_policy_loss(plan)))
    if "loss" in plan.controllers:
        own = None if kl.loss.aggregation is None else TokenReduction(kl.loss.aggregation, kl.loss.empty_rows)
        terms["kl"] = Term(_exact_kl if plan.exact_loss else functools.partial(_reference_kl, kl.loss), "kl_loss", own)
    if kl.rollout.coef > 0:
        terms["rollout_kl"] = Term(functools.partial(_rollout_kl, kl.rollout), "rollout_kl")
    if loss.has_entropy_term():
        own = None if loss.entropy_aggregation is None else TokenReduction(loss.entropy_aggregation, loss.empty_rows)
        terms["entropy"] = Term(_negative_entropy, "entropy", own)
    return terms


def make_weighting(plan: Plan) -> Callable[[Batch], Batch]:
    """Makes `batch -> batch`, which adds the token weights of the loss, and those of terms reduced in another way.

    The batch has all rows of an update: it is not split into micro-batches yet.
    """
    weights_of = make_token_weights(plan)
    own = {name: term.reduction for name, term in make_terms(plan).items() if term.reduction is not None}

    def with_token_weights(batch: Batch) -> Batch:
        of_terms = {name: weights_of(batch, reduction) for name, reduction in own.items()}
        return dataclasses.replace(batch, token_weights=weights_of(batch), term_weights=of_terms)

    return with_token_weights


def make_token_weights(plan: Plan) -> TokenWeights:
    """Makes `(batch, reduction=None) -> [B, T]`: weights of the tokens of an update, by the reduction of the loss."""
    loss = plan.config.loss
    num_groups = plan.num_groups

    def token_weights(batch: Batch, reduction: TokenReduction | None = None) -> Array:
        mode, empty_rows = reduction or (loss.aggregation, loss.empty_rows)
        prompts = mode == "prompt_mean"
        return kljax.token_weights(
            loss_mask(loss, batch),
            mode=mode,
            # A term may have another reduction than the loss, and only this one divides by a length.
            max_length=loss.max_length if mode == "seq_mean_token_sum_norm" else None,
            group_ids=batch.group_ids if prompts else None,
            num_groups=num_groups if prompts else None,
            empty_rows=empty_rows,
        )

    return token_weights


def loss_mask(loss: Loss, batch: Batch) -> Array:
    """Returns the mask [B, T] that the loss divides by: without rejected tokens, unless they are to count."""
    return batch.completion_mask if loss.rejected_tokens == "count" else batch.kept()


def _corrected_loss(policy_loss: PolicyLoss, stats: kljax.TokenStats, batch: Batch, coefs: Coefficients) -> Array:
    """Computes the policy loss, times the weights of the corrections."""
    losses = policy_loss(stats, batch, coefs.get("key"))
    return losses if batch.correction_weights is None else losses * batch.correction_weights


def _exact_kl(stats: kljax.TokenStats, batch: Batch, coefs: Coefficients) -> Array:
    return required(stats.kl)


def _reference_kl(section: LossKL, stats: kljax.TokenStats, batch: Batch, coefs: Coefficients) -> Array:
    """Estimates the KL to the reference, importance-corrected as the section says."""
    mask = batch.completion_mask
    by_token = section.importance_corrected and section.importance_level == "token"
    estimates = kljax.reference_kl_loss(
        stats.log_prob,
        required(batch.ref_log_probs),
        mask,
        estimator=cast(Estimator, section.estimator),
        sampling_log_probs=required(batch.old_log_probs) if by_token else None,
        **section.model_dump(include=OF_ESTIMATE),
    )
    if by_token or not section.importance_corrected:
        return estimates
    ratios_of = kljax.sequence_ratios if section.importance_level == "sequence" else kljax.geometric_ratios
    ratios = ratios_of(stats.log_prob, required(batch.old_log_probs), mask)
    return kljax.broadcast_to_tokens(ratios, mask) * estimates


def _rollout_kl(section: RolloutKL, stats: kljax.TokenStats, batch: Batch, coefs: Coefficients) -> Array:
    options = section.model_dump(exclude={"coef"})
    return kljax.rollout_kl_loss(stats.log_prob, required(batch.rollout_log_probs), batch.completion_mask, **options)


def _negative_entropy(stats: kljax.TokenStats, batch: Batch, coefs: Coefficients) -> Array:
    return -required(stats.entropy)
