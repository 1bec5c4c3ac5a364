"""One update's loss and gradient from a batch and settings, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.parity_outside import advantages as advantage_functions
from tests.parity_outside.batches import Array, DrawnBatch
from tests.parity_outside.losses import policy_loss, trusted_tokens
from tests.parity_outside.scoring import COARSE, FIELDS, move_columns, record, score, select_mask
from tests.parity_outside.settings import Settings
from tests.parity_outside.tape import Node, gradient, select


def run_step(batch: DrawnBatch, settings: Settings, *, seed: int, dtype: type = np.float32) -> dict[str, Array]:
    """Every field of a dump by its name, as the system with these settings computes it."""
    fields: dict[str, Array] = {}
    settings = _place_kl(settings)

    def keep(name: str, value: Array) -> Array:
        fields[name] = record(name, value, settings, seed)
        return fields[name]

    _score_models(batch, settings, dtype, keep)
    mask = select_mask(settings["mask"], batch)
    keep("mask", mask.astype(dtype))
    log_probs = Node(fields["log_probs"])
    old = Node(_old_rows(fields, batch, settings))
    reference = Node(fields[FIELDS[settings["kl_against"]]])
    penalty = np.zeros_like(log_probs.value)
    if settings["kl_reward"]:
        first = Node(fields[FIELDS[settings["kl_reward_from"]]])
        penalty = keep("kl", _estimate(settings["kl_reward"], first, reference, settings).value)
    penalized = mask if settings["kl_reward_mask"] is None else select_mask(settings["kl_reward_mask"], batch)
    computed = advantage_functions.compute_advantages(batch, settings, mask, np.where(penalized, penalty, 0), dtype)
    advantages = keep("advantages", computed)
    per_token = advantages[:, None] if advantages.ndim == 1 else advantages
    if settings["kl_advantage"]:
        penalty = keep("kl", _estimate(settings["kl_advantage"], log_probs, reference, settings).value)
        per_token = per_token + _centered(penalty, mask, settings)
    per_token = _spread_advantages(advantages, per_token, mask, settings)
    ratio = _ratio(log_probs, old, mask, settings)
    if ratio.value.shape == mask.shape:
        ratio = ratio + (keep("ratio", ratio.value) - ratio.value)
    else:
        keep("ratio", _ratio(log_probs, old, mask, {**settings, "ratio_level": "token"}).value)
    if settings["ratio_gradient"] == "none":
        ratio = ratio.detach()
    token_loss = policy_loss(log_probs, ratio, per_token, {**fields, "mask": mask}, settings)
    if settings["correction"]:
        token_loss = token_loss * keep("weights", _weights(fields, batch, mask, settings))
    for factor in _row_factors(fields, mask, per_token, settings):
        token_loss = token_loss * factor
    stored = keep("token_loss", np.broadcast_to(token_loss.value, mask.shape).astype(dtype))
    token_loss = token_loss + (stored - token_loss.value)
    kl = _kl_term(log_probs, reference, {**fields, "mask": mask}, settings)
    if kl is not None:
        kl = _weigh_kl(kl + (keep("kl", kl.value) - kl.value), fields, per_token, settings)
    masks = _loss_masks(batch, settings, mask, per_token)
    if settings["correction"] == "reject":
        masks = (masks[0] & (fields["weights"] != 0), masks[1] & (fields["weights"] != 0))
    loss = _reduce(batch, settings, masks, (token_loss, kl), log_probs)
    keep("loss", loss.value)
    keep("grad_log_probs", _gradient(loss, log_probs, batch, settings))
    return fields


def _place_kl(settings: Settings) -> Settings:
    """The settings with the KL in the reward in place of the loss, or the other way; its size stays.

    verl issues 594 and 3276: `use_kl_in_reward` and `use_kl_loss` exchanged.
    """
    if settings["kl_place"] == "reward":
        return {
            **settings,
            "kl_reward": settings["kl"],
            "kl_reward_coef": settings["kl_coef"],
            "kl": None,
            "kl_coef": 0.0,
        }
    if settings["kl_place"] == "loss":
        return {
            **settings,
            "kl": settings["kl_reward"],
            "kl_coef": settings["kl_reward_coef"],
            "kl_reward": None,
            "kl_reward_coef": 0.0,
        }
    return settings


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
            logits_shift=settings[_LOGITS[name][0]] if name in _LOGITS else 0,
            logits_dtype=settings[_LOGITS[name][1]] if name in _LOGITS else None,
        )
        if name == "ref_log_probs":
            values = values[advantage_functions.ROWS[settings["ref_rows"]](batch)]
        keep(name, values.astype(dtype))


_LOGITS = {
    "log_probs": ("logits_shift", "logits_dtype"),
    "ref_log_probs": ("ref_logits_shift", "ref_logits_dtype"),
}


def _old_rows(fields: dict[str, Array], batch: DrawnBatch, settings: Settings) -> Array:
    """The old policy's log-probs as the ratio uses them: of other rows, or the policy's own in a part of the batch."""
    values = move_columns(fields[FIELDS[settings["old"]]], settings["old_shift"])
    kind = settings["old_rows"]
    if kind == "policy in the first micro-batch":
        first = batch.micro_batch_ids == batch.micro_batch_ids.min()
        return np.where(first[:, None], fields["log_probs"], values)
    return np.asarray(values[advantage_functions.ROWS[kind](batch)])


def _centered(penalty: Array, mask: Array, settings: Settings) -> Array:
    """The change of the advantages: the mean KL of the batch less that of the token, times the coefficient."""
    mean = penalty[mask].mean() if settings["kl_centered"] else penalty.dtype.type(0)
    if settings["kl_centered"] == "row":
        sums = np.where(mask, penalty, 0).sum(axis=1, keepdims=True)
        mean = sums / np.maximum(mask.sum(axis=1, keepdims=True), 1).astype(penalty.dtype)
    elif settings["kl_centered"] == "all columns":
        mean = penalty.mean()
    return np.where(mask, mean - penalty, 0) * penalty.dtype.type(settings["kl_advantage_coef"])


def _spread_advantages(advantages: Array, per_token: Array, mask: Array, settings: Settings) -> Array:
    """The advantages as the loss reads them: along the columns, or a column off."""
    if settings["advantage_axis"] == "columns":
        return advantages[None, :]
    if not settings["advantage_shift"]:
        return per_token
    # prime-rl pull request 1525: log-probs are moved to the predicting token and advantages are not, or twice.
    spread = np.where(mask, np.broadcast_to(per_token, mask.shape), 0)
    return move_columns(spread, settings["advantage_shift"])


def _ratio(log_probs: Node, old: Node, mask: Array, settings: Settings) -> Node:
    """Policy over old policy: of each token, or of a row through the mean of its log-ratios."""
    difference = old - log_probs if settings["ratio_inverse"] else log_probs - old
    difference = _rounded(difference * settings["log_ratio_factor"], settings["log_ratio_dtype"])
    bound = settings["log_ratio_clip"]
    if settings["ratio_level"] == "token":
        return (difference.clip(-bound, bound) if bound is not None else difference).exp()
    dtype = difference.value.dtype
    counts = {"product": 1, "padded mean": mask.shape[1]}.get(settings["ratio_level"], mask.sum(axis=1, keepdims=True))
    weights = mask / np.maximum(counts, 1)
    if settings["ratio_level"] == "unmasked mean":
        # AReaL pull request 1346: the padding after the completion is in the mean of a row.
        spread = np.cumsum(mask, axis=1) > 0
        mask, weights = spread, spread / np.maximum(spread.sum(axis=1, keepdims=True), 1)
    if settings["ratio_level"] == "mean of ratios":
        ratio = difference.exp()
        return (select(mask, ratio, Node(np.zeros_like(ratio.value))) * weights.astype(dtype)).sum(axis=1)
    mean = (select(mask, difference, Node(np.zeros_like(difference.value))) * weights.astype(dtype)).sum(axis=1)
    return (mean.clip(None, bound) if bound is not None else mean).exp()


def _rounded(value: Node, dtype: str | None) -> Node:
    """The value rounded to a coarser type, with the derivative of the value."""
    if dtype is None:
        return value
    return value + (value.value.astype(COARSE[dtype]).astype(value.value.dtype) - value.value)


def _weights(fields: dict[str, Array], batch: DrawnBatch, mask: Array, settings: Settings) -> Array:
    """The weights of the rollout correction: old policy over sampler, bounded."""
    difference = fields[FIELDS[settings["correction_from"]]] - _sampler(fields, batch, settings)
    if settings["correction_inverse"]:
        difference = -difference
    if settings["correction_dtype"] is not None:
        difference = difference.astype(COARSE[settings["correction_dtype"]]).astype(difference.dtype)
    every = difference
    if settings["correction_level"] == "prefix":
        difference = np.cumsum(np.where(mask, difference, 0), axis=1)
    elif settings["correction_level"] != "token":
        difference = np.where(mask, difference, 0).sum(axis=1, keepdims=True)
    if settings["correction_level"] == "geometric":
        difference = difference / np.maximum(mask.sum(axis=1, keepdims=True), 1)
    ratio = np.broadcast_to(np.exp(difference), mask.shape)
    if settings["correction_mean_one"] == "before the bounds":
        ratio = ratio / ratio[mask].mean()
    low, high = settings["correction_lower"], settings["correction_upper"]
    if settings["correction"] == "clip":
        weights = np.clip(ratio, low, high) if low is not None or high is not None else ratio
    else:
        inside = ratio <= (np.inf if high is None else high)
        inside &= ratio >= (-np.inf if low is None else low)
        weights = np.where(inside, ratio, 0)
    weights = _normalized(weights, mask, settings) ** settings["correction_times"]
    if settings["correction_veto"] is not None:
        rejected = np.any(mask & (np.exp(every) < settings["correction_veto"]), axis=1, keepdims=True)
        weights = np.where(rejected, 0, weights)
    return np.asarray(weights, fields["log_probs"].dtype)


def _sampler(fields: dict[str, Array], batch: DrawnBatch, settings: Settings) -> Array:
    """The sampler's log-probs as the weights use them."""
    sampler = move_columns(fields["rollout_log_probs"], settings["rollout_shift"])
    sampler = sampler[advantage_functions.ROWS[settings["rollout_rows"]](batch)]
    if settings["rollout_fill"] is None:
        return sampler
    # vime pull request 70: a server without a log-prob of the last token, and 0 or the trainer's in its place.
    at_end = batch.columns == batch.lengths[:, None] - 1
    filling = fields["old_log_probs"] if settings["rollout_fill"] == "old" else np.zeros_like(sampler)
    return np.where(at_end, filling, sampler)


