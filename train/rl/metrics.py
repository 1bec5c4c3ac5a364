"""Metrics of the compiled functions: parts that are merged exactly and divided once, on the host; and their limits."""

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp

import kljax
from train.config.schema import Guard
from train.rl.kl_metrics import FIRST_UPDATE_ALONE, KL_METRICS, ROLLOUT_KL_MAX, largest_of

SHARE = "updates_beyond_limit"
"""The metric of `guard.action: skip`: the share of a step's updates that were skipped beyond a limit."""


SLOPE = "policy_slope"
"""The size of the gradient of a loss of the user to its arrays; `WITHOUT_GRADIENT` is made of it for an update."""
WITHOUT_GRADIENT = "updates_without_gradient"
"""The metric of a loss of the user: the share of a step's updates that it gave no gradient."""


class Metric(Protocol):
    """A metric of a part of a batch, such as `kljax.WeightedSum` (a mean) or `kljax.Extremes` (a largest value)."""

    def __add__(self, other: Any) -> Self:
        """Merges the metric with that of another part."""

    def reduce(self, axis: int = 0) -> Self:
        """Merges parts that lie along an axis."""

    def value(self) -> jax.Array:
        """Returns the number that is logged."""


Metrics = dict[str, Metric]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LargestToken:
    """The token with the largest value, whatever the split of the batch; ties go to the first by row and column.

    Attributes:
      largest: its value, a scalar; negative infinity if there was no token. NaN counts as infinite.
      row, column: where it is in the rollout batch, int32.
      log_prob: log-prob of the token under the policy.
      other_log_prob: the same under the other policy of the KL, the reference or the sampler; NaN if it is not known.
    """

    largest: jax.Array
    row: jax.Array
    column: jax.Array
    log_prob: jax.Array
    other_log_prob: jax.Array

    @classmethod
    def of(
        cls,
        values: jax.Array,
        mask: jax.Array,
        *,
        rows: jax.Array,
        log_probs: jax.Array,
        other_log_probs: jax.Array | None,
    ) -> Self:
        """Finds the token among the tokens of a mask, detached.

        Args:
          values: [B, T].
          mask: [B, T] bool.
          rows: [B] int32, the numbers of the rows.
          log_probs, other_log_probs: [B, T].
        """
        columns = jnp.arange(mask.shape[1], dtype=jnp.int32)[None]
        last = jnp.iinfo(jnp.int32).max
        reference = jnp.full_like(log_probs, jnp.nan) if other_log_probs is None else other_log_probs
        tokens = cls(
            largest=jnp.where(mask, values, -jnp.inf),
            row=jnp.where(mask, rows[:, None], last),
            column=jnp.where(mask, columns, last),
            log_prob=jnp.where(mask, log_probs, -jnp.inf),
            other_log_prob=jnp.where(mask, reference, -jnp.inf),
        )
        return jax.lax.stop_gradient(tokens).reduce(None)

    def __add__(self, other: Self) -> Self:
        return _merge_tokens(self, other)

    def reduce(self, axis: int | None = 0) -> Self:
        """Merges parts that lie along an axis; None: along all."""
        order = jnp.where(jnp.isnan(self.largest), jnp.inf, self.largest)
        chosen = order == order.max(axis, keepdims=True)
        last = jnp.iinfo(jnp.int32).max
        for position in (self.row, self.column):
            chosen &= position == jnp.where(chosen, position, last).min(axis, keepdims=True)
        # One token is left, so that its numbers are the largest of those that are left.
        return type(self)(
            largest=jnp.where(chosen, self.largest, -jnp.inf).max(axis),
            row=jnp.where(chosen, self.row, last).min(axis),
            column=jnp.where(chosen, self.column, last).min(axis),
            log_prob=jnp.where(chosen, self.log_prob, -jnp.inf).max(axis),
            other_log_prob=jnp.where(chosen, self.other_log_prob, -jnp.inf).max(axis),
        )

    def value(self) -> jax.Array:
        """Returns the value of the token."""
        return self.largest


