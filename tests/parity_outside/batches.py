"""Random batches: the models' logits, the sampled tokens and their rewards, before any formula of a system."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tests import other_seeds

Array = np.ndarray[Any, np.dtype[Any]]

# Rewards that strain a mean or a standard deviation, from the drawn ones: "equal" has no exact mean in float32.
_REWARDS: dict[str, Callable[[Array], Array]] = {
    "drawn": lambda rewards: rewards,
    "equal": lambda rewards: np.full_like(rewards, 0.7),
    "near": lambda rewards: 0.7 + 1e-6 * rewards,
    "binary": lambda rewards: (rewards >= 0.75).astype(float),
    "negative": lambda rewards: -3.1 * rewards - 0.1,
    "tiny": lambda rewards: 1e-7 * rewards,
    "huge": lambda rewards: 3e5 * rewards + 0.3,
}
VOCABULARY = 11
PADDED_VOCABULARY = 13
PAD, EOS = 0, 1


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """Size and layout of a batch.

    `layout` is "left" (prompts end at one column, padded on their left), "packed" (each row starts with its prompt and
    is padded on its right) or "completions" (no prompt in the arrays). `drift` scales how far policy and sampler are
    from the old policy: at 0 every ratio is 1. `rewards` is "drawn" or a key of `_REWARDS`; log-probs are `padding`
    where the mask is not set, if that is a number.
    """

    groups: int = 3
    group_size: int = 3
    prompt: int = 5
    completion: int = 9
    layout: str = "left"
    empty: int = 0
    drift: float = 1.0
    rewards: str = "drawn"
    padding: float | None = None

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.groups * self.group_size

    @property
    def width(self) -> int:
        """Columns of every per-token array."""
        return self.completion if self.layout == "completions" else self.prompt + self.completion


@dataclasses.dataclass(frozen=True)
class DrawnBatch:
    """Outputs of the models and the sampler; `logits` has one `[B, T, V]` array for each model.

    Logits at column `t` predict the token of column `t`. `starts` is the first column that is not padding, `truncated`
    the rows that were cut at the limit, so that they end without an end token.
    """

    shape: BatchShape
    tokens: Array
    starts: Array
    prompt_lengths: Array
    lengths: Array
    truncated: Array
    group_ids: Array
    micro_batch_ids: Array
    rewards: Array
    values: Array
    logits: dict[str, Array]

    @property
    def columns(self) -> Array:
        """Column numbers, `[1, T]`."""
        return np.arange(self.shape.width)[None, :]

    @property
    def completion(self) -> Array:
        """True on the tokens of the completions, `[B, T]`."""
        return (self.columns >= self.prompt_lengths[:, None]) & (self.columns < self.lengths[:, None])


def draw_batch(seed: int, shape: BatchShape) -> DrawnBatch:
    """Draws a batch whose policies differ enough that every clip, cap and bound is active somewhere."""
    rng = other_seeds.example(seed)
    rows, width = shape.rows, shape.width
    starts, prompt_lengths, lengths, truncated = _draw_lengths(rng, shape)
    logits = _draw_logits(rng, rows, width, shape.drift)
    columns = np.arange(width)[None, :]
    tokens = _sample(rng, logits["rollout"][..., :VOCABULARY])
    ended = (columns == lengths[:, None] - 1) & ~truncated[:, None] & (lengths > prompt_lengths)[:, None]
    tokens = np.where(ended, EOS, tokens)
    tokens = np.where((columns < starts[:, None]) | (columns >= lengths[:, None]), PAD, tokens)
    correct = rng.random(rows) < 0.5
    rewards = correct + 0.25 * rng.integers(0, 3, rows) - 0.125 * truncated
    group_ids = np.repeat(np.arange(shape.groups), shape.group_size)
    return DrawnBatch(
        shape=shape,
        tokens=tokens,
        starts=starts,
        prompt_lengths=prompt_lengths,
        lengths=lengths,
        truncated=truncated,
        group_ids=group_ids,
        micro_batch_ids=(np.arange(rows) >= (2 * rows + 2) // 3).astype(int),
        rewards=_REWARDS[shape.rewards](_spread(rewards, group_ids)),
        values=0.5 * rng.normal(size=(rows, width)) + 0.4,
        logits=logits,
    )


def _draw_lengths(rng: np.random.Generator, shape: BatchShape) -> tuple[Array, Array, Array, Array]:
    rows, limit = shape.rows, shape.completion
    counts = rng.integers(2, limit, rows)
    truncated = np.zeros(rows, bool)
    truncated[rng.choice(rows, size=max(1, rows // 5), replace=False)] = True
    counts = np.where(truncated, limit, counts)
    empty = np.arange(rows) >= rows - shape.empty
    counts, truncated = np.where(empty, 0, counts), truncated & ~empty
    prompts = rng.integers(2, shape.prompt + 1, shape.groups).repeat(shape.group_size)
    if shape.layout == "left":
        prompt_lengths = np.full(rows, shape.prompt)
        starts = shape.prompt - prompts
    elif shape.layout == "packed":
        prompt_lengths, starts = prompts, np.zeros(rows, int)
    else:
        prompt_lengths, starts = np.zeros(rows, int), np.zeros(rows, int)
    return starts, prompt_lengths, prompt_lengths + counts, truncated


def _draw_logits(rng: np.random.Generator, rows: int, width: int, drift: float) -> dict[str, Array]:
    size = (rows, width, PADDED_VOCABULARY)

    def moved(base: Array, everywhere: float, rare: float) -> Array:
        jumps = (rng.random((rows, width, 1)) < 0.15) * rng.normal(size=size)
        return base + everywhere * rng.normal(size=size) + rare * jumps

    old = 1.3 * rng.normal(size=size)
    return {
        "old": old,
        "rollout": moved(old, 0.15 * drift, 0.9 * drift),
        "policy": moved(old, 0.3 * drift, 1.2 * drift),
        "reference": moved(old, 0.5, 1.5),
        "stale reference": moved(old, 0.5, 1.5),
    }


def _sample(rng: np.random.Generator, logits: Array) -> Array:
    """Draws a token from the distribution at each position, neither padding nor the end token."""
    noise = rng.gumbel(size=logits.shape)
    return EOS + 1 + np.argmax((logits + noise)[..., EOS + 1 :], axis=-1)


def _spread(rewards: Array, group_ids: Array) -> Array:
    """The rewards with several values in each group; of three groups and more, the first has a single value."""
    result = rewards.copy()
    ids = np.unique(group_ids)
    for group in ids:
        rows = np.flatnonzero(group_ids == group)
        if group == 0 and ids.size > 2:
            result[rows] = rewards[rows[0]]
        elif np.ptp(result[rows]) == 0:
            result[rows[0]] += 0.5
    return result
