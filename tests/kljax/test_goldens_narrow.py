"""The recorded PyTorch results in float32 and bfloat16, on the default device, within bounds from float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.goldens import cases, narrow

pytestmark = pytest.mark.xla

KL = narrow.cases_of("kl")


@pytest.mark.accelerator
@pytest.mark.thorough
@pytest.mark.parametrize("dtype", narrow.DTYPES)
@pytest.mark.parametrize("family", narrow.KINDS)
def test_every_recorded_result(family: str, dtype: str) -> None:
    (row,) = narrow.load().rows(f"{family} {dtype}", seconds=np.inf)
    assert row["compared"] == row["cases"] > 0
    assert "problem" not in row, row["problem"]


@pytest.mark.parametrize("dtype", narrow.DTYPES)
def test_a_result_within_its_bounds(dtype: str) -> None:
    exercise, case = KL[0]
    assert 0 < narrow.share_of_bound(exercise, case, dtype) <= 1


def test_a_small_error_is_beyond_the_bounds() -> None:
    exercise, case = KL[0]

    def scaled(given: cases.Case) -> None:
        def estimate(log_probs: jax.Array) -> jax.Array:
            factor = 1.0 if log_probs.dtype == jnp.float64 else 1 + 1e-4
            return factor * kljax.estimate_kl(log_probs, given.given("ref_log_probs"), **arguments)

        given.assert_value_and_grad(estimate, "log_probs")

    arguments = {"estimator": "k1"}
    assert narrow.share_of_bound(scaled, case, "float32") > 10
    assert narrow.share_of_bound(exercise, case, "float32") <= 1
