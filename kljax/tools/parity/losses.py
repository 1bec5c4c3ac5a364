"""The stages of the loss: policy loss per token, reduction, gradient, metrics."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import kljax
from kljax.systems import Call
from kljax.systems._call import parameters
from kljax.tools.parity.advantages import token_advantages
from kljax.tools.parity.dump import METRIC
from kljax.tools.parity.policies import bounded_kl, kl_policy, kl_terms, log_ratio, policy_pair
from kljax.tools.parity.positions import apply_rule, over_tokens, row_mean, value_and_change
from kljax.tools.parity.recipe import MaskRule, Recipe, ReductionRecipe
from kljax.tools.parity.replay import MissingFields, Prediction, Replay, remembered
from kljax.tools.parity.rounding import EXP, PRODUCTS, accumulator, tree_height

METRICS = ("kl", "ppo_kl", "ratio")
BY_ROW = ("gspo_loss", "gmpo_loss", "vespo_loss")
ROW_LEVELS = ("sequence", "geometric", "average", "geometric_average")


def token_loss(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the policy loss of each token, with the correction's weights and without the KL term.

    It is compared at tokens in the recorded mask and in that of the recipe.
    """
    used = replay.used_mask(recipe)
    value, bound = _policy_loss(replay, recipe, replay.unit("token_loss", recipe))
    return Prediction(value, np.where(used, bound, 0), replay.arrays["mask"] & used)


