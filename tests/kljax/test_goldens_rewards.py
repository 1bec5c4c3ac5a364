"""KL in the reward and as a loss term against the recorded results of Trinity-RFT, OpenRLHF, slime and SkyRL."""

import chex
import jax
import jax.numpy as jnp
import pytest

import kljax
from tests.goldens import cases, epsilon

# Rows of the estimator tables: all of Trinity's names that its cases use.
TRINITY = {name: {"estimator": name} for name in ("k1", "k2", "k3", "low_var_kl", "abs")}
TRINITY_MODES = {
    "token-mean": ({"mode": "token_mean"}, "batch"),
    "seq-mean-token-sum": ({"mode": "seq_mean_token_sum", "empty_rows": "count"}, None),
    "seq-mean-token-mean": ({"mode": "seq_mean_token_mean", "empty_rows": "count"}, "row"),
}
# SkyRL's k3 is the clamped one; the other names are the bare estimators, which `rollout_kl_loss` has itself.
SKYRL_ROLLOUT = {"k1": "k1", "abs": "abs", "k2": "k2", "k3": "low_var_kl"}
ROWS = {"mode": "seq_mean_token_mean", "empty_rows": "count"}


@cases.parametrize(("trinity", "apply_kl_penalty_to_reward"))
def test_trinity_shapes_the_rewards(case: cases.Case) -> None:
    mask, params = case.given("mask"), case.params
    if params["adaptive"]:
        controller = kljax.adaptive_kl(params["kl_coef"], target=params["target_kl"], horizon=params["horizon"])
    else:
        controller = kljax.fixed_kl(params["kl_coef"])
    state = controller.init()
    arrays = (case.given(name) for name in ("token_level_scores", "old_log_probs", "ref_log_probs"))
    rewards, kl = kljax.kl_shaped_rewards(*arrays, mask, coef=state.coef, **TRINITY[params["estimator"]])
    case.assert_matches(rewards, case.result("token_level_rewards"))
    case.assert_matches(kljax.aggregate(kl * epsilon.factors(mask, "row"), mask, **ROWS), case.result("metric_kl"))
    case.assert_matches(state.coef, case.result("metric_kl_coef"))  # logged before the update


def test_adaptive_coefficient_follows_the_systems() -> None:
    # The numbers that verl, SkyRL and OpenRLHF give for these two updates, run in sequence.
    controller = kljax.adaptive_kl(0.1, target=0.1, horizon=10_000)
    state = controller.update(controller.init(), 0.5, 256)
    chex.assert_trees_all_close(state.coef, 0.100512, rtol=1e-12, atol=0)
    state = controller.update(state, 0.0, 256)
    chex.assert_trees_all_close(state.coef, 0.09999737856, rtol=1e-10, atol=0)


def test_adaptive_coefficient_never_turns_negative_as_it_does_in_the_systems() -> None:
    # 1000 samples at horizon 100: verl and Trinity arrive at -0.1 and reward the KL from then on.
    controller = kljax.adaptive_kl(0.1, target=0.1, horizon=100)
    chex.assert_trees_all_equal(controller.update(controller.init(), 0.0, 1000).coef, jnp.zeros(()))


@cases.parametrize(("openrlhf", "compute_reward"))
def test_openrlhf_places_the_score_on_the_last_token(case: cases.Case) -> None:
    # OpenRLHF leaves the KL at masked positions and masks it later, in the advantages; here they are exactly 0.
    mask, kl = case.given("mask"), case.given("kl")
    rewards = kljax.subtract_kl(case.given("rewards"), kl, mask, coef=0.05)
    case.assert_matches(rewards, jnp.where(mask, case.result("token_level_rewards"), 0))


@cases.parametrize(("slime", "get_reinforce_plus_plus_returns"))
def test_slime_reinforce_plus_plus(case: cases.Case) -> None:
    mask, kl, params = case.given("mask"), case.given("kl"), case.params
    rewards = kljax.subtract_kl(case.given("rewards"), kl, mask, coef=params["kl_coef"])
    returns = kljax.reinforce_plus_plus_returns(rewards, mask, gamma=params["gamma"])
    case.assert_matches(returns, jnp.where(mask, case.result("returns"), 0))


@cases.parametrize(("slime", "get_reinforce_plus_plus_baseline_advantages"))
def test_slime_reinforce_plus_plus_baseline(case: cases.Case) -> None:
    # slime subtracts the KL from the advantages at masked positions too; here they are exactly 0.
    mask, kl = case.given("mask"), case.given("kl")
    penalty = case.params["kl_coef"] * kljax.estimate_kl(kl, jnp.zeros_like(kl), mask, estimator="k1")
    advantages = kljax.broadcast_to_tokens(case.given("rewards"), mask) - penalty
    case.assert_matches(advantages, jnp.where(mask, case.result("advantages"), 0))


