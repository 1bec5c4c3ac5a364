"""Metrics of the compiled functions: parts that are merged exactly and divided once, on the host."""

from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp

import kljax


class Metric(Protocol):
    """A metric of a part of a batch, such as `kljax.WeightedSum` (a mean) or `kljax.Extremes` (a largest value)."""

    def __add__(self, other: Any) -> Self:
        """Merges the metric with that of another part."""

    def reduce(self, axis: int = 0) -> Self:
        """Merges parts that lie along an axis."""

    def value(self) -> jax.Array:
        """Returns the number that is logged."""


Metrics = dict[str, Metric]


def single(value: jax.Array) -> kljax.WeightedSum:
    """Returns a number as a metric; merged with others it is their mean."""
    return kljax.WeightedSum(value, jnp.ones_like(value))


def metric_values(metrics: Metrics) -> dict[str, float]:
    """Copies metrics to the host in one transfer and divides each once."""
    return {name: float(metric.value()) for name, metric in jax.device_get(metrics).items()}
