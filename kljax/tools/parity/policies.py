"""Stages per token: mask, log-probs from logits or hidden states, ratios, the rollout correction, the KL."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from kljax.tools.parity.dump import Dump, Stored
from kljax.tools.parity.positions import apply_rule, over_tokens, row_mean, shift_rows, value_and_change
from kljax.tools.parity.recipe import Kl, LogProbRecipe, Ratio, Recipe
from kljax.tools.parity.replay import MissingFields, Prediction, Replay, remembered
from kljax.tools.parity.rounding import EXP, PRODUCTS, UNITS, narrowest_dtype, round_to, tree_height

# Numbers of logits that are in memory at a time.
PART = 1 << 22
# How far a forward pass of other shapes may move a logit, in units of its roundoff and of the largest logit.
FORWARD = 8.0


def mask(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the mask from the lengths of prompts and rows by the rule of the header, at every position.

    Raises:
      MissingFields: without lengths, or without the mask of tools that the rule needs.
    """
    needed = ("prompt_lengths", "lengths", *(() if recipe.mask_rule.tools is None else ("tool_mask",)))
    if missing := [name for name in needed if name not in replay.arrays]:
        raise MissingFields(*missing)
    value = apply_rule(replay.layout.completions(replay.shape[1]), recipe.mask_rule, replay.layout)
    return Prediction(value, np.zeros(replay.shape), np.ones(replay.shape, bool))


def log_probs(replay: Replay, recipe: Recipe, *, side: str) -> Prediction:
    """Recomputes the log-probs of the policy or, of the side "ref_", of the reference.

    They are compared at trained tokens of the rows whose logits or hidden states are recorded.

    Raises:
      MissingFields: if none are.
    """
    if f"{side}logits" not in replay.dump and f"{side}hidden" not in replay.dump:
        raise MissingFields(f"{side}logits or {side}hidden")
    settings = recipe.reference if side else recipe.log_probs
    unit = replay.unit(f"{side}log_probs", recipe)
    keep = replay.arrays["mask"]
    # What is moved may come from a token that is not trained.
    scored = _score(replay, side, settings, np.ones_like(keep) if settings.moved else keep, unit)
    value, bound, at = (shift_rows(array, settings.moved) for array in scored)
    if settings.source is not None:
        value = replay.arrays[settings.source]
        bound = bound + unit * np.abs(value)
    return Prediction(value, bound, keep & at)


