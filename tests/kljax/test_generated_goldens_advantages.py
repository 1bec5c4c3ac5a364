"""Advantage estimators of verl, Trinity-RFT, SkyRL, OpenRLHF and TRL against their recorded results.

Where a test is thorough, `test_systems` compares the same results with the calls of the table.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import kljax
from tests.goldens import cases, compare, epsilon
from tests.goldens.cases import GENERATED

EPS = 1e-6


def groups(case: cases.Case, **options: Any) -> dict[str, Any]:
    """The groups of a case; a row alone keeps its reward, as in verl and Trinity."""
    return {"group_ids": case.given("group_ids"), "num_groups": compare.NUM_GROUPS, "singleton": "reward", **options}


def outcome(case: cases.Case) -> jax.Array:
    """The reward of each row, however the system was given it."""
    if "rewards" in case.inputs:
        return case.given("rewards")
    return kljax.masked_sum(case.given("outcome_rewards"), case.given("mask"), axis=-1)


def grpo(case: cases.Case) -> jax.Array:
    """GRPO under the options of verl, SkyRL and Trinity."""
    params = case.params
    by_std = params.get("norm_adv_by_std_in_grpo", params.get("grpo_norm_by_std", True))
    scale = {"group": "std", "batch": "batch_std"}[params.get("std_cal_level", "group")] if by_std else "none"
    return kljax.grpo_advantages(outcome(case), **groups(case), scale=scale, eps=EPS)


def rloo(case: cases.Case, singleton: str = "reward") -> jax.Array:
    return kljax.rloo_advantages(outcome(case), **groups(case, singleton=singleton))


def opo(case: cases.Case) -> jax.Array:
    return kljax.opo_advantages(outcome(case), mask=case.given("mask"), **groups(case))


def pass_at_k(case: cases.Case) -> jax.Array:
    arguments = groups(case)
    del arguments["singleton"]
    scale = "std" if case.params["norm_adv_by_std_in_grpo"] else "none"
    return kljax.pass_at_k_advantages(outcome(case), **arguments, scale=scale, eps=EPS)


def maxrl(case: cases.Case) -> jax.Array:
    return kljax.grpo_advantages(outcome(case), **groups(case), scale="mean", eps=EPS)


def opmd(case: cases.Case) -> jax.Array:
    options = compare.renamed(case, baseline="opmd_baseline", tau="tau")
    return kljax.opmd_advantages(outcome(case), **groups(case), **options)


def asymre(case: cases.Case) -> jax.Array:
    return kljax.asymre_advantages(outcome(case), **groups(case), shift=case.params["baseline_shift"])


def rec(case: cases.Case) -> jax.Array:
    scale = "std" if case.params["std_normalize"] else "none"
    return kljax.grpo_advantages(outcome(case), **groups(case), scale=scale, ddof=0, eps=EPS)


def gpg(case: cases.Case) -> jax.Array:
    return kljax.gpg_advantages(outcome(case), **groups(case))


ROWS: dict[tuple[str, str], Callable[[cases.Case], jax.Array]] = {
    ("verl", "compute_grpo_outcome_advantage"): grpo,
    ("verl", "compute_grpo_vectorized_outcome_advantage"): grpo,
    ("verl", "compute_grpo_passk_outcome_advantage"): pass_at_k,
    ("verl", "compute_rloo_outcome_advantage"): rloo,
    ("verl", "compute_rloo_vectorized_outcome_advantage"): lambda case: rloo(case, "zero"),
    ("verl", "compute_opo_outcome_advantage"): opo,
    ("verl", "compute_gpg_outcome_advantage"): gpg,
    ("skyrl", "compute_grpo_outcome_advantage"): grpo,
    ("skyrl", "compute_rloo_outcome_advantage"): lambda case: rloo(case, "zero"),
    ("skyrl", "compute_maxrl_advantage"): maxrl,
    ("trinity", "GRPOAdvantageFn"): grpo,
    ("trinity", "GRPOGroupedAdvantage"): grpo,
    ("trinity", "RLOOAdvantageFn"): rloo,
    ("trinity", "OPMDAdvantageFn"): opmd,
    ("trinity", "OPMDGroupAdvantage"): opmd,
    ("trinity", "ASYMREAdvantageFn"): asymre,
    ("trinity", "ASYMREGroupAdvantage"): asymre,
    ("trinity", "RECGroupedAdvantage"): rec,
    ("trinity", "REINFORCEGroupAdvantage"): outcome,
}


@cases.parametrize(*ROWS, file=GENERATED)
def test_advantages_of_rows(case: cases.Case) -> None:
    per_token = kljax.broadcast_to_tokens(ROWS[case.system, case.function](case), case.given("mask"))
    case.assert_outputs(**dict.fromkeys(case.outputs, per_token))  # the systems' returns are the same array


@cases.parametrize(("trinity", "ClipBAdvantageFn"), ("trinity", "ClipVAdvantageFn"), file=GENERATED)
def test_advantages_with_a_filter_of_tokens(case: cases.Case) -> None:
    mask, params = case.given("mask"), case.params
    per_token = kljax.broadcast_to_tokens(grpo(case), mask)
    arrays = per_token, case.given("log_probs"), case.given("entropies")
    if params["name"] == "clipb":
        kept = kljax.clip_b_mask(*arrays, mask, mu=params["mu"])
    else:
        kept = kljax.clip_v_mask(*arrays, case.given("necs"), mask, mu=params["mu"], max_fraction=params["max_frac"])
    assert (mask & ~kept).any()
    case.assert_outputs(advantages=per_token, returns=per_token, kept=mask & kept)


@cases.parametrize(("verl", "compute_reinforce_plus_plus_baseline_outcome_advantage"), file=GENERATED)
def test_reinforce_plus_plus_baseline(case: cases.Case) -> None:
    mask = case.given("mask")
    centred = kljax.reinforce_plus_plus_baseline_advantages(outcome(case), **groups(case))
    whitened = jnp.where(mask, epsilon.whiten(kljax.broadcast_to_tokens(centred, mask), mask), 0)
    case.assert_outputs(advantages=whitened, returns=whitened)


@cases.parametrize(("verl", "compute_gdpo_outcome_advantage"), file=GENERATED)
def test_gdpo(case: cases.Case) -> None:
    mask, weights = case.given("mask"), case.params["gdpo_reward_weights"]
    scale = "std" if case.params["norm_adv_by_std_in_grpo"] else "none"
    options = {} if weights is None else {"weights": jnp.array(weights)}
    rows = kljax.gdpo_advantages(case.given("reward_components"), **groups(case), **options, scale=scale, eps=EPS)
    whitened = jnp.where(mask, epsilon.whiten(kljax.broadcast_to_tokens(rows, mask), mask), 0)
    case.assert_outputs(advantages=whitened, returns=whitened)


@cases.parametrize(("verl", "compute_remax_outcome_advantage"), ("trinity", "REMAXAdvantageFn"), file=GENERATED)
def test_remax(case: cases.Case) -> None:
    # The systems leave the return at a masked token between others; here it is 0.
    mask = case.given("mask")
    advantages, returns = kljax.remax_advantages(case.given("outcome_rewards"), case.given("baselines"), mask)
    assert set(case.outputs) == {"advantages", "returns"}
    case.assert_matches(advantages, jnp.where(mask, case.result("advantages"), 0))
    case.assert_matches(returns, jnp.where(mask, case.result("returns"), 0))


@pytest.mark.thorough
@cases.parametrize(
    ("verl", "compute_optimal_token_baseline_advantage"),
    ("verl", "compute_multi_turn_optimal_token_baseline_advantage"),
    file=GENERATED,
)
def test_optimal_token_baseline(case: cases.Case) -> None:
    # The returns at masked positions, which verl leaves, are 0 here.
    mask = case.given("mask")
    names = ("outcome_rewards", "old_log_probs", "sum_squared_probs", "mask")
    options = {
        "align": "token" if "multi_turn" in case.function else "position",
        "zero_tail": case.params["handle_zero_tail"],
        "weights": case.given("is_weights") if case.params["weights"] else None,
        "eps": 1e-8,
    }
    advantages, returns = kljax.otb_advantages(*(case.given(name) for name in names), **groups(case), **options)
    assert set(case.outputs) == {"advantages", "returns"}
    case.assert_matches(advantages, case.result("advantages"))
    case.assert_matches(returns, jnp.where(mask, case.result("returns"), 0))


def whitened(case: cases.Case, advantages: jax.Array) -> jax.Array:
    """As the system whitens: verl and Trinity with an epsilon in the mean too, SkyRL only in the variance."""
    mask = case.given("mask")
    if case.system == "skyrl":
        return kljax.masked_whiten(advantages, mask, eps=epsilon.EPS)
    return jnp.where(mask, epsilon.whiten(advantages, mask), 0)


@pytest.mark.thorough
@cases.parametrize(
    ("verl", "compute_gae_advantage_return"),
    ("skyrl", "compute_gae_advantage_return"),
    ("trinity", "PPOAdvantageFn"),
    ("openrlhf", "get_advantages_and_returns"),
    file=GENERATED,
)
def test_gae(case: cases.Case) -> None:
    mask, params = case.given("mask"), case.params
    rule = {"verl": "skip", "openrlhf": "zero"}.get(case.system, "none")
    lam = next(params[name] for name in ("lam", "lambd") if name in params)
    arrays = case.given("token_rewards"), case.given("values"), mask
    advantages, returns = kljax.gae(*arrays, gamma=params["gamma"], lam=lam, masked_tokens=rule)
    if case.system != "openrlhf":
        advantages = whitened(case, advantages)
    assert set(case.outputs) == {"advantages", "returns"}
    case.assert_matches(advantages, jnp.where(mask, case.result("advantages"), 0))
    case.assert_matches(returns, jnp.where(mask, case.result("returns"), 0))


@pytest.mark.thorough
@cases.parametrize(
    ("verl", "compute_reinforce_plus_plus_outcome_advantage"),
    ("skyrl", "compute_reinforce_plus_plus_outcome_advantage"),
    ("trinity", "REINFORCEPLUSPLUSAdvantageFn"),
    ("openrlhf", "get_cumulative_returns"),
    file=GENERATED,
)
def test_reinforce_plus_plus(case: cases.Case) -> None:
    mask, rule = case.given("mask"), {"verl": "skip", "skyrl": "reset"}.get(case.system, "zero")
    gamma = case.params["gamma"]
    returns = kljax.reinforce_plus_plus_returns(case.given("token_rewards"), mask, gamma=gamma, masked_tokens=rule)
    expected = {"returns": returns}
    if case.system != "openrlhf":
        expected["advantages"] = whitened(case, returns)
    assert set(case.outputs) == set(expected)
    for name, array in expected.items():
        case.assert_matches(array, jnp.where(mask, case.result(name), 0))


@cases.parametrize(("skyrl", "_normalize_advantages"), file=GENERATED)
def test_skyrl_normalises_with_the_mean_of_the_padding_too(case: cases.Case) -> None:
    # What masked_whiten(ddof=0) would be, if its mean were not over the masked positions as well.
    mask, advantages = case.given("mask"), case.given("advantages")
    centred = advantages - advantages.mean()
    normalised = centred / jnp.sqrt(kljax.masked_mean(jnp.square(centred), mask))
    weights = kljax.token_weights(mask, mode="token_mean")
    assert case.outputs == ("advantages",)
    case.assert_matches(normalised * weights, jnp.where(mask, case.result("advantages"), 0))


@cases.parametrize(("openrlhf", "compute_advantages_and_returns"), file=GENERATED)
def test_openrlhf_from_rewards_to_advantages(case: cases.Case) -> None:
    # Baseline of the group, clip of the reward, KL in the reward, returns, whitening by the population's variance.
    mask, params, kl, rewards = case.given("mask"), case.params, case.given("kl"), case.given("rewards")
    name, pairs = params["name"], {"group_ids": jnp.array([0, 0, 1, 1, 2, 2]), "num_groups": 3}
    if name == "rloo":
        rewards = kljax.rloo_advantages(rewards, **pairs)
    elif name in ("reinforce_baseline", "dr_grpo"):
        rewards = kljax.grpo_advantages(rewards, **pairs, scale="none")
    elif name == "group_norm":
        rewards = kljax.grpo_advantages(rewards, **pairs, eps=1e-9)
    elif name == "flash_reinforce":
        rewards = kljax.grpo_advantages(rewards, jnp.zeros(6, int), num_groups=1, scale="none")
    clipped = jnp.clip(rewards, *params["reward_clip_range"])
    shaped = kljax.subtract_kl(clipped, kl, mask, coef=params["kl_coef"])
    gamma = params.get("gamma", 1.0)
    if name == "gae":
        options = {"gamma": gamma, "lam": params["lambd"], "masked_tokens": "zero"}
        advantages, returns = kljax.gae(shaped, case.given("values"), mask, **options)
    else:
        advantages = returns = kljax.reinforce_plus_plus_returns(shaped, mask, gamma=gamma, masked_tokens="zero")
    if params.get("no_std_norm"):
        advantages = jnp.where(mask, advantages - kljax.masked_mean(advantages, mask), 0)
    elif name in ("gae", "reinforce", "reinforce_baseline"):
        advantages = kljax.masked_whiten(advantages, mask, ddof=0, eps=0.0)
    assert set(case.outputs) == {"advantages", "returns"}
    case.assert_matches(advantages, jnp.where(mask, case.result("advantages"), 0))
    case.assert_matches(returns, jnp.where(mask, case.result("returns"), 0))


@cases.parametrize(("trl", "advantages"), file=GENERATED)
def test_trl(case: cases.Case) -> None:
    params, pairs = case.params, {"group_ids": jnp.array([0, 0, 1, 1, 2, 2]), "num_groups": 3, "eps": 1e-4}
    components = next((case.given(name) for name in case.inputs if name.endswith("components")), None)
    if components is not None:
        there = ~jnp.isnan(components)
    if params["multi_objective_aggregation"] == "normalize_then_sum":
        options = {"weights": jnp.array(params["reward_weights"]), "valid": there, "normalize": "rows"}
        case.assert_outputs(advantages=kljax.gdpo_advantages(components, **pairs, **options))
        return
    scale = {"group": "std", "batch": "batch_std", "none": "none"}[params["scale_rewards"]]
    if components is None:
        rewards, valid = case.given("rewards"), None
    else:
        # A row counts if any of its rewards is there; those that are not add nothing.
        rewards, valid = jnp.where(there, components, 0).sum(-1), there.any(-1)
    case.assert_outputs(advantages=kljax.grpo_advantages(rewards, **pairs, scale=scale, valid=valid))


@cases.parametrize(("trl", "rloo_advantages"), file=GENERATED)
def test_trl_rloo(case: cases.Case) -> None:
    # The KL of a whole row is part of its reward, before the leave-one-out baseline.
    rewards, params = case.given("rewards"), case.params
    if params["beta"]:
        mask, old, ref = (case.given(name) for name in ("mask", "old_log_probs", "ref_log_probs"))
        rewards = rewards - params["beta"] * kljax.masked_sum(kljax.k1(old, ref), mask, axis=-1)
    advantages = kljax.rloo_advantages(rewards, jnp.array([0, 0, 1, 1, 2, 2]), num_groups=3)
    if params["normalize_advantages"]:
        advantages = kljax.grpo_advantages(advantages, jnp.zeros(6, int), num_groups=1, eps=1e-4)
    case.assert_outputs(advantages=advantages)


def trajectories(case: cases.Case, rewards: jax.Array, **options: Any) -> jax.Array:
    """GRPO over trajectories of two steps, one reward each, given to both steps."""
    prompts = case.given("prompt_ids")[::2]
    return kljax.grpo_advantages(rewards, prompts, num_groups=2, singleton="reward", eps=EPS, **options)


@cases.parametrize(("trinity", "StepWiseGRPOAdvantageFn"), file=GENERATED)
def test_step_wise_grpo(case: cases.Case) -> None:
    scale = {"group": "std", "batch": "batch_std"}[case.params["std_cal_level"]]
    per_run = trajectories(case, case.given("rewards")[1::2], scale=scale)
    at_last = jnp.stack([jnp.zeros_like(per_run), per_run], axis=1).reshape(-1)
    divide = case.params.get("enable_step_norm", False)
    steps = kljax.broadcast_to_steps(at_last, case.given("run_ids"), num_groups=3, divide_by_steps=divide)
    case.assert_outputs(advantages=kljax.broadcast_to_tokens(steps, case.given("mask")))


@cases.parametrize(("trinity", "GiGPOAdvantageFn"), file=GENERATED)
def test_gigpo(case: cases.Case) -> None:
    # Trinity divides by 1 + eps where it does not divide by a standard deviation.
    params, by_run = case.params, case.given("rewards").reshape(3, 2)
    scale, divisor = ("std", 1.0) if params["fnorm"] == "std" else ("none", 1 + EPS)
    per_run = trajectories(case, by_run.sum(1), scale=scale) / (1.0 if scale == "std" else divisor)
    returns = kljax.reinforce_plus_plus_returns(by_run, jnp.ones((3, 2), bool), gamma=params["gamma"]).reshape(-1)
    states = kljax.grpo_advantages(returns, case.given("state_ids"), num_groups=3, scale=scale, eps=EPS) / divisor
    rows = jnp.repeat(per_run, 2) + params["omega"] * states
    case.assert_outputs(advantages=kljax.broadcast_to_tokens(rows, case.given("mask")))


@cases.parametrize(("trinity", "OnPolicyDistillAdvantage"), file=GENERATED)
def test_on_policy_distillation(case: cases.Case) -> None:
    old, teacher, mask = (case.given(name) for name in ("old_log_probs", "teacher_log_probs", "mask"))
    coef = case.params["kl_coef"]
    advantages = kljax.distillation_advantages(jnp.zeros_like(old), old, teacher, mask, coef=coef)
    case.assert_outputs(advantages=advantages, returns=advantages)


@pytest.mark.thorough
@cases.parametrize(("trinity", "JSDAdvantage"), file=GENERATED)
def test_jsd_of_sampled_tokens(case: cases.Case) -> None:
    temperature = case.params.get("temperature", 1.0)
    old, teacher = (case.given(name) / temperature for name in ("old_log_probs", "teacher_log_probs"))
    options = {"beta": case.params["lambda_coef"], "coef": case.params.get("kl_coef", 1.0)}
    advantages = kljax.jsd_advantages(old, teacher, case.given("mask"), **options)
    case.assert_outputs(advantages=advantages, returns=advantages)
