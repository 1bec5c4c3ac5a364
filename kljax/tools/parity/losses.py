"""The stages of the loss: policy loss per token, reduction, gradient, metrics."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import kljax
from kljax.systems import Call
from kljax.tools.parity.advantages import token_advantages
from kljax.tools.parity.calls import pull_call
from kljax.tools.parity.fields import METRIC
from kljax.tools.parity.policies import kl_cancellation, kl_move, kl_policy, kl_terms, log_ratio, policy_pair
from kljax.tools.parity.positions import apply_rule, over_tokens, row_mean, value_and_change
from kljax.tools.parity.recipe import Recipe, RecipeStep
from kljax.tools.parity.replay import MissingFields, Prediction, Replay
from kljax.tools.parity.rounding import EXP, PRODUCTS, accumulator, tree_height
from kljax.tools.parity.sums import micro_batches, token_weights

BY_ROW = ("gspo_loss", "gmpo_loss", "vespo_loss")
ROW_LEVELS = ("sequence", "geometric", "average", "geometric_average")


def token_loss(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the policy loss of each token, without the KL term.

    Returns a `Prediction`, `[B, T]`, with the correction's weights. It is compared at tokens in the recorded mask and
    in that of the recipe.
    """
    step = recipe.loss or RecipeStep()
    used = replay.used_mask(recipe)
    unit = replay.unit("token_loss", recipe)
    inputs, factor = _inputs(replay, recipe), _factor(replay, recipe)
    call = replay.call("loss", step)

    def compute(policy: np.ndarray) -> np.ndarray:
        arrays = {**inputs, "log_probs": policy}
        if step.outside == "clipped":
            return factor * _clipped_surrogate(call, arrays)[0]
        return factor * over_tokens(replay.run("loss", step, arrays), replay.shape)

    value, change = value_and_change(compute, _policy(replay, recipe)[0], _move(replay, recipe, unit))
    bound = change + PRODUCTS * unit * np.abs(value) + _inherited(replay, recipe, value)
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
        bound += abs(coef) * np.where(weights != 0, weights * errors, 0).sum()
        bound += abs(coef) * height * np.abs(products).sum()
    return Prediction(np.asarray(total), np.asarray(bound + unit * abs(total)), np.asarray(True))