def _normalized(weights: Array, mask: Array, settings: Settings) -> Array:
    """The weights over one of their means, or as they are."""
    if settings["correction_mean_one"] == "row":
        sums = np.where(mask, weights, 0).sum(axis=1, keepdims=True)
        weights = weights * np.maximum(mask.sum(axis=1, keepdims=True), 1) / np.where(sums == 0, 1, sums)
    elif settings["correction_mean_one"] == "mean of rows":
        means = np.where(mask, weights, 0).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
        weights = weights / means[mask.any(axis=1)].mean()
    elif settings["correction_mean_one"] is True:
        weights = weights / weights[mask].mean()
    elif settings["correction_mean_one"] == "all columns":
        # verl `rollout_is_batch_normalize` with a plain mean, where masked tokens have the weight 0.
        weights = weights / np.where(mask, weights, 0).mean()
    return weights


def _row_factors(fields: dict[str, Array], mask: Array, advantages: Array, settings: Settings) -> Iterator[Array]:
    """The factors of 0 and 1 by which rows leave the policy loss and stay in its divisor."""
    if settings["sequence_mask"] is not None:
        yield _sequence_mask(fields, mask, advantages, settings)
    if settings["row_rejection"] is not None:
        yield _row_rejection(fields, mask, settings)
    if settings["row_band"] is not None:
        yield _row_band(fields, mask, settings)


