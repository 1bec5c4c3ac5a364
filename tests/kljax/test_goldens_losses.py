"""Policy losses and their metrics against the recorded results of verl and ART: value and gradient."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import pytest

import kljax
from tests.goldens import cases, epsilon

# verl clips log-ratios at 20 before `exp`, has the dual clip always on, and clips GSPO's log-ratio at 10 from above.
VERL_PPO = {"log_ratio_clip": 20.0}
VERL_GSPO = {"gradient": "token", "max_log_ratio": 10.0}
VERL_MODES = {
    "token-mean": ({"mode": "token_mean"}, None),
    "seq-mean-token-mean": ({"mode": "seq_mean_token_mean", "empty_rows": "drop"}, "row"),
}
ART_EPS = 1e-6

Loss = Callable[[jax.Array], jax.Array]


def inputs(case: cases.Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    return case.given("old_log_probs"), case.given("advantages"), case.given("mask")


def bounds(case: cases.Case) -> dict[str, float]:
    return {"clip_low": case.params["clip_ratio_low"], "clip_high": case.params["clip_ratio_high"]}


def assert_verl(
    case: cases.Case,
    per_token: Loss,
    clipped: kljax.WeightedSum,
    lower: kljax.WeightedSum | None = None,
    log_ratio_clip: float | None = 20.0,
) -> None:
    """Loss and gradient, and the metrics with the epsilon of verl's masked mean taken into account."""
    old, _, mask = inputs(case)
    arguments, over = VERL_MODES[case.params["loss_agg_mode"]]
    factor, batch_factor = epsilon.factors(mask, over), epsilon.factors(mask, "batch").min()
    case.assert_value_and_grad(lambda lp: kljax.aggregate(per_token(lp) * factor, mask, **arguments), "log_probs")
    case.assert_matches(batch_factor * clipped.value(), case.result("metric_pg_clipfrac"))
    lower_value = jnp.zeros(()) if lower is None else lower.value()
    case.assert_matches(batch_factor * lower_value, case.result("metric_pg_clipfrac_lower"))
    ppo_kl = kljax.ppo_kl(case.given("log_probs"), old, mask, log_ratio_clip=log_ratio_clip)
    case.assert_matches(batch_factor * ppo_kl.value(), case.result("metric_ppo_kl"))


@cases.parametrize(("verl", "compute_policy_loss_vanilla"))
def test_verl_ppo(case: cases.Case) -> None:
    rest, dual = inputs(case), {"dual_clip": case.params["clip_ratio_c"]}
    lp = case.given("log_probs")
    assert_verl(
        case,
        lambda lp: kljax.ppo_clip_loss(lp, *rest, **bounds(case), **dual, **VERL_PPO),
        kljax.clip_fraction(lp, *rest, **bounds(case)),
        kljax.dual_clip_fraction(lp, *rest, **dual),
    )


@cases.parametrize(("verl", "compute_policy_loss_gspo"))
def test_verl_gspo(case: cases.Case) -> None:
    rest = inputs(case)
    fraction = kljax.clip_fraction(case.given("log_probs"), *rest, **bounds(case), level="geometric")
    # verl's GSPO does not clip the log-ratio of its ppo_kl metric, unlike its PPO and CISPO.
    assert_verl(case, lambda lp: kljax.gspo_loss(lp, *rest, **bounds(case), **VERL_GSPO), fraction, log_ratio_clip=None)


@cases.parametrize(("verl", "compute_policy_loss_cispo"))
def test_verl_cispo(case: cases.Case) -> None:
    old, advantages, mask = inputs(case)
    # verl counts every ratio outside the bounds, whatever the sign of its advantage.
    low, high = 1 - case.params["clip_ratio_low"], 1 + case.params["clip_ratio_high"]
    inside = kljax.rejection_mask(case.given("log_probs"), old, mask, lower=low, upper=high)
    fraction = kljax.WeightedSum.of((~inside).astype(jnp.float64), mask)
    assert_verl(case, lambda lp: kljax.cispo_loss(lp, old, advantages, mask, **bounds(case)), fraction)


@cases.parametrize(("art", "loss_fn"))
def test_art_with_the_centred_adjustment(case: cases.Case) -> None:
    old, advantages, mask = inputs(case)
    ref, params = case.given("ref_log_probs"), case.params
    loss_fn = kljax.ppo_clip_loss if params["ppo"] else kljax.cispo_loss
    clips = {"clip_low": params["epsilon"], "clip_high": params["epsilon_high"]}
    mode = {"mean": "token_mean", "sum": "token_sum"}[params["reduction"]]
    factor = epsilon.factors(mask, "batch", ART_EPS).min()

    def loss(lp: jax.Array) -> jax.Array:
        # ART divides the mean KL by n + 1e-6, so its shifts sum to zero only up to that; here the mean is exact.
        mean = kljax.masked_mean(lp - ref, mask)
        adjusted, used = kljax.centered_kl_advantages(
            advantages, lp, ref, mask, coef=params["kl_penalty_coef"], estimator="k1", mean_kl=factor * mean
        )
        assert used.shape == ()
        total = kljax.aggregate(loss_fn(lp, old, adjusted, mask, **clips), mask, mode=mode)
        return total * factor if params["reduction"] == "mean" else total

    case.assert_value_and_grad(loss, "log_probs")


@pytest.mark.parametrize("loss_fn", [kljax.ppo_clip_loss, kljax.gspo_loss, kljax.cispo_loss])
def test_art_leaks_a_masked_nan_and_this_does_not(loss_fn: Callable[..., jax.Array]) -> None:
    # A NaN in the reference at a masked position makes ART's loss NaN (0 * NaN in the mean KL).
    lp, old, advantages = jnp.array([[-1.0, -2.0]]), jnp.array([[-1.1, jnp.nan]]), jnp.array([[1.0, jnp.nan]])
    ref, mask = jnp.array([[-1.5, jnp.nan]]), jnp.array([[True, False]])

    def loss(lp: jax.Array) -> jax.Array:
        adjusted, _ = kljax.centered_kl_advantages(advantages, lp, ref, mask, coef=1.0)
        return loss_fn(lp, old, adjusted, mask).sum()

    value, grad = jax.value_and_grad(loss)(lp)
    assert jnp.isfinite(value)
    assert jnp.isfinite(grad).all()
    chex.assert_trees_all_equal(grad[0, 1], jnp.zeros(()))
