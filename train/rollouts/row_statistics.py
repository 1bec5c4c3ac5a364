"""Statistics of the completions of a step on the host, and the errors that they call for: copies, and floors."""

import math
from collections.abc import Mapping
from hashlib import blake2b

import jax
import numpy as np

from train.config.schema import Config
from train.distributed.global_arrays import RowSplit
from train.rollouts.source import Array, Completions, SourceError
from train.sequences.token_fields import LEAST_LOG_PROB

LEAST_CHANCE = math.log(1e-12)
"""Chance of copies, in nats, below which they are no chance: it is the share of false alarms."""
MOST_MISSING = 0.01
"""Share of the tokens of a step that may have no log-prob; one of them alone always may."""
RowStatistics = Mapping[str, np.ndarray]


def has_log_prob(log_probs: np.ndarray) -> np.ndarray:
    """Returns where log-probs are real: at least `LEAST_LOG_PROB`. Servers write floors below it."""
    return log_probs >= LEAST_LOG_PROB


def measure_rows(config: Config, completions: Completions, rows: RowSplit) -> RowStatistics:
    """Measures the rows that this process judges.

    Returns:
      `ids`, uint64, equal where completions are; `most_log_prob`, float64, no less than the log-prob of the completion
      under the distribution that it was drawn from, 0 if nothing is known; and, if the source brought log-probs to the
      host, `missing`, the number of tokens without one. Each `[len(rows.own)]`.
    """
    tokens = rows.select_own(completions.tokens)
    mask = rows.select_own(completions.completion_mask)
    statistics = {"ids": _digests(tokens, mask), "most_log_prob": np.zeros(len(mask))}
    recorded = completions.fields.get("rollout_log_probs") if config.rollout.record_log_probs else None
    if recorded is None:
        return statistics
    log_probs = rows.select_own(recorded)
    known = mask & has_log_prob(log_probs)
    if not isinstance(recorded, jax.Array):
        statistics["missing"] = (mask & ~known).sum(-1)
    most = np.where(known, log_probs, 0).astype(np.float64)
    return statistics | {"most_log_prob": _most_log_probs(config, completions, most)}


def _digests(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns 64 bits of a hash of the ids of each completion."""
    ids = (row[real].astype("<i4").tobytes() for row, real in zip(tokens, mask, strict=True))
    return np.frombuffer(b"".join(blake2b(row, digest_size=8).digest() for row in ids), np.uint64)


def _most_log_probs(config: Config, completions: Completions, log_probs: np.ndarray) -> np.ndarray:
    """Sums the log-probs of rows, corrected for cuts that they do not contain: the kept tokens have a mass of top-p."""
    section = config.rollout
    contains_cuts = "kept_ids" in completions.fields
    if not contains_cuts and (section.top_k > 0 or section.min_p > 0):
        return np.zeros(len(log_probs))
    mass = 1.0 if contains_cuts else section.top_p
    return np.minimum(log_probs - math.log(mass), 0).sum(-1)


def check_rows(config: Config, statistics: RowStatistics, lengths: np.ndarray, leading: np.ndarray) -> dict[str, float]:
    """Returns the metrics of a step.

    Forks, and rows without an episode, are no completions of their own, so that groups have different sizes.

    A group of n copies of the completion y has the chance `p(y)**(n - 1)` after its first row. All groups of a step
    are copies whose chances multiply to less than c with a probability of less than c, since

      sum_y p(y)**n [p(y)**(n - 1) < c] <= c sum_y p(y) = c

    Args:
      config: has the number of completions of a prompt.
      statistics: `measure_rows` of the rows of all processes.
      lengths: tokens of each row.
      leading: whether each row is a completion of its own, [rows] bool.

    Raises:
      SourceError: the completions of every group are copies, which chance does not explain; or too many tokens have no
        log-prob.
    """
    section = config.rollout
    total = int(lengths.sum())
    missing = int(statistics["missing"].sum()) if "missing" in statistics else 0
    if missing > max(1, MOST_MISSING * total):
        raise SourceError(
            f"rollout: {missing} of the {total} sampled tokens have no log-prob of the sampler (null, or a floor below "
            f"{LEAST_LOG_PROB:g} such as -9999), expected at most {MOST_MISSING:.0%}: they came from another "
            "distribution than these log-probs, as with a grammar or a bias; record those of the distribution that was "
            "sampled, or none (rollout.record_log_probs=false)"
        )
    metrics = {"log_probs_missing": missing / max(total, 1)} if "missing" in statistics else {}
    samples = section.samples_per_prompt
    if samples == 1:
        return metrics
    numbers = np.flatnonzero(leading)
    groups = numbers // samples
    sizes = np.bincount(groups)
    pairs = np.stack([groups.astype(np.uint64), statistics["ids"][numbers]])
    distinct = np.bincount(np.unique(pairs, axis=1)[0].astype(np.int64), minlength=len(sizes))
    most = np.full(len(sizes), -np.inf)
    np.maximum.at(most, groups, statistics["most_log_prob"][numbers])
    several = sizes > 1
    if not several.any():
        return metrics | {"repeated_completions": 0.0, "copied_groups": 0.0}
    sizes, distinct, most = sizes[several], distinct[several], most[several]
    copies = distinct == 1
    chances = (sizes - 1) * most
    chance = float(chances.sum())
    if copies.all() and chance < LEAST_CHANCE:
        raise SourceError(_describe_copies(config, len(copies), chance))
    return metrics | {
        "repeated_completions": 1 - int(distinct.sum()) / int(sizes.sum()),
        "copied_groups": float((copies & (chances < LEAST_CHANCE)).mean()),
    }


def _describe_copies(config: Config, groups: int, chance: float) -> str:
    causes = "one seed for all of them, answers from a cache, a watermark, or greedy sampling"
    remedy = "the server, or a proxy before it, has to draw every completion by itself"
    if config.rollout.source.type == "file":
        remedy = "record such completions, or set rollout.samples_per_prompt=1 if rows are to be equal"
    return (
        f"rollout: in each of the {groups} groups of the step all {config.rollout.samples_per_prompt} completions are "
        f"equal, by chance with a probability of 1e{chance / math.log(10):.0f}; likely causes: {causes}; {remedy}"
    )


def without_floors(mask: Array, log_probs: Array) -> tuple[Array, Array]:
    """Leaves the tokens without a log-prob out of a mask of sampled tokens; their log-probs are 0 then.

    Arrays on the devices, which a sampler of this process has computed, stay as they are.
    """
    if not isinstance(log_probs, np.ndarray):
        return mask, log_probs
    known = has_log_prob(log_probs)
    return mask & known, np.where(known, log_probs, 0)
