"""Ways to compare the rewards of a group: who is in it, what is subtracted, and what divides."""

from collections.abc import Callable

import numpy as np

from kljax.systems import Call
from kljax.tools.parity.recipe import AdvantageStep
from kljax.tools.parity.rounding import round_to


def _rows_in(size: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Makes a group of so many rows that follow each other."""
    return lambda ids, parts: np.arange(len(ids)) // size


def _groups_in(size: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Makes a group of so many groups that follow each other."""
    return lambda ids, parts: ids // size


# The group of each row, by the groups of the dump, numbered from 0, and the micro-batches.
GROUPINGS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "recorded": lambda ids, parts: ids,
    "interleaved": lambda ids, parts: np.arange(len(ids)) % (int(ids.max()) + 1),
    "moved": lambda ids, parts: np.roll(ids, 1),
    "batch": lambda ids, parts: np.zeros_like(ids),
    "cut": lambda ids, parts: np.unique(np.stack([ids, parts]), axis=1, return_inverse=True)[1].reshape(-1),
    **{f"rows in {size}": _rows_in(size) for size in (2, 3, 4, 8)},
    **{f"groups in {size}": _groups_in(size) for size in (2, 3, 4)},
}
# What another system compares in place of a reward, by the rewards and the lengths of their rows.
REWARDS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "ranks": lambda rewards, sizes: (rewards[:, None] > rewards[None, :]).mean(1),
    "above 0": lambda rewards, sizes: (rewards > 0).astype(float),
    "above 0.5": lambda rewards, sizes: (rewards > 0.5).astype(float),
    "whole numbers": lambda rewards, sizes: np.trunc(rewards),
    "whitened": lambda rewards, sizes: (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-8),
    "per token": lambda rewards, sizes: rewards / np.maximum(sizes, 1),
    "in bfloat16": lambda rewards, sizes: round_to(rewards, "bfloat16"),
    "in float16": lambda rewards, sizes: round_to(rewards, "float16"),
}
# Rows whose rewards make the statistics of a group, by the number of tokens of each row and whether it is cut.
MEMBERS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "all": lambda sizes, cut: np.ones(len(sizes), bool),
    "not empty": lambda sizes, cut: sizes > 0,
    "not cut": lambda sizes, cut: ~cut,
}
# What is subtracted, by the rewards of the group, the lengths of its rows and all rewards.
CENTERS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], float]] = {
    "mean": lambda members, sizes, batch: members.mean(),
    "median": lambda members, sizes, batch: np.median(members),
    "batch": lambda members, sizes, batch: batch.mean(),
    "none": lambda members, sizes, batch: 0.0,
    "best": lambda members, sizes, batch: members.max(),
    "worst": lambda members, sizes, batch: members.min(),
    "first": lambda members, sizes, batch: members[0],
    "last": lambda members, sizes, batch: members[-1],
    "by length": lambda members, sizes, batch: (members * sizes).sum() / max(sizes.sum(), 1),
    "others": lambda members, sizes, batch: members.mean(),
    "log mean exp": lambda members, sizes, batch: np.log(np.exp(members - members.max()).mean()) + members.max(),
}
# What divides, by the rewards of the group and the degrees of freedom that are subtracted.
DIVISORS: dict[str, Callable[[np.ndarray, int], float]] = {
    "std": lambda members, ddof: members.std(ddof=ddof),
    "variance": lambda members, ddof: members.var(ddof=ddof),
    "range": lambda members, ddof: np.ptp(members),
    "mean absolute": lambda members, ddof: np.abs(members - members.mean()).mean(),
    "std of all centered": lambda members, ddof: members.std(ddof=ddof),
    "std of its micro-batches": lambda members, ddof: members.std(ddof=ddof),
    "std of the others": lambda members, ddof: members.std(ddof=ddof),
    "root mean square": lambda members, ddof: np.sqrt(np.square(members).mean()),
}


def is_other(step: AdvantageStep) -> bool:
    """Tells whether a step compares rewards in a way that no function of the library has."""
    return (step.center, step.divisor, step.members, step.floor) != ("mean", "std", "all", 0.0)


