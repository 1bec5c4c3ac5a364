"""Recorded cases that no call of the table describes: options that the library composes of several functions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import kljax
from tests.goldens import cases, compare, epsilon
from tests.goldens.cases import Case
from tests.goldens.compare import Reduction
from tests.kljax.systems.advantages import PAIRS
from tests.kljax.systems.metrics import KEY, trinity_clips

EPS = 1e-6
UNNAMED: list[tuple[Callable[[Case], None], Case]] = []


def unnamed(*functions: tuple[str, str], **params: Any) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Registers a comparison for the cases of the given (system, function) pairs that have these params."""

    def register(compare_case: Callable[[Case], None]) -> Callable[[Case], None]:
        chosen = [case for case in cases.all_cases() if (case.system, case.function) in functions]
        chosen = [case for case in chosen if all(case.params.get(name) == value for name, value in params.items())]
        assert {(case.system, case.function) for case in chosen} == set(functions)
        UNNAMED.extend((compare_case, case) for case in chosen)
        return compare_case

    return register


def assert_advantages(case: Case, advantages: jax.Array) -> None:
    """Compares advantages of rows or of tokens with each result of the case, which are one array in the systems."""
    mask = case.given("mask")
    tokens = kljax.broadcast_to_tokens(advantages, mask) if advantages.ndim == 1 else advantages
    for name in case.outputs:
        case.assert_matches(tokens, jnp.where(mask, case.result(name), 0))


@unnamed(("trinity", "MIXPolicyLossFn"), ("trinity", "MIXCHORDPolicyLossFn"))
def mixtures(case: Case) -> None:
    # Each part is a mean over its own tokens, times its number of rows; `mu` follows a schedule in CHORD.
    _, old, advantages, mask = compare.policy(case)
    params, expert = case.params, case.given("expert") > 0
    weight = "uncertainty" if params.get("enable_phi_function") else "none"
    step, mu = 5, params.get("mu", params.get("mu_peak"))
    if step < params.get("mu_warmup_steps", 0):
        mu = step / params["mu_warmup_steps"] * params["mu_peak"]

    def total(lp: jax.Array) -> jax.Array:
        clips = {**trinity_clips(case), "dual_clip": 3.0, "log_ratio_clip": 20.0}
        ppo = kljax.ppo_clip_loss(lp, old, advantages, mask, **clips)
        sft = kljax.cross_entropy_loss(lp, mask, weight=weight)
        reduction = compare.TRINITY[params["loss_agg_mode"]]
        usual, taught = (
            compare.reduced(loss, mask & rows[:, None], reduction) * rows.sum().astype(jnp.float64)
            for loss, rows in ((ppo, ~expert), (sft, expert))
        )
        return (1 - mu) * usual + mu * taught

    case.assert_value_and_grad(total, "log_probs")


def trajectories(case: Case, rewards: jax.Array, **options: Any) -> jax.Array:
    """GRPO over trajectories of two steps, one reward each."""
    prompts = case.given("prompt_ids")[::2]
    return kljax.grpo_advantages(rewards, prompts, num_groups=2, singleton="reward", eps=EPS, **options)


@unnamed(("trinity", "StepWiseGRPOAdvantageFn"), enable_step_norm=True)
def step_wise(case: Case) -> None:
    per_run = trajectories(case, case.given("rewards")[1::2], scale="batch_std")
    at_last = jnp.stack([jnp.zeros_like(per_run), per_run], axis=1).reshape(-1)
    steps = kljax.broadcast_to_steps(at_last, case.given("run_ids"), num_groups=3, divide_by_steps=True)
    assert case.params["std_cal_level"] == "batch"
    assert_advantages(case, steps)


@unnamed(("trinity", "GiGPOAdvantageFn"))
def gigpo(case: Case) -> None:
    # Trinity divides by 1 + eps where it does not divide by a standard deviation.
    params, by_run = case.params, case.given("rewards").reshape(3, 2)
    scale, divisor = ("std", 1.0) if params["fnorm"] == "std" else ("none", 1 + EPS)
    per_run = trajectories(case, by_run.sum(1), scale=scale) / divisor
    returns = kljax.reinforce_plus_plus_returns(by_run, jnp.ones((3, 2), bool), gamma=params["gamma"]).reshape(-1)
    states = kljax.grpo_advantages(returns, case.given("state_ids"), num_groups=3, scale=scale, eps=EPS) / divisor
    assert_advantages(case, jnp.repeat(per_run, 2) + params["omega"] * states)


@unnamed(
    ("verl", "compute_grpo_vectorized_outcome_advantage"),
    ("verl", "compute_grpo_passk_outcome_advantage"),
    ("verl", "compute_gdpo_outcome_advantage"),
    norm_adv_by_std_in_grpo=False,
)
def verl_without_std(case: Case) -> None:
    mask, name, groups = case.given("mask"), case.params["name"], {"num_groups": compare.NUM_GROUPS, "scale": "none"}
    ids = case.given("group_ids")
    if name == "gdpo":
        weights = jnp.array(case.params["gdpo_reward_weights"])
        rows = kljax.gdpo_advantages(
            case.given("reward_components"), ids, **groups, weights=weights, singleton="reward"
        )
        whitened = epsilon.whiten(kljax.broadcast_to_tokens(rows, mask), mask)
        assert_advantages(case, jnp.where(mask, whitened, 0))
        return
    rewards = kljax.masked_sum(case.given("outcome_rewards"), mask, axis=-1)
    if name == "grpo_passk":
        assert_advantages(case, kljax.pass_at_k_advantages(rewards, ids, **groups))
    else:
        assert_advantages(case, kljax.grpo_advantages(rewards, ids, **groups, singleton="reward"))


