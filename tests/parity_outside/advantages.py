"""Rewards and advantages, with and without a KL in the reward."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.parity_outside.batches import Array, DrawnBatch
from tests.parity_outside.scoring import COARSE, move_columns
from tests.parity_outside.settings import Settings


def compute_advantages(batch: DrawnBatch, settings: Settings, mask: Array, kl: Array, dtype: type) -> Array:
    """Advantages, `[B]` where all tokens of a row share one and `[B, T]` elsewhere.

    `kl` is the estimate per token that a KL in the reward takes off, as it is, without its coefficient.
    """
    rewards = _change_rewards(batch.rewards.astype(dtype), batch, settings) * dtype(settings["reward_scale"])
    if settings["reward_clip"] is not None:
        rewards = np.clip(rewards, -dtype(settings["reward_clip"]), dtype(settings["reward_clip"]))
    rewards = rewards - dtype(settings["overlong_penalty"]) * batch.truncated.astype(dtype)
    if settings["truncated_reward"] is not None:
        rewards = np.where(batch.truncated, dtype(settings["truncated_reward"]), rewards)
    penalty = dtype(settings["kl_reward_coef"]) * np.where(mask, kl, 0) if settings["kl_reward_coef"] else None
    if penalty is not None and settings["kl_reward_place"] == "row":
        at_end = batch.columns == batch.lengths[:, None] - 1
        penalty = np.where(at_end, penalty.sum(axis=1, keepdims=True), dtype(0))
    if penalty is not None and settings["kl_reward_place"] == "row mean":
        penalty = penalty / np.maximum(mask.sum(axis=1, keepdims=True), 1).astype(dtype)
    if penalty is not None and settings["kl_reward_shift"]:
        penalty = move_columns(penalty, settings["kl_reward_shift"])
    groups = _group_ids(batch, settings["groups"])
    function = settings["advantage"]
    if function in ("group", "pass at k", "baseline returns"):
        if penalty is not None and (function != "baseline returns" or settings["kl_reward_order"] == "early"):
            rewards = rewards - penalty.sum(axis=1)
        advantages = _group_advantages(rewards, groups, batch, settings)
        if function == "baseline returns":
            late = penalty if settings["kl_reward_order"] == "late" else None
            advantages = _returns(_token_rewards(advantages, batch, mask, late, settings), mask, settings)
    elif function == "returns":
        advantages = _returns(_token_rewards(rewards, batch, mask, penalty, settings), mask, settings)
    else:
        advantages = _gae(_token_rewards(rewards, batch, mask, penalty, settings), batch, mask, settings)
    return _change(advantages, batch, mask, settings)


def _change_rewards(rewards: Array, batch: DrawnBatch, settings: Settings) -> Array:
    """Rewards as a system reads them: rounded, of another row, as ranks or as right and wrong, or less for length."""
    dtype = rewards.dtype.type
    lengths = (batch.lengths - batch.prompt_lengths).astype(rewards.dtype)
    limit = dtype(batch.shape.completion)
    if settings["reward_rows"] != "same":
        rewards = rewards[ROWS[settings["reward_rows"]](batch)]
    if settings["reward_dtype"] is not None:
        rewards = rewards.astype(COARSE[settings["reward_dtype"]]).astype(rewards.dtype)
    if settings["reward_transform"] == "right or wrong":
        rewards = (rewards > 0.5).astype(rewards.dtype)
    elif settings["reward_transform"] == "ranks":
        rewards = (rewards[:, None] > rewards[None, :]).mean(axis=1).astype(rewards.dtype)
    elif settings["reward_transform"] == "per token":
        rewards = rewards / np.maximum(lengths, 1)
    elif settings["reward_transform"] == "standardized":
        # OpenRLHF's and TRL's PPO can whiten the scores of a batch before anything else.
        rewards = (rewards - rewards.mean()) / rewards.std(ddof=1)
    elif settings["reward_transform"] == "whole numbers":
        # A tensor of a whole-number type cuts the fractions off.
        rewards = np.trunc(rewards)
    if settings["length_penalty"]:
        rewards = rewards - dtype(settings["length_penalty"]) * lengths / limit
    if settings["overlong_buffer"] is not None:
        buffer = dtype(settings["overlong_buffer"])
        rewards = rewards + np.minimum((limit - buffer - lengths) / buffer, 0).astype(rewards.dtype)
    return rewards


ROWS: dict[str, Callable[[DrawnBatch], Array]] = {
    "same": lambda batch: np.arange(batch.shape.rows),
    "moved by one": lambda batch: np.roll(np.arange(batch.shape.rows), 1),
    "reversed": lambda batch: np.arange(batch.shape.rows)[::-1],
    "by length": lambda batch: np.argsort(batch.lengths, kind="stable"),
    # A repetition of the prompts that another part of the system reads in the other order.
    "interleaved": lambda batch: (
        np.arange(batch.shape.rows).reshape(batch.shape.groups, batch.shape.group_size).T.ravel()
    ),
}


def _change(advantages: Array, batch: DrawnBatch, mask: Array, settings: Settings) -> Array:
    """Whitening, and the faults that change advantages once they are computed."""
    times = int(settings["whiten"] or 0)
    if times and advantages.ndim == 1:
        advantages = np.repeat(advantages[:, None], batch.shape.width, axis=1)
    for _ in range(times):
        advantages = _whiten_parts(advantages, batch, mask, settings)
    if settings["row_whitening"]:
        advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + advantages.dtype.type(1e-8))
    dtype = advantages.dtype.type
    advantages = dtype(settings["advantage_factor"]) * advantages + dtype(settings["advantage_offset"])
    if settings["advantage_clip"] is not None:
        advantages = np.clip(advantages, -dtype(settings["advantage_clip"]), dtype(settings["advantage_clip"]))
    if settings["advantage_min"] is not None or settings["advantage_max"] is not None:
        advantages = np.clip(advantages, settings["advantage_min"], settings["advantage_max"])
    advantages = np.where(advantages < 0, dtype(settings["negative_factor"]) * advantages, advantages)
    if settings["advantage_sign"]:
        advantages = np.sign(advantages)
    if settings["advantage_norm"] == "mean absolute":
        tokens = np.broadcast_to(advantages[:, None] if advantages.ndim == 1 else advantages, mask.shape)
        advantages = advantages / np.abs(tokens[mask]).mean()
    counts = np.maximum(mask.sum(axis=1), 1)
    if settings["advantage_spread"]:
        advantages = advantages / (counts if advantages.ndim == 1 else counts[:, None]).astype(dtype)
    if settings["advantage_decay"] != 1.0:
        left = np.maximum(batch.lengths[:, None] - 1 - batch.columns, 0)
        rows = advantages[:, None] if advantages.ndim == 1 else advantages
        advantages = rows * (dtype(settings["advantage_decay"]) ** left.astype(dtype))
    return _place(advantages, batch, settings)


def _place(advantages: Array, batch: DrawnBatch, settings: Settings) -> Array:
    """Advantages on the rows and tokens that get them."""
    advantages = advantages[ROWS[settings["advantage_rows"]](batch)]
    if settings["advantage_place"] != "last token":
        return advantages
    at_end = batch.columns == batch.lengths[:, None] - 1
    return np.where(at_end, advantages[:, None] if advantages.ndim == 1 else advantages, 0).astype(advantages.dtype)


def _whiten_parts(advantages: Array, batch: DrawnBatch, mask: Array, settings: Settings) -> Array:
    """Whitening of the batch, or of each micro-batch or group of rows by itself."""
    if settings["whiten_over"] == "batch":
        return _whiten(advantages, mask, settings)
    ids = {
        "micro-batches": batch.micro_batch_ids,
        "groups": batch.group_ids,
        # slime pull request 2235, Miles 3229: statistics of the process alone.
        "ranks": rank_ids(batch, 2),
    }[settings["whiten_over"]]
    result = advantages.copy()
    for part in np.unique(ids):
        rows = ids == part
        result[rows] = _whiten(advantages[rows], mask[rows], settings)
    return result


def rank_ids(batch: DrawnBatch, ranks: int) -> Array:
    """The process of each row, if processes have rows in turn, as a distributed sampler gives them."""
    return np.arange(batch.shape.rows) % ranks


def _group_ids(batch: DrawnBatch, kind: str) -> Array:
    rows = np.arange(batch.shape.rows)
    return {
        "prompt": batch.group_ids,
        "interleaved": rows % batch.shape.groups,
        "batch": np.zeros_like(rows),
        "moved by one": np.roll(batch.group_ids, 1),
        "pairs of rows": rows // 2,
        "pairs of groups": batch.group_ids // 2,
        # A process that has a part of a group knows the rewards of that part.
        "within micro-batches": batch.group_ids * batch.shape.rows + batch.micro_batch_ids,
    }[kind]


def _group_advantages(rewards: Array, groups: Array, batch: DrawnBatch, settings: Settings) -> Array:
    """Each reward less the center of its group, over the scale of the group or the batch."""
    lengths = (batch.lengths - batch.prompt_lengths).astype(rewards.dtype)
    counted = {
        "all": np.ones(rewards.shape, bool),
        "no empty rows": lengths > 0,
        "no truncated rows": ~batch.truncated,
    }[settings["members"]]
    centered = rewards - np.array([rewards[groups == group].mean() for group in groups], rewards.dtype)
    dtype = rewards.dtype.type
    advantages = np.zeros_like(rewards)
    if settings["advantage"] == "pass at k":
        return _pass_at_k(rewards, groups, settings)
    eps, ddof = dtype(settings["eps"]), settings["ddof"]
    for group in np.unique(groups):
        rows = groups == group
        members = rewards[rows & counted] if np.any(rows & counted) else rewards[rows]
        count = members.size
        mean = members.mean()
        center = {
            "mean": mean,
            "median": dtype(np.median(members)),
            "best": members.max(),
            "batch": rewards.mean(),
            "none": dtype(0),
            "first": members[0],
            "by length": (members * lengths[rows & counted]).sum() / max(lengths[rows & counted].sum(), 1),
            "others": (members.sum() - members) / dtype(max(count - 1, 1)),
            "worst": members.min(),
            "log mean exp": np.log(np.exp(members - members.max()).mean()) + members.max(),
        }[settings["center"]]
        parts = np.isin(batch.micro_batch_ids, batch.micro_batch_ids[rows])
        spreads = {"batch std": rewards, "batch std of centered": centered, "micro-batch std": rewards[parts]}
        spread = spreads.get(settings["scale"], members)
        variance = np.square(spread - spread.mean()).sum() / dtype(max(spread.size - ddof, 1))
        scale = np.sqrt(variance + eps) if settings["eps_inside"] else np.sqrt(variance) + eps
        if settings["scale_floor"] is not None:
            scale = np.maximum(np.sqrt(variance), dtype(settings["scale_floor"])) + eps
        if settings["scale"] == "none":
            scale = dtype(1)
        elif settings["scale"] == "range":
            scale = np.ptp(members) + eps
        elif settings["scale"] == "others std":
            # NeMo-RL issue 1518: the deviation is that of the other rows, as the baseline is.
            others = [np.delete(members, row).std(ddof=1) for row in range(count)]
            scale = np.array(others, rewards.dtype) + eps
        elif settings["scale"] == "mean absolute":
            scale = np.abs(members - mean).mean() + eps
        elif settings["scale"] == "root mean square":
            scale = np.sqrt(np.square(members).mean()) + eps
        elif settings["scale"] == "variance":
            scale = variance + eps
        elif settings["scale"] == "mean":
            scale = mean + eps
        advantages[rows] = (rewards[rows] - center) / scale
    return advantages


def _pass_at_k(rewards: Array, groups: Array, settings: Settings) -> Array:
    """The best row of each group has its lead over the second, over the deviation; the others have 0."""
    dtype = rewards.dtype.type
    advantages = np.zeros_like(rewards)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        order = rows[np.argsort(-rewards[rows], kind="stable")]
        scale = rewards[rows].std(ddof=settings["ddof"]) + dtype(settings["eps"])
        lead = rewards[order[0]] - rewards[order[1]]
        advantages[order[0]] = lead if settings["scale"] == "none" else lead / scale
    return advantages


def _token_rewards(scores: Array, batch: DrawnBatch, mask: Array, penalty: Array | None, settings: Settings) -> Array:
    """The score on the last token, less the penalty of each token."""
    rewards = np.zeros((batch.shape.rows, batch.shape.width), scores.dtype)
    if penalty is not None:
        rewards = rewards - penalty
    last = {
        "last token": batch.lengths - 1,
        "last column": np.full(batch.shape.rows, batch.shape.width - 1),
        "first token": batch.prompt_lengths,
        "one before the last": np.maximum(batch.lengths - 2, batch.prompt_lengths),
        # TRL issue 3750: on the padding after the end token, where there is padding.
        "after the end": np.minimum(batch.lengths, batch.shape.width - 1),
        "every token": batch.lengths - 1,
    }[settings["reward_column"]]
    if settings["reward_column"] == "every token":
        return rewards + np.where(mask, scores[:, None], 0)
    rewards[np.arange(batch.shape.rows), last] += scores
    return rewards


def _returns(rewards: Array, mask: Array, settings: Settings) -> Array:
    """Discounted sums from the end; nothing is trained or discounted where the mask is not set."""
    gamma = rewards.dtype.type(settings["gamma"])
    returns = np.zeros_like(rewards)
    running = np.zeros_like(rewards[:, 0])
    columns = range(rewards.shape[1])
    for column in columns if settings["returns_direction"] == "forward" else reversed(columns):
        step = rewards[:, column] + gamma * running
        running = np.where(mask[:, column], step, running)
        returns[:, column] = np.where(mask[:, column], running, 0)
    return returns


def _gae(rewards: Array, batch: DrawnBatch, mask: Array, settings: Settings) -> Array:
    """Generalized advantage estimation that skips, or does not skip, what the mask leaves out."""
    dtype = rewards.dtype.type
    gamma, lam = dtype(settings["gamma"]), dtype(settings["lam"])
    values = move_columns(batch.values.astype(dtype), settings["values_shift"])
    advantages = np.zeros_like(rewards)
    running = np.zeros_like(rewards[:, 0])
    following = np.zeros_like(running)
    if settings["gae_bootstrap"]:
        # A row that was cut at the limit goes on: the value of its last token stands for what follows.
        last = values[np.arange(batch.shape.rows), batch.lengths - 1]
        following = np.where(batch.truncated, last, following)
    for column in reversed(range(rewards.shape[1])):
        used = mask[:, column] if settings["masked_steps"] == "skip" else np.ones_like(mask[:, column])
        step = rewards[:, column] + gamma * following - values[:, column] + gamma * lam * running
        running = np.where(used, step, running)
        following = np.where(used, values[:, column], following)
        advantages[:, column] = running
    return advantages + values if settings["gae_returns"] else advantages


def _whiten(values: Array, mask: Array, settings: Settings) -> Array:
    """Values less their mean over the mask, over their standard deviation, and 0 where the mask is not set."""
    dtype = values.dtype.type
    inside = values[mask]
    mean = inside.mean() if settings["whiten_mean"] == "mask" else values.mean()
    variance = np.square(inside - mean).sum() / dtype(inside.size - settings["whiten_ddof"])
    center = dtype(0) if settings["whiten_parts"] == "scale" else mean
    scale = dtype(1) if settings["whiten_parts"] == "center" else np.sqrt(variance + dtype(1e-8))
    if settings["whiten_parts"] == "mean added back":
        # slime issue 1369, `distributed_masked_whiten` with `shift_mean=False`.
        return np.where(mask, (values - center) / scale + mean, 0).astype(dtype)
    return np.where(mask, (values - center) / scale, 0).astype(dtype)