def _sequence_mask(fields: dict[str, Array], mask: Array, advantages: Array, settings: Settings) -> Array:
    """0 on rows of negative advantage whose mean log-ratio of the old policy to the policy is above the threshold."""
    difference = np.where(mask, fields["old_log_probs"] - fields["log_probs"], 0)
    divergence = difference.sum(axis=1, keepdims=True) / np.maximum(mask.sum(axis=1, keepdims=True), 1)
    return np.where((advantages < 0) & (divergence > settings["sequence_mask"]), 0, 1).astype(difference.dtype)


def _row_rejection(fields: dict[str, Array], mask: Array, settings: Settings) -> Array:
    """0 on rows whose mean size of old policy less sampler is above the threshold."""
    difference = np.where(mask, np.abs(fields["old_log_probs"] - fields["rollout_log_probs"]), 0)
    divergence = difference.sum(axis=1, keepdims=True) / np.maximum(mask.sum(axis=1, keepdims=True), 1)
    return np.where(divergence > settings["row_rejection"], 0, 1).astype(difference.dtype)


def _row_band(fields: dict[str, Array], mask: Array, settings: Settings) -> Array:
    """0 on rows whose geometric mean of old policy over sampler is further from 1 than this.

    SkyRL `off_policy_correction_utils.py`, `sequence_mask` with `geometric`.
    """
    difference = np.where(mask, fields["old_log_probs"] - fields["rollout_log_probs"], 0)
    mean = difference.sum(axis=1, keepdims=True) / np.maximum(mask.sum(axis=1, keepdims=True), 1)
    return np.where(np.abs(np.exp(mean) - 1) > settings["row_band"], 0, 1).astype(difference.dtype)


