"""The quantities of tokens that the page colours, and their summaries."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A number of each sampled token.

    Attributes:
      key: its name in the page, and its column if it has one.
      label: text for people.
      unit: of the numbers.
      scale: whether colours go from 0 up, or from 0 both ways.
      difference: the columns that it is the difference of; the first alternative that a rollout has counts.
      histogram: whether the page shows its distribution.
    """

    key: str
    label: str
    unit: str = ""
    scale: Literal["up", "both"] = "up"
    difference: tuple[tuple[str, str], ...] = ()
    histogram: bool = False

    def of(self, columns: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Returns the values of a rollout; None if it has no such column."""
        for first, second in self.difference:
            if first in columns and second in columns:
                return columns[first] - columns[second]
        return columns.get(self.key)


QUANTITIES = (
    Quantity("kl", "KL to the reference (k3)", "nats"),
    Quantity("exact_kl", "exact KL to the reference", "nats"),
    Quantity(
        "log_ratio_reference",
        "log-ratio, policy to reference",
        "nats",
        "both",
        (("policy_log_probs", "ref_log_probs"), ("old_log_probs", "ref_log_probs")),
        histogram=True,
    ),
    Quantity(
        "log_ratio_sampler",
        "log-ratio, trainer to sampler",
        "nats",
        "both",
        (("old_log_probs", "log_probs"), ("policy_log_probs", "log_probs")),
        histogram=True,
    ),
    Quantity(
        "log_ratio_old",
        "log-ratio, policy to old policy",
        "nats",
        "both",
        (("policy_log_probs", "old_log_probs"),),
        histogram=True,
    ),
    Quantity("mismatch_kl", "mismatch KL", "nats"),
    Quantity("advantages", "advantage", "", "both"),
    Quantity("entropy", "entropy", "nats"),
    Quantity("loss_weights", "weight in the loss"),
    Quantity("correction_weights", "correction weight"),
    Quantity("policy_version", "policy version", "steps"),
    Quantity("policy_log_probs", "log-prob, policy", "nats"),
    Quantity("old_log_probs", "log-prob, old policy", "nats"),
    Quantity("log_probs", "log-prob, sampler", "nats"),
    Quantity("ref_log_probs", "log-prob, reference", "nats"),
)
"""In the order of the page; a numeric column that is not among them follows under its own name."""
BINS = 61
QUANTILE = 0.99
FAR = 8.0
"""A histogram ends at this many times the quantile."""


def quantity_of(column: str) -> Quantity:
    """Returns the quantity of a column that the table does not know."""
    return Quantity(column, column.replace("_", " "))


def color_limit(values: np.ndarray) -> float:
    """Returns the number that has the full colour: nearly all absolute values are below it."""
    finite = np.abs(values[np.isfinite(values)])
    limit = float(np.quantile(finite, QUANTILE)) if finite.size else 0.0
    return limit or float(finite.max(initial=0.0)) or 1.0


def histogram_limit(values: np.ndarray) -> float:
    """Returns the end of the axis of a histogram: the largest value, unless that is very far off."""
    finite = np.abs(values[np.isfinite(values)])
    return min(float(finite.max(initial=0.0)), FAR * color_limit(values)) or 1.0


def histogram(values: np.ndarray, limit: float) -> dict[str, Any]:
    """Counts values in equal bins from `-limit` to `limit`, and how many are below and above."""
    finite = values[np.isfinite(values)]
    counts, _ = np.histogram(finite, BINS, (-limit, limit))
    beyond = int((finite < -limit).sum()), int((finite > limit).sum())
    return {
        "counts": counts.tolist(),
        "below": beyond[0],
        "above": beyond[1],
        "mean": float(finite.mean()) if finite.size else None,
        "std": float(finite.std()) if finite.size else None,
        "largest": float(np.abs(finite).max()) if finite.size else None,
    }
