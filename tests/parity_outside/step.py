"""One update's loss and gradient from a batch and settings, stage by stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tests.parity_outside import advantages as advantage_functions
from tests.parity_outside.batches import Array, DrawnBatch
from tests.parity_outside.scoring import move_columns, record, score, select_mask
from tests.parity_outside.settings import Settings
from tests.parity_outside.tape import Node, gradient, larger, select, smaller

_FIELDS = {
    "policy": "log_probs",
    "old": "old_log_probs",
    "rollout": "rollout_log_probs",
    "reference": "ref_log_probs",
}


def run_step(batch: DrawnBatch, settings: Settings, *, seed: int, dtype: type = np.float32) -> dict[str, Array]:
    """Every field of a dump by its name, as the system with these settings computes it."""
    fields: dict[str, Array] = {}

    def keep(name: str, value: Array) -> Array:
        fields[name] = record(name, value, settings, seed)
        return fields[name]

    _score_models(batch, settings, dtype, keep)
    mask = select_mask(settings["mask"], batch)
    keep("mask", mask.astype(dtype))
    log_probs = Node(fields["log_probs"])
    old = Node(move_columns(fields[_FIELDS[settings["old"]]], settings["old_shift"]))
    reference = Node(fields[_FIELDS[settings["kl_against"]]])
    penalty = np.zeros_like(log_probs.value)
    if settings["kl_reward"]:
        penalty = keep("kl", _estimate(settings["kl_reward"], Node(fields["old_log_probs"]), reference, settings).value)
    penalized = mask if settings["kl_reward_mask"] is None else select_mask(settings["kl_reward_mask"], batch)
    computed = advantage_functions.compute_advantages(batch, settings, mask, np.where(penalized, penalty, 0), dtype)
    advantages = keep("advantages", computed)
    per_token = advantages[:, None] if advantages.ndim == 1 else advantages
    if settings["kl_advantage"]:
        penalty = keep("kl", _estimate(settings["kl_advantage"], log_probs, reference, settings).value)
        per_token = per_token + _centered(penalty, mask, settings)
    if settings["advantage_axis"] == "columns":
        per_token = advantages[None, :]
    ratio = _ratio(log_probs, old, mask, settings)
    if ratio.value.shape == mask.shape:
        ratio = ratio + (keep("ratio", ratio.value) - ratio.value)
    else:
        keep("ratio", _ratio(log_probs, old, mask, {**settings, "ratio_level": "token"}).value)
    if settings["ratio_gradient"] == "none":
        ratio = ratio.detach()
    token_loss = _policy_loss(log_probs, ratio, per_token, fields, settings)
    if settings["correction"]:
        token_loss = token_loss * keep("weights", _weights(fields, mask, settings))
    if settings["sequence_mask"] is not None:
        token_loss = token_loss * _sequence_mask(fields, mask, per_token, settings)
    stored = keep("token_loss", np.broadcast_to(token_loss.value, mask.shape).astype(dtype))
    token_loss = token_loss + (stored - token_loss.value)
    kl = _kl_term(log_probs, reference, fields, settings)
    if kl is not None:
        kl = kl + (keep("kl", kl.value) - kl.value)
        if settings["correction_on_kl"]:
            kl = kl * fields["weights"]
    masks = _loss_masks(batch, settings, mask, per_token)
    loss = _reduce(batch, settings, masks, (token_loss, kl), log_probs)
    keep("loss", loss.value)
    keep("grad_log_probs", _gradient(loss, log_probs, batch, settings))
    return fields


def _score_models(batch: DrawnBatch, settings: Settings, dtype: type, keep: Any) -> None:
    """The log-probs of policy, old policy, sampler and reference."""
    caps = {"log_probs": settings["policy_softcap"], "ref_log_probs": settings["ref_softcap"]}
    normalizers = {"log_probs": settings["normalizer"], "ref_log_probs": settings["ref_normalizer"]}
    temperature = settings["temperature"]
    models = (
        (
            "log_probs",
            "policy",
            settings["policy_temperature"] or temperature,
            settings["vocabulary"],
            settings["log_probs_shift"],
        ),
        ("old_log_probs", "old", settings["old_temperature"] or temperature, "real", 0),
        ("rollout_log_probs", "rollout", settings["rollout_temperature"] or temperature, "real", 0),
        (
            "ref_log_probs",
            settings["reference"],
            settings["ref_temperature"] or temperature,
            settings["ref_vocabulary"],
            settings["ref_shift"],
        ),
    )
    for name, model, heat, vocabulary, shift in models:
        values = score(
            batch,
            model,
            temperature=heat,
            softcap=caps.get(name) or settings["softcap"],
            vocabulary=vocabulary,
            normalizer=normalizers.get(name),
            shift=shift,
        )
        if name == "ref_log_probs":
            values = values[_ROWS[settings["ref_rows"]](batch)]
        keep(name, values.astype(dtype))


_ROWS: dict[str, Callable[[DrawnBatch], Array]] = {
    "same": lambda batch: np.arange(batch.shape.rows),
    "moved by one": lambda batch: np.roll(np.arange(batch.shape.rows), 1),
    "reversed": lambda batch: np.arange(batch.shape.rows)[::-1],
    "by length": lambda batch: np.argsort(batch.lengths, kind="stable"),
}


def _centered(penalty: Array, mask: Array, settings: Settings) -> Array:
    """The change of the advantages: the mean KL of the batch less that of the token, times the coefficient."""
    mean = penalty[mask].mean() if settings["kl_centered"] else penalty.dtype.type(0)
    return np.where(mask, mean - penalty, 0) * penalty.dtype.type(settings["kl_advantage_coef"])


def _ratio(log_probs: Node, old: Node, mask: Array, settings: Settings) -> Node:
    """Policy over old policy: of each token, or of a row through the mean of its log-ratios."""
    difference = old - log_probs if settings["ratio_inverse"] else log_probs - old
    difference = difference * settings["log_ratio_factor"]
    bound = settings["log_ratio_clip"]
    if settings["ratio_level"] == "token":
        return (difference.clip(-bound, bound) if bound is not None else difference).exp()
    dtype = difference.value.dtype
    counts = {"product": 1, "padded mean": mask.shape[1]}.get(settings["ratio_level"], mask.sum(axis=1, keepdims=True))
    weights = mask / np.maximum(counts, 1)
    mean = (select(mask, difference, Node(np.zeros_like(difference.value))) * weights.astype(dtype)).sum(axis=1)
    return (mean.clip(None, bound) if bound is not None else mean).exp()


def _policy_loss(log_probs: Node, ratio: Node, advantages: Array, fields: dict[str, Array], settings: Settings) -> Node:
    low, high = settings["clip_low"], settings["clip_high"]
    if settings["loss"] == "ppo":
        free, bounded = ratio * -advantages, ratio.clip(1 - low, 1 + high) * -advantages
        loss = smaller(free, bounded) if settings["optimistic"] else larger(free, bounded)
        if settings["dual_clip"] is not None:
            limit = Node(
                np.broadcast_to(-advantages * settings["dual_clip"], loss.value.shape).astype(loss.value.dtype)
            )
            loss = select(np.broadcast_to(advantages < 0, loss.value.shape), smaller(loss, limit), loss)
    elif settings["loss"] == "unclipped":
        loss = ratio * -advantages
    elif settings["loss"] == "reinforce":
        loss = log_probs * -advantages
    elif settings["loss"] == "cispo":
        loss = log_probs * (ratio.clip(1 - low, 1 + high).detach().value * -advantages)
    elif settings["loss"] == "cispo masked":
        inside = (ratio.value >= 1 - low) & (ratio.value <= 1 + high)
        loss = log_probs * (np.where(inside, ratio.value, 0) * -advantages)
    elif settings["loss"] == "cispo with gradient":
        loss = log_probs * ratio.clip(1 - low, 1 + high) * -advantages
    elif settings["loss"] in ("sapo", "sapo gate"):
        tau = np.where(advantages > 0, settings["tau_positive"], settings["tau_negative"])
        tau = np.broadcast_to(tau, ratio.value.shape).astype(ratio.value.dtype)
        loss = ((ratio - 1.0) * tau).sigmoid() * (4 / tau)
        loss = loss * -advantages if settings["loss"] == "sapo gate" else log_probs * (loss.value * -advantages)
    else:
        moved = np.exp(fields["log_probs"]) - np.exp(fields["rollout_log_probs"])
        trusted = np.where(advantages > 0, moved <= high, moved >= -low)
        if settings["loss"] == "ipo":
            trusted = (moved <= high) & (moved >= -low)
        loss = ratio * np.where(trusted, -advantages, 0).astype(ratio.value.dtype)
    return loss * (settings["loss_sign"] * settings["token_loss_factor"])


def _weights(fields: dict[str, Array], mask: Array, settings: Settings) -> Array:
    """The weights of the rollout correction: old policy over sampler, bounded."""
    sampler = move_columns(fields["rollout_log_probs"], settings["rollout_shift"])
    difference = fields[_FIELDS[settings["correction_from"]]] - sampler
    if settings["correction_inverse"]:
        difference = -difference
    if settings["correction_level"] != "token":
        difference = np.where(mask, difference, 0).sum(axis=1, keepdims=True)
    if settings["correction_level"] == "geometric":
        difference = difference / np.maximum(mask.sum(axis=1, keepdims=True), 1)
    ratio = np.broadcast_to(np.exp(difference), mask.shape)
    low, high = settings["correction_lower"], settings["correction_upper"]
    if settings["correction"] == "clip":
        weights = np.clip(ratio, low, high) if low is not None or high is not None else ratio
    else:
        inside = ratio <= (np.inf if high is None else high)
        inside &= ratio >= (-np.inf if low is None else low)
        weights = np.where(inside, ratio, 0)
    if settings["correction_mean_one"] == "row":
        sums = np.where(mask, weights, 0).sum(axis=1, keepdims=True)
        weights = weights * np.maximum(mask.sum(axis=1, keepdims=True), 1) / np.where(sums == 0, 1, sums)
    elif settings["correction_mean_one"]:
        weights = weights / weights[mask].mean()
    weights = weights ** settings["correction_times"]
    return np.asarray(weights, fields["log_probs"].dtype)


def _sequence_mask(fields: dict[str, Array], mask: Array, advantages: Array, settings: Settings) -> Array:
    """0 on rows of negative advantage whose mean log-ratio of the old policy to the policy is above the threshold."""
    difference = np.where(mask, fields["old_log_probs"] - fields["log_probs"], 0)
    divergence = difference.sum(axis=1, keepdims=True) / np.maximum(mask.sum(axis=1, keepdims=True), 1)
    return np.where((advantages < 0) & (divergence > settings["sequence_mask"]), 0, 1).astype(difference.dtype)


def _estimate(estimator: str, log_probs: Node, reference: Node, settings: Settings) -> Node:
    difference = reference - log_probs if settings["kl_swapped"] else log_probs - reference
    if settings["kl_dtype"]:
        rounded = difference.value.astype(ml_dtypes.bfloat16).astype(difference.value.dtype)
        difference = difference + (rounded - difference.value)
    if estimator == "low_var_kl":
        difference = difference.clip(-20.0, 20.0)
    value = {
        "k1": lambda: difference,
        "abs": difference.abs,
        "k2": lambda: difference * difference * 0.5,
        "squared": lambda: difference * difference,
        "k3": lambda: (-difference).exp() + difference - 1.0,
        "low_var_kl": lambda: ((-difference).exp() + difference - 1.0).clip(-10.0, 10.0),
    }[estimator]()
    if settings["kl_floor"] is not None:
        value = value.clip(settings["kl_floor"], None)
    value = value + settings["kl_offset"]
    bound = settings["kl_value_clip"]
    return (value if bound is None else value.clip(-bound, bound)) * settings["kl_scale"]


def _kl_term(log_probs: Node, reference: Node, fields: dict[str, Array], settings: Settings) -> Node | None:
    """The estimate per token that enters the loss, with its ratio if it has one."""
    if settings["kl"] is None:
        return None
    first = log_probs if settings["kl_from"] == "policy" else Node(fields["old_log_probs"])
    value = _estimate(settings["kl"], first, reference, settings)
    if settings["kl_gradient"] == "none":
        value = value.detach()
    elif settings["kl_gradient"] == "k2":
        half = _estimate("k2", first, reference, {**settings, "kl_value_clip": None, "kl_scale": 1.0})
        value = half - half.detach() + value.detach()
    if settings["kl_ratio"]:
        ratio = (log_probs - fields["old_log_probs"]).exp()
        if settings["kl_ratio_cap"] is not None:
            ratio = ratio.clip(0.0, settings["kl_ratio_cap"])
        value = value * (ratio.detach() if settings["kl_ratio_detached"] else ratio)
    return value


def _reduce(
    batch: DrawnBatch, settings: Settings, masks: tuple[Array, Array], terms: tuple[Node, Node | None], log_probs: Node
) -> Node:
    """The scalar that is differentiated: policy loss, KL term and entropy bonus, each with its token weights.

    `masks` are those of the policy loss and of the KL, `terms` their values per token.
    """
    used, penalized = masks
    token_loss, kl = terms
    dtype = log_probs.value.dtype
    weights = weigh_tokens(settings["reduction"], used, batch, settings).astype(dtype)
    loss = _weighted(token_loss, used, weights)
    if kl is not None:
        mode = settings["kl_reduction"] or settings["reduction"]
        kl_weights = weigh_tokens(mode, penalized, batch, settings).astype(dtype)
        loss = loss + _weighted(kl, penalized, kl_weights) * settings["kl_coef"]
    if settings["entropy_coef"]:
        loss = loss + _weighted(log_probs, used, weights) * settings["entropy_coef"]
    return loss * settings["loss_factor"] + settings["loss_offset"]


def _loss_masks(batch: DrawnBatch, settings: Settings, mask: Array, advantages: Array) -> tuple[Array, Array]:
    """The tokens of the policy loss and of the KL term."""
    used = mask if settings["loss_mask"] is None else select_mask(settings["loss_mask"], batch)
    if settings["drop_zero_rows"]:
        used = used & np.any((advantages != 0) & mask, axis=1, keepdims=True)
    return used, used if settings["kl_mask"] is None else select_mask(settings["kl_mask"], batch)


def _weighted(values: Node, mask: Array, weights: Array) -> Node:
    filled = values + np.zeros(mask.shape, weights.dtype)
    return (select(mask, filled, Node(np.zeros_like(filled.value))) * weights).sum()


def weigh_tokens(mode: str, mask: Array, batch: DrawnBatch, settings: Settings) -> Array:
    """The weight of each token in the scalar, `[B, T]`.

    Micro-batches are averaged with equal weight if asked for, added up ("sum"), or weighted by their rows ("rows").
    """
    if not settings["micro_batches"]:
        return _weigh(mode, mask, batch, settings)
    parts = np.unique(batch.micro_batch_ids)
    weights = np.zeros(mask.shape)
    for part in parts:
        rows = batch.micro_batch_ids == part
        share = {"sum": 1.0, "rows": rows.mean()}.get(settings["micro_batches"], 1 / len(parts))
        weights[rows] = share * _weigh(mode, mask[rows], batch, settings, rows)
    return weights


def _weigh(mode: str, mask: Array, batch: DrawnBatch, settings: Settings, of: Array | slice = slice(None)) -> Array:
    group_ids, attended = batch.group_ids[of], (batch.lengths - batch.starts)[of]
    values = mask.astype(float)
    counts = values.sum(axis=1, keepdims=True)
    rows = int((counts > 0).sum()) if settings["empty_rows"] == "drop" else len(counts)
    rows, eps = max(rows, 1), settings["divisor_eps"]
    length = settings["max_length"] or mask.shape[1]
    if mode == "prompt_mean":
        totals = np.array([values[group_ids == group].sum() for group in group_ids])[:, None]
        return values / np.maximum(totals, 1) / len(np.unique(group_ids))
    return {
        "token_mean": lambda: values / (max(values.sum(), 1) + eps),
        "token_sum": lambda: values,
        "seq_mean_token_mean": lambda: values / (np.maximum(counts, 1) + eps) / rows,
        "seq_mean_token_sum": lambda: values / rows,
        "seq_mean_token_sum_norm": lambda: values / length / rows,
        "sum_norm": lambda: values / length,
        "padded_mean": lambda: values / mask.size,
        "attention_mean": lambda: values / attended.sum(),
        "longest_norm": lambda: values / counts.max() / rows,
        "length_twice": lambda: values / np.maximum(counts, 1) ** 2 / rows,
        "root_length": lambda: values / np.sqrt(np.maximum(counts, 1)) / rows,
    }[mode]()


def _gradient(loss: Node, log_probs: Node, batch: DrawnBatch, settings: Settings) -> Array:
    """Derivative of the loss by the policy's log-probs, as `backward` leaves it."""
    result = gradient(loss, log_probs) * log_probs.value.dtype.type(settings["gradient_factor"])
    if settings["gradient_rows"] == "last micro-batch":
        last = batch.micro_batch_ids == batch.micro_batch_ids.max()
        result = np.where(last[:, None], result, 0).astype(result.dtype)
    if settings["gradient_clip"] is not None:
        result = np.clip(result, -settings["gradient_clip"], settings["gradient_clip"])
    if settings["gradient_norm"] is not None:
        norm = float(np.sqrt(np.square(result).sum()))
        result = result * result.dtype.type(min(1.0, settings["gradient_norm"] / norm))
    return np.asarray(result)