def _estimate(estimator: str, log_probs: Node, reference: Node, settings: Settings) -> Node:
    difference = reference - log_probs if settings["kl_swapped"] else log_probs - reference
    if settings["kl_dtype"]:
        difference = _rounded(difference, settings["kl_dtype"])
    if settings["kl_log_ratio_clip"] is not None:
        difference = difference.clip(-settings["kl_log_ratio_clip"], settings["kl_log_ratio_clip"])
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
    if settings["kl_level"] == "row":
        first, reference = (_row_mean(node, fields["mask"]) for node in (first, reference))
    value = _estimate(settings["kl"], first, reference, settings)
    if settings["kl_gradient"] == "none":
        value = value.detach()
    elif settings["kl_gradient"] == "k2":
        half = _estimate("k2", first, reference, {**settings, "kl_value_clip": None, "kl_scale": 1.0})
        value = half - half.detach() + value.detach()
    if settings["kl_ratio"]:
        ratio = _kl_ratio(log_probs, fields, settings)
        if settings["kl_ratio_cap"] is not None:
            ratio = ratio.clip(0.0, settings["kl_ratio_cap"])
        value = value * (ratio.detach() if settings["kl_ratio_detached"] else ratio)
    return value


def _weigh_kl(kl: Node, fields: dict[str, Array], advantages: Array, settings: Settings) -> Node:
    """The KL with the factors that some systems give it."""
    if settings["correction_on_kl"]:
        kl = kl * fields["weights"]
    if settings["kl_on_trusted"]:
        # prime-rl `kl_mask_type`: the KL of the tokens that the trust region keeps.
        kl = kl * trusted_tokens(fields, advantages, settings).astype(kl.value.dtype)
    return kl


