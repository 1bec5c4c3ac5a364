"""Reductions and masked statistics against the recorded results of Trinity-RFT, verl and SkyRL."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import pytest

import kljax
from tests.goldens import cases, epsilon


class Reduction(NamedTuple):
    """Arguments of `aggregate`, a factor, and over what the system's epsilon enters a divisor."""

    arguments: dict[str, object]
    eps: str | None = None  # "batch": n is the number of tokens of the batch; "row": of the row
    scale: float = 1.0


T = 12
COUNT, DROP = {"empty_rows": "count"}, {"empty_rows": "drop"}
REDUCTIONS = {
    # Trinity counts rows without a token, and its "norm" is a sum over the batch, not a mean over its rows.
    ("trinity", "token-mean", None): Reduction({"mode": "token_mean"}, eps="batch"),
    ("trinity", "seq-mean-token-sum", None): Reduction({"mode": "seq_mean_token_sum", **COUNT}),
    ("trinity", "seq-mean-token-mean", None): Reduction({"mode": "seq_mean_token_mean", **COUNT}, eps="row"),
    ("trinity", "seq-mean-token-sum-norm", None): Reduction({"mode": "token_sum"}, scale=1 / (T + epsilon.EPS)),
    # verl drops rows without a token.
    ("verl", "token-mean", None): Reduction({"mode": "token_mean"}),
    ("verl", "token-sum", None): Reduction({"mode": "token_sum"}),
    ("verl", "seq-mean-token-sum", None): Reduction({"mode": "seq_mean_token_sum", **DROP}),
    ("verl", "seq-mean-token-mean", None): Reduction({"mode": "seq_mean_token_mean", **DROP}, eps="row"),
    ("verl", "seq-mean-token-sum-norm", None): Reduction({"mode": "seq_mean_token_sum_norm", "max_length": T, **DROP}),
    ("verl", "seq-mean-token-sum-norm", 100): Reduction({"mode": "seq_mean_token_sum_norm", "max_length": 100, **DROP}),
}
# SkyRL folds the weights into the advantages and sums the loss; it counts rows without a token.
SKYRL = {
    "token_mean": {"mode": "token_mean"},
    "sequence_mean": {"mode": "seq_mean_token_mean", **COUNT},
    "seq_mean_token_sum_norm": {"mode": "seq_mean_token_sum_norm", "max_length": 64, **COUNT},
}


@cases.parametrize(("trinity", "aggregate_loss"), ("verl", "agg_loss"))
def test_aggregate(case: cases.Case) -> None:
    key = case.system, case.params["loss_agg_mode"], case.params.get("loss_scale_factor")
    reduction, mask = REDUCTIONS[key], case.given("mask")
    factor = epsilon.factors(mask, reduction.eps) * reduction.scale
    case.assert_value_and_grad(lambda v: kljax.aggregate(v * factor, mask, **reduction.arguments), "advantages")


@cases.parametrize(("skyrl", "apply_loss_reduction_to_advantages_minibatch"))
def test_skyrl_scales_the_advantages_by_the_token_weights(case: cases.Case) -> None:
    # SkyRL leaves masked positions as they are scaled and drops them in the loss; here their weight is exactly 0.
    mask, advantages, cotangent = (case.given(name) for name in ("mask", "advantages", "cotangent"))
    weights = kljax.token_weights(mask, **SKYRL[case.params["loss_reduction"]])
    case.assert_matches(advantages * weights, jnp.where(mask, case.result("value"), 0))
    case.assert_matches(cotangent * weights, jnp.where(mask, case.result("grad"), 0))


@cases.parametrize(("verl", "masked_mean"))
def test_masked_mean(case: cases.Case) -> None:
    mask, axis = case.given("mask"), case.params["axis"]
    factor = epsilon.factors(mask, "batch" if axis is None else "row")
    case.assert_value_and_grad(lambda v: kljax.masked_mean(v * factor, mask, axis=axis), "advantages")


@cases.parametrize(("verl", "masked_var"))
def test_masked_var(case: cases.Case) -> None:
    # verl's variance is the population variance divided by (n + eps), then times n / (n - 1) if unbiased; the
    # epsilon in the mean that it subtracts is of second order, 1e-17 here.
    mask, ddof = case.given("mask"), int(case.params["unbiased"])
    factor = epsilon.factors(mask, "batch").min()
    case.assert_value_and_grad(lambda v: factor * kljax.masked_var(v, mask, ddof=ddof), "advantages")


@cases.parametrize(("verl", "masked_whiten"))
def test_masked_whiten(case: cases.Case) -> None:
    mask, shift_mean = case.given("mask"), case.params["shift_mean"]
    # verl also whitens the masked positions, which moves the gradient of the unmasked ones; here they are exactly 0.
    case.assert_value_and_grad(lambda v: epsilon.whiten(v, mask, shift_mean=shift_mean), "advantages")
    whitened = kljax.masked_whiten(case.given("advantages"), mask, shift_mean=shift_mean, eps=epsilon.EPS)
    case.assert_matches(whitened, jnp.where(mask, case.result("value"), 0))
    assert not whitened[~mask].any()


ALL_MODES = [
    {"mode": "token_mean"},
    {"mode": "token_sum"},
    {"mode": "seq_mean_token_sum"},
    {"mode": "seq_mean_token_mean"},
    {"mode": "seq_mean_token_sum_norm", "max_length": T},
    {"mode": "prompt_mean", "group_ids": jnp.array([0, 1]), "num_groups": 2},
]


@pytest.mark.parametrize("empty_rows", ["drop", "count"])
@pytest.mark.parametrize("arguments", ALL_MODES, ids=lambda arguments: arguments["mode"])
def test_nothing_unmasked_is_zero_where_pytorch_gives_nan(arguments: dict[str, object], empty_rows: str) -> None:
    # verl 0.9.1 gives NaN for an all-masked batch in every mode but token-sum, OpenRLHF's masked_mean too.
    values, mask = jnp.full((2, T), jnp.nan), jnp.zeros((2, T), bool)
    value, grad = jax.value_and_grad(lambda v: kljax.aggregate(v, mask, empty_rows=empty_rows, **arguments))(values)
    chex.assert_trees_all_equal((value, grad), (jnp.zeros(()), jnp.zeros((2, T))))


def test_whitening_fewer_than_two_tokens_does_not_raise() -> None:
    # verl raises ValueError for one token or none; here a single token is its own mean, and becomes 0.
    values = jnp.array([[3.0, 5.0]])
    for mask in (jnp.zeros((1, 2), bool), jnp.array([[True, False]])):
        chex.assert_trees_all_equal(kljax.masked_whiten(values, mask), jnp.zeros((1, 2)))


def test_whitening_a_constant_is_zero_where_slime_gives_nan() -> None:
    # slime's single pass E[v^2] - E[v]^2 turns slightly negative for equal advantages: rsqrt of it is NaN.
    values, mask = jnp.full((3, 5), 0.1, jnp.float32), jnp.ones((3, 5), bool)
    chex.assert_trees_all_close(kljax.masked_whiten(values, mask), jnp.zeros((3, 5), jnp.float32), atol=1e-3, rtol=0)