class Summed:
    """The addition of a metric whose arrays are sums over the parts of a batch."""

    def __add__(self, other: Self) -> Self:
        return jax.tree.map(operator.add, self, other)

    def reduce(self, axis: int = 0) -> Self:
        """Adds parts that lie along an axis."""
        return jax.tree.map(lambda x: x.sum(axis), self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ZScore(Summed):
    """A sum of numbers whose mean is expected to be 0, over its standard deviation.

    Attributes:
      sum: of the numbers, a scalar.
      variance: of the sum, a scalar.
    """

    sum: jax.Array
    variance: jax.Array

    @classmethod
    def of(cls, values: jax.Array, variances: jax.Array, mask: jax.Array) -> Self:
        """Sums the numbers of a mask, and their variances, detached; all [B, T]."""
        totals = (kljax.masked(x, mask).sum() for x in (values, variances))
        return jax.lax.stop_gradient(cls(*totals))

    def value(self) -> jax.Array:
        """Returns the sum in standard deviations; 0 if there was no number."""
        return self.sum / jnp.sqrt(jnp.where(self.variance == 0, 1, self.variance))


# The updates of a step are merged outside their programs: compiled, this is one call.
@jax.jit
def _merge_tokens(first: LargestToken, second: LargestToken) -> LargestToken:
    return jax.tree.map(lambda *parts: jnp.stack(parts), first, second).reduce()


def single(value: jax.Array) -> kljax.WeightedSum:
    """Returns a number as a metric; merged with others it is their mean."""
    return kljax.WeightedSum(value, jnp.ones_like(value))


def add_update(totals: Metrics, metrics: Metrics, number: int) -> Metrics:
    """Adds the metrics of update 0, 1, ... on a batch to the totals; some are of the first alone."""
    added = {name: new for name, new in metrics.items() if not number or name not in FIRST_UPDATE_ALONE}
    return totals | {name: totals[name] + new if name in totals else new for name, new in added.items()}


def metric_values(metrics: Metrics) -> dict[str, float]:
    """Copies metrics to the host in one transfer and divides each once."""
    return {name: float(metric.value()) for name, metric in jax.device_get(metrics).items()}


class Limit(NamedTuple):
    """A field of the guard that is set, the metrics that it limits, and their name in messages.

    Attributes:
      tokens: metrics that name the token to blame.
    """

    field: str
    metrics: tuple[str, ...]
    name: str
    number: float
    tokens: tuple[str, ...] = ()
    least: bool = False

    def is_exceeded_by(self, value: Any) -> Any:
        """Tells whether a number, or each number of an array, is beyond the limit; NaN is not."""
        return value < self.number if self.least else value > self.number


def limits(guard: Guard) -> Iterator[Limit]:
    """Yields the limits that are set."""
    largest = tuple(map(largest_of, KL_METRICS))
    if guard.max_kl is not None:
        yield Limit("guard.max_kl", KL_METRICS, "the KL to the reference", guard.max_kl, largest)
    if guard.max_token_kl is not None:
        for metrics, name in ((largest, "the KL to the reference"), ((ROLLOUT_KL_MAX,), "the rollout KL")):
            yield Limit("guard.max_token_kl", metrics, f"{name} at one token", guard.max_token_kl, metrics)
    if guard.min_entropy is not None:
        yield Limit("guard.min_entropy", ("entropy",), "the entropy", guard.min_entropy, least=True)


def is_beyond(guard: Guard, metrics: Mapping[str, Any]) -> jax.Array:
    """Tells, in a compiled program, whether the metrics of a whole update are beyond a limit."""
    left = [
        limit.is_exceeded_by(metrics[name].value())
        for limit in limits(guard)
        for name in limit.metrics
        if name in metrics
    ]
    return jnp.stack(left).any() if left else jnp.zeros((), bool)
