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


def counted(tokens: jax.Array, mask: jax.Array) -> kljax.WeightedSum:
    return kljax.WeightedSum.of(tokens.astype(jnp.float64), mask)


def assert_verl(
    case: cases.Case,
    per_token: Loss,
    clipped: kljax.WeightedSum,
    lower: kljax.WeightedSum | None = None,
    *,
    log_ratio_clip: float | None = 20.0,
    mode: str | None = None,
) -> None:
    """Loss and gradient, and the metrics with the epsilon of verl's masked mean taken into account."""
    old, _, mask = inputs(case)
    arguments, over = VERL_MODES[mode or case.params["loss_agg_mode"]]
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
    fraction = counted(~inside, mask)
    assert_verl(case, lambda lp: kljax.cispo_loss(lp, old, advantages, mask, **bounds(case)), fraction)


@cases.parametrize(("verl", "compute_policy_loss_dppo_tv"), ("verl", "compute_policy_loss_dppo_kl"))
def test_verl_dppo(case: cases.Case) -> None:
    rest, lp = inputs(case), case.given("log_probs")
    options = {**bounds(case), "divergence": case.function.removeprefix("compute_policy_loss_dppo_")}
    capped, kept = case.params["clip_ratio_c"], kljax.dppo_mask(lp, *rest, **options)
    above = kept & (kljax.token_ratios(lp, rest[0], rest[2]) > capped)
    assert_verl(
        case,
        lambda lp: kljax.dppo_loss(lp, *rest, **options, through="log_prob", max_ratio=capped, log_ratio_clip=20.0),
        counted(~kept, rest[2]),
        counted(above, rest[2]),
    )


@cases.parametrize(("verl", "compute_policy_loss_sapo"))
def test_verl_sapo(case: cases.Case) -> None:
    rest = inputs(case)
    options = {"tau_positive": case.params["tau_pos"], "tau_negative": case.params["tau_neg"], "log_ratio_clip": 20.0}
    # verl's SAPO reduces by rows whatever mode it is given.
    assert_verl(
        case,
        lambda lp: kljax.sapo_loss(lp, *rest, **options),
        counted(jnp.zeros(rest[2].shape, bool), rest[2]),
        mode="seq-mean-token-mean",
    )


@cases.parametrize(("verl", "compute_policy_loss_geo_mean"))
def test_verl_geo_mean(case: cases.Case) -> None:
    old, advantages, mask = inputs(case)
    clips, lp = bounds(case), case.given("log_probs")
    low, high = jnp.exp(-clips["clip_low"]), jnp.exp(clips["clip_high"])
    # verl counts what is beyond either bound, the one that has no effect as well, apart by the sign of the advantage.
    beyond = ~kljax.rejection_mask(lp, old, mask, lower=low, upper=high)
    factor = epsilon.factors(mask, "batch").min()
    for name, sign in (("metric_pg_clipfrac", advantages > 0), ("metric_pg_clipfrac_lower", advantages < 0)):
        case.assert_matches(factor * counted(beyond & sign, mask).value(), case.result(name))
    case.assert_matches(factor * kljax.ppo_kl(lp, old, mask).value(), case.result("metric_ppo_kl"))

    def loss(lp: jax.Array) -> jax.Array:
        per_token = kljax.gmpo_loss(lp, old, advantages, mask, **clips) * epsilon.factors(mask, "row")
        return kljax.aggregate(per_token, mask, mode="seq_mean_token_mean", empty_rows="count")

    case.assert_value_and_grad(loss, "log_probs")


@cases.parametrize(("verl", "compute_policy_loss_gpg"))
def test_verl_gpg(case: cases.Case) -> None:
    _, advantages, mask = inputs(case)
    arguments, over = VERL_MODES[case.params["loss_agg_mode"]]
    factor = epsilon.factors(mask, over)
    case.assert_value_and_grad(
        lambda lp: kljax.aggregate(kljax.gpg_loss(lp, advantages, mask) * factor, mask, **arguments), "log_probs"
    )


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
        mean = kljax.masked_mean(lp.astype(jnp.float64) - ref.astype(jnp.float64), mask)
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
