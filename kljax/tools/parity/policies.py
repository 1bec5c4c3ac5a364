"""Stages per token: mask, log-probs, ratios, the rollout correction, the KL."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from kljax._numerics import clip
from kljax.tools.parity import scoring
from kljax.tools.parity.calls import per_token, remembered
from kljax.tools.parity.header import RecipeCalls
from kljax.tools.parity.positions import (
    ROW_ORDERS,
    apply_rule,
    last_positions,
    over_tokens,
    shift_rows,
    value_and_change,
)
from kljax.tools.parity.recipe import Kl, Recipe, RecipeStep
from kljax.tools.parity.replay import Prediction, Replay
from kljax.tools.parity.rounding import EXP, PRODUCTS, round_to, tree_height


def mask(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the mask from the lengths of prompts and rows.

    Args:
      replay: the recorded arrays, among them `prompt_lengths` and `lengths`.
      recipe: its `mask_rule` is applied.

    Returns:
      A `Prediction`, `[B, T]` bool, exact, compared at every position.
    """
    prompts, lengths = replay.arrays["prompt_lengths"][:, None], replay.arrays["lengths"][:, None]
    position = np.arange(replay.shape[1])
    value = apply_rule((position >= prompts) & (position < lengths), recipe.mask_rule, replay.layout)
    return Prediction(value, np.zeros(replay.shape), np.ones(replay.shape, bool))


