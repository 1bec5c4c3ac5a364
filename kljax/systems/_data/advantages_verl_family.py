"""Advantage estimators of verl and SkyRL. `r` is the reward of a row, `mean` and `std` are of its group."""

from functools import partial

from kljax.systems._row import Call, Golden, Row, on

TO_TOKENS, WHITEN = Call("broadcast_to_tokens"), Call("masked_whiten")
ROW_REWARDS = {"rewards": "token_level_rewards summed over a row", "group_ids": "uid"}
STD = "std (n - 1) + 1e-6"
WHITENED = "(v - mean) / sqrt(var + 1e-8) over the unmasked tokens of the batch, var with n - 1"
ALONE_REWARD = "a row alone in its group keeps its reward"
ALONE_ZERO = "a row alone in its group gets 0"


def _grpo(scale: str = "std", singleton: str = "reward", **more: float) -> Call:
    return Call("grpo_advantages", {"scale": scale, "ddof": 1, "eps": 1e-6, "singleton": singleton, **more})


GRPO, CENTERED = _grpo(), Call("grpo_advantages", {"scale": "none", "singleton": "reward"})
RLOO = Call("rloo_advantages", {"singleton": "reward"})
REMAX = Call("remax_advantages")

verl = partial(Row, "verl", "advantage", option="algorithm.adv_estimator", gradient="data")


def _recorded(name: str, **params: object) -> tuple[Golden, ...]:
    return (on(f"compute_{name}_outcome_advantage", **params),)


def _otb(name: str, align: str, function: str) -> Row:
    tokens = "the same position" if align == "position" else "their n-th unmasked token"
    return verl(
        name,
        Call("otb_advantages", {"align": align, "zero_tail": True, "eps": 1e-8, "singleton": "reward"}),
        f"rewards to go - their mean over the rows of the group at {tokens}, weighted by the norm of the score so far",
        given={
            "token_rewards": "token_level_rewards",
            "sum_squared_probs": "sum_pi_squared",
            "group_ids": "uid",
            "weights": "rollout_is_weights",
            "zero_tail": "handle_zero_tail",
        },
        divisors="sum of the weights + 1e-8",
        note=ALONE_REWARD,
        goldens=(on(function),),
    )


VERL = (
    verl(
        "gae",
        Call("gae", {"gamma": 1.0, "lam": 1.0}, then=(WHITEN,)),
        "GAE over the unmasked tokens, then whitened; the returns are not",
        given={"rewards": "token_level_rewards", "gamma": "algorithm.gamma", "lam": "algorithm.lam"},
        divisors=WHITENED,
        defaults="the default; gamma 1, lam 1",
        note="the only system whose recursion skips masked tokens",
        goldens=(on("compute_gae_advantage_return"),),
    ),
    verl(
        "grpo",
        GRPO,
        "(r - mean) / std",
        given=ROW_REWARDS,
        divisors=STD,
        note=f"{ALONE_REWARD} / (1 + 1e-6)",
        goldens=_recorded("grpo", norm_adv_by_std_in_grpo=True),
    ),
    verl(
        "grpo+norm_adv_by_std_in_grpo=false",
        CENTERED,
        "r - mean: Dr.GRPO",
        option="algorithm.adv_estimator grpo, algorithm.norm_adv_by_std_in_grpo false",
        given=ROW_REWARDS,
        note=ALONE_REWARD,
        goldens=_recorded("grpo", norm_adv_by_std_in_grpo=False),
    ),
    verl(
        "grpo_vectorized",
        GRPO,
        "(r - mean) / std, without a loop",
        given=ROW_REWARDS,
        divisors=STD,
        note="before 0.9 the variance was at least 1e-6",
        goldens=_recorded("grpo_vectorized", norm_adv_by_std_in_grpo=True),
    ),
    verl(
        "gdpo",
        Call(
            "gdpo_advantages",
            {"scale": "std", "ddof": 1, "eps": 1e-6, "singleton": "reward"},
            then=(TO_TOKENS, WHITEN),
        ),
        "the weighted sum of the GRPO advantages of each reward, then whitened",
        given={"rewards": "gdpo_reward_keys, [B, K]", "weights": "gdpo_reward_weights", "group_ids": "uid"},
        divisors=f"{STD}; then {WHITENED}",
        goldens=_recorded("gdpo", norm_adv_by_std_in_grpo=True),
    ),
    verl(
        "grpo_passk",
        Call("pass_at_k_advantages", {"scale": "std", "ddof": 1, "eps": 1e-6}),
        "the best row of a group gets (highest r - second highest r) / std, the others 0",
        given=ROW_REWARDS,
        divisors=STD,
        note="verl raises for a group of one",
        goldens=_recorded("grpo_passk", norm_adv_by_std_in_grpo=True),
    ),
    verl(
        "reinforce_plus_plus_baseline",
        Call("reinforce_plus_plus_baseline_advantages", {"singleton": "reward"}, then=(TO_TOKENS, WHITEN)),
        "r - mean, then whitened",
        given=ROW_REWARDS,
        divisors=WHITENED,
        note=ALONE_REWARD,
        goldens=_recorded("reinforce_plus_plus_baseline"),
    ),
    verl(
        "reinforce_plus_plus",
        Call("reinforce_plus_plus_returns", {"gamma": 1.0, "masked_tokens": "carry"}, then=(WHITEN,)),
        "discounted returns, then whitened",
        given={"token_rewards": "token_level_rewards", "gamma": "algorithm.gamma"},
        divisors=WHITENED,
        note="masked tokens are skipped; before 0.9 they cut the row, as in SkyRL",
        goldens=_recorded("reinforce_plus_plus"),
    ),
    verl(
        "remax",
        REMAX,
        "rewards to go - the reward of the greedy completion",
        given={"token_rewards": "token_level_rewards", "baselines": "reward_baselines"},
        goldens=_recorded("remax"),
    ),
    verl(
        "rloo",
        RLOO,
        "r - mean of the others = n / (n - 1) (r - mean)",
        given=ROW_REWARDS,
        divisors="n - 1",
        note=ALONE_REWARD,
        goldens=_recorded("rloo"),
    ),
    verl(
        "rloo_vectorized",
        Call("rloo_advantages", {"singleton": "zero"}),
        "r - mean of the others, without a loop",
        given=ROW_REWARDS,
        divisors="n - 1",
        note=f"{ALONE_ZERO}, unlike in rloo",
        goldens=_recorded("rloo_vectorized"),
    ),
    verl(
        "opo",
        Call("opo_advantages", {"singleton": "reward"}),
        "r - mean weighted by length",
        given=ROW_REWARDS | {"lengths": "tokens of each row"},
        divisors="tokens of the group",
        note=ALONE_REWARD,
        goldens=_recorded("opo"),
    ),
    verl(
        "gpg",
        Call("gpg_advantages", {"singleton": "reward"}),
        "alpha (r - mean) with alpha = rows / rows of reward other than 0, over the batch",
        given=ROW_REWARDS,
        divisors="max(rows of reward other than 0, 1)",
        note=ALONE_REWARD,
        goldens=_recorded("gpg"),
    ),
    _otb("optimal_token_baseline", "position", "compute_optimal_token_baseline_advantage"),
    _otb("tir_optimal_token_baseline", "token", "compute_multi_turn_optimal_token_baseline_advantage"),
)

