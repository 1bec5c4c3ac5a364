"""Advantage estimators of verl."""

from functools import partial

from kljax.systems._call import Call
from kljax.systems._entry import Entry, call, recorded

# Each entry is a paragraph: its name and call, its meaning, then the details; the formatter would make it a column.
# fmt: off
ROW_REWARDS = {"rewards": "token_level_rewards summed over a row", "group_ids": "uid"}
TOKEN_BASELINE = {
    "token_rewards": "token_level_rewards", "sum_squared_probs": "sum_pi_squared", "group_ids": "uid",
    "weights": "rollout_is_weights", "zero_tail": "handle_zero_tail"
}
WHITENED = "(v - mean) / sqrt(var + 1e-8) over the unmasked tokens of the batch, var with n - 1"
ALONE_KEEPS_REWARD = "a row alone in its group keeps its reward"
WHITEN = call("masked_whiten")

advantage = partial(Entry, "verl", "advantage", option="algorithm.adv_estimator", gradient="constant")

ENTRIES = (
    # Advantages. r is the reward of a row, mean and std are of its group.
    advantage("gae", Call("gae", {"gamma": 1.0, "lam": 1.0}, then=(WHITEN,)),
        "GAE over the unmasked tokens, then whitened; the returns are not",
        sources={"rewards": "token_level_rewards", "gamma": "algorithm.gamma", "lam": "algorithm.lam"},
        divisors=WHITENED, defaults="the default; gamma 1, lam 1",
        note="the only system whose recursion skips masked tokens", goldens=recorded("compute_gae_advantage_return")),
    advantage("grpo", call("grpo_advantages", scale="std", ddof=1, eps=1e-6, singleton="reward"),
        "(r - mean) / std", sources=ROW_REWARDS, divisors="std (n - 1) + 1e-6",
        note="a row alone in its group keeps its reward / (1 + 1e-6)",
        goldens=recorded("compute_grpo_outcome_advantage", norm_adv_by_std_in_grpo=True)),
    advantage("grpo+norm_adv_by_std_in_grpo=false", call("grpo_advantages", scale="none", singleton="reward"),
        "r - mean: Dr.GRPO", option="algorithm.adv_estimator grpo, algorithm.norm_adv_by_std_in_grpo false",
        sources=ROW_REWARDS, note=ALONE_KEEPS_REWARD,
        goldens=recorded("compute_grpo_outcome_advantage", norm_adv_by_std_in_grpo=False)),
    advantage("grpo_vectorized", call("grpo_advantages", scale="std", ddof=1, eps=1e-6, singleton="reward"),
        "(r - mean) / std, without a loop", sources=ROW_REWARDS, divisors="std (n - 1) + 1e-6",
        note="before 0.9 the variance was at least 1e-6",
        goldens=recorded("compute_grpo_vectorized_outcome_advantage", norm_adv_by_std_in_grpo=True)),
    advantage("gdpo",
        Call("gdpo_advantages", {"scale": "std", "ddof": 1, "eps": 1e-6, "singleton": "reward"},
            then=(call("broadcast_to_tokens"), WHITEN)),
        "the weighted sum of the GRPO advantages of each reward, then whitened",
        sources={"rewards": "gdpo_reward_keys, [B, K]", "weights": "gdpo_reward_weights", "group_ids": "uid"},
        divisors="std (n - 1) + 1e-6; then (v - mean) / sqrt(var + 1e-8) over the unmasked tokens of the batch, var "
        "with n - 1", goldens=recorded("compute_gdpo_outcome_advantage", norm_adv_by_std_in_grpo=True)),
    advantage("grpo_passk", call("pass_at_k_advantages", scale="std", ddof=1, eps=1e-6),
        "the best row of a group gets (highest r - second highest r) / std, the others 0", sources=ROW_REWARDS,
        divisors="std (n - 1) + 1e-6", note="verl raises for a group of one",
        goldens=recorded("compute_grpo_passk_outcome_advantage", norm_adv_by_std_in_grpo=True)),
    advantage("reinforce_plus_plus_baseline",
        Call("reinforce_plus_plus_baseline_advantages", {"singleton": "reward"}, then=(call("broadcast_to_tokens"),
            WHITEN)),
        "r - mean, then whitened", sources=ROW_REWARDS, divisors=WHITENED, note=ALONE_KEEPS_REWARD,
        goldens=recorded("compute_reinforce_plus_plus_baseline_outcome_advantage")),
    advantage("reinforce_plus_plus",
        Call("reinforce_plus_plus_returns", {"gamma": 1.0, "masked_tokens": "skip"}, then=(WHITEN,)),
        "discounted returns, then whitened",
        sources={"token_rewards": "token_level_rewards", "gamma": "algorithm.gamma"}, divisors=WHITENED,
        note="masked tokens are skipped; before 0.9 they cut the row, as in SkyRL",
        goldens=recorded("compute_reinforce_plus_plus_outcome_advantage")),
    advantage("remax", call("remax_advantages"),
        "rewards to go - the reward of the greedy completion",
        sources={"token_rewards": "token_level_rewards", "baselines": "reward_baselines"},
        goldens=recorded("compute_remax_outcome_advantage")),
    advantage("rloo", call("rloo_advantages", singleton="reward"),
        "r - mean of the others = n / (n - 1) (r - mean)", sources=ROW_REWARDS, divisors="n - 1",
        note=ALONE_KEEPS_REWARD, goldens=recorded("compute_rloo_outcome_advantage")),
    advantage("rloo_vectorized", call("rloo_advantages", singleton="zero"),
        "r - mean of the others, without a loop", sources=ROW_REWARDS, divisors="n - 1",
        note="a row alone in its group gets 0, unlike in rloo",
        goldens=recorded("compute_rloo_vectorized_outcome_advantage")),
    advantage("opo", call("opo_advantages", singleton="reward"),
        "r - mean weighted by length", sources=ROW_REWARDS | {"mask": "tokens of each row"},
        divisors="tokens of the group", note=ALONE_KEEPS_REWARD, goldens=recorded("compute_opo_outcome_advantage")),
    advantage("gpg", call("gpg_advantages", singleton="reward"),
        "alpha (r - mean) with alpha = rows / rows of reward other than 0, over the batch", sources=ROW_REWARDS,
        divisors="max(rows of reward other than 0, 1)", note=ALONE_KEEPS_REWARD,
        goldens=recorded("compute_gpg_outcome_advantage")),
    advantage("optimal_token_baseline",
        call("otb_advantages", align="position", zero_tail=True, eps=1e-8, singleton="reward"),
        "rewards to go - their mean over the rows of the group at the same position, weighted by the norm of the "
        "score so far", sources=TOKEN_BASELINE, divisors="sum of the weights + 1e-8", note=ALONE_KEEPS_REWARD,
        goldens=recorded("compute_optimal_token_baseline_advantage")),
    advantage("tir_optimal_token_baseline",
        call("otb_advantages", align="token", zero_tail=True, eps=1e-8, singleton="reward"),
        "rewards to go - their mean over the rows of the group at their n-th unmasked token, weighted by the norm of "
        "the score so far", sources=TOKEN_BASELINE, divisors="sum of the weights + 1e-8", note=ALONE_KEEPS_REWARD,
        goldens=recorded("compute_multi_turn_optimal_token_baseline_advantage")),
)