def _kl_ratio(log_probs: Node, fields: dict[str, Array], settings: Settings) -> Node:
    """The ratio that the KL has: of the token to the old policy, or another one that systems have had."""
    kind = settings["kl_ratio"]
    difference = log_probs - fields["rollout_log_probs" if kind == "to the sampler" else "old_log_probs"]
    if kind == "row":
        difference = _row_mean(difference, fields["mask"])
    return (-difference if kind == "inverse" else difference).exp()


def _row_mean(values: Node, mask: Array) -> Node:
    """The mean of each row over the mask, on all of its tokens."""
    weights = (mask / np.maximum(mask.sum(axis=1, keepdims=True), 1)).astype(values.value.dtype)
    mean = (select(mask, values, Node(np.zeros_like(values.value))) * weights).sum(axis=1)
    return mean + np.zeros(mask.shape, values.value.dtype)


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
        # SkyRL's Megatron workers and verl's older actor: the KL alone is averaged in each micro-batch.
        parts = {"micro_batches": True} if settings["kl_micro_batches"] else {}
        kl_weights = weigh_tokens(mode, penalized, batch, {**settings, **parts}).astype(dtype)
        loss = loss + _weighted(kl, penalized, kl_weights) * settings["kl_coef"]
    if settings["entropy_coef"]:
        loss = loss + _weighted(log_probs, used, weights) * settings["entropy_coef"]
    return loss * settings["loss_factor"] + settings["loss_offset"]


def _loss_masks(batch: DrawnBatch, settings: Settings, mask: Array, advantages: Array) -> tuple[Array, Array]:
    """The tokens of the policy loss and of the KL term."""
    used = mask if settings["loss_mask"] is None else select_mask(settings["loss_mask"], batch)
    if settings["drop_zero_rows"]:
        counted = advantages > 0 if settings["drop_zero_rows"] == "negative, too" else advantages != 0
        used = used & np.any(counted & mask, axis=1, keepdims=True)
    return used, used if settings["kl_mask"] is None else select_mask(settings["kl_mask"], batch)


def _weighted(values: Node, mask: Array, weights: Array) -> Node:
    filled = values + np.zeros(mask.shape, weights.dtype)
    return (select(mask, filled, Node(np.zeros_like(filled.value))) * weights).sum()


def weigh_tokens(mode: str, mask: Array, batch: DrawnBatch, settings: Settings) -> Array:
    """The weight of each token in the scalar, `[B, T]`.

    Micro-batches are averaged with equal weight if asked for, added up ("sum"), or weighted by their rows ("rows").
    """
    if settings["repeated_rows"]:
        return _weigh_repeated(mode, mask, batch, settings)
    if not settings["micro_batches"] and settings["rank_means"] is None:
        return _weigh(mode, mask, batch, settings)
    ids = batch.micro_batch_ids
    if settings["rank_means"] is not None:
        # prime-rl issue 2358: each process divides by its own tokens, and gradients are averaged.
        ids = advantage_functions.rank_ids(batch, settings["rank_means"])
    parts = np.unique(ids)
    weights = np.zeros(mask.shape)
    for part in parts:
        rows = ids == part
        share = {"sum": 1.0, "rows": rows.mean()}.get(settings["micro_batches"], 1 / len(parts))
        weights[rows] = share * _weigh(mode, mask[rows], batch, settings, rows)
    return weights


def _weigh_repeated(mode: str, mask: Array, batch: DrawnBatch, settings: Settings) -> Array:
    """The first rows stand twice, as padding to a multiple of the processes (verl `pad_dataproto_to_divisor`)."""
    rows = np.arange(len(mask))
    rows = np.concatenate([rows, rows[: settings["repeated_rows"]]])
    weights = np.zeros(mask.shape)
    np.add.at(weights, rows, _weigh(mode, mask[rows], batch, settings, rows))
    return weights