@unnamed(("verl", "compute_policy_loss_clip_cov"), clip_cov_ratio=0.05)
def clip_cov_of_a_part(case: Case) -> None:
    # Which of the candidates are dropped is a matter of chance; how many are is a metric of the case.
    log_probs, *rest = compare.policy(case)
    names = {"lower": "clip_cov_lb", "upper": "clip_cov_ub", "fraction": "clip_cov_ratio"}
    clips = compare.renamed(case, clip_low="clip_ratio_low", clip_high="clip_ratio_high")
    options = {**clips, **compare.renamed(case, **names)}
    there = kljax.ppo_clip_loss(log_probs, *rest, **clips) != 0
    dropped, candidates = (
        (kljax.clip_cov_loss(log_probs, *rest, KEY, **options) == 0) & there
        for options in (options, options | {"fraction": 1.0})
    )
    assert dropped.any()
    assert candidates[dropped].all()
    assert (candidates & ~dropped).any()


@unnamed(("skyrl", "ppo_critic_loss"), value_clip=None)
@unnamed(("openrlhf", "ValueLoss"), clip_eps=None)
def value_without_clip(case: Case) -> None:
    returns, mask = case.given("returns"), case.given("mask")
    reduction = compare.ROW_MEAN
    if case.system == "openrlhf":
        assert not case.params["token_level_loss"]
        reduction = Reduction({"mode": "seq_mean_token_mean", **compare.DROP}, "row")
    compare.assert_loss(case, lambda values: kljax.value_loss(values, None, returns, mask, clip=None), reduction)


@unnamed(("skyrl", "_normalize_advantages"))
def skyrl_normalization(case: Case) -> None:
    # What masked_whiten(ddof=0) would be, if its mean were not over the masked positions as well.
    mask, advantages = case.given("mask"), case.given("advantages")
    centred = advantages - advantages.mean()
    normalised = centred / jnp.sqrt(kljax.masked_mean(jnp.square(centred), mask))
    assert_advantages(case, normalised * kljax.token_weights(mask, mode="token_mean"))


@unnamed(("openrlhf", "compute_advantages_and_returns"), no_std_norm=True)
def gae_without_std(case: Case) -> None:
    mask, params = case.given("mask"), case.params
    clipped = jnp.clip(case.given("rewards"), *params["reward_clip_range"])
    shaped = kljax.subtract_kl(clipped, case.given("kl"), mask, coef=params["kl_coef"])
    options = {"gamma": params["gamma"], "lam": params["lambd"], "masked_tokens": "zero"}
    advantages, returns = kljax.gae(shaped, case.given("values"), mask, **options)
    centred = jnp.where(mask, advantages - kljax.masked_mean(advantages, mask), 0)
    for name, values in (("advantages", centred), ("returns", returns)):
        case.assert_matches(values, jnp.where(mask, case.result(name), 0))


@unnamed(("trl", "rloo_advantages"), normalize_advantages=True)
def trl_rloo_normalized(case: Case) -> None:
    assert not case.params["beta"]
    advantages = kljax.rloo_advantages(case.given("rewards"), **PAIRS)
    normalized = kljax.grpo_advantages(advantages, jnp.zeros(6, int), num_groups=1, eps=1e-4)
    case.assert_matches(normalized, case.result("advantages"))


@unnamed(("trl", "GMPOTrainer._compute_loss"), batch="empty_row")
def gmpo_with_an_empty_row(case: Case) -> None:
    # A row without a token has ratio exp(0) in TRL, and so the loss -A, without a gradient; here it has no loss.
    _, *rest = compare.policy(case)
    mask, beta = rest[-1], case.params["beta"]
    clips = compare.renamed(case, clip_low="epsilon", clip_high="epsilon_high")
    empty = jnp.where(mask.any(-1), 0, -case.given("row_advantages")).mean()

    def loss(lp: jax.Array) -> jax.Array:
        per_token = kljax.gmpo_loss(lp, *rest, **clips)
        if beta:
            per_token += beta * kljax.estimate_kl(lp, case.given("ref_log_probs"), mask)
        return compare.reduced(per_token, mask, compare.ROW_MEAN) + empty

    case.assert_value_and_grad(loss, "log_probs")


@unnamed(("art", "loss_fn"), mask_prob_ratio=True)
def art_mask_of_ratios(case: Case) -> None:
    # Tokens outside the bounds have ratio 0, which PPO's and CISPO's clips then raise to their lower bound.
    _, old, advantages, mask = compare.policy(case)
    low, high = case.params["epsilon"], case.params["epsilon_high"]

    def loss(lp: jax.Array) -> jax.Array:
        inside = kljax.rejection_mask(lp, old, mask, lower=1 - low, upper=1 + high)
        surrogate, lowest = kljax.cispo_loss, (1 - low) * kljax.reinforce_loss(lp, advantages, mask)
        if case.params["ppo"]:
            surrogate, lowest = kljax.ppo_clip_loss, jnp.maximum(-advantages * (1 - low), 0)
        return jnp.where(inside, surrogate(lp, old, advantages, mask & inside, clip_low=low, clip_high=high), lowest)

    compare.assert_loss(case, loss, Reduction({"mode": "token_mean"}, "batch", 1e-6))