def _score(replay: Replay, side: str, settings: LogProbRecipe, mask: np.ndarray, unit: float) -> Prediction:
    """Computes the log-probs of one policy on the recorded rows and positions."""
    dump = replay.dump
    layout = replay.layout
    tokens = replay.arrays["tokens"]
    value = np.zeros(mask.shape)
    bound = np.zeros(mask.shape)
    at = np.zeros(mask.shape, bool)
    width = dump.stored(f"{side}logits").shape[-1] if f"{side}logits" in dump else _head(dump, side).shape[-1]
    position = np.arange(mask.shape[1])
    columns = replay.arrays["columns"] if "columns" in dump else position
    column_of = np.full(mask.shape[1] + 2, -1)
    column_of[columns] = np.arange(len(columns))
    step = max(1, PART // width)
    for number, row in enumerate(dump.read("rows")):
        for local in np.flatnonzero(replay.rows == row):
            inside = position > 0
            if settings.forward:
                # Without padding, what a model makes of it is unknown.
                inside = (position > layout.starts[local]) & (position < layout.lengths[local])
            positions = np.flatnonzero(mask[local] & inside)
            positions = positions[column_of[positions - 1 + settings.shift] >= 0]
            for start in range(0, len(positions), step):
                chunk = positions[start : start + step]
                logits, errors = _logits(dump, side, number, column_of[chunk - 1 + settings.shift])
                if settings.forward is not None:
                    errors = errors + FORWARD * UNITS[settings.forward] * np.abs(logits).max(-1, keepdims=True)
                scored = _log_softmax_at(logits, errors, tokens[local, chunk], settings, unit)
                value[local, chunk], bound[local, chunk] = scored
                at[local, chunk] = True
    return Prediction(value, bound, at)


def _log_softmax_at(
    logits: np.ndarray, errors: np.ndarray, ids: np.ndarray, settings: LogProbRecipe, unit: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log-probs of some ids, NaN outside the vocabulary, and their bounds, from logits and their errors."""
    z = settings.logit_scale * logits
    e = abs(settings.logit_scale) * errors
    if settings.logits_dtype is not None:
        z = round_to(z, settings.logits_dtype)
    if settings.softcap is not None:
        z = settings.softcap * np.tanh(z / settings.softcap)
        e = e + unit * EXP * np.abs(z)
    z = z / settings.temperature
    e = e / settings.temperature
    e = e + unit * np.abs(z) * (1 + (settings.logit_scale != 1) + (settings.temperature != 1))
    z = z[:, : settings.vocab_size]
    e = e[:, : settings.vocab_size]
    if settings.top_p is not None:
        z = np.where(_top_p_set(z, settings.top_p, ids), z, -np.inf)
    positions = np.arange(len(ids))
    inside = ids < z.shape[1]
    chosen = np.where(inside, ids, 0)
    distance = z - z.max(-1, keepdims=True)
    powers = np.exp(distance)
    total = powers.sum(-1)
    probs = powers / total[:, None]
    value = distance[positions, chosen] - np.log(total)
    spread = np.sum(probs * np.abs(np.where(probs > 0, distance, 0)), -1)
    rounding = unit * (spread + EXP + tree_height(z.shape[1]) + EXP * np.abs(np.log(total)))
    rounding += unit * (np.abs(distance[positions, chosen]) + np.abs(value))
    carried = e[positions, chosen] + np.sum(probs * e, -1)
    return np.where(inside, value, np.nan), carried + rounding


def _top_p_set(logits: np.ndarray, top_p: float, ids: np.ndarray) -> np.ndarray:
    """Returns the smallest set of likely tokens whose mass reaches `top_p`, `[P, V]`; the sampled token is in it."""
    order = np.argsort(-logits, -1, kind="stable")
    ordered = np.take_along_axis(logits, order, -1)
    probs = np.exp(ordered - ordered[:, :1])
    probs /= probs.sum(-1, keepdims=True)
    keep = np.zeros(probs.shape, bool)
    np.put_along_axis(keep, order, np.cumsum(probs, -1) - probs < top_p, -1)
    keep[np.arange(len(ids)), np.minimum(ids, logits.shape[1] - 1)] = True
    return keep


def _logits(dump: Dump, side: str, number: int, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reads logits, which are exact as recorded, or multiplies hidden states by the head, with the product's error."""
    if f"{side}logits" in dump:
        logits = dump.stored(f"{side}logits").part(number, source).astype(np.float64)
        return logits, np.zeros_like(logits)
    stored = dump.stored(f"{side}hidden")
    head = _head(dump, side)
    hidden = stored.part(number, source).astype(np.float64)
    logits = np.empty((len(hidden), head.shape[1]))
    magnitude = np.empty_like(logits)
    width = max(1, PART // head.shape[0])
    for start in range(0, head.shape[1], width):
        weights = head.part(slice(None), slice(start, start + width)).astype(np.float64)
        logits[:, start : start + width] = hidden @ weights
        magnitude[:, start : start + width] = np.abs(hidden) @ np.abs(weights)
    # Products accumulate in float32 at least; the result has the dtype of the hidden states.
    kind = narrowest_dtype(hidden) if stored.kind == "float32" else stored.kind
    output = UNITS.get(kind, UNITS["float32"])
    accumulated = min(output, UNITS["float32"]) * tree_height(head.shape[0])
    return logits, output * np.abs(logits) + accumulated * magnitude


def _head(dump: Dump, side: str) -> Stored:
    return dump.stored(f"{side}head" if f"{side}head" in dump else "head")


def old_log_probs(replay: Replay, ratio: Ratio) -> np.ndarray:
    """Returns the log-probs of the old policy; without any in the dump, the policy is its own old policy."""
    absent = ratio.old == "old_log_probs" and ratio.old not in replay.arrays
    return replay.arrays["log_probs" if absent else ratio.old]


def policy_pair(replay: Replay, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log-probs whose difference is the log-ratio of the policy loss: of the policy and the old one."""
    policy = replay.arrays["log_probs"]
    old = shift_rows(old_log_probs(replay, recipe.ratio), recipe.ratio.shift)
    return (2 * old - policy if recipe.ratio.swapped else policy), old


def log_ratio(replay: Replay, recipe: Recipe) -> np.ndarray:
    """Returns the logarithm of the importance ratio, within the bound that the header's loss has for a token."""
    policy, old = policy_pair(replay, recipe)
    arguments = recipe.calls["loss"].arguments if "loss" in recipe.calls else {}
    bound = arguments.get("log_ratio_clip") if arguments.get("level", "token") == "token" else None
    return policy - old if bound is None else np.clip(policy - old, -bound, bound)


def ratio(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the importance ratio of policy and old policy, before any clip, at trained tokens."""
    with np.errstate(all="ignore"):
        difference = log_ratio(replay, recipe)
        value = np.exp(difference)
        bound = value * replay.unit("ratio", recipe) * (np.abs(difference) + EXP)
    return Prediction(value, bound, replay.arrays["mask"])


def weights(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the weights of the rollout correction, at tokens in the recorded mask and in that of the recipe."""
    inputs = replay.inputs("correction")
    step = recipe.correction
    used = replay.used_mask(recipe)
    numerator = inputs["log_probs"] if step.policy is None else replay.arrays[step.policy]
    denominator = shift_rows(inputs["sampling_log_probs"], step.shift)
    if "advantages" in inputs:
        inputs["advantages"] = over_tokens(inputs["advantages"], replay.shape)
    if step.swapped:
        numerator, denominator = denominator, numerator
    unit = replay.unit("weights", recipe)
    move = unit * (np.abs(numerator - denominator) * (1 + tree_height(replay.shape[1])) + EXP)

    def compute(policy: np.ndarray) -> np.ndarray:
        arrays = {**inputs, "log_probs": policy, "sampling_log_probs": denominator, "mask": used}
        return over_tokens(replay.run("correction", recipe, arrays), replay.shape) ** step.weights

    value, change = value_and_change(compute, np.where(used, numerator, 0), np.where(used, move, 0))
    factor = step.scale
    if step.normalized:
        batch = replay.batch.predict("weights", recipe.changed("correction", normalized=False, scale=1.0)).value
        factor = factor / (batch[replay.batch.used_mask(recipe)].mean() or 1.0)
    value = factor * value
    bound = abs(factor) * change + PRODUCTS * unit * np.abs(value)
    return Prediction(value, bound, replay.arrays["mask"] & used)


def kl_terms(
    replay: Replay, policy: np.ndarray, kl: Kl, used: np.ndarray, ratio: Ratio
) -> tuple[np.ndarray, np.ndarray]:
    """Estimates the KL per token at other log-probs of the policy, and differentiates it by the token's own.

    Returns `[B, T]` estimates in nats and their derivatives, both times `kl.scale`; 0 where masked. The ratio of a row
    is a constant here.
    """
    reference = shift_rows(replay.arrays[kl.reference], kl.shift)
    old = shift_rows(old_log_probs(replay, ratio), ratio.shift)
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
    """Returns the log-probs of the policy whose KL is estimated."""
    return replay.arrays[kl.policy if kl.policy in replay.arrays else "log_probs"]


def kl_per_token(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the KL estimate of each token, without its coefficient; 0 where masked.

    It is compared at tokens in the recorded mask and in that of the recipe.

    Raises:
      MissingFields: if the header has no KL.
    """
    if not recipe.kl.place:
        raise MissingFields("header.kl")
    used = replay.used_mask(recipe)
    value, bound = bounded_kl(replay, recipe.kl, used, recipe.ratio, replay.unit("kl", recipe))
    return Prediction(value, np.where(used, bound, 0), replay.arrays["mask"] & used)


def bounded_kl(
    replay: Replay, kl: Kl, used: np.ndarray, ratio: Ratio, unit: float, *, derivative: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the estimates of `kl_terms`, or their derivatives, and how far rounding may move them, `[B, T]`."""
    policy = kl_policy(replay, kl)
    x = policy - shift_rows(replay.arrays[kl.reference], kl.shift)
    log_ratio = policy - old_log_probs(replay, replay.recipe.ratio) if kl.corrected else np.zeros(replay.shape)
    distance = np.abs(x) + (np.abs(log_ratio) + EXP if kl.corrected else 0)
    move = unit * np.where(np.isfinite(distance), distance, 0)
    value, bound = value_and_change(lambda at: kl_terms(replay, at, kl, used, ratio)[int(derivative)], policy, move)
    if kl.estimator in ("k3", "low_var_kl"):
        # Its terms cancel near 0.
        with np.errstate(all="ignore"):
            x = np.clip(x, -20, None) * (-1 if kl.swapped else 1)
            terms = unit * abs(kl.scale) * np.exp(log_ratio) * (8 * np.exp(-x) + 4 * np.abs(x) + 4)
            bound = bound + np.where(np.isfinite(terms), terms, 0)
    return value, bound + PRODUCTS * unit * np.abs(value)