def _weigh(mode: str, mask: Array, batch: DrawnBatch, settings: Settings, of: Array | slice = slice(None)) -> Array:
    group_ids, attended = batch.group_ids[of], (batch.lengths - batch.starts)[of]
    values = mask.astype(float)
    numerators = values
    if settings["numerator_mask"] is not None:
        # TRL issue 6369: tokens that leave the sum stay in the divisor.
        numerators = (mask & select_mask(settings["numerator_mask"], batch)[of]).astype(float)
    if settings["divisor_mask"] is not None:
        values = select_mask(settings["divisor_mask"], batch)[of].astype(float)
    counts = values.sum(axis=1, keepdims=True)
    rows = int((counts > 0).sum()) if settings["empty_rows"] == "drop" else len(counts)
    rows, eps = max(rows, 1), settings["divisor_eps"]
    length = settings["max_length"] or mask.shape[1]
    if mode == "prompt_mean":
        totals = np.array([values[group_ids == group].sum() for group in group_ids])[:, None]
        return numerators / np.maximum(totals, 1) / len(np.unique(group_ids))
    longest = np.array([counts[batch.micro_batch_ids[of] == part].max() for part in batch.micro_batch_ids[of]])
    return {
        "token_mean": lambda: numerators / (max(values.sum(), 1) + eps),
        "token_sum": lambda: numerators,
        # slime's `calculate_per_token_loss`: a row without a token counts as one.
        "token_mean_min_one": lambda: numerators / np.maximum(counts, 1).sum(),
        "token_mean_of_pairs": lambda: _weigh_pairs(numerators, counts),
        "seq_mean_token_mean": lambda: numerators / (np.maximum(counts, 1) + eps) / rows,
        "seq_mean_token_sum": lambda: numerators / rows,
        "seq_mean_token_sum_norm": lambda: numerators / length / rows,
        "sum_norm": lambda: numerators / length,
        "padded_mean": lambda: numerators / mask.size,
        "attention_mean": lambda: numerators / attended.sum(),
        "longest_norm": lambda: numerators / counts.max() / rows,
        "longest_of_micro_batch": lambda: numerators / np.maximum(longest[:, None], 1) / rows,
        "length_twice": lambda: numerators / np.maximum(counts, 1) ** 2 / rows,
        "root_length": lambda: numerators / np.sqrt(np.maximum(counts, 1)) / rows,
    }[mode]()


def _weigh_pairs(numerators: Array, counts: Array) -> Array:
    """SkyRL `token_mean_legacy` for micro-batches of two rows: a row that is left over has the weight 0."""
    pairs = len(counts) // 2
    totals = counts[: 2 * pairs].reshape(pairs, 2).sum(axis=1).repeat(2)[:, None]
    weights = np.zeros(numerators.shape)
    weights[: 2 * pairs] = numerators[: 2 * pairs] / np.maximum(totals, 1) / pairs
    return weights


def _gradient(loss: Node, log_probs: Node, batch: DrawnBatch, settings: Settings) -> Array:
    """Derivative of the loss by the policy's log-probs, as `backward` leaves it."""
    result = gradient(loss, log_probs) * log_probs.value.dtype.type(settings["gradient_factor"])
    if settings["gradient_rows"] == "last micro-batch":
        last = batch.micro_batch_ids == batch.micro_batch_ids.max()
        result = np.where(last[:, None], result, 0).astype(result.dtype)
    elif settings["gradient_rows"] == "first micro-batch":
        result = np.where((batch.micro_batch_ids == 0)[:, None], result, 0).astype(result.dtype)
    if settings["gradient_norm_parts"] is not None:
        result = result.copy()
        for part in np.unique(batch.micro_batch_ids):
            rows = batch.micro_batch_ids == part
            norm = float(np.sqrt(np.square(result[rows]).sum()))
            result[rows] *= result.dtype.type(min(1.0, settings["gradient_norm_parts"] / max(norm, 1e-30)))
    if settings["gradient_clip"] is not None:
        result = np.clip(result, -settings["gradient_clip"], settings["gradient_clip"])
    if settings["gradient_norm"] is not None:
        norm = float(np.sqrt(np.square(result).sum()))
        result = result * result.dtype.type(min(1.0, settings["gradient_norm"] / norm))
    return np.asarray(result)