def gradient(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the derivative of the scalar loss by the log-probs of the policy.

    Returns a `Prediction`, `[B, T]`, compared at every position, masked ones too.
    """
    unit = replay.unit("grad_log_probs", recipe)
    settings = recipe.gradient
    total, bound = np.zeros(replay.shape), np.zeros(replay.shape)
    for coef, name, weights in _terms(replay, recipe):
        if name == "token_loss" and settings.through_policy:
            value, errors = _policy_gradient(replay, recipe, weights, unit)
        elif name == "kl" and settings.through_kl and recipe.kl is not None and recipe.kl.policy == "log_probs":
            value, errors = _kl_gradient(replay, recipe, weights, unit)
        else:
            continue
        total = total + coef * value
        bound = bound + abs(coef) * errors
    total = settings.scale * total
    bound = abs(settings.scale) * bound
    return Prediction(total, bound + unit * np.abs(total), np.ones(replay.shape, bool))


def _terms(replay: Replay, recipe: Recipe) -> list[tuple[float, str, np.ndarray]]:
    """Lists the terms of the loss: coefficient, field per token, and the weight of each token, `[B, T]`.

    Raises:
      MissingFields: if the header has no policy loss, and the dump no loss per token.
    """
    if recipe.loss is None and "token_loss" not in replay.arrays:
        raise MissingFields("header.loss")
    terms = [(1.0, "token_loss", token_weights(replay, recipe, recipe.reduction))]
    if recipe.kl is not None and recipe.kl.place == "loss" and recipe.kl.coef:
        reduction = recipe.kl_reduction or recipe.reduction
        terms.append((recipe.kl.coef, "kl", token_weights(replay, recipe, reduction, recipe.kl_mask)))
    if recipe.entropy.coef:
        terms.append((-recipe.entropy.coef, "entropy", _entropy_weights(replay, recipe)))
    return terms


def _entropy_weights(replay: Replay, recipe: Recipe) -> np.ndarray:
    """Returns the weight of each token in the entropy bonus, `[B, T]`."""
    chosen = _entropy_mask(replay, recipe)
    if recipe.entropy.reduction == "loss":
        return np.where(chosen, token_weights(replay, recipe, recipe.reduction), 0)
    batch = replay.batch
    selected = batch.used_mask(recipe) & _entropy_mask(batch, recipe)
    parts = micro_batches(batch, 0 if "micro_batch_ids" in batch.arrays else 1)
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
        for rows in micro_batches(batch, 0 if "micro_batch_ids" in batch.arrays else 1):
            # The systems take the quantile of float32 numbers.
            values = np.where(used[rows], batch.arrays["entropy"][rows], 0).astype(np.float32)
            if used[rows].any():
                limit = np.quantile(values[used[rows]], np.float32(1 - recipe.entropy.quantile))
                result[rows] = used[rows] & (values >= limit)
        return result

    mask: np.ndarray = batch.remember(("entropy mask", recipe.mask, recipe.entropy.quantile), compute)
    return mask[replay.rows]


def _inputs(replay: Replay, recipe: Recipe) -> dict[str, Any]:
    """Returns the arrays of the policy loss, but for the log-probs of the policy."""
    sign = -1 if (recipe.loss or RecipeStep()).flipped else 1
    return {
        **replay.inputs("loss"),
        "old_log_probs": policy_pair(replay, recipe)[1],
        "advantages": sign * token_advantages(replay, recipe)[0],
        "mask": replay.used_mask(recipe),
        "key": replay.batch.remember("key", lambda: jax.random.key(0)),
    }


def _factor(replay: Replay, recipe: Recipe) -> np.ndarray:
    """Returns what multiplies the policy loss of each token as a constant, `[B, T]`."""
    step = recipe.loss or RecipeStep()
    factor = np.full(replay.shape, -step.scale if step.flipped else step.scale)
    if recipe.entropy.quantile < 1:
        factor = factor * _entropy_mask(replay, recipe)
    if step.outside == "masked":
        factor = factor * _within_clips(replay.call("loss", step), *policy_pair(replay, recipe))
    if recipe.correction is not None and step.weights:
        weights = np.where(replay.used_mask(recipe), replay.input("weights", recipe)[0], 0)
        factor = factor * weights**step.weights
    return factor


def _policy(replay: Replay, recipe: Recipe) -> tuple[np.ndarray, np.ndarray | float]:
    """Returns the log-probs of the policy that enter the loss, and their factor of its log-ratios."""
    policy, old = policy_pair(replay, recipe)
    if not (recipe.loss or RecipeStep()).summed:
        return policy, 1.0
    lengths = replay.used_mask(recipe).sum(1, keepdims=True)
    return old + lengths * (policy - old), lengths


def _by_row(replay: Replay, recipe: Recipe) -> bool:
    call = replay.call("loss", recipe.loss or RecipeStep())
    return call.function in BY_ROW or call.arguments.get("level") in ROW_LEVELS


def _move(replay: Replay, recipe: Recipe, unit: float) -> np.ndarray:
    """Returns how far rounding moves the log-ratio."""
    policy, old = _policy(replay, recipe)[0], policy_pair(replay, recipe)[1]
    height = tree_height(replay.shape[1]) if _by_row(replay, recipe) else 0
    distance = np.abs(policy - old) * (1 + height)
    return unit * (np.where(np.isfinite(distance), distance, 0) + EXP)


def _inherited(replay: Replay, recipe: Recipe, value: np.ndarray) -> np.ndarray:
    """Returns the errors of recomputed advantages and weights: the loss is proportional to both."""
    inputs = [token_advantages(replay, recipe)]
    if recipe.correction is not None:
        inputs.append(replay.input("weights", recipe))
    relative = sum(bound / np.maximum(np.abs(array), 1e-30) for array, bound in inputs)
    return np.abs(value) * relative


def _policy_gradient(replay: Replay, recipe: Recipe, weights: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
    step = recipe.loss or RecipeStep()
    policy, factor_of_rows = _policy(replay, recipe)
    inputs = _inputs(replay, recipe)
    call = replay.call("loss", step)
    cotangent = np.ascontiguousarray(np.broadcast_to(weights * _factor(replay, recipe), replay.shape))

    def compute(log_probs: np.ndarray) -> np.ndarray:
        arrays = {**inputs, "log_probs": log_probs}
        if step.outside == "clipped":
            total = cotangent * _clipped_surrogate(call, arrays)[1]
        else:
            total = pull_call(call, arrays, cotangent)
        if step.weight_gradient and call.function == "cispo_loss":
            total = total + cotangent * _of_weight(call, arrays)
        total = factor_of_rows * total
        return -total if recipe.ratio.swapped else total

    value, change = value_and_change(compute, policy, _move(replay, recipe, unit))
    height = tree_height(replay.shape[1]) if _by_row(replay, recipe) else 0
    return value, change + (PRODUCTS + height) * unit * np.abs(value) + _inherited(replay, recipe, value)


def has_clips(call: Call) -> bool:
    """Tells whether a loss has a clip below and one above."""
    return {"clip_low", "clip_high"} <= set(inspect.signature(getattr(kljax, call.function)).parameters)


def _clips(call: Call) -> tuple[float, float]:
    """Returns the distances of the clips of a loss from 1, below and above; infinite without them."""
    if not has_clips(call):
        return np.inf, np.inf
    signature = inspect.signature(getattr(kljax, call.function)).parameters
    low, high = (call.arguments.get(name, signature[name].default) for name in ("clip_low", "clip_high"))
    return low, high


def _clipped_surrogate(call: Call, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns `-A clip(r)` of each token, and its derivative by the log-prob."""
    mask = arrays["mask"]
    low, high = _clips(call)
    ratio = np.exp(np.where(mask, arrays["log_probs"] - arrays["old_log_probs"], 0))
    clipped = np.where(mask, -arrays["advantages"] * np.clip(ratio, 1 - low, 1 + high), 0)
    return clipped, np.where((ratio >= 1 - low) & (ratio <= 1 + high), clipped, 0)


def _of_weight(call: Call, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the part of CISPO's derivative that passes through the clipped ratio, if that is not a constant."""
    policy, old = arrays["log_probs"], arrays["old_log_probs"]
    inside = arrays["mask"] & _within_clips(call, policy, old)
    return np.where(inside, -arrays["advantages"] * np.exp(policy - old) * policy, 0)


def _within_clips(call: Call, policy: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Returns where the ratio of a token is within the clips of its loss."""
    low, high = _clips(call)
    ratio = np.exp(policy - old)
    return np.asarray((ratio >= 1 - low) & (ratio <= 1 + high))


def _kl_gradient(replay: Replay, recipe: Recipe, weights: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
    assert recipe.kl is not None
    kl = recipe.kl
    used = apply_rule(replay.used_mask(recipe), recipe.kl_mask, replay.layout)
    policy = kl_policy(replay, kl)
    move = kl_move(replay, kl, unit)
    key = ("kl_gradient", unit, recipe.mask, recipe.kl_mask, recipe.ratio, dataclasses.replace(kl, coef=0.0))
    value, change = replay.remember(
        key, lambda: value_and_change(lambda x: kl_terms(replay, x, kl, used, recipe.ratio)[1], policy, move)
    )
    value, change = (np.where(weights != 0, weights * array, 0) for array in (value, change))
    bound = change + weights * kl_cancellation(replay, kl, unit) + PRODUCTS * unit * np.abs(value)
    if kl.corrected and kl.ratio != "token" and not kl.detached:
        # The ratio of the row has a derivative of its own, the same for each of its tokens.
        terms = np.where(weights != 0, weights * kl_terms(replay, policy, kl, used, recipe.ratio)[0], 0)
        count = used.sum(1, keepdims=True) if kl.ratio == "product" else 1
        value = value + np.where(used, count * row_mean(terms, used), 0)
        bound = bound + unit * tree_height(replay.shape[1]) * np.abs(terms).max(initial=0)
    return value, bound


def _mean_of(name: str) -> Callable[[Replay, Recipe], Prediction]:
    """Makes the metric that is the mean of a field over the tokens: of some rows, their share of it."""

    def metric(replay: Replay, recipe: Recipe) -> Prediction:
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
        bound = (np.where(used, errors, 0).sum() + height * np.abs(selected).sum()) / count
        mean = selected.sum() / count
        return Prediction(np.asarray(mean), np.asarray(bound + unit * abs(mean)), np.asarray(True))

    return metric


METRICS = {name: _mean_of(name) for name in ("kl", "ppo_kl", "ratio")}
