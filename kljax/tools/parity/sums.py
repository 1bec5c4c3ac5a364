"""The weight of each token in the scalar loss: rows and tokens that count, and what divides them."""

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
    """Returns the weight of each token in the loss, by the masks of the whole batch.

    Returns `[B, T]` float64, of the rows of the replay.
    """
    batch = replay.batch
    rule = rule or MaskRule()

    def compute() -> np.ndarray:
        mask = apply_rule(batch.used_mask(recipe), rule, batch.layout)
        if reduction.rows == "spread":
            advantages = over_tokens(batch.arrays["advantages"], batch.shape)
            mask = mask & (np.where(mask, advantages, 0) != 0).any(1, keepdims=True)
        return _weights(batch, mask, reduction)

    weights: np.ndarray = batch.remember(("token_weights", recipe.mask, rule, reduction), compute)
    return weights[replay.rows]


def micro_batches(batch: Replay, count: int) -> list[np.ndarray]:
    """Lists the rows of each micro-batch, `[B]` bool: that many equal ones, or the recorded ones for 0."""
    rows = np.arange(len(batch.rows))
    parts = rows * count // len(rows) if count else batch.arrays["micro_batch_ids"]
    return [parts == part for part in np.unique(parts)]


def _weights(batch: Replay, mask: np.ndarray, reduction: ReductionRecipe) -> np.ndarray:
    if reduction.micro_batches == 1:
        return _weights_of_rows(batch, mask, reduction, np.ones(len(mask), bool))
    parts = micro_batches(batch, reduction.micro_batches)
    shares = {"mean": 1 / len(parts), "sum": 1.0}
    each = (shares.get(reduction.parts, rows.mean()) * _weights_of_rows(batch, mask, reduction, rows) for rows in parts)
    return np.asarray(sum(each))


def _weights_of_rows(batch: Replay, mask: np.ndarray, reduction: ReductionRecipe, rows: np.ndarray) -> np.ndarray:
    """Returns the weights of some rows as a batch of their own, 0 elsewhere."""
    part = mask[rows]
    keywords: dict[str, Any] = {"mode": reduction.mode, "empty_rows": reduction.empty_rows}
    numbers: dict[str, float] = {}
    ids: np.ndarray | None = None
    if reduction.mode == "seq_mean_token_sum_norm":
        numbers["max_length"] = float(mask.shape[1] if reduction.max_length is None else reduction.max_length)
    if reduction.mode == "prompt_mean":
        _, ids = np.unique(batch.arrays[reduction.groups][rows], return_inverse=True)
        keywords["num_groups"] = int(np.max(ids)) + 1
    denominator = reduction.denominator
    if denominator is None and reduction.mode == "token_mean" and "divisor" in batch.arrays and rows.all():
        denominator = max(float(batch.arrays["divisor"]) * reduction.share, 1.0)
    if denominator is not None and reduction.mode != "token_sum":
        numbers["denominator"] = float(denominator)

    def compute(mask: Any, ids: Any, numbers: dict[str, Any]) -> jax.Array:
        return kljax.token_weights(mask, group_ids=ids, **keywords, **numbers)

    weights = np.asarray(remembered(f"token_weights {keywords!r}", compute)(part, ids, numbers), np.float64)
    count = part.sum()
    per_row = part.sum(1, keepdims=True)
    weights = weights * count / (count + reduction.eps_batch) if count else weights
    weights = weights * per_row / np.maximum(per_row + reduction.eps_row, 1e-300)
    result = np.zeros(mask.shape)
    result[rows] = reduction.scale * weights
    return result
