"""The stages of the loss: policy loss per token, reduction, gradient, metrics."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import kljax
from kljax.systems import Call
from kljax.systems._call import steps
from kljax.tools.parity.advantages import token_advantages
from kljax.tools.parity.calls import check_call, per_token, pull_call, run_call
from kljax.tools.parity.fields import METRIC, ORDER
from kljax.tools.parity.policies import (
    kl_at,
    kl_cancellation,
    kl_gradient_at,
    kl_move,
    kl_policy,
    log_ratio,
    micro_batch,
    policy_pair,
    row_mean,
)
from kljax.tools.parity.positions import apply_rule, shift_rows, value_and_change
from kljax.tools.parity.recipe import Kl, Recipe, RecipeStep, ReductionRecipe
from kljax.tools.parity.replay import Prediction, Replay
from kljax.tools.parity.rounding import EXP, PRODUCTS, accumulator, tree_height
from kljax.tools.parity.sums import token_weights

BY_ROW = ("gspo_loss", "gmpo_loss", "vespo_loss")
# Losses of one token that no other token enters.
ALONE = (
    *("ppo_clip_loss", "cispo_loss", "dppo_loss", "sapo_loss", "importance_sampling_loss"),
    *("reinforce_loss", "gpg_loss", "cross_entropy_loss"),
)
ROW_LEVELS = ("sequence", "geometric", "average", "geometric_average")


def policy_loss_at(replay: Replay, policy: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Computes the policy loss per token at other log-probs.

    Args:
      policy: `[..., B, T]` log-probs of the policy in nats; leading axes only if `_is_elementwise`.

    Returns:
      `[..., B, T]` losses before the reduction.
    """
    step, arrays = recipe.loss or RecipeStep(), _inputs(replay, policy, recipe)
    calls = _parts(replay, step)
    if not step.arguments:
        replay.remember(("checked", "loss"), lambda: check_call("loss", replay.call("loss", step), arrays))
    total = np.zeros(policy.shape)
    for factor, call in calls:
        result = np.asarray(run_call("loss", call, arrays), np.float64)
        if _is_rewritten(step) and call.function == "ppo_clip_loss":
            result = _rewritten(step, call, arrays, result)[0]
        total = total + factor * result.reshape(per_token(result.shape))
    return total * _correction(replay, recipe)


