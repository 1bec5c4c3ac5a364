"""One update's loss and gradient from a batch and settings, stage by stage."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.parity_outside import advantages as advantage_functions
from tests.parity_outside.batches import Array, DrawnBatch
from tests.parity_outside.scoring import move_columns, record, score, select_mask
from tests.parity_outside.settings import Settings
from tests.parity_outside.tape import Node, gradient, larger, select, smaller


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
    source = {"old": "old_log_probs", "rollout": "rollout_log_probs", "policy": "log_probs"}[settings["old"]]
    old = Node(move_columns(fields[source], settings["old_shift"]))
    reference = Node(fields["ref_log_probs" if settings["kl_against"] == "reference" else "rollout_log_probs"])
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
    ratio = _ratio(log_probs, old, mask, settings)
    if ratio.value.shape == mask.shape:
        ratio = ratio + (keep("ratio", ratio.value) - ratio.value)
    else:
        keep("ratio", _ratio(log_probs, old, mask, {**settings, "ratio_level": "token"}).value)
    token_loss = _policy_loss(log_probs, ratio, per_token, fields, settings)
    if settings["correction"]:
        token_loss = token_loss * keep("weights", _weights(fields, mask, settings))
    stored = keep("token_loss", np.broadcast_to(token_loss.value, mask.shape).astype(dtype))
    token_loss = token_loss + (stored - token_loss.value)
    kl = _kl_term(log_probs, reference, fields, settings)
    if kl is not None:
        kl = kl + (keep("kl", kl.value) - kl.value)
    masks = _loss_masks(batch, settings, mask, per_token)
    loss = _reduce(batch, settings, masks, (token_loss, kl), log_probs)
    keep("loss", loss.value)
    keep("grad_log_probs", _gradient(loss, log_probs, settings))
    return fields


def _score_models(batch: DrawnBatch, settings: Settings, dtype: type, keep: Any) -> None:
    """The log-probs of policy, old policy, sampler and reference."""
    shared = {"softcap": settings["softcap"]}
    temperature = settings["temperature"]
    models = (
        (
            "log_probs",
            "policy",
            settings["policy_temperature"] or temperature,
            settings["vocabulary"],
            settings["log_probs_shift"],
        ),
        ("old_log_probs", "old", temperature, "real", 0),
        ("rollout_log_probs", "rollout", temperature, "real", 0),
        (
            "ref_log_probs",
            settings["reference"],
            settings["ref_temperature"] or temperature,
            settings["ref_vocabulary"],
            settings["ref_shift"],
        ),
    )
    for name, model, heat, vocabulary, shift in models:
        values = score(batch, model, temperature=heat, vocabulary=vocabulary, shift=shift, **shared)
        if name == "ref_log_probs" and settings["ref_rows"] == "moved by one":
            values = np.roll(values, 1, axis=0)
        keep(name, values.astype(dtype))


def _centered(penalty: Array, mask: Array, settings: Settings) -> Array:
    """The change of the advantages: the mean KL of the batch less that of the token, times the coefficient."""
    mean = penalty[mask].mean() if settings["kl_centered"] else penalty.dtype.type(0)
    return np.where(mask, mean - penalty, 0) * penalty.dtype.type(settings["kl_advantage_coef"])


def _ratio(log_probs: Node, old: Node, mask: Array, settings: Settings) -> Node:
    """Policy over old policy: of each token, or of a row through the mean of its log-ratios."""
    difference = old - log_probs if settings["ratio_inverse"] else log_probs - old
    bound = settings["log_ratio_clip"]
    if settings["ratio_level"] == "token":
        return (difference.clip(-bound, bound) if bound is not None else difference).exp()
    dtype = difference.value.dtype
    weights = mask / np.maximum(mask.sum(axis=1, keepdims=True), 1)
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
    elif settings["loss"] == "sapo":
        tau = np.where(advantages > 0, settings["tau_positive"], settings["tau_negative"])
        tau = np.broadcast_to(tau, ratio.value.shape).astype(ratio.value.dtype)
        loss = ((ratio - 1.0) * tau).sigmoid() * (4 / tau)
        loss = log_probs * (loss.value * -advantages)
    else:
        moved = np.exp(fields["log_probs"]) - np.exp(fields["rollout_log_probs"])
        trusted = np.where(advantages > 0, moved <= high, moved >= -low)
        loss = ratio * np.where(trusted, -advantages, 0).astype(ratio.value.dtype)
    return loss * (settings["loss_sign"] * settings["token_loss_factor"])


def _weights(fields: dict[str, Array], mask: Array, settings: Settings) -> Array:
    """The weights of the rollout correction: old policy over sampler, bounded."""
    difference = fields["old_log_probs"] - move_columns(fields["rollout_log_probs"], settings["rollout_shift"])
    if settings["correction_inverse"]:
        difference = -difference
    if settings["correction_level"] == "sequence":
        difference = np.where(mask, difference, 0).sum(axis=1, keepdims=True)
    ratio = np.broadcast_to(np.exp(difference), mask.shape)
    low, high = settings["correction_lower"], settings["correction_upper"]
    if settings["correction"] == "clip":
        weights = np.clip(ratio, low, high) if low is not None or high is not None else ratio
    else:
        inside = ratio <= (np.inf if high is None else high)
        inside &= ratio >= (-np.inf if low is None else low)
        weights = np.where(inside, ratio, 0)
    if settings["correction_mean_one"]:
        weights = weights / weights[mask].mean()
    weights = weights ** settings["correction_times"]
    return np.asarray(weights, fields["log_probs"].dtype)


def _estimate(estimator: str, log_probs: Node, reference: Node, settings: Settings) -> Node:
    difference = reference - log_probs if settings["kl_swapped"] else log_probs - reference
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
    """The weight of each token in the scalar, `[B, T]`; micro-batches are averaged with equal weight if asked for."""
    if not settings["micro_batches"]:
        return _weigh(mode, mask, batch.group_ids, settings)
    parts = np.unique(batch.micro_batch_ids)
    weights = np.zeros(mask.shape)
    for part in parts:
        rows = batch.micro_batch_ids == part
        weights[rows] = _weigh(mode, mask[rows], batch.group_ids[rows], settings) / len(parts)
    return weights


def _weigh(mode: str, mask: Array, group_ids: Array, settings: Settings) -> Array:
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
        "length_twice": lambda: values / np.maximum(counts, 1) ** 2 / rows,
        "root_length": lambda: values / np.sqrt(np.maximum(counts, 1)) / rows,
    }[mode]()


def _gradient(loss: Node, log_probs: Node, settings: Settings) -> Array:
    """Derivative of the loss by the policy's log-probs, as `backward` leaves it."""
    result = gradient(loss, log_probs) * log_probs.value.dtype.type(settings["gradient_factor"])
    if settings["gradient_norm"] is not None:
        norm = float(np.sqrt(np.square(result).sum()))
        result = result * result.dtype.type(min(1.0, settings["gradient_norm"] / norm))
    return np.asarray(result)