def grouped(group_ids: np.ndarray, grouping: str, parts: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns the group of each row, `[B]`, and the number of groups, which is that of rows where groups are others.

    Args:
      grouping: a key of `GROUPINGS`.
      parts: `[B]` micro-batch of each row.
    """
    _, ids = np.unique(group_ids, return_inverse=True)
    return GROUPINGS[grouping](ids, parts), int(ids.max()) + 1 if grouping == "recorded" else len(ids)


def compare_rewards(
    step: AdvantageStep,
    call: Call,
    rewards: np.ndarray,
    ids: np.ndarray,
    *,
    sizes: np.ndarray,
    cut: np.ndarray,
    parts: np.ndarray,
) -> np.ndarray:
    """Compares the rewards of each group.

    Args:
      step: its members, center, divisor and floor.
      call: of the header, with the scale, ddof and epsilon.
      rewards: `[B]`.
      ids: `[B]` group of each row.
      sizes: `[B]` number of tokens of each row.
      cut: `[B]` bool, rows that are cut at the limit.
      parts: `[B]` micro-batch of each row.

    Returns:
      `[B]` advantages; a group without a member takes all its rows.
    """
    result, counted = np.zeros(len(rewards)), MEMBERS[step.members](sizes, cut)
    ddof, eps = call.arguments.get("ddof", 1), call.arguments.get("eps", 1e-6)
    scale = call.arguments.get("scale", "none")
    sizes_of_groups = np.bincount(ids)
    centered = rewards - (np.bincount(ids, rewards) / np.maximum(sizes_of_groups, 1))[ids]
    for group in np.unique(ids):
        rows = ids == group
        inside = rows & counted if (rows & counted).any() else rows
        members = rewards[inside]
        result[rows] = rewards[rows] - CENTERS[step.center](members, sizes[inside], rewards)
        if step.center == "others" and inside.sum() > 1:
            result[rows] = np.where(inside, inside.sum() / (inside.sum() - 1), 1)[rows] * result[rows]
        spread = rewards if scale == "batch_std" else members
        if step.divisor == "std of all centered":
            spread = centered
        elif step.divisor == "std of its micro-batches":
            spread = rewards[np.isin(parts, parts[rows])]
        if scale != "none" and step.divisor == "std of the others" and len(members) > 2:
            spreads = np.array([np.delete(members, row).std(ddof=ddof) for row in range(len(members))])
            result[inside] /= np.maximum(spreads, step.floor) + eps
        elif scale != "none" and len(spread) > ddof:
            result[rows] /= max(DIVISORS[step.divisor](spread, ddof), step.floor) + eps
    return result


def whitened(values: np.ndarray, mask: np.ndarray, call: Call, parts: str) -> np.ndarray:
    """Whitens advantages as `masked_whiten` does, or a part of it.

    Args:
      values: `[B, T]`.
      mask: `[B, T]` bool.
      call: of `masked_whiten`, with ddof and epsilon.
      parts: of the step's `whitening`.

    Returns:
      `[B, T]`, 0 where masked.
    """
    inside = values[mask]
    mean = values.mean() if parts == "padded" else inside.mean()
    variance = np.square(inside - mean).sum() / max(inside.size - call.arguments.get("ddof", 1), 1)
    scale = 1.0 if parts == "center" else np.sqrt(variance + call.arguments.get("eps", 1e-8))
    result = (values - (0.0 if parts == "scale" else mean)) / scale
    return np.where(mask, result + (mean if parts == "mean added back" else 0.0), 0)


def root_factor(call: Call, rewards: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Returns what epsilon in the variance, not at the standard deviation, multiplies each row with, `[B]`."""
    ddof, eps = call.arguments.get("ddof", 1), call.arguments.get("eps", 1e-6)
    if call.arguments.get("scale", "std") == "batch_std":
        spread = np.full(len(rewards), rewards.std(ddof=ddof))
    else:
        sizes = np.bincount(ids)
        mean = np.bincount(ids, rewards) / np.maximum(sizes, 1)
        squares = np.bincount(ids, (rewards - mean[ids]) ** 2)
        spread = np.sqrt(squares / np.maximum(sizes - ddof, 1))[ids]
    factor: np.ndarray = (spread + eps) / np.sqrt(np.maximum(spread**2 + eps, 1e-300))
    return factor
