"""Stages per token: mask, log-probs, ratios, the rollout correction, the KL."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from kljax.tools.parity import scoring
from kljax.tools.parity.calls import remembered
from kljax.tools.parity.header import RecipeCalls
from kljax.tools.parity.positions import apply_rule, over_tokens, row_mean, shift_rows, value_and_change
from kljax.tools.parity.recipe import Kl, Ratio, Recipe, RecipeStep
from kljax.tools.parity.replay import MissingFields, Prediction, Replay
from kljax.tools.parity.rounding import EXP, PRODUCTS, tree_height


def mask(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the mask from the lengths of prompts and rows, and from the header's rule, or raises `MissingFields`.

    Returns a `Prediction`, `[B, T]` bool, exact, compared at every position.
    """
    needed = ("prompt_lengths", "lengths", *(() if recipe.mask_rule.tools is None else ("tool_mask",)))
    if missing := [name for name in needed if name not in replay.arrays]:
        raise MissingFields(*missing)
    value = apply_rule(replay.layout.completions(replay.shape[1]), recipe.mask_rule, replay.layout)
    return Prediction(value, np.zeros(replay.shape), np.ones(replay.shape, bool))


def log_probs(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the log-probs of the policy from recorded logits or hidden states.

    Returns a `Prediction`, `[B, T]` in nats, compared at trained tokens of the rows whose logits are recorded.
    """
    return _scored("log_probs", replay, recipe)


def ref_log_probs(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the log-probs of the reference from recorded logits or hidden states.

    Returns a `Prediction`, `[B, T]` in nats, compared at trained tokens of the rows whose logits are recorded.
    """
    return _scored("ref_log_probs", replay, recipe)


def _scored(name: str, replay: Replay, recipe: Recipe) -> Prediction:
    side = name.removesuffix("log_probs")
    settings = recipe.reference if side else recipe.log_probs
    if f"{side}logits" not in replay.dump and f"{side}hidden" not in replay.dump:
        raise MissingFields(f"{side}logits or {side}hidden")
    keep = replay.arrays["mask"]
    unit = replay.unit(name, recipe)
    # What is moved may come from a token that is not trained.
    scored = scoring.score(replay, side, settings, np.ones_like(keep) if settings.moved else keep, unit)
    value, bound, at = (shift_rows(array, settings.moved) for array in scored)
    if settings.source is not None:
        value = replay.arrays[settings.source]
        bound = bound + unit * np.abs(value)
    return Prediction(value, bound, keep & at)


def old_log_probs(replay: Replay, ratio: Ratio) -> np.ndarray:
    """Returns the log-probs of the old policy; without any in the dump, the policy is its own old policy, `[B, T]`."""
    absent = ratio.old == "old_log_probs" and ratio.old not in replay.arrays
    return replay.arrays["log_probs" if absent else ratio.old]


def policy_pair(replay: Replay, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log-probs whose difference is the log-ratio of the policy loss.

    Returns `[B, T]` log-probs of the policy and of the old policy, in nats.
    """
    policy = replay.arrays["log_probs"]
    old = shift_rows(old_log_probs(replay, recipe.ratio), recipe.ratio.shift)
    return (2 * old - policy if recipe.ratio.swapped else policy), old


def log_ratio(replay: Replay, recipe: Recipe) -> np.ndarray:
    """Returns the logarithm of the importance ratio, within the bound that the loss of the header has for a token.

    Returns `[B, T]` in nats.
    """
    policy, old = policy_pair(replay, recipe)
    bound = declared_log_ratio_clip(replay.plan)
    return policy - old if bound is None else np.clip(policy - old, -bound, bound)


def declared_log_ratio_clip(plan: RecipeCalls) -> float | None:
    """Returns the bound of a token's log-ratio in the loss of the header; None without one, and for ratios of rows."""
    arguments = plan.calls["loss"].arguments if "loss" in plan.calls else {}
    return arguments.get("log_ratio_clip") if arguments.get("level", "token") == "token" else None


def ratio(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the importance ratio of policy and old policy, before any clip.

    Returns a `Prediction`, `[B, T]`, compared at trained tokens.
    """
    with np.errstate(all="ignore"):
        difference = log_ratio(replay, recipe)
        value = np.exp(difference)
        bound = value * replay.unit("ratio", recipe) * (np.abs(difference) + EXP)
    return Prediction(value, bound, replay.arrays["mask"])


def weights(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the weights of the rollout correction.

    Returns a `Prediction`, `[B, T]`, compared at tokens in the recorded mask and in that of the recipe. A weight per
    row is repeated for its tokens.
    """
    inputs = replay.inputs("correction")
    step = recipe.correction or RecipeStep()
    used = replay.used_mask(recipe)
    numerator = inputs["log_probs"]
    denominator = shift_rows(inputs["sampling_log_probs"], step.shift)
    if step.policy is not None:
        numerator = replay.arrays[step.policy]
    if "advantages" in inputs:
        inputs["advantages"] = over_tokens(inputs["advantages"], replay.shape)
    if step.swapped:
        numerator, denominator = denominator, numerator
    unit = replay.unit("weights", recipe)
    move = unit * (np.abs(numerator - denominator) * (1 + tree_height(replay.shape[1])) + EXP)

    def compute(policy: np.ndarray) -> np.ndarray:
        arrays = {**inputs, "log_probs": policy, "sampling_log_probs": denominator, "mask": used}
        result = replay.run("correction", step, arrays)
        return over_tokens(result, replay.shape) ** step.weights

    value, change = value_and_change(compute, np.where(used, numerator, 0), np.where(used, move, 0))
    factor = step.scale
    if step.normalized:
        plain = recipe.changed("correction", normalized=False, scale=1.0)
        batch = replay.batch.predict("weights", plain).value
        tokens = replay.batch.used_mask(recipe)
        factor = factor / (batch[tokens].mean() or 1.0)
    value = factor * value
    change = abs(factor) * change
    return Prediction(value, change + PRODUCTS * unit * np.abs(value), replay.arrays["mask"] & used)


def kl_terms(
    replay: Replay, policy: np.ndarray, kl: Kl, used: np.ndarray, ratio: Ratio
) -> tuple[np.ndarray, np.ndarray]:
    """Estimates the KL per token at other log-probs of the policy, and differentiates it by the token's own.

    Returns `[B, T]` estimates in nats and their derivatives, both times `kl.scale`; 0 where masked. The ratio of a row
    is a constant here.
    """
    old = old_log_probs(replay, ratio)
    reference = shift_rows(replay.arrays[kl.reference], kl.shift)
    old = shift_rows(old, ratio.shift)
    if kl.ratio != "token":
        count = used.sum(1, keepdims=True) if kl.ratio == "product" else 1
        old = policy - count * row_mean(replay.arrays["log_probs"] - old, used)
    log_ratio = old - policy if ratio.swapped else policy - old
    first, second = (reference, policy) if kl.swapped else (policy, reference)
    settings: dict[str, Any] = {"estimator": kl.estimator, "gradient": kl.gradient}
    clips: dict[str, float | None] = {name: getattr(kl, name) for name in ("log_ratio_clip", "value_clip")}
    if kl.corrected:
        clips["max_ratio"] = kl.max_ratio
    if kl.estimator != "low_var_kl":
        # A clip at infinity changes nothing, and has the program of any other.
        clips = {name: np.inf if clip is None else float(clip) for name, clip in clips.items()}

    def compute(first: Any, second: Any, sampling: Any, used: Any, clips: dict[str, Any]) -> Any:
        def estimate(first: Any, second: Any, sampling: Any) -> jax.Array:
            return kljax.estimate_kl(first, second, used, sampling_log_probs=sampling, **settings, **clips)

        estimates, pull = jax.vjp(estimate, first, second, sampling)
        return estimates, *pull(jnp.ones_like(estimates))

    # The ratio is that of the policy, whichever of the two comes first.
    sampling = first - log_ratio if kl.corrected else None
    program = remembered(f"kl {settings!r}", compute)
    value, of_first, of_second, of_sampling = program(first, second, sampling, used, clips)
    derivative = np.asarray(of_second if kl.swapped else of_first)
    if sampling is not None:
        # `first` is in `sampling`, and so is the ratio, unless it is a constant.
        constant = kl.detached or kl.ratio != "token"
        moved = (0 if kl.swapped else 1) - (0 if constant else -1 if ratio.swapped else 1)
        derivative = derivative + moved * np.asarray(of_sampling)
    return kl.scale * np.asarray(value), kl.scale * derivative


def kl_policy(replay: Replay, kl: Kl) -> np.ndarray:
    """Returns the log-probs of the policy whose KL is estimated.

    Returns `[B, T]` log-probs in nats.
    """
    return replay.arrays[kl.policy if kl.policy in replay.arrays else "log_probs"]


def kl_per_token(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the KL estimate of each token, without its coefficient; without a KL it raises `MissingFields`.

    Returns a `Prediction`, `[B, T]` in nats times the term's `scale`; value and bound are 0 where masked. It is
    compared at tokens in the recorded mask and in that of the recipe.
    """
    if recipe.kl is None:
        raise MissingFields("header.kl")
    kl = recipe.kl
    used = replay.used_mask(recipe)
    unit = replay.unit("kl", recipe)
    policy = kl_policy(replay, kl)
    move = kl_move(replay, kl, unit)
    value, change = value_and_change(lambda x: kl_terms(replay, x, kl, used, recipe.ratio)[0], policy, move)
    bound = change + kl_cancellation(replay, kl, unit) + PRODUCTS * unit * np.abs(value)
    return Prediction(value, np.where(used, bound, 0), replay.arrays["mask"] & used)


def kl_move(replay: Replay, kl: Kl, unit: float) -> np.ndarray:
    """Returns how far rounding moves the log-ratios of a KL estimate.

    Returns `[B, T]` distances in nats.
    """
    policy = kl_policy(replay, kl)
    distance = np.abs(policy - shift_rows(replay.arrays[kl.reference], kl.shift))
    if kl.corrected:
        distance = distance + np.abs(policy - old_log_probs(replay, replay.plan.recipe.ratio)) + EXP
    return unit * np.where(np.isfinite(distance), distance, 0)


def kl_cancellation(replay: Replay, kl: Kl, unit: float) -> np.ndarray:
    """Returns the rounding of the terms of k3, which cancel near 0, in value and in derivative.

    Returns `[B, T]` bounds in nats; 0 for other estimators.
    """
    if kl.estimator not in ("k3", "low_var_kl"):
        return np.zeros(replay.shape)
    policy = kl_policy(replay, kl)
    with np.errstate(all="ignore"):
        x = np.clip(policy - shift_rows(replay.arrays[kl.reference], kl.shift), -20, None) * (-1 if kl.swapped else 1)
        weight = np.exp(policy - old_log_probs(replay, replay.plan.recipe.ratio)) if kl.corrected else 1.0
        terms = unit * abs(kl.scale) * weight * (8 * np.exp(-x) + 4 * np.abs(x) + 4)
    return np.where(np.isfinite(terms), terms, 0)