def token_loss(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the policy loss of each token, without the KL term.

    Returns:
      A `Prediction`, `[B, T]`, with the correction's weights. It is compared at tokens in the recorded mask and in that
      of the recipe.
    """
    used, unit = replay.used_mask(recipe), replay.unit("token_loss", recipe)

    def compute(policy: np.ndarray) -> np.ndarray:
        return policy_loss_at(replay, policy, recipe)

    policy, move, stacked = _pair(replay, recipe)[0], _move(replay, recipe, unit), _is_elementwise(replay, recipe)
    value, change = value_and_change(compute, policy, move, stacked=stacked)
    bound = change + PRODUCTS * unit * np.abs(value) + _inherited(replay, recipe, value)
    return Prediction(value, np.where(used, bound, 0), replay.arrays["mask"] & used)


def loss(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the scalar loss, KL term included, from the values per token."""
    unit, total, bound = replay.unit("loss", recipe), 0.0, 0.0
    height = accumulator(unit) * tree_height(int(replay.used_mask(recipe).sum())) + PRODUCTS * unit
    for coef, name, reduction in _terms(recipe):
        weights = token_weights(replay, recipe, reduction, recipe.kl_mask if name == "kl" else None)
        values, errors = entropy_per_token(replay, recipe) if name == "entropy" else replay.input(name, recipe)
        if name == "kl":
            values, errors = (_kl_weights(replay, recipe) * array for array in (values, errors))
        products = np.where(weights != 0, weights * values, 0)
        total += coef * products.sum()
        bound += abs(coef) * np.where(weights != 0, weights * errors, 0).sum()
        bound += abs(coef) * height * np.abs(products).sum()
    total += recipe.reduction.offset
    return Prediction(np.asarray(total), np.asarray(bound + unit * abs(total)), np.asarray(True))


def gradient(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the derivative of the scalar loss by the log-probs of the policy.

    Returns:
      A `Prediction`, `[B, T]`, compared at every position, masked ones too.
    """
    unit, settings = replay.unit("grad_log_probs", recipe), recipe.gradient
    total, bound = np.zeros(replay.shape), np.zeros(replay.shape)
    terms = {name: (coef, reduction) for coef, name, reduction in _terms(recipe)}
    if settings.through_policy:
        value, errors = _policy_gradient(replay, recipe, unit)
        total, bound = total + value, bound + errors
    if settings.through_kl and "kl" in terms and (recipe.kl or Kl()).policy == "log_probs":
        coef, reduction = terms["kl"]
        value, errors = _kl_gradient(replay, recipe, reduction, unit)
        factor = coef * _kl_weights(replay, recipe)
        total, bound = total + factor * value, bound + np.abs(factor) * errors
    if recipe.entropy.source == "sampled":
        total = total + recipe.entropy.coef * token_weights(replay, recipe, recipe.reduction)
    total, bound = settings.scale * total, abs(settings.scale) * bound
    if settings.micro_batch != "all":
        inside = micro_batch(replay, settings.micro_batch)[:, None]
        total, bound = np.where(inside, total, 0), np.where(inside, bound, 0)
    if settings.part_norm is not None:
        parts = replay.arrays["micro_batch_ids"]
        norms = np.sqrt(np.bincount(parts, np.square(total).sum(1)))[parts][:, None]
        factor = np.minimum(1, settings.part_norm / np.maximum(norms, 1e-30))
        total, bound = total * factor, bound * factor
        bound = bound + unit * (PRODUCTS + tree_height(total.size)) * np.abs(total)
    if settings.clip is not None:
        total = np.clip(total, -settings.clip, settings.clip)
    norm = float(np.linalg.norm(total))
    if settings.norm is not None and norm > settings.norm:
        total, bound = total * settings.norm / norm, bound * settings.norm / norm
        # The norm has the rounding of a sum, and each number that of the factor.
        bound = bound + unit * (PRODUCTS + tree_height(total.size)) * np.abs(total)
    return Prediction(total, bound + unit * np.abs(total), np.ones(replay.shape, bool))


def _kl_weights(replay: Replay, recipe: Recipe) -> np.ndarray | float:
    """Returns the factor of the KL term of each token, 1 unless the correction's weights multiply it."""
    factor: np.ndarray | float = 1.0
    if recipe.kl is not None and recipe.kl.trusted:
        call, pair = replay.call("loss", recipe.loss or RecipeStep()), policy_pair(replay, recipe)
        around = call.function == "dppo_loss"
        factor = _trusted(replay, recipe, pair[1]) if around else _within_clips(call, *pair)
    if recipe.correction is None or recipe.kl is None or not recipe.kl.weighted:
        return factor
    return np.where(replay.used_mask(recipe), factor * replay.input("weights", recipe)[0], 0)


def entropy_per_token(replay: Replay, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Returns the entropy of an entropy bonus.

    Returns:
      `[B, T]` entropies in nats and their bounds; NaN if they are not recorded.
    """
    if recipe.entropy.source == "sampled":
        return -replay.arrays["log_probs"], np.zeros(replay.shape)
    return replay.arrays.get("entropy", np.full(replay.shape, np.nan)), np.zeros(replay.shape)


def _inputs(replay: Replay, policy: np.ndarray, recipe: Recipe) -> dict[str, Any]:
    """Returns the arrays of the policy loss, at other log-probs of the policy."""
    step, advantages = recipe.loss or RecipeStep(), token_advantages(replay, recipe)[0]
    arrays: dict[str, Any] = {**replay.inputs("loss"), "old_log_probs": policy_pair(replay, recipe)[1]}
    if step.columns:
        advantages = np.broadcast_to(replay.input("advantages", recipe)[0][None, :], replay.shape)
    if step.moved:
        advantages = shift_rows(np.where(replay.used_mask(recipe), advantages, 0), step.moved)
    arrays |= {"advantages": (-1 if step.flipped else 1) * advantages, "mask": replay.used_mask(recipe)}
    if policy.ndim > 2:
        arrays = {name: np.broadcast_to(array, policy.shape) for name, array in arrays.items()}
    return {**arrays, "log_probs": policy, "key": replay.remember("key", lambda: jax.random.key(0))}


def _parts(replay: Replay, step: RecipeStep) -> list[tuple[float, Call]]:
    """Lists the policy loss and the terms that it adds to itself, each with its factor."""
    call = replay.call("loss", step)
    first = dataclasses.replace(call, plus=())
    sign = -step.scale if step.flipped else step.scale
    return [(sign, first), *((step.scale * step.added, term) for term in call.plus)]


def _correction(replay: Replay, recipe: Recipe) -> np.ndarray | float:
    """Returns the factor of the rollout correction, `[B, T]`, or 1 without one."""
    step = recipe.loss or RecipeStep()
    factor = np.ones(replay.shape)
    if step.max_drift is not None:
        factor = factor * (_drifted(replay, recipe) <= step.max_drift)[:, None]
    if step.max_mismatch is not None:
        factor = factor * (mismatches(replay, recipe) <= step.max_mismatch)[:, None]
    if step.max_row_distance is not None:
        factor = factor * (row_distances(replay, recipe) <= step.max_row_distance)[:, None]
    if step.outside.startswith("masked"):
        sides = None if step.outside == "masked" else token_advantages(replay, recipe)[0]
        factor = factor * _within_clips(replay.call("loss", step), *policy_pair(replay, recipe), sides)
    if step.trust is not None:
        factor = factor * _trusted(replay, recipe, replay.arrays[step.trust])
    if step.recorded:
        factor = factor * np.where(replay.used_mask(recipe), replay.arrays["weights"], 0)
    if recipe.correction is None or not step.weights:
        return factor
    weights = np.where(replay.used_mask(recipe), replay.input("weights", recipe)[0], 0)
    return np.asarray(factor * weights**step.weights)


def _drifted(replay: Replay, recipe: Recipe) -> np.ndarray:
    """Returns how far the log-probs of each row of negative advantage fell in the mean; others have -inf, `[B]`."""
    used = replay.used_mask(recipe)
    negative = (np.where(used, token_advantages(replay, recipe)[0], 0) < 0).any(1)
    return np.where(negative, drifts(replay, recipe), -np.inf)


def mismatches(replay: Replay, recipe: Recipe) -> np.ndarray:
    """Returns the mean distance of the old policy and the sampler in each row, `[B]` in nats per token."""
    distance = np.abs(replay.arrays["old_log_probs"] - replay.arrays["rollout_log_probs"])
    return row_mean(distance, replay.used_mask(recipe))[:, 0]


def row_distances(replay: Replay, recipe: Recipe) -> np.ndarray:
    """Returns how far the geometric mean of old policy over sampler is from 1 in each row, `[B]`."""
    difference = replay.arrays["old_log_probs"] - replay.arrays["rollout_log_probs"]
    return np.abs(np.expm1(row_mean(difference, replay.used_mask(recipe))[:, 0]))


def _trusted(replay: Replay, recipe: Recipe, center: np.ndarray) -> np.ndarray:
    """Returns the tokens in the trust region of the header's loss around another policy, `[B, T]` bool."""
    low, high = _clips(replay.plan.calls["loss"])
    moved = np.exp(policy_pair(replay, recipe)[0]) - np.exp(center)
    return np.where(token_advantages(replay, recipe)[0] > 0, moved <= high, moved >= -low)


def drifts(replay: Replay, recipe: Recipe) -> np.ndarray:
    """Returns how far the log-probs of each row fell from the old policy in the mean, `[B]` in nats per token."""
    policy, old = policy_pair(replay, recipe)
    return row_mean(old - policy, replay.used_mask(recipe))[:, 0]


def _pair(replay: Replay, recipe: Recipe) -> tuple[np.ndarray, np.ndarray | float]:
    """Returns the log-probs of the policy that enter the loss, and their factor of its log-ratios."""
    (policy, old), how = policy_pair(replay, recipe), (recipe.loss or RecipeStep()).row_ratio
    if how == "mean":
        return policy, 1.0
    used = replay.used_mask(recipe)
    lengths = used.sum(1, keepdims=True)
    if how == "mean of ratios":
        ratios = np.exp(policy - old)
        means = row_mean(ratios, used)
        return old + np.log(np.where(used, means, 1)), np.where(used, ratios / np.where(used, means, 1), 1)
    factor = lengths if how == "sum" else lengths / replay.shape[1]
    return old + factor * (policy - old), factor


def _terms(recipe: Recipe) -> list[tuple[float, str, ReductionRecipe]]:
    """Lists the terms of the loss: coefficient, field per token, reduction."""
    terms = [(1.0, "token_loss", recipe.reduction)]
    if recipe.kl is not None and recipe.kl.place == "loss" and recipe.kl.coef:
        terms.append((recipe.kl.coef, "kl", recipe.kl_reduction or recipe.reduction))
    if recipe.entropy.coef:
        terms.append((-recipe.entropy.coef, "entropy", recipe.reduction))
    return terms


def _by_row(replay: Replay, recipe: Recipe) -> bool:
    call = replay.call("loss", recipe.loss or RecipeStep())
    return call.function in BY_ROW or call.arguments.get("level") in ROW_LEVELS


def _is_elementwise(replay: Replay, recipe: Recipe) -> bool:
    """Whether the loss of a token depends on the numbers of that token alone."""
    call = replay.call("loss", recipe.loss or RecipeStep())
    return all(step.function in ALONE for step, _ in steps(call)) and not _by_row(replay, recipe)


def _move(replay: Replay, recipe: Recipe, unit: float) -> np.ndarray:
    """Returns how far rounding moves the log-ratio."""
    policy, old = _pair(replay, recipe)[0], policy_pair(replay, recipe)[1]
    height = tree_height(replay.shape[1]) if _by_row(replay, recipe) else 0
    distance = np.abs(policy - old) * (1 + height)
    return unit * (np.where(np.isfinite(distance), distance, 0) + EXP)


def _inherited(replay: Replay, recipe: Recipe, value: np.ndarray) -> np.ndarray:
    """Returns the errors of recomputed advantages and weights: the loss is proportional to both."""
    relative = np.zeros(replay.shape)
    inputs = [token_advantages(replay, recipe)]
    if recipe.correction is not None:
        inputs.append(replay.input("weights", recipe))
    for array, bound in inputs:
        relative = relative + bound / np.maximum(np.abs(array), 1e-30)
    return np.abs(value) * relative


def _policy_gradient(replay: Replay, recipe: Recipe, unit: float) -> tuple[np.ndarray, np.ndarray]:
    (policy, factor_of_rows), old = _pair(replay, recipe), policy_pair(replay, recipe)[1]
    step, weights = recipe.loss or RecipeStep(), token_weights(replay, recipe, recipe.reduction)
    # Where each token stands alone, the weights of the reduction multiply its derivative.
    alone = _is_elementwise(replay, recipe)
    inner = np.ones(replay.shape) if alone else weights

    def compute(log_probs: np.ndarray) -> np.ndarray:
        arrays, total = _inputs(replay, log_probs, recipe), np.zeros(log_probs.shape)
        cotangent = np.broadcast_to(inner * _correction(replay, recipe), log_probs.shape)
        for factor, call in _parts(replay, step):
            if _is_rewritten(step) and call.function == "ppo_clip_loss":
                result = np.asarray(run_call("loss", call, arrays), np.float64)
                pulled = np.asarray(pull_call("loss", call, arrays, cotangent))
                total = total + factor * _rewritten(step, call, arrays, result, pulled=pulled, cotangent=cotangent)[1]
                continue
            total = total + factor * np.asarray(pull_call("loss", call, arrays, cotangent))
            if step.weight_gradient and call.function == "cispo_loss":
                total = total + factor * cotangent * _of_weight(call, arrays)
        total = recipe.ratio.factor * factor_of_rows * total
        if (bound := recipe.ratio.log_ratio_clip) is not None:
            total = np.where(np.abs(recipe.ratio.factor * (replay.arrays["log_probs"] - old)) > bound, 0, total)
        return -total if recipe.ratio.swapped else total

    stages = (stage for stage in ORDER["token_loss"])
    key = ("policy_gradient", unit, *(getattr(recipe, stage) for stage in stages), None if alone else recipe.reduction)
    move = _move(replay, recipe, unit)
    value, change = replay.remember(key, lambda: value_and_change(compute, policy, move, stacked=alone))
    if alone:
        value, change = (np.where(weights != 0, weights * array, 0) for array in (value, change))
    height = tree_height(replay.shape[1]) if _by_row(replay, recipe) else 0
    return value, change + (PRODUCTS + height) * unit * np.abs(value) + _inherited(replay, recipe, value)


def _is_rewritten(step: RecipeStep) -> bool:
    """Tells whether PPO's loss has a form that the library's function lacks."""
    return step.dual_both or step.outside == "clipped"


def _rewritten(
    step: RecipeStep,
    call: Call,
    arrays: Mapping[str, np.ndarray],
    result: np.ndarray,
    *,
    pulled: np.ndarray | float = 0.0,
    cotangent: np.ndarray | float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns PPO's loss per token and its derivative by the log-probs in the form of a step, where it has another.

    Args:
      result: the loss of the call.
      pulled: its derivative.
      cotangent: factor of the derivative.
    """
    advantages, mask = arrays["advantages"], arrays["mask"]
    if step.outside == "clipped":
        ratio = np.exp(np.where(mask, arrays["log_probs"] - arrays["old_log_probs"], 0))
        low, high = _clips(call)
        clipped = np.where(mask, -advantages * np.clip(ratio, 1 - low, 1 + high), 0)
        inside = mask & (ratio >= 1 - low) & (ratio <= 1 + high)
        return clipped, np.where(inside, cotangent * clipped, 0)
    limit = -advantages * call.arguments.get("dual_clip", np.inf)
    beyond = mask & (advantages > 0) & (result > limit)
    return np.where(beyond, limit, result), np.where(beyond, 0, pulled)


def has_clips(call: Call) -> bool:
    """Tells whether a loss has a clip below and one above."""
    return {"clip_low", "clip_high"} <= set(inspect.signature(getattr(kljax, call.function)).parameters)


def _clips(call: Call) -> tuple[float, float]:
    """Returns the distances of the clips of a loss from 1, below and above."""
    signature = inspect.signature(getattr(kljax, call.function)).parameters
    low, high = (call.arguments.get(name, signature[name].default) for name in ("clip_low", "clip_high"))
    return low, high


def _of_weight(call: Call, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the part of CISPO's derivative that passes through the clipped ratio, if that is not a constant."""
    policy, old = arrays["log_probs"], arrays["old_log_probs"]
    inside = arrays["mask"] & _within_clips(call, policy, old)
    return np.where(inside, -arrays["advantages"] * np.exp(policy - old) * policy, 0)


def _within_clips(call: Call, policy: np.ndarray, old: np.ndarray, advantages: np.ndarray | None = None) -> np.ndarray:
    """Returns where the ratio of a token is within the clips of its loss, or with advantages where PPO's is."""
    low, high = _clips(call)
    ratio = np.exp(policy - old)
    if advantages is not None:
        return np.asarray(~((advantages > 0) & (ratio > 1 + high)) & ~((advantages < 0) & (ratio < 1 - low)))
    return np.asarray((ratio >= 1 - low) & (ratio <= 1 + high))


def _kl_gradient(
    replay: Replay, recipe: Recipe, reduction: ReductionRecipe, unit: float
) -> tuple[np.ndarray, np.ndarray]:
    kl, used = recipe.kl or Kl(), apply_rule(replay.used_mask(recipe), recipe.kl_mask, replay.layout)
    weights = token_weights(replay, recipe, reduction, recipe.kl_mask)
    other = kl.corrected and not kl.detached and kl.ratio in ("row", "inverse")
    kl = dataclasses.replace(kl, detached=kl.detached or other)

    # The estimate of a token depends on its own log-prob alone.
    def compute(log_probs: np.ndarray) -> np.ndarray:
        return kl_gradient_at(replay, log_probs, kl, used)

    key = ("kl_gradient", unit, recipe.mask, recipe.kl_mask, dataclasses.replace(kl, coef=0.0))
    move = kl_move(replay, kl, unit)
    value, change = replay.remember(key, lambda: value_and_change(compute, kl_policy(replay, kl), move, stacked=True))
    value, change = (np.where(weights != 0, weights * array, 0) for array in (value, change))
    bound = change + weights * kl_cancellation(replay, kl, unit) + PRODUCTS * unit * np.abs(value)
    if kl.level == "row":
        value, bound = (np.where(used, row_mean(array, used), 0) for array in (value, bound))
    if other:
        # The ratio of the log-prob of other tokens, or of the other sign, has a derivative of its own.
        terms = np.where(weights != 0, weights * kl_at(replay, kl_policy(replay, kl), kl, used), 0)
        terms = -terms if kl.ratio == "inverse" else np.where(used, row_mean(terms, used), 0)
        value, bound = value + terms, bound + unit * tree_height(replay.shape[1]) * np.abs(terms).max()
    return value, bound


def _mean_of(name: str) -> Callable[[Replay, Recipe], Prediction]:
    """Makes the metric that is the mean of a field over the tokens."""

    def metric(replay: Replay, recipe: Recipe) -> Prediction:
        unit, used = replay.unit(METRIC + name, recipe), replay.used_mask(recipe)
        if name == "ppo_kl":
            values = -log_ratio(replay, recipe)
            errors = unit * np.abs(values)
        else:
            values, errors = replay.input(name, recipe)
        selected, count = np.where(used, values, 0), max(int(used.sum()), 1)
        height = accumulator(unit) * tree_height(count) + 2 * unit
        bound = (np.where(used, errors, 0).sum() + height * np.abs(selected).sum()) / count
        mean = selected.sum() / count
        return Prediction(np.asarray(mean), np.asarray(bound + unit * abs(mean)), np.asarray(True))

    return metric


METRICS = {name: _mean_of(name) for name in ("kl", "ppo_kl", "ratio")}