def log_probs(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the log-probs of the policy from recorded logits or hidden states.

    Args:
      recipe: settings of the log-probs; with the adapter off, the result is the recorded `ref_log_probs`, or NaN.

    Returns:
      A `Prediction`, `[B, T]` in nats, compared at unmasked tokens of the rows whose logits are recorded.
    """
    return _scored("log_probs", replay, recipe)


def ref_log_probs(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the log-probs of the reference from recorded logits or hidden states.

    Args:
      recipe: settings of the reference; with its `adapter` False, the result is the recorded `log_probs`.

    Returns:
      A `Prediction`, `[B, T]` in nats, compared at unmasked tokens of the rows whose logits are recorded.
    """
    return _scored("ref_log_probs", replay, recipe)


def _scored(name: str, replay: Replay, recipe: Recipe) -> Prediction:
    side = name.removesuffix("log_probs")
    settings = recipe.reference if side else recipe.log_probs
    keep, unit = replay.arrays["mask"], replay.unit(name, recipe)
    if settings.adapter and settings.source is None:
        moved = settings.moved or settings.rows != "same"
        scored = scoring.score(replay.dump, side, settings, np.ones_like(keep) if moved else keep, unit)
        # What leaves a row at its end is lost.
        order = ROW_ORDERS[settings.rows](replay.layout)
        value, bound, at = (shift_rows(array, settings.moved)[order] for array in scored)
        return Prediction(settings.scale * value, abs(settings.scale) * bound, keep & at)
    other = settings.source or ("log_probs" if side else "ref_log_probs")
    value = replay.arrays.get(other, np.full(replay.shape, np.nan))
    rows = np.zeros(replay.shape, bool)
    rows[replay.arrays["rows"]] = True
    return Prediction(value, unit * (1 + np.abs(value)), keep & rows)


def policy_pair(replay: Replay, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log-probs whose difference is the log-ratio of the policy loss.

    Args:
      recipe: settings of the ratio; an old policy that is not recorded is the policy itself.

    Returns:
      `[B, T]` log-probs of the policy and of the old policy, in nats.
    """
    policy, settings = replay.arrays["log_probs"], recipe.ratio
    old = shift_rows(replay.old_log_probs(recipe), settings.shift)[ROW_ORDERS[settings.rows](replay.layout)]
    if settings.own != "none":
        old = np.where(micro_batch(replay, settings.own)[:, None], policy, old)
    if settings.recorded:
        return old + np.log(np.where(replay.arrays["ratio"] > 0, replay.arrays["ratio"], 1)), old
    if settings.swapped:
        policy = 2 * old - policy
    if settings.factor != 1:
        policy = old + settings.factor * (policy - old)
    if settings.dtype is not None:
        policy = old + round_to(policy - old, settings.dtype)
    if settings.log_ratio_clip is not None:
        policy = old + np.clip(policy - old, -settings.log_ratio_clip, settings.log_ratio_clip)
    return policy, old


def micro_batch(replay: Replay, which: str) -> np.ndarray:
    """Returns the rows of the first or the last micro-batch, recorded or a half of the rows, `[B]` bool."""
    rows = np.arange(replay.shape[0])
    parts = replay.arrays.get("micro_batch_ids", 2 * rows // len(rows))
    return np.asarray(parts == (parts.min() if which == "first" else parts.max()))


def log_ratio(replay: Replay, recipe: Recipe) -> np.ndarray:
    """Returns the logarithm of the importance ratio, within the bound that the loss of the header has for a token.

    Returns:
      `[B, T]` in nats.
    """
    policy, old = policy_pair(replay, recipe)
    bound = declared_log_ratio_clip(replay.plan)
    if recipe.ratio.log_ratio_clip is not None or bound is None:
        return policy - old
    return np.clip(policy - old, -bound, bound)


def declared_log_ratio_clip(plan: RecipeCalls) -> float | None:
    """Returns the bound of a token's log-ratio in the loss of the header; None without one, and for ratios of rows."""
    arguments = plan.calls["loss"].arguments if "loss" in plan.calls else {}
    return arguments.get("log_ratio_clip") if arguments.get("level", "token") == "token" else None


def ratio(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the importance ratio of policy and old policy, before any clip.

    Returns:
      A `Prediction`, `[B, T]`, compared at unmasked tokens.
    """
    with np.errstate(all="ignore"):
        difference = log_ratio(replay, recipe)
        value = np.exp(difference)
        bound = value * replay.unit("ratio", recipe) * (np.abs(difference) + EXP)
    return Prediction(value, bound, replay.arrays["mask"])


def weights(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the weights of the rollout correction.

    Args:
      replay: the recorded arrays, with the arrays that the correction takes: `old_log_probs` and `rollout_log_probs`
        unless the header or the system has others.

    Returns:
      A `Prediction`, `[B, T]`, compared at tokens in the recorded mask and in that of the recipe. A weight per row is
      repeated for its tokens.
    """
    step, used = recipe.correction or RecipeStep(), replay.used_mask(recipe)
    inputs = replay.inputs("correction")
    numerator, denominator = inputs["log_probs"], inputs["sampling_log_probs"]
    if step.policy is not None:
        numerator = replay.arrays[step.policy]
    if "advantages" in inputs:
        inputs["advantages"] = over_tokens(inputs["advantages"], replay.shape)
    denominator = shift_rows(denominator, step.shift)[ROW_ORDERS[step.rows](replay.layout)]
    if step.swapped:
        numerator, denominator = denominator, numerator
    ends = used & (np.arange(replay.shape[1]) == last_positions(used)[:, None])
    if step.end == "unsampled":
        denominator = np.where(ends, 0, denominator)
    plain = np.where(used, numerator - denominator, 0)
    if step.dtype is not None or step.prefix or step.normalized == "free":
        numerator = denominator + _changed_log_ratio(step, plain, used)
    unit = replay.unit("weights", recipe)
    move = unit * (np.abs(numerator - denominator) * (1 + tree_height(replay.shape[1])) + EXP)

    def compute(policy: np.ndarray) -> np.ndarray:
        arrays = {**inputs, "log_probs": policy, "sampling_log_probs": denominator, "mask": used}
        result = np.asarray(replay.run("correction", step, arrays), np.float64)
        return np.broadcast_to(result.reshape(per_token(result.shape)), replay.shape) ** step.weights

    value, change = value_and_change(compute, np.where(used, numerator, 0), np.where(used, move, 0))
    factor = step.scale / _mean_weight(value, used, step.normalized)
    value, change = factor * value, np.abs(factor) * change
    if step.veto:
        likely = np.where(used, np.exp(plain), np.inf).min(1, keepdims=True) >= step.veto
        value, change = value * likely, change * likely
    if step.end == "one":
        value, change = np.where(ends, 1, value), np.where(ends, 0, change)
    return Prediction(value, change + PRODUCTS * unit * np.abs(value), replay.arrays["mask"] & used)


def _changed_log_ratio(step: RecipeStep, difference: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Returns the log-ratio that the weights of a correction are made of, `[B, T]`."""
    if step.dtype is not None:
        difference = round_to(difference, step.dtype)
    if step.prefix:
        difference = np.cumsum(np.where(used, difference, 0), 1)
    if step.normalized == "free" and used.any():
        difference = difference - np.log(np.exp(difference[used]).mean())
    return difference


def _mean_weight(weights: np.ndarray, used: np.ndarray, over: str) -> np.ndarray:
    """Returns the mean of weights that divides them, of the batch, of each row or of rows; 1 if there is none."""
    if over in ("none", "free"):
        return np.ones(1)
    if over == "rows":
        means = np.where(used, weights, 0).sum(1) / np.maximum(used.sum(1), 1)
        mean = means[used.any(1)].mean() if used.any() else 1.0
        return np.asarray(mean if mean else 1.0)
    if over == "columns":
        mean = np.where(used, weights, 0).mean()
        return np.asarray(mean if mean else 1.0)
    axis = None if over == "batch" else 1
    total, count = (np.sum(np.where(used, array, 0), axis, keepdims=True) for array in (weights, np.ones(used.shape)))
    return np.asarray(np.where(total == 0, 1, total / np.maximum(count, 1)))


def kl_at(replay: Replay, policy: np.ndarray, kl: Kl, used: np.ndarray) -> np.ndarray:
    """Estimates the KL per token at other log-probs of the policy.

    Args:
      policy: `[..., B, T]` log-probs of the policy in nats.
      used: `[B, T]` bool, the tokens of the estimate.

    Returns:
      `[..., B, T]` estimates in nats times `kl.scale`; 0 where masked.
    """
    return _kl_program(replay, policy, kl, used)[0]


def kl_gradient_at(replay: Replay, policy: np.ndarray, kl: Kl, used: np.ndarray) -> np.ndarray:
    """Differentiates the KL of each token by its own log-prob.

    Args:
      policy: `[..., B, T]` log-probs of the policy in nats.
      used: `[B, T]` bool, the tokens of the estimate.

    Returns:
      `[..., B, T]` derivatives times `kl.scale`; 0 where masked.
    """
    return _kl_program(replay, policy, kl, used)[1]


def _kl_program(replay: Replay, policy: np.ndarray, kl: Kl, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the estimates and their derivatives, in the shape of `policy`."""
    sampling = _sampling(replay, kl, used) if kl.corrected else None
    reference = shift_rows(replay.arrays[kl.reference], kl.shift)
    if kl.level == "row":
        policy, reference = (row_mean(array, used) for array in (policy, reference))
    if kl.dtype is not None:
        # The rounding has the gradient of its argument, and the importance ratio is not rounded.
        rounded = reference + round_to(policy - reference, kl.dtype)
        sampling, policy = None if sampling is None else sampling + rounded - policy, rounded
    recorded = reference, used, sampling
    arrays = [None if array is None else np.broadcast_to(array, policy.shape) for array in recorded]
    settings: dict[str, Any] = {"estimator": kl.estimator, "gradient": kl.gradient}
    clips = {"max_ratio": kl.max_ratio if kl.corrected else None}
    clips |= {"log_ratio_clip": kl.log_ratio_clip, "value_clip": kl.value_clip}
    # The estimate is bounded before its ratio, which the library's function bounds after it.
    inner = kl.bound is not None and kl.corrected
    if inner:
        clips["value_clip"] = kl.bound

    def compute(policy: Any, reference: Any, used: Any, sampling: Any, numbers: dict[str, Any]) -> Any:
        clips = {name: numbers[name] for name in ("max_ratio", "log_ratio_clip", "value_clip")}

        def estimate(policy: Any) -> jax.Array:
            first, second = (reference, policy) if kl.swapped else (policy, reference)
            corrected = sampling
            if kl.detached and sampling is not None:
                # The ratio keeps its value, and loses its gradient.
                corrected = sampling + policy - jax.lax.stop_gradient(policy)
            if kl.swapped and corrected is not None:
                # The ratio is that of the policy, whichever of the two comes first.
                corrected = corrected + first - second
            if not inner:
                return kljax.estimate_kl(first, second, used, sampling_log_probs=corrected, **settings, **clips)
            options = {name: clip for name, clip in clips.items() if name != "max_ratio"}
            weight = jnp.exp(jnp.where(used, first - corrected, 0))
            if clips["max_ratio"] is not None:
                weight = jnp.minimum(weight, clips["max_ratio"])
            return weight * kljax.estimate_kl(first, second, used, **settings, **options)

        def changed(policy: Any) -> jax.Array:
            result = estimate(policy)
            result = result if numbers["floor"] is None else clip(result, numbers["floor"], None)
            return jnp.where(used, result + numbers["offset"], 0)

        estimates, pull = jax.vjp(changed, policy)
        return estimates, pull(jnp.ones_like(estimates))[0]

    program = remembered(f"kl {settings!r} {kl.swapped} {kl.detached} {inner}", compute)
    value, derivative = program(policy, *arrays, {**clips, "floor": kl.floor, "offset": kl.offset})
    return kl.scale * np.asarray(value), kl.scale * np.asarray(derivative)


def row_mean(values: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Returns the mean of each row over its tokens, repeated for all, `[..., B, T]`."""
    mean = np.where(used, values, 0).sum(-1, keepdims=True) / np.maximum(used.sum(1, keepdims=True), 1)
    return np.broadcast_to(mean, values.shape)


def _sampling(replay: Replay, kl: Kl, used: np.ndarray) -> np.ndarray:
    """Returns the log-probs that the KL's importance ratio is taken to, `[B, T]`."""
    policy, old = replay.arrays["log_probs"], replay.old_log_probs(replay.plan.recipe)
    if kl.ratio == "sampler":
        return replay.arrays["rollout_log_probs"]
    if kl.ratio == "token":
        return old
    return policy - (old - policy if kl.ratio == "inverse" else row_mean(policy - old, used))


def kl_policy(replay: Replay, kl: Kl) -> np.ndarray:
    """Returns the log-probs of the policy whose KL is estimated.

    Args:
      kl: settings of the KL term; a policy that is not recorded is the one that is trained.

    Returns:
      `[B, T]` log-probs in nats.
    """
    return replay.arrays.get(kl.policy, replay.arrays["log_probs"])


def kl_per_token(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the KL estimate of each token, without its coefficient.

    Returns:
      A `Prediction`, `[B, T]` in nats times the term's `scale`; value and bound are 0 where masked. It is compared at
      tokens in the recorded mask and in that of the recipe.
    """
    kl, used, unit = recipe.kl or Kl(), replay.used_mask(recipe), replay.unit("kl", recipe)
    policy = kl_policy(replay, kl)
    move = kl_move(replay, kl, unit)
    value, change = value_and_change(lambda lp: kl_at(replay, lp, kl, used), policy, move, stacked=True)
    bound = change + kl_cancellation(replay, kl, unit) + PRODUCTS * unit * np.abs(value)
    return Prediction(value, np.where(used, bound, 0), replay.arrays["mask"] & used)


def kl_move(replay: Replay, kl: Kl, unit: float) -> np.ndarray:
    """Returns how far rounding moves the log-ratios of a KL estimate.

    Returns:
      `[B, T]` distances in nats.
    """
    policy = kl_policy(replay, kl)
    distance = np.abs(policy - shift_rows(replay.arrays[kl.reference], kl.shift))
    if kl.corrected:
        distance = distance + np.abs(policy - replay.old_log_probs(replay.plan.recipe)) + EXP
    return unit * np.where(np.isfinite(distance), distance, 0)


def kl_cancellation(replay: Replay, kl: Kl, unit: float) -> np.ndarray:
    """Returns the rounding of the terms of k3, which cancel near 0, in value and in derivative.

    Returns:
      `[B, T]` bounds in nats; 0 for other estimators.
    """
    if kl.estimator not in ("k3", "low_var_kl"):
        return np.zeros(replay.shape)
    policy = kl_policy(replay, kl)
    with np.errstate(all="ignore"):
        x = np.clip(policy - shift_rows(replay.arrays[kl.reference], kl.shift), -20, None) * (-1 if kl.swapped else 1)
        weight = np.exp(policy - replay.old_log_probs(replay.plan.recipe)) if kl.corrected else 1.0
        terms = unit * abs(kl.scale) * weight * (8 * np.exp(-x) + 4 * np.abs(x) + 4)
    return np.where(np.isfinite(terms), terms, 0)
