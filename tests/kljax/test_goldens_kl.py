"""KL estimators against the recorded results of Trinity-RFT, verl, SkyRL, OpenRLHF and slime: value and gradient."""

import chex
import jax
import jax.numpy as jnp
import pytest

import kljax
from tests.goldens import cases

# What each system's name means, as arguments of `estimate_kl`.
TRINITY = {
    "k1": {"estimator": "k1"},
    "k2": {"estimator": "k2"},
    "k3": {"estimator": "k3"},
    "abs": {"estimator": "abs"},
    "low_var_kl": {"estimator": "k3", "log_ratio_clip": 20.0, "value_clip": 10.0},
    "corrected_k3": {"estimator": "k3", "max_ratio": 2.0},  # corrected by old_log_probs where a case has them
    "dummy": {"estimator": "none"},
}
VERL = {
    "kl": {"estimator": "k1"},
    "k1": {"estimator": "k1"},
    "abs": {"estimator": "abs"},
    "mse": {"estimator": "k2"},
    "k2": {"estimator": "k2"},
    "k3": {"estimator": "low_var_kl"},
    "low_var_kl": {"estimator": "low_var_kl"},
    "k1+": {"estimator": "k1", "gradient": "k2"},
    "abs+": {"estimator": "abs", "gradient": "k2"},
    "k3+": {"estimator": "low_var_kl", "gradient": "k2"},
    "low_var_kl+": {"estimator": "low_var_kl", "gradient": "k2"},
}
SKYRL = {
    "k1": {"estimator": "k1"},
    "abs": {"estimator": "abs"},
    "k2": {"estimator": "k2"},
    "k3": {"estimator": "low_var_kl"},
}
OPENRLHF = {
    "k1": {"estimator": "k1", "value_clip": 10.0},
    "k2": {"estimator": "k2", "value_clip": 10.0},
    "k3": {"estimator": "k3", "value_clip": 10.0},
}
SLIME = {
    "k1": {"estimator": "k1"},
    "k2": {"estimator": "k2"},
    "k3": {"estimator": "k3"},
    "low_var_kl": {"estimator": "k3", "value_clip": 10.0},  # no clip of the log-ratio, unlike verl's
}
NAMES = {
    "trinity": ("estimator", TRINITY),
    "verl": ("kl_penalty", VERL),
    "skyrl": ("kl_estimator_type", SKYRL),
    "openrlhf": ("kl_estimator", OPENRLHF),
    "slime": ("kl_loss_type", SLIME),
}


@cases.parametrize(
    ("trinity", "calculate_kl"),
    ("verl", "kl_penalty"),
    ("skyrl", "compute_approx_kl"),
    ("openrlhf", "compute_approx_kl"),
    ("slime", "compute_approx_kl"),
)
def test_value_and_gradient(case: cases.Case) -> None:
    parameter, table = NAMES[case.system]
    arguments = dict(table[case.params[parameter]])
    if "old_log_probs" in case.inputs:
        arguments["sampling_log_probs"] = case.given("old_log_probs")
    mask = case.given("mask") if "mask" in case.inputs else None
    ref = case.given("ref_log_probs")
    case.assert_value_and_grad(lambda lp: kljax.estimate_kl(lp, ref, mask, **arguments), "log_probs")


@pytest.mark.parametrize(
    ("system", "arguments", "expected"),
    [
        pytest.param("OpenRLHF", OPENRLHF["k3"], 10.0, id="openrlhf-k3"),
        pytest.param("slime", SLIME["low_var_kl"], 10.0, id="slime-low_var_kl"),
        pytest.param("verl", VERL["low_var_kl"], 10.0, id="verl-low_var_kl"),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_overflow_under_a_value_clip_has_gradient_zero(
    system: str, arguments: dict[str, object], expected: float, dtype: jnp.dtype
) -> None:
    # At x = -100 (and -1000 in float64) slime and OpenRLHF give the value 10 and the gradient NaN (inf * 0); verl,
    # which also clips the log-ratio, gives 0. Here the clipped value has gradient 0 for every system's arguments.
    x = jnp.array([-1000.0, -100.0], dtype)
    value, grad = jax.value_and_grad(lambda x: kljax.estimate_kl(x, jnp.zeros_like(x), **arguments).sum())(x)
    chex.assert_trees_all_equal(value, jnp.asarray(2 * expected, dtype))
    chex.assert_trees_all_equal(grad, jnp.zeros_like(x))


@pytest.mark.parametrize("distance", [-100.0, -800.0])
def test_corrected_k3_where_the_ratio_vanishes_stays_finite_under_a_log_ratio_clip(distance: float) -> None:
    # exp(lp - old) = 0 and exp(-x) = inf: Trinity's corrected_k3 is 0 * inf = NaN in value and gradient. Its arguments
    # have no clip of the log-ratio; with one, both are finite.
    lp, zero = jnp.array([distance]), jnp.array([0.0])
    arguments = {**TRINITY["corrected_k3"], "sampling_log_probs": zero, "log_ratio_clip": 20.0}
    value, grad = jax.value_and_grad(lambda lp: kljax.estimate_kl(lp, zero, **arguments).sum())(lp)
    chex.assert_trees_all_close((value, grad[0]), (jnp.zeros(()), jnp.zeros(())), rtol=0, atol=1e-30)


def test_abs_has_gradient_zero_at_zero_as_in_pytorch() -> None:
    # torch.abs has gradient 0 at 0, jnp.abs has 1: the difference of every token that is exactly on policy.
    grad = jax.grad(lambda lp: kljax.abs_diff(lp, jnp.zeros(1)).sum())(jnp.zeros(1))
    chex.assert_trees_all_equal(grad, jnp.zeros(1))