@cases.parametrize(("slime", "ppo_kl_shaped_gae"))
def test_slime_ppo(case: cases.Case) -> None:
    # slime has no mask here but rows of their own length, which the prefix mask of this batch describes.
    mask, kl, params = case.given("mask"), case.given("kl"), case.params
    rewards = kljax.subtract_kl(case.given("rewards"), kl, mask, coef=params["kl_coef"])
    advantages, returns = kljax.gae(rewards, case.given("values"), mask, gamma=params["gamma"], lam=params["lambd"])
    case.assert_matches(advantages, case.result("advantages"))
    case.assert_matches(returns, case.result("returns"))
    case.assert_matches(kljax.masked(kl, mask), jnp.where(mask, case.result("raw_kl"), 0))


@cases.parametrize(("trinity", "calculate_kl_loss"))
def test_trinity_kl_loss(case: cases.Case) -> None:
    mask, ref, coef = case.given("mask"), case.given("ref_log_probs"), case.params["kl_coef"]
    arguments, over = TRINITY_MODES[case.params["loss_agg_mode"]]
    factor = epsilon.factors(mask, over)

    def loss(log_probs: jax.Array) -> jax.Array:
        estimator = TRINITY[case.params["estimator"]]
        per_token = kljax.reference_kl_loss(log_probs, ref, mask, gradient="value", **estimator)
        return kljax.aggregate(per_token * factor, mask, **arguments)

    case.assert_value_and_grad(lambda lp: coef * loss(lp), "log_probs")
    case.assert_matches(loss(case.given("log_probs")), case.result("metric_kl_loss"))
    chex.assert_trees_all_close(coef, case.result("metric_kl_coef").item())


@cases.parametrize(("skyrl", "rollout_kl_loss"))
def test_skyrl_rollout_kl_loss(case: cases.Case) -> None:
    name, mask, rollout = case.params["rollout_kl_estimator_type"], case.given("mask"), case.given("rollout_log_probs")
    meaning = SKYRL_ROLLOUT[name]

    def loss(log_probs: jax.Array) -> jax.Array:
        if name == meaning:
            per_token = kljax.rollout_kl_loss(log_probs, rollout, mask, estimator=name)
        else:
            per_token = kljax.estimate_kl(log_probs, rollout, mask, estimator=meaning)
        return kljax.aggregate(per_token, mask, **ROWS)

    case.assert_value_and_grad(loss, "log_probs")


@cases.parametrize(("prime-rl", "default_loss_fn"), ("prime-rl", "ref_kl_loss_fn"))
def test_prime_rl_kl_term(case: cases.Case) -> None:
    # The KL term is the library's; the policy-gradient part it is added to (DPPO, and a gradient towards the reference)
    # is written out here. prime-rl's squared log-ratio has no half, and both parts are summed over tokens.
    mask, rollout = case.given("mask"), case.given("rollout_log_probs")
    default = case.function == "default_loss_fn"
    kl_tau = case.params["kl_tau"] if default else 1e-3

    def policy_part(lp: jax.Array) -> jax.Array:
        # What is written out here is not rounded to the type of narrow inputs.
        lp, old = lp.astype(jnp.float64), rollout.astype(jnp.float64)
        diff = jnp.exp(lp) - jnp.exp(old)
        if default:
            advantages = case.given("advantages").astype(jnp.float64)
            signal = case.params["adv_tau"] * advantages
            too_high, too_low = diff > case.params["dppo_mask_high"], diff < -case.params["dppo_mask_low"]
            dropped = jnp.where(advantages > 0, too_high, too_low)
        else:
            signal, dropped = jax.lax.stop_gradient(case.given("ref_log_probs") - lp), diff < -0.2
        return -jnp.where(mask & ~dropped, signal * jnp.exp(lp - old), 0)

    def loss(lp: jax.Array) -> jax.Array:
        kl = 2 * kljax.rollout_kl_loss(lp, rollout, mask, estimator="k2")
        return kljax.aggregate(policy_part(lp) + kl_tau * kl, mask, mode="token_sum")

    case.assert_value_and_grad(loss, "log_probs")


@pytest.mark.parametrize("scores", [jnp.array([1.0, 2.0]), jnp.zeros((2, 3))], ids=["rows", "tokens"])
def test_row_without_a_token_gets_no_reward(scores: jax.Array) -> None:
    # OpenRLHF puts the score of an all-masked row on its last column, slime asserts that there is none.
    mask = jnp.array([[False] * 3, [True] * 3])
    rewards, kl = kljax.kl_shaped_rewards(scores, jnp.full((2, 3), -1.0), jnp.full((2, 3), -2.0), mask, coef=0.5)
    chex.assert_trees_all_equal((rewards[0], kl[0]), (jnp.zeros(3), jnp.zeros(3)))
