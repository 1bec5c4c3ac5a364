"""The correction for a sampler that is not the trainer's policy, once per rollout batch, and metrics of the mismatch.

Everything here is treated as a constant by the updates.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import kljax
from train.config.algorithms import CORRECTIONS
from train.config.correction import Correction
from train.config.plan import Plan
from train.config.signatures import Signature
from train.rl.functions import ChosenFunction
from train.rl.metrics import Metrics, single
from train.sequences.batch import Batch, required
from train.sequences.token_fields import LAGS

Array = jax.Array
Entry = tuple[Signature, Correction]


def make_correction(plan: Plan) -> Callable[[Batch], tuple[Batch, Metrics]]:
    """Makes `batch -> (batch, metrics)`, which adds the weights and the mask of the corrections to a rollout batch.

    The batch is scored, with advantages if there are any; without corrections it stays as it is. The metrics measure
    the mismatch.
    """
    config = plan.config
    buckets = config.rollout.mismatch_by_position
    longest = config.data.max_completion_length
    entries = list(zip(plan.corrections, config.correction, strict=True))

    def correct(batch: Batch) -> tuple[Batch, Metrics]:
        if not plan.mismatch:
            return batch, {}
        metrics = measure_mismatch(batch, buckets=buckets, max_length=longest)
        if not entries:
            return batch, metrics
        old, recorded, mask = _policies(batch)
        steps = [_step(ChosenFunction(f"correction[{n}]", *entry), batch) for n, entry in enumerate(entries)]
        corrected = kljax.correct_rollout(old, recorded, mask, steps=steps)
        bounds = [entry for signature, entry in entries if signature.target == CORRECTIONS["max_lag"]]
        if bounds:
            lags = required(batch.fields.get(LAGS))
            fresh = [kljax.max_lag_mask(lags, mask, **entry.options()) for entry in bounds]
            metrics["rollout_lag_rejected"] = kljax.masked_fraction(jnp.stack(fresh).all(0), mask)
        rejects = any(signature.returns != "Float" for signature, _ in entries)
        weights = corrected.weights
        metrics |= {
            "correction_sample_size": single(kljax.effective_sample_size(weights, mask)),
            "correction_clipped": kljax.masked_fraction(_within_bounds(entries, batch), mask),
            "correction_rejected": kljax.masked_fraction(corrected.kept, mask),
        }
        kept_mask = batch.kept_mask
        if rejects:
            kept_mask = corrected.kept if kept_mask is None else corrected.kept & kept_mask
        return dataclasses.replace(batch, correction_weights=weights, kept_mask=kept_mask), metrics

    return correct


def measure_mismatch(batch: Batch, *, buckets: int, max_length: int) -> Metrics:
    """Measures how far the trainer's policy is from the sampler's on the sampled tokens, before the first update.

    Args:
      batch: a scored rollout batch.
      buckets: parts of a completion that are measured on their own; 0: none.
      max_length: the longest completion.
    """
    old, recorded, mask = _policies(batch)
    metrics: Metrics = {
        "mismatch_k1": kljax.rollout_kl(old, recorded, mask, estimator="k1"),
        "mismatch_k3": kljax.rollout_kl(old, recorded, mask, estimator="k3"),
        "mismatch_chi_squared": kljax.chi_squared(old, recorded, mask),
        "mismatch_perplexity_ratio": kljax.perplexity_ratio(old, recorded, mask),
    }
    if buckets:
        places = kljax.kl_by_position(recorded, old, mask, num_buckets=buckets, max_length=max_length)
        for bucket in range(buckets):
            part = jax.tree.map(lambda x, bucket=bucket: x[bucket], places)
            metrics[f"mismatch_k3_part_{bucket + 1}_of_{buckets}"] = part
    return metrics


def _policies(batch: Batch) -> tuple[Array, Array, Array]:
    return required(batch.old_log_probs), required(batch.rollout_log_probs), batch.completion_mask


def _step(function: ChosenFunction, batch: Batch) -> Callable[[Array, Array, Array], Array]:
    """Makes one step of `correct_rollout`: it sees the mask that the steps before it left.

    A weight below 0 of a function of the user, which would turn the sign of the loss, is NaN: the update is skipped.
    """

    def step(log_probs: Array, recorded: Array, mask: Array) -> Array:
        arrays = {
            "log_probs": lambda: log_probs,
            "sampling_log_probs": lambda: recorded,
            "mask": lambda: mask,
            "advantages": lambda: required(batch.advantages),
            "lags": lambda: required(batch.fields.get(LAGS)),
        }
        result: Array = function.call(arrays)
        function.check(result, (mask.shape,), booleans=True)
        if not function.is_of_user or result.dtype == bool:
            return result
        return jnp.where(result < 0, jnp.nan, result)

    return step


def _within_bounds(entries: Iterable[Entry], batch: Batch) -> Array:
    """Returns where [B, T] every ratio lies within the bounds of its weight."""
    inside = jnp.ones_like(batch.completion_mask)
    for level, low, high in _weight_bounds(entries):
        ratios = kljax.importance_weights(*_policies(batch), level=level)
        inside &= ratios >= (0 if low is None else low)
        inside &= ratios <= (jnp.inf if high is None else high)
    return inside


def _weight_bounds(entries: Iterable[Entry]) -> Iterator[tuple[Any, float | None, float | None]]:
    """Yields level, lower and upper bound of each entry that gives weights."""
    for signature, entry in entries:
        options = entry.options()
        if signature.returns == "Float" and "level" in options:
            yield options["level"], options.get("lower"), options.get("upper", options.get("max_weight"))
