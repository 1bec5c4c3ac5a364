"""How the tests of the generated cases reduce a loss per token as a system does."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import kljax
from tests.goldens import batches, cases, epsilon

COUNT, DROP = {"empty_rows": "count"}, {"empty_rows": "drop"}
NUM_GROUPS = 3


class Reduction(NamedTuple):
    """Arguments of `aggregate`, over what the system's epsilon enters a divisor, that epsilon, and a factor."""

    arguments: dict[str, Any]
    eps: str | None = None  # "batch": n is the number of tokens of the batch; "row": of the row
    size: float = epsilon.EPS
    scale: float = 1.0


TOKEN_MEAN, TOKEN_SUM = Reduction({"mode": "token_mean"}), Reduction({"mode": "token_sum"})
ROW_MEAN = Reduction({"mode": "seq_mean_token_mean", **COUNT})  # rows without a token count
VERL = {
    "token-mean": TOKEN_MEAN,
    "seq-mean-token-mean": Reduction({"mode": "seq_mean_token_mean", **DROP}, "row"),
    "seq-mean-token-sum": Reduction({"mode": "seq_mean_token_sum", **DROP}),
}
TRINITY = {
    "token-mean": Reduction({"mode": "token_mean"}, "batch"),
    "seq-mean-token-sum": Reduction({"mode": "seq_mean_token_sum", **COUNT}),
    "seq-mean-token-mean": Reduction({"mode": "seq_mean_token_mean", **COUNT}, "row"),
    "seq-mean-token-sum-norm": Reduction({"mode": "token_sum"}, scale=1 / (batches.LENGTH + epsilon.EPS)),
}
Loss = Callable[[jax.Array], jax.Array]


def reduced(per_token: jax.Array, mask: jax.Array, reduction: Reduction) -> jax.Array:
    """The scalar that the system makes of a loss per token."""
    factor = epsilon.factors(mask, reduction.eps, reduction.size) * reduction.scale
    return kljax.aggregate(per_token * factor, mask, **reduction.arguments)


def assert_loss(case: cases.Case, per_token: Loss, reduction: Reduction, mask: jax.Array | None = None) -> None:
    """Asserts the value and the gradient of a reduced loss, over the mask of the case unless another is given."""
    mask = case.given("mask") if mask is None else mask
    case.assert_value_and_grad(lambda lp: reduced(per_token(lp), mask, reduction), case.gradient_of or "log_probs")


def mean(metric: kljax.WeightedSum | jax.Array, mask: jax.Array, eps: float | None = epsilon.EPS) -> jax.Array:
    """A metric over tokens as a system divides it: by the number of tokens plus an epsilon."""
    value = metric.value() if isinstance(metric, kljax.WeightedSum) else kljax.masked_mean(metric, mask)
    number = mask.sum().astype(jnp.float64)
    return value if eps is None else value * number / (number + eps)


def policy(case: cases.Case) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Log-probs, old log-probs, advantages and mask."""
    log_probs, old, mask = (case.given(name) for name in ("log_probs", "old_log_probs", "mask"))
    rows = "row_advantages" in case.inputs
    advantages = kljax.broadcast_to_tokens(case.given("row_advantages"), mask) if rows else case.given("advantages")
    return log_probs, old, advantages, mask


def renamed(case: cases.Case, **names: str) -> dict[str, Any]:
    """Arguments of the library from those params of the case that are there."""
    return {
        argument: case.params[parameter]
        for argument, parameter in names.items()
        if case.params.get(parameter) is not None
    }