skyrl = partial(
    Row, "skyrl", "advantage", option="trainer.algorithm.advantage_estimator", gradient="data", defaults="grpo"
)
SKYRL = (
    skyrl(
        "gae",
        Call("gae", {"gamma": 1.0, "lam": 1.0, "masked_tokens": "none"}, then=(WHITEN,)),
        "GAE over all tokens, then whitened",
        given={"rewards": "token_level_rewards", "gamma": "trainer.algorithm.gamma", "lam": "trainer.algorithm.lambd"},
        divisors=WHITENED,
        note="values and rewards under the mask enter the recursion as they are",
        goldens=(on("compute_gae_advantage_return"),),
    ),
    skyrl(
        "grpo",
        GRPO,
        "(r - mean) / std",
        given=ROW_REWARDS,
        divisors=STD,
        note=f"{ALONE_REWARD} / (1 + 1e-6)",
        goldens=_recorded("grpo", grpo_norm_by_std=True),
    ),
    skyrl(
        "grpo+grpo_norm_by_std=false",
        CENTERED,
        "r - mean: Dr.GRPO",
        option="trainer.algorithm.advantage_estimator grpo, grpo_norm_by_std false",
        given=ROW_REWARDS,
        note=ALONE_REWARD,
        goldens=_recorded("grpo", grpo_norm_by_std=False),
    ),
    skyrl(
        "rloo",
        Call("rloo_advantages", {"singleton": "zero"}),
        "r - mean of the others",
        given=ROW_REWARDS,
        divisors="n - 1",
        note=f"{ALONE_ZERO}; in verl and Trinity it keeps its reward",
        goldens=_recorded("rloo"),
    ),
    skyrl(
        "reinforce++",
        Call("reinforce_plus_plus_returns", {"gamma": 1.0, "masked_tokens": "reset"}, then=(WHITEN,)),
        "discounted returns, then whitened",
        given={"token_rewards": "token_level_rewards", "gamma": "trainer.algorithm.gamma"},
        divisors=WHITENED,
        note="a masked token cuts the row: credit from behind a tool's output does not reach the tokens before it",
        goldens=_recorded("reinforce_plus_plus"),
    ),
    skyrl(
        "maxrl",
        Call("grpo_advantages", {"scale": "mean", "eps": 1e-6, "singleton": "reward"}),
        "(r - mean) / mean",
        given=ROW_REWARDS,
        divisors="mean + 1e-6",
        note=f"a negative mean turns the sign; prime-rl's max_rl gives 0 there. {ALONE_REWARD}",
        goldens=(on("compute_maxrl_advantage"),),
    ),
    skyrl(
        "advantage_batch_normalize",
        None,
        "(A - mean) / std after the estimator",
        option="trainer.algorithm.advantage_batch_normalize",
        divisors="mean over all positions, padding included; std over unmasked tokens, var at least 1e-8, n not n - 1",
        defaults="off",
        goldens=(on("_normalize_advantages"),),
        reason="its mean depends on the padding; masked_whiten(A, mask, ddof=0) is what it means to be",
    ),
)

ROWS = (*VERL, *SKYRL)