def loss(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the scalar loss, KL term included, from the values per token: of some rows, their share of it."""
    unit = replay.unit("loss", recipe)
    total = 0.0
    bound = 0.0
    height = accumulator(unit) * tree_height(int(replay.batch.used_mask(recipe).sum())) + PRODUCTS * unit
    for coef, name, weights in _terms(replay, recipe):
        values, errors = replay.input(name, recipe)
        products = np.where(weights != 0, weights * values, 0)
        total += coef * products.sum()
        bound += abs(coef) * (np.where(weights != 0, weights * errors, 0).sum() + height * np.abs(products).sum())
    return Prediction(np.asarray(total), np.asarray(bound + unit * abs(total)), np.asarray(True))


def gradient(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the derivative of the scalar loss by the log-probs of the policy, at every position."""
    unit = replay.unit("grad_log_probs", recipe)
    settings = recipe.gradient
    total = np.zeros(replay.shape)
    bound = np.zeros(replay.shape)
    for coef, name, weights in _terms(replay, recipe):
        if name == "token_loss" and settings.through_policy:
            value, errors = _policy_loss(replay, recipe, unit, weights)
        elif name == "kl" and settings.through_kl and recipe.kl.policy == "log_probs":
            value, errors = _kl_gradient(replay, recipe, weights, unit)
        else:
            continue
        total = total + coef * value
        bound = bound + abs(coef) * errors
    total = settings.scale * total
    return Prediction(total, abs(settings.scale) * bound + unit * np.abs(total), np.ones(replay.shape, bool))


def _terms(replay: Replay, recipe: Recipe) -> list[tuple[float, str, np.ndarray]]:
    """Lists the terms of the loss: coefficient, field per token, and the weight of each token, `[B, T]`.

    Raises:
      MissingFields: if the header has no policy loss, and the dump no loss per token.
    """
    if "loss" not in recipe.calls and "token_loss" not in replay.arrays:
        raise MissingFields("header.loss")
    terms = [(1.0, "token_loss", _token_weights(replay, recipe, recipe.reduction))]
    if recipe.kl.place == "loss" and recipe.kl.coef:
        reduction = recipe.kl_reduction or recipe.reduction
        terms.append((recipe.kl.coef, "kl", _token_weights(replay, recipe, reduction, recipe.kl_mask)))
    if recipe.entropy.coef:
        terms.append((-recipe.entropy.coef, "entropy", _entropy_weights(replay, recipe)))
    return terms


def _token_weights(
    replay: Replay, recipe: Recipe, reduction: ReductionRecipe, rule: MaskRule | None = None
) -> np.ndarray:
    """Returns the weight of each token in the loss, `[B, T]`, by the masks of the whole batch."""
    batch = replay.batch
    rule = rule or MaskRule()

    def compute() -> np.ndarray:
        mask = apply_rule(batch.used_mask(recipe), rule, batch.layout)
        if reduction.rows == "spread":
            advantages = over_tokens(batch.arrays["advantages"], batch.shape)
            mask = mask & (np.where(mask, advantages, 0) != 0).any(1, keepdims=True)
        parts = _micro_batches(batch, reduction.micro_batches)
        shares = {"mean": 1 / len(parts), "sum": 1.0}
        each = (shares.get(reduction.parts, rows.mean()) * _weights(batch, mask, reduction, rows) for rows in parts)
        return np.asarray(sum(each))

    weights: np.ndarray = batch.remember(("token_weights", recipe.mask, rule, reduction), compute)
    return weights[replay.rows]


def _micro_batches(batch: Replay, count: int) -> list[np.ndarray]:
    """Lists the rows of each micro-batch, `[B]` bool: that many equal ones, or the recorded ones for 0."""
    rows = np.arange(len(batch.rows))
    parts = rows * count // len(rows) if count else batch.arrays["micro_batch_ids"]
    return [parts == part for part in np.unique(parts)]


def _weights(batch: Replay, mask: np.ndarray, reduction: ReductionRecipe, rows: np.ndarray) -> np.ndarray:
    """Returns the weights of some rows as a batch of their own, 0 elsewhere."""
    part = mask[rows]
    keywords: dict[str, Any] = {"mode": reduction.mode, "empty_rows": reduction.empty_rows}
    numbers: dict[str, float] = {}
    ids: np.ndarray | None = None
    if reduction.mode == "seq_mean_token_sum_norm":
        numbers["max_length"] = float(mask.shape[1] if reduction.max_length is None else reduction.max_length)
    if reduction.mode == "prompt_mean":
        _, ids = np.unique(batch.arrays[reduction.groups][rows], return_inverse=True)
        keywords["num_groups"] = int(np.max(ids)) + 1
    denominator = reduction.denominator
    if denominator is None and reduction.mode == "token_mean" and "divisor" in batch.arrays and rows.all():
        denominator = max(float(batch.arrays["divisor"]) * reduction.share, 1.0)
    if denominator is not None and reduction.mode != "token_sum":
        numbers["denominator"] = float(denominator)

    def compute(mask: Any, ids: Any, numbers: dict[str, Any]) -> jax.Array:
        return kljax.token_weights(mask, group_ids=ids, **keywords, **numbers)

    weights = np.asarray(remembered(f"token_weights {keywords!r}", compute)(part, ids, numbers), np.float64)
    count = part.sum()
    per_row = part.sum(1, keepdims=True)
    weights = weights * count / (count + reduction.eps_batch) if count else weights
    weights = weights * per_row / np.maximum(per_row + reduction.eps_row, 1e-300)
    result = np.zeros(mask.shape)
    result[rows] = reduction.scale * weights
    return result


def _entropy_weights(replay: Replay, recipe: Recipe) -> np.ndarray:
    """Returns the weight of each token in the entropy bonus, `[B, T]`."""
    if recipe.entropy.reduction == "loss":
        return np.where(_entropy_mask(replay, recipe), _token_weights(replay, recipe, recipe.reduction), 0)
    batch = replay.batch
    selected = batch.used_mask(recipe) & _entropy_mask(batch, recipe)
    parts = _micro_batches(batch, 0 if "micro_batch_ids" in batch.arrays else 1)
    shares = np.zeros(batch.shape[0])
    for rows in parts:
        shares[rows] = recipe.reduction.scale / (len(parts) * max(int(selected[rows].sum()), 1))
    return selected[replay.rows] * shares[replay.rows, None]


def _entropy_mask(replay: Replay, recipe: Recipe) -> np.ndarray:
    """Returns the tokens whose entropy is in the highest quantile of their micro-batch, `[B, T]` bool."""
    if recipe.entropy.quantile >= 1:
        return np.ones(replay.shape, bool)
    batch = replay.batch

    def compute() -> np.ndarray:
        used = batch.used_mask(recipe)
        result = np.zeros(batch.shape, bool)
        for rows in _micro_batches(batch, 0 if "micro_batch_ids" in batch.arrays else 1):
            # The systems take the quantile of float32 numbers.
            values = np.where(used[rows], batch.arrays["entropy"][rows], 0).astype(np.float32)
            if used[rows].any():
                limit = np.quantile(values[used[rows]], np.float32(1 - recipe.entropy.quantile))
                result[rows] = used[rows] & (values >= limit)
        return result

    mask: np.ndarray = batch.remember(("entropy mask", recipe.mask, recipe.entropy.quantile), compute)
    return mask[replay.rows]


def _policy_loss(
    replay: Replay, recipe: Recipe, unit: float, weights: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the policy loss of each token, or with weights the derivative of its weighted sum, and its bound."""
    step = recipe.loss
    used = replay.used_mask(recipe)
    call = replay.call("loss", recipe)
    policy, old = policy_pair(replay, recipe)
    sign = -1 if step.flipped else 1
    advantages, errors = token_advantages(replay, recipe)
    relative = errors / np.maximum(np.abs(advantages), 1e-30)
    inputs = {**replay.inputs("loss"), "old_log_probs": old, "advantages": sign * advantages, "mask": used}
    inputs["key"] = replay.batch.remember("key", lambda: jax.random.key(0))
    # What multiplies the loss of a token as a constant.
    factor = np.full(replay.shape, sign * step.scale)
    if recipe.entropy.quantile < 1:
        factor = factor * _entropy_mask(replay, recipe)
    if step.outside == "masked":
        factor = factor * _within_clips(call, policy - old)
    if "correction" in recipe.calls and step.weights:
        correction, errors = replay.input("weights", recipe)
        factor = factor * np.where(used, correction, 0) ** step.weights
        relative = relative + errors / np.maximum(np.abs(correction), 1e-30)
    # The ratio of a row as a product: each of its log-ratios counts as often as the row has tokens.
    lengths = used.sum(1, keepdims=True) if step.summed else 1.0
    start = old + lengths * (policy - old) if step.summed else policy
    cotangent = None if weights is None else np.ascontiguousarray(np.broadcast_to(weights * factor, replay.shape))

    def compute(log_probs: np.ndarray) -> np.ndarray:
        arrays = {**inputs, "log_probs": log_probs}
        if cotangent is None:
            if step.outside == "clipped":
                return factor * _clipped_surrogate(call, arrays)[0]
            return factor * over_tokens(replay.run("loss", recipe, arrays), replay.shape)
        if step.outside == "clipped":
            total = cotangent * _clipped_surrogate(call, arrays)[1]
        else:
            total = replay.run("loss", recipe, arrays, cotangent)
        if step.weight_gradient and call.function == "cispo_loss":
            # The part that passes through the clipped ratio.
            x = log_probs - old
            inside = used & _within_clips(call, x)
            total = total + cotangent * np.where(inside, -arrays["advantages"] * np.exp(x) * log_probs, 0)
        return np.asarray((-1 if recipe.ratio.swapped else 1) * lengths * total)

    by_row = call.function in BY_ROW or call.arguments.get("level") in ROW_LEVELS
    height = tree_height(replay.shape[1]) if by_row else 0
    distance = np.abs(start - old) * (1 + height)
    move = unit * (np.where(np.isfinite(distance), distance, 0) + EXP)
    value, change = value_and_change(compute, start, move)
    roundings = PRODUCTS + (height if weights is not None else 0)
    return value, change + np.abs(value) * (roundings * unit + relative)


def clips_of(call: Call) -> tuple[float, float] | None:
    """Returns the distances of the clips of a loss from 1, below and above; None if it has not both."""
    values = {parameter.name: call.arguments.get(parameter.name, parameter.default) for parameter in parameters(call)}
    return (values["clip_low"], values["clip_high"]) if {"clip_low", "clip_high"} <= values.keys() else None


def _within_clips(call: Call, log_ratio: np.ndarray) -> np.ndarray:
    """Returns where the ratio of a token is within the clips of its loss."""
    low, high = clips_of(call) or (np.inf, np.inf)
    ratio = np.exp(log_ratio)
    return np.asarray((ratio >= 1 - low) & (ratio <= 1 + high))


def _clipped_surrogate(call: Call, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns `-A clip(r)` of each token, and its derivative by the log-prob."""
    mask = arrays["mask"]
    low, high = clips_of(call) or (np.inf, np.inf)
    x = np.where(mask, arrays["log_probs"] - arrays["old_log_probs"], 0)
    clipped = np.where(mask, -arrays["advantages"] * np.clip(np.exp(x), 1 - low, 1 + high), 0)
    return clipped, np.where(_within_clips(call, x), clipped, 0)


def _kl_gradient(replay: Replay, recipe: Recipe, weights: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
    kl = recipe.kl
    used = apply_rule(replay.used_mask(recipe), recipe.kl_mask, replay.layout)
    key = ("kl_gradient", unit, recipe.mask, recipe.kl_mask, recipe.ratio, recipe.changed("kl", coef=0.0).kl)
    estimates = replay.remember(key, lambda: bounded_kl(replay, kl, used, recipe.ratio, unit, derivative=True))
    value = np.where(weights != 0, weights * estimates[0], 0)
    bound = np.where(weights != 0, np.abs(weights) * estimates[1], 0)
    if kl.corrected and kl.ratio != "token" and not kl.detached:
        # The ratio of the row has a derivative of its own, the same for each of its tokens.
        terms = np.where(weights != 0, weights * kl_terms(replay, kl_policy(replay, kl), kl, used, recipe.ratio)[0], 0)
        count = used.sum(1, keepdims=True) if kl.ratio == "product" else 1
        value = value + np.where(used, count * row_mean(terms, used), 0)
        bound = bound + unit * tree_height(replay.shape[1]) * np.abs(terms).max(initial=0)
    return value, bound


def mean(replay: Replay, recipe: Recipe, *, name: str) -> Prediction:
    """Recomputes the metric that is the mean of a field over the tokens: of some rows, their share of it."""
    unit = replay.unit(METRIC + name, recipe)
    used = replay.used_mask(recipe)
    if name == "ppo_kl":
        values = -log_ratio(replay, recipe)
        errors = unit * np.abs(values)
    else:
        values, errors = replay.input(name, recipe)
    selected = np.where(used, values, 0)
    count = max(int(replay.batch.used_mask(recipe).sum()), 1)
    height = accumulator(unit) * tree_height(count) + 2 * unit
    mean = selected.sum() / count
    bound = (np.where(used, errors, 0).sum() + height * np.abs(selected).sum()) / count + unit * abs(mean)
    return Prediction(np.asarray(mean), np.asarray(bound), np.asarray(True))
