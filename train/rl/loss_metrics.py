"""The metrics of a loss over the tokens of a micro-batch; all are treated as constants."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

import kljax
from train.config.algorithms import UserFunction
from train.config.kl import KL
from train.config.loss import Loss
from train.config.plan import Plan
from train.rl.algorithms import PolicyLoss, make_policy_loss
from train.rl.kl_metrics import KL_ESTIMATE, KL_EXACT, ROLLOUT_KL_MAX, largest_of
from train.rl.metrics import SLOPE, WITHOUT_GRADIENT, LargestToken, Metrics, single
from train.rl.sampling_bias import measure_sampling_bias
from train.sequences.batch import Batch, required

Array = jax.Array
Measure = Callable[[kljax.TokenStats, Batch, Batch, Array | None], Metrics]

RATIO_LEVELS: Mapping[str, str] = {"gspo_loss": "geometric"}
"""The level of the ratio that a loss clips, where no parameter says so."""
CLIPS_NO_RATIO = ("gmpo_loss", "dppo_loss", "rec_loss")
"""Losses whose `clip_low` and `clip_high` bound something else than a ratio of one level, or not always."""

LEVELS = get_args(kljax.typing.Level)


class LossMetrics(NamedTuple):
    """The metrics of one micro-batch, detached.

    Attributes:
      parts: the loss and each of its terms, scalars that add up over the micro-batches of an update.
      tokens: statistics of the tokens.
      per_token: [n, T] by the names of `token_values.PER_TOKEN`; micro-batches stay apart.
      choices: `Routers.choices`, which add up over the micro-batches too.
    """

    parts: dict[str, Array]
    tokens: Metrics
    per_token: dict[str, Array]
    choices: Array | None = None

    def reduce(self) -> "LossMetrics":
        """Merges the micro-batches that lie along the leading axis."""
        parts = {name: value.sum(0) for name, value in self.parts.items()}
        tokens = {name: metric.reduce() for name, metric in self.tokens.items()}
        choices = None if self.choices is None else self.choices.sum(0)
        return LossMetrics(parts, tokens, self.per_token, choices)

    def of_update(self) -> Metrics:
        """Returns the metrics of a whole update, whose parts have been summed."""
        metrics: Metrics = {name: single(value) for name, value in self.parts.items()}
        for name, metric in self.tokens.items():
            if name == SLOPE and isinstance(metric, kljax.WeightedSum):
                metrics[WITHOUT_GRADIENT] = single(1.0 * ((metric.weight > 0) & (metric.sum == 0)))
            else:
                metrics[name] = metric
        return metrics


def make_measure(plan: Plan, vocab_size: int) -> Measure:
    """Makes `(statistics, batch, masked, key) -> metrics` of a micro-batch whose old log-probs are filled in.

    `masked` is the batch with the mask of the loss.
    """
    loss = plan.config.loss
    kl = plan.config.kl
    clip = _ratio_clip(loss, plan.loss.target) if plan.loss is not None else None
    slope = None
    if isinstance(loss, UserFunction) and plan.advantage is not None:
        slope = functools.partial(_policy_slope, make_policy_loss(plan))

    def measure(stats: kljax.TokenStats, batch: Batch, masked: Batch, key: Array | None) -> Metrics:
        metrics = _token_metrics(loss, kl, stats, batch)
        if plan.measures_sampling_bias(recorded=batch.rollout_log_probs is not None):
            metrics |= measure_sampling_bias(stats, batch, vocab_size)
        if clip is not None:
            old = required(batch.old_log_probs)
            advantages = required(batch.advantages)
            metrics["clip_fraction"] = kljax.clip_fraction(
                stats.log_prob, old, advantages, masked.completion_mask, **clip
            )
        if slope is not None:
            metrics[SLOPE] = slope(stats, masked, key)
        return metrics

    return measure


def per_token_values(stats: kljax.TokenStats, batch: Batch) -> dict[str, Array]:
    """Returns the values of each token that a recording may ask for; a program that returns none computes none."""
    weights = required(batch.token_weights)
    if batch.correction_weights is not None:
        weights = weights * batch.correction_weights
    values = {
        "policy_log_probs": stats.log_prob,
        "entropy": required(stats.entropy),
        "loss_weights": kljax.masked(weights, batch.kept()),
    }
    return values if stats.kl is None else {**values, "exact_kl": stats.kl}


def _ratio_clip(section: Loss, target: str) -> dict[str, Any] | None:
    """Returns the options of `kljax.clip_fraction` for a loss; None if it clips no ratio of a level.

    Args:
      section: has the bounds.
      target: the function, as in its signature.
    """
    options = section.options()
    function = target.rpartition(":")[2]
    level = options.get("level", RATIO_LEVELS.get(function, "token"))
    bounds: dict[str, Any] = {name: options[name] for name in ("clip_low", "clip_high") if name in options}
    known = target == f"kljax:{function}" and function not in CLIPS_NO_RATIO
    if not known or len(bounds) < 2 or min(bounds.values()) < 0 or level not in LEVELS:
        return None
    return {"level": level, **bounds}


def _policy_slope(
    policy_loss: PolicyLoss, stats: kljax.TokenStats, batch: Batch, key: Array | None
) -> kljax.WeightedSum:
    """Sums the derivatives of the policy loss to log-probs and entropies, beside the tokens with an advantage."""
    kept_mask = batch.kept()

    def total(log_prob: Array, entropy: Array) -> Array:
        moved = dataclasses.replace(stats, log_prob=log_prob, entropy=entropy)
        return kljax.masked(policy_loss(moved, batch, key), kept_mask).sum()

    constants = jax.lax.stop_gradient((stats.log_prob, required(stats.entropy)))
    slopes = jax.grad(total, argnums=(0, 1))(*constants)
    size = sum(jnp.abs(slope).sum() for slope in slopes)
    count = (kept_mask & (required(batch.advantages) != 0)).sum()
    return kljax.WeightedSum(jnp.asarray(size, float), count.astype(float))


def _token_metrics(loss: Loss, kl: KL, stats: kljax.TokenStats, batch: Batch) -> Metrics:
    mask = batch.completion_mask
    metrics: Metrics = {
        "entropy": kljax.WeightedSum.of(required(stats.entropy), mask),
        "ppo_kl": kljax.ppo_kl(stats.log_prob, required(batch.old_log_probs), mask),
    }
    rows = jnp.arange(len(mask), dtype=jnp.int32) if batch.row_numbers is None else batch.row_numbers
    largest = functools.partial(LargestToken.of, mask=mask, rows=rows, log_probs=stats.log_prob)
    if batch.ref_log_probs is not None:
        metrics[KL_ESTIMATE] = kljax.reference_kl(stats.log_prob, batch.ref_log_probs, mask)
        estimates = kljax.estimate_kl(stats.log_prob, batch.ref_log_probs, mask, estimator="k3")
        metrics[largest_of(KL_ESTIMATE)] = largest(estimates, other_log_probs=batch.ref_log_probs)
    if stats.kl is not None:
        forward = kl.loss.direction == "forward"
        metrics["kl_reference_forward" if forward else KL_EXACT] = kljax.WeightedSum.of(stats.kl, mask)
        if not forward:
            metrics[largest_of(KL_EXACT)] = largest(stats.kl, other_log_probs=batch.ref_log_probs)
    if batch.rollout_log_probs is not None:
        recorded = batch.rollout_log_probs
        metrics["rollout_kl"] = kljax.rollout_kl(stats.log_prob, recorded, mask)
        if kl.rollout.coef > 0:
            estimates = kljax.estimate_kl(recorded, stats.log_prob, mask, estimator="k3")
            metrics[ROLLOUT_KL_MAX] = largest(estimates, other_log_probs=recorded)
        if loss.old_log_probs == "trainer":
            # The completions are of this policy, so the error shows how sampler and trainer differ: rounding, or a bug.
            error = jnp.abs(required(batch.old_log_probs) - recorded)
            metrics["rollout_log_prob_error"] = kljax.Extremes.of(error, mask)
    return metrics
