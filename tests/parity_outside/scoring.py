"""Masks, log-probs of the four models, and faults of a single recorded field."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tests import other_seeds
from tests.parity_outside.batches import EOS, PAD, VOCABULARY, Array, DrawnBatch
from tests.parity_outside.settings import Settings

# The recorded log-probs of each model.
FIELDS = {
    "policy": "log_probs",
    "old": "old_log_probs",
    "rollout": "rollout_log_probs",
    "reference": "ref_log_probs",
}
COARSE = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def select_mask(kind: str, batch: DrawnBatch) -> Array:
    """The trained tokens, right ("completion") or wrong in one of the ways that systems have had."""
    columns, mask = batch.columns, batch.completion
    after_first = columns >= np.maximum(batch.starts, 1)[:, None]
    last = columns == batch.lengths[:, None] - 1
    middle = (batch.prompt_lengths + (batch.lengths - batch.prompt_lengths) // 2)[:, None]
    if kind.startswith("last "):
        return mask & (columns >= batch.lengths[:, None] - int(kind.removeprefix("last ")))
    if kind.startswith("first "):
        return mask & (columns < batch.prompt_lengths[:, None] + int(kind.removeprefix("first ")))
    choices = {
        "completion": mask,
        "prompt": after_first & (columns < batch.lengths[:, None]),
        "prompt and left padding": (columns >= 1) & (columns < batch.lengths[:, None]),
        "padding": columns >= batch.prompt_lengths[:, None],
        "all": np.broadcast_to(columns >= 1, mask.shape),
        "no end token": mask & ~(last & ~batch.truncated[:, None]),
        "no last token": mask & ~last,
        "no first token": mask & (columns != batch.prompt_lengths[:, None]),
        "late by one": move_columns(mask, 1),
        "early by one": move_columns(mask, -1),
        "no truncated rows": mask & ~batch.truncated[:, None],
        "one token more": (columns >= batch.prompt_lengths[:, None]) & (columns < batch.lengths[:, None] + 1),
        "one token before": (columns >= batch.prompt_lengths[:, None] - 1) & (columns < batch.lengths[:, None]),
        "no middle tokens": mask & (columns != middle) & (columns != middle - 1),
        "no last row": mask & (np.arange(batch.shape.rows) < batch.shape.rows - 1)[:, None],
        # A slice at the width of the longest prompt (arrays that are padded on the right).
        "after the longest prompt": mask & (columns >= batch.prompt_lengths.max()),
        # TRL pull request 6365: groups of one reward count for nothing.
        "no equal groups": mask & ~_equal_groups(batch)[:, None],
    }
    return np.asarray(choices[kind])


def _equal_groups(batch: DrawnBatch) -> Array:
    """True on the rows of a group whose rewards are all the same."""
    spreads = [np.ptp(batch.rewards[batch.group_ids == group]) for group in batch.group_ids]
    return np.array(spreads) == 0


def score(
    batch: DrawnBatch,
    model: str,
    *,
    temperature: float,
    softcap: float | None,
    vocabulary: str,
    normalizer: str | None,
    shift: int,
    logits_shift: int = 0,
    logits_dtype: str | None = None,
) -> Array:
    """Log-prob of each token, `[B, T]` in float64; the first token of an array with a prompt has none and gets 0.

    `normalizer` leaves logits out of the sum: "top 4" those below the fourth but for the token's own, "no pad token"
    the pad token's, "no end token" the end token's, "top p 0.9" those beyond the most probable tokens whose sum reaches
    0.9, "min p 0.1" those below 0.1 of the largest probability. `logits_shift` moves the logits against the tokens,
    `logits_dtype` rounds them.
    """
    logits = move_columns(batch.logits[model], logits_shift) if logits_shift else batch.logits[model]
    if logits_dtype is not None:
        logits = logits.astype(COARSE[logits_dtype]).astype(float)
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    logits = logits / temperature
    if vocabulary == "real":
        logits = logits[..., :VOCABULARY]
    top = logits.max(axis=-1, keepdims=True)
    terms = np.where(_summed(logits, batch.tokens, normalizer), np.exp(logits - top), 0)
    picked = np.take_along_axis(logits, batch.tokens[..., None], axis=-1)[..., 0]
    log_probs = picked - (np.log(terms.sum(axis=-1)) + top[..., 0])
    if batch.shape.layout != "completions":
        log_probs[:, 0] = 0.0
    log_probs = move_columns(log_probs, shift)
    return log_probs if batch.shape.padding is None else np.where(batch.completion, log_probs, batch.shape.padding)


def _summed(logits: Array, tokens: Array, normalizer: str | None) -> Array:
    """True where a logit is in the sum of the normalizer."""
    if normalizer is None:
        return np.ones(logits.shape, bool)
    numbers = np.broadcast_to(np.arange(logits.shape[-1]), logits.shape)
    picked = numbers == tokens[..., None]
    if normalizer in ("no pad token", "no end token"):
        return np.asarray((numbers != {"no pad token": PAD, "no end token": EOS}[normalizer]) | picked)
    if normalizer.startswith(("top p ", "min p ")):
        probabilities = np.exp(logits - logits.max(axis=-1, keepdims=True))
        if normalizer.startswith("min p "):
            return np.asarray((probabilities >= float(normalizer.removeprefix("min p "))) | picked)
        ordered = -np.sort(-probabilities, axis=-1)
        before = np.cumsum(ordered, axis=-1) - ordered
        likely = before < float(normalizer.removeprefix("top p ")) * ordered.sum(axis=-1, keepdims=True)
        least = np.where(likely, ordered, np.inf).min(axis=-1, keepdims=True)
        return np.asarray((probabilities >= least) | picked)
    count = int(normalizer.removeprefix("top "))
    return np.asarray((logits >= np.sort(logits, axis=-1)[..., -count, None]) | picked)


def record(name: str, value: Array, settings: Settings, seed: int) -> Array:
    """The field as the system has it from here on: with noise, in a coarser type, with rows exchanged or scaled."""
    if name in settings["noise"]:
        rng = other_seeds.example([seed, 7])
        value = value + (settings["noise"][name] * rng.normal(size=value.shape)).astype(value.dtype)
    if name in settings["field_rows"]:
        value = np.roll(value, settings["field_rows"][name], axis=0)
    if name in settings["field_factor"]:
        value = value * value.dtype.type(settings["field_factor"][name])
    if name in settings["coarse"]:
        value = value.astype(COARSE[settings["coarse"][name]]).astype(value.dtype)
    return value


def move_columns(values: Array, by: int) -> Array:
    """`values` moved by some columns to the right, with zeros where nothing arrives."""
    moved: Any = np.zeros_like(values)
    width = values.shape[1]
    for column in range(width):
        if 0 <= column - by < width:
            moved[:, column] = values[:, column - by]
    return np.asarray(moved)
