"""The limits of the guard: one table for the compiled update, which may be skipped, and for the host."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from train.config.schema import Guard

SHARE = "updates_beyond_limit"
"""The metric of `guard.action: skip`: the share of a step's updates that were skipped beyond a limit."""


class Limit(NamedTuple):
    """A field of the guard that is set, the metrics that it limits, and their name in messages."""

    field: str
    metrics: tuple[str, ...]
    name: str
    number: float
    least: bool = False

    def is_left_by(self, value: Any) -> Any:
        """Tells whether a number, or an array, is beyond the limit; one that is no number is not."""
        return value < self.number if self.least else value > self.number


def limits(guard: Guard) -> Iterator[Limit]:
    """Yields the limits that are set."""
    kls = ("kl_reference", "kl_reference_exact")
    if guard.max_kl is not None:
        yield Limit("guard.max_kl", kls, "the KL to the reference", guard.max_kl)
    if guard.max_token_kl is not None:
        metrics = tuple(f"{name}_max" for name in kls)
        yield Limit("guard.max_token_kl", metrics, "the KL to the reference at one token", guard.max_token_kl)
    if guard.min_entropy is not None:
        yield Limit("guard.min_entropy", ("entropy",), "the entropy", guard.min_entropy, least=True)


def is_beyond(guard: Guard, metrics: Mapping[str, Any]) -> jax.Array:
    """Tells, in a compiled program, whether the metrics of a whole update are beyond a limit."""
    left = [
        limit.is_left_by(metrics[name].value()) for limit in limits(guard) for name in limit.metrics if name in metrics
    ]
    return jnp.stack(left).any() if left else jnp.zeros((), bool)
