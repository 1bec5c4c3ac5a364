"""The weight of each token in the scalar loss: rows and tokens that count, and what divides them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import kljax
from kljax.tools.parity.calls import remembered
from kljax.tools.parity.positions import apply_rule, over_tokens
from kljax.tools.parity.recipe import MaskRule, Recipe, ReductionRecipe
from kljax.tools.parity.replay import Replay


def token_weights(
    replay: Replay, recipe: Recipe, reduction: ReductionRecipe, rule: MaskRule | None = None
) -> np.ndarray:
    """Returns the weight of each token in the loss.

    Args:
      rule: of the mask of one term, if it differs from that of the loss.

    Returns:
      `[B, T]` float64; NaN if the groups of the reduction are not recorded.
    """

    def compute() -> np.ndarray:
        rows = _rows_that_count(replay, reduction.rows)
        mask = replay.used_mask(recipe)
        if rejected:
            mask = mask & (replay.input("weights", recipe)[0] != 0)
        mask = mask if rule in (None, MaskRule()) else apply_rule(mask, rule, replay.layout)
        mask = mask & rows[:, None]
        summed = mask if reduction.summed == MaskRule() else apply_rule(mask, reduction.summed, replay.layout)
        if reduction.divisor is None:
            return np.where(summed, _token_weights(mask, reduction, replay.arrays), 0)
        counted = apply_rule(mask, reduction.divisor, replay.layout)
        # A row without a token to count is divided by one.
        counted |= mask & ~counted.any(1, keepdims=True) & (mask.cumsum(1) == 1)
        return np.where(mask, _token_weights(counted, reduction, replay.arrays).max(1, keepdims=True), 0)

    rejected = recipe.correction if recipe.correction is not None and recipe.correction.rejects else None
    key = ("token_weights", recipe.mask, rejected, rule or MaskRule(), dataclasses.replace(reduction, offset=0.0))
    weights: np.ndarray = replay.remember(key, compute)
    return weights


def _rows_that_count(replay: Replay, which: str) -> np.ndarray:
    """Returns the rows that enter a reduction, `[B]` bool."""
    mask = replay.arrays["mask"]
    if which not in ("spread", "positive") or "advantages" not in replay.arrays:
        return np.ones(len(mask), bool)
    values = np.where(mask, over_tokens(replay.arrays["advantages"], replay.shape), 0)
    return np.asarray((values > 0 if which == "positive" else values != 0).any(1))


def _token_weights(mask: np.ndarray, reduction: ReductionRecipe, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    if repeated := reduction.repeated:
        twice = {name: np.concatenate([array, array[:repeated]]) for name, array in arrays.items() if array.ndim == 1}
        once = dataclasses.replace(reduction, repeated=0)
        weights = _token_weights(np.concatenate([mask, mask[:repeated]]), once, twice)
        weights[:repeated] += weights[len(mask) :]
        return weights[: len(mask)]
    if reduction.micro_batches == 1 and reduction.parts == "mean":
        return _weights_of_rows(mask, reduction, arrays, np.ones(len(mask), bool))
    rows = np.arange(len(mask))
    parts = rows * reduction.micro_batches // len(mask) if reduction.micro_batches else arrays["micro_batch_ids"]
    if reduction.split == "strided":
        parts = rows % reduction.micro_batches
    if reduction.size:
        parts = rows // reduction.size
    undivided = dataclasses.replace(reduction, micro_batches=1, parts="mean", split="contiguous", size=0)
    masks = [parts == part for part in np.unique(parts)]
    masks = [part for part in masks if part.sum() >= reduction.size]
    shares = {"mean": 1 / len(masks), "sum": 1.0}
    each = [
        shares.get(reduction.parts, rows.mean()) * _weights_of_rows(mask, undivided, arrays, rows) for rows in masks
    ]
    return np.asarray(sum(each))


def _weights_of_rows(
    mask: np.ndarray, reduction: ReductionRecipe, arrays: Mapping[str, np.ndarray], rows: np.ndarray
) -> np.ndarray:
    """Returns the weights of some rows as a batch of their own, 0 elsewhere."""
    part = mask[rows]
    keywords: dict[str, Any] = {"mode": reduction.mode, "empty_rows": reduction.empty_rows}
    ids: np.ndarray | None = None
    if reduction.mode == "seq_mean_token_sum_norm":
        keywords["max_length"] = mask.shape[1] if reduction.max_length is None else reduction.max_length
    if reduction.mode == "prompt_mean":
        if reduction.groups not in arrays:
            return np.full(mask.shape, np.nan)
        _, ids = np.unique(arrays[reduction.groups][rows], return_inverse=True)
        keywords["num_groups"] = int(ids.max()) + 1
    if reduction.denominator is not None and reduction.mode != "token_sum":
        keywords["denominator"] = reduction.denominator

    def compute(mask: Any, ids: Any) -> jax.Array:
        return kljax.token_weights(mask, group_ids=ids, **keywords)

    weights = np.asarray(remembered(f"token_weights {keywords!r}", compute)(part, ids), np.float64)
    count, per_row = part.sum(), part.sum(1, keepdims=True)
    weights = weights * count / (count + reduction.eps_batch) if count else weights
    weights = weights * per_row / np.maximum(per_row + reduction.eps_row, 1e-300)
    weights = weights / np.maximum(per_row, 1) ** reduction.length_power
    if reduction.longest:
        parts = np.unique(arrays["micro_batch_ids"][rows], return_inverse=True)[1]
        longest = np.zeros(parts.max() + 1)
        np.maximum.at(longest, parts, part.sum(1))
        weights = weights * keywords.get("max_length", 1) / np.maximum(longest[parts][:, None], 1)
    result = np.zeros(mask.shape)
    result[rows] = reduction.scale * weights
    return result
