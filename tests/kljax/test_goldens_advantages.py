"""Advantage estimators against the recorded results of verl."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np

import kljax
from tests.goldens import cases, epsilon

GROUPS = 3
# verl leaves the reward of a row that is alone in its group; no case has such a row, so the rule is checked below.
GROUP_ESTIMATORS: dict[str, Callable[..., jax.Array]] = {
    "compute_grpo_outcome_advantage": kljax.grpo_advantages,
    "compute_rloo_outcome_advantage": kljax.rloo_advantages,
    "compute_reinforce_plus_plus_baseline_outcome_advantage": kljax.reinforce_plus_plus_baseline_advantages,
}
GRPO_SCALE = {True: {"scale": "std", "ddof": 1, "eps": 1e-6}, False: {"scale": "none"}}


def scores(case: cases.Case) -> jax.Array:
    return kljax.masked_sum(case.given("token_level_rewards"), case.given("mask"), axis=-1)


def assert_tokens(case: cases.Case, advantages: jax.Array) -> None:
    per_token = kljax.broadcast_to_tokens(advantages, case.given("mask"))
    case.assert_matches(per_token, case.result("advantages"))
    case.assert_matches(per_token, case.result("returns"))


@cases.parametrize(("verl", "compute_grpo_outcome_advantage"), ("verl", "compute_rloo_outcome_advantage"))
def test_group_advantages(case: cases.Case) -> None:
    scale = GRPO_SCALE[case.params["norm_adv_by_std_in_grpo"]] if "grpo" in case.function else {}
    estimator = GROUP_ESTIMATORS[case.function]
    advantages = estimator(scores(case), case.given("group"), num_groups=GROUPS, singleton="reward", **scale)
    assert_tokens(case, advantages)


@cases.parametrize(("verl", "compute_opo_outcome_advantage"))
def test_opo(case: cases.Case) -> None:
    assert_tokens(case, kljax.opo_advantages(scores(case), case.given("group"), case.given("mask"), num_groups=GROUPS))


@cases.parametrize(("verl", "compute_reinforce_plus_plus_baseline_outcome_advantage"))
def test_reinforce_plus_plus_baseline(case: cases.Case) -> None:
    mask = case.given("mask")
    centred = kljax.reinforce_plus_plus_baseline_advantages(scores(case), case.given("group"), num_groups=GROUPS)
    per_token = kljax.broadcast_to_tokens(centred, mask)
    whitened = jnp.where(mask, epsilon.whiten(per_token, mask), 0)
    case.assert_matches(whitened, case.result("advantages"))
    chex.assert_trees_all_close(kljax.masked_whiten(per_token, mask), whitened, rtol=1e-7, atol=1e-8)


@cases.parametrize(("verl", "compute_reinforce_plus_plus_outcome_advantage"))
def test_reinforce_plus_plus(case: cases.Case) -> None:
    mask = case.given("mask")
    returns = kljax.reinforce_plus_plus_returns(
        case.given("token_level_rewards"), mask, gamma=case.params["gamma"], masked_tokens="skip"
    )
    case.assert_matches(returns, case.result("returns"))
    case.assert_matches(jnp.where(mask, epsilon.whiten(returns, mask), 0), case.result("advantages"))


@cases.parametrize(("verl", "compute_gae_advantage_return"))
def test_gae(case: cases.Case) -> None:
    # verl leaves numbers at masked positions (a whitened 0, a return equal to the carried value); here they are 0.
    mask, rewards, values = case.given("mask"), case.given("token_level_rewards"), case.given("values")
    advantages, returns = kljax.gae(rewards, values, mask, gamma=case.params["gamma"], lam=case.params["lam"])
    case.assert_matches(returns, jnp.where(mask, case.result("returns"), 0))
    whitened = jnp.where(mask, epsilon.whiten(advantages, mask), 0)
    case.assert_matches(whitened, jnp.where(mask, case.result("advantages"), 0))
    assert not advantages[~mask].any()


def test_groups_of_one_have_the_advantages_that_the_systems_give() -> None:
    # verl GRPO: r / (1 + 1e-6); verl RLOO, OPO and baseline: r; SkyRL RLOO: 0. slime's GRPO gives NaN.
    rewards, ids, alone = jnp.array([2.0]), jnp.array([0]), {"num_groups": 1, "singleton": "reward"}
    chex.assert_trees_all_close(kljax.grpo_advantages(rewards, ids, **alone), np.array([2 / (1 + 1e-6)]), rtol=1e-12)
    for estimator in (kljax.rloo_advantages, kljax.reinforce_plus_plus_baseline_advantages):
        chex.assert_trees_all_equal(estimator(rewards, ids, **alone), rewards)
        chex.assert_trees_all_equal(estimator(rewards, ids, num_groups=1), jnp.zeros(1))
    chex.assert_trees_all_equal(kljax.opo_advantages(rewards, ids, jnp.ones((1, 5), bool), **alone), rewards)
    chex.assert_trees_all_equal(kljax.grpo_advantages(rewards, ids, num_groups=1), jnp.zeros(1))
