"""Advantage estimators of slime, OpenRLHF, TRL, ART and prime-rl. `r` is the reward of a row."""

from functools import partial

from kljax.systems._data.advantages_verl_family import TO_TOKENS
from kljax.systems._row import Call, Row, on

WHITEN = Call("masked_whiten")
NO_PYPI = "slime is not on PyPI and its recorded cases do not hold this one"

slime = partial(Row, "slime", "advantage", option="--advantage-estimator", gradient="data")
SLIME_GRPO = Call("grpo_advantages", {"scale": "std", "ddof": 1, "eps": 1e-6})
GROUPS = {"rewards": "raw reward", "group_ids": "i // n_samples_per_prompt"}
SLIME = (
    *(
        slime(
            name,
            SLIME_GRPO,
            "(r - mean) / std, done with the rewards after the rollout",
            given=GROUPS,
            divisors="std (n - 1) + 1e-6; none with --disable-grpo-std-normalization",
            defaults="the default" if name == "grpo" else "",
            note="NaN there for a group of one, 0 here; one group for the whole batch where samples are missing; "
            f"kl_coef has no effect{'' if name == 'grpo' else f'; the {name} policy loss'}",
            reason=NO_PYPI,
        )
        for name in ("grpo", "gspo", "cispo")
    ),
    slime(
        "ppo",
        Call("gae", {"gamma": 1.0, "lam": 1.0, "masked_tokens": "skip"}),
        "GAE over the response, of rewards with the KL subtracted",
        given={
            "mask": "the positions of the response, not the loss mask",
            "rewards": "see the placement kl_coef",
            "gamma": "--gamma",
            "lam": "--lambd",
        },
        divisors="none; whitened with --normalize-advantages",
        note="knows no loss mask: tool outputs count like tokens, and the reward lands on the last position",
        goldens=(on("ppo_kl_shaped_gae"),),
    ),
    slime(
        "reinforce_plus_plus",
        Call("reinforce_plus_plus_returns", {"gamma": 1.0, "masked_tokens": "none"}),
        "discounted returns of rewards with the KL subtracted",
        given={"token_rewards": "see the placement kl_coef", "gamma": "--gamma"},
        divisors="none; --normalize-advantages is required with it",
        note="a row without a token raises there",
        goldens=(on("get_reinforce_plus_plus_returns"),),
    ),
    slime(
        "reinforce_plus_plus_baseline",
        Call("reinforce_plus_plus_baseline_advantages", then=(TO_TOKENS,)),
        "r - mean, then - kl_coef * KL per token",
        given=GROUPS,
        divisors="none; --normalize-advantages is required with it",
        note="the KL is subtracted at masked positions as well",
        goldens=(on("get_reinforce_plus_plus_baseline_advantages"),),
    ),
    slime(
        "normalize_advantages",
        WHITEN,
        "whitens the advantages of the batch",
        option="--normalize-advantages",
        given={"values": "the advantages"},
        divisors="sqrt(var + 1e-8), var with n - 1",
        defaults="off",
        note="var = E[v^2] - E[v]^2 in one float32 pass: slightly negative, so NaN, for near-constant advantages",
        reason=NO_PYPI,
    ),
)

openrlhf = partial(Row, "openrlhf", "advantage", option="--algo.advantage.estimator", gradient="data")
POPULATION = Call("masked_whiten", {"ddof": 0, "eps": 0.0})
POPULATION_WHITENED = "(v - mean) / sqrt(max(var, 1e-8)) over the tokens of the rollout batch, var with n"
RETURNS = Call("reinforce_plus_plus_returns", {"gamma": 1.0, "masked_tokens": "none"})
PLACED = {"rewards": "reward model score", "group_ids": "i // n_samples_per_prompt"}
AFTER = "then the KL is subtracted per token and the rewards are summed to returns: gamma 1"
OPENRLHF = (
    openrlhf(
        "gae",
        Call("gae", {"gamma": 1.0, "lam": 1.0, "masked_tokens": "carry"}, then=(POPULATION,)),
        "GAE with rewards and values 0 under the mask, then whitened",
        given={"rewards": "see the placement compute_reward", "gamma": "gamma", "lam": "lambd"},
        divisors=POPULATION_WHITENED,
        defaults="the default; gamma 1, lambd 1",
        goldens=(on("compute_advantages_and_returns", name="gae", no_std_norm=None), on("get_advantages_and_returns")),
    ),
    openrlhf(
        "reinforce",
        Call("reinforce_plus_plus_returns", {"gamma": 1.0, "masked_tokens": "none"}, then=(POPULATION,)),
        "discounted returns, then whitened: REINFORCE++",
        given={"token_rewards": "see the placement compute_reward", "gamma": "gamma"},
        divisors=POPULATION_WHITENED,
        goldens=(
            on("compute_advantages_and_returns", name="reinforce", no_std_norm=None),
            on("get_cumulative_returns"),
        ),
    ),
    openrlhf(
        "rloo",
        Call("rloo_advantages"),
        f"r - mean of the others; {AFTER}",
        given=PLACED,
        divisors="n - 1",
        note="a group of one is refused",
        goldens=(on("compute_advantages_and_returns", name="rloo"),),
    ),
    openrlhf(
        "reinforce_baseline",
        Call("reinforce_plus_plus_baseline_advantages"),
        f"r - mean; {AFTER}; then whitened",
        given=PLACED,
        divisors=POPULATION_WHITENED,
        note="a group of one is refused; --algo.advantage.no_std_norm centres only",
        goldens=(on("compute_advantages_and_returns", name="reinforce_baseline", no_std_norm=None),),
    ),
    openrlhf(
        "group_norm",
        Call("grpo_advantages", {"scale": "std", "ddof": 1, "eps": 1e-9}),
        f"(r - mean) / std: GRPO; {AFTER}",
        given=PLACED,
        divisors="std (n - 1) + 1e-9",
        note="a group of one is refused",
        goldens=(on("compute_advantages_and_returns", name="group_norm"),),
    ),
    openrlhf(
        "dr_grpo",
        Call("grpo_advantages", {"scale": "none"}),
        f"r - mean; {AFTER}",
        given=PLACED,
        note="a group of one is refused",
        goldens=(on("compute_advantages_and_returns", name="dr_grpo"),),
    ),
    openrlhf(
        "flash_reinforce",
        Call("grpo_advantages", {"scale": "none", "num_groups": 1}),
        f"r - mean of the batch; {AFTER}",
        given={"rewards": "reward model score", "group_ids": "0 for every row: the batch is one group"},
        goldens=(on("compute_advantages_and_returns", name="flash_reinforce"),),
    ),
)

trl = partial(Row, "trl", "advantage", gradient="data")
TRL_REWARDS = {"rewards": "the weighted sum of the reward functions", "group_ids": "i // num_generations"}
NAN_ROWS = "a row whose rewards are all NaN is left out and gets 0: `valid` here"
TRL = (
    trl(
        "scale_rewards=group",
        Call("grpo_advantages", {"scale": "std", "ddof": 1, "eps": 1e-4}),
        "(r - mean) / std",
        option="GRPOConfig.scale_rewards",
        given=TRL_REWARDS,
        divisors="std (n - 1) + 1e-4",
        defaults="the default",
        note=NAN_ROWS,
        goldens=(on("advantages", scale_rewards="group", multi_objective_aggregation="sum_then_normalize"),),
    ),
    trl(
        "scale_rewards=batch",
        Call("grpo_advantages", {"scale": "batch_std", "ddof": 1, "eps": 1e-4}),
        "(r - mean of the group) / std of the batch",
        option="GRPOConfig.scale_rewards",
        given=TRL_REWARDS,
        divisors="std of the batch (n - 1) + 1e-4",
        note=NAN_ROWS,
        goldens=(on("advantages", scale_rewards="batch"),),
    ),
    trl(
        "scale_rewards=none",
        Call("grpo_advantages", {"scale": "none"}),
        "r - mean: Dr.GRPO",
        option="GRPOConfig.scale_rewards",
        given=TRL_REWARDS,
        note=NAN_ROWS,
        goldens=(on("advantages", scale_rewards="none"),),
    ),
    trl(
        "normalize_then_sum",
        Call("gdpo_advantages", {"scale": "std", "ddof": 1, "eps": 1e-4, "normalize": "rows"}),
        "each reward normalised in its group, summed with weights, normalised over the batch: GDPO",
        option="GRPOConfig.multi_objective_aggregation",
        given={"rewards": "[B, K]", "weights": "reward_weights", "group_ids": "i // num_generations"},
        divisors="std (n - 1) + 1e-4, twice",
        note="verl whitens over tokens where this normalises over rows",
        goldens=(on("advantages", multi_objective_aggregation="normalize_then_sum"),),
    ),
    trl(
        "rloo",
        Call("rloo_advantages"),
        "r - mean of the others, r with the summed KL subtracted",
        option="RLOOTrainer",
        given={"rewards": "see the placement rloo_beta", "group_ids": "i // num_generations"},
        divisors="scorable rows of the group - 1",
        note=NAN_ROWS,
        goldens=(on("rloo_advantages", normalize_advantages=False),),
    ),
    trl(
        "rloo+normalize_advantages",
        None,
        "(A - mean) / std over the batch after rloo",
        option="RLOOConfig.normalize_advantages",
        divisors="std (n - 1) + 1e-4",
        defaults="off",
        goldens=(on("rloo_advantages", normalize_advantages=True),),
        reason="two calls: rloo_advantages, then grpo_advantages of the result with one group and eps=1e-4",
    ),
)

OTHERS = (
    Row(
        "art",
        "advantage",
        "kimi_k2_tau",
        Call("kimi_advantages"),
        "A - tau * (log pi - log old), at every update anew, on top of any estimator",
        option="kimi_k2_tau",
        given={"old_log_probs": "old log-probs", "tau": "kimi_k2_tau"},
        gradient="data",
        defaults="None: off",
        note="before the KL of kl_penalty_coef; there at masked tokens too, which the loss leaves out",
        goldens=(on("loss_fn", kimi_k2_tau=0.5),),
    ),
    Row(
        "art",
        "advantage",
        "scale_rewards",
        Call("grpo_advantages", {"scale": "std", "ddof": 0, "eps": 1e-6}),
        "(r - mean) / std with n, not n - 1",
        option="TrainConfig.scale_rewards",
        given={"rewards": "trajectory.reward", "group_ids": "the trajectory group"},
        divisors="std (n) + 1e-6; then, when packed, the mean of |A| over assistant tokens",
        gradient="data",
        defaults="on",
        note="a trajectory of advantage 0 is dropped; the population std, unlike everywhere else",
        reason="part of its tokenizer's loop over trajectories, which no case recorded",
    ),
    Row(
        "art",
        "advantage",
        "scale_rewards=false",
        Call("grpo_advantages", {"scale": "none"}),
        "r - mean",
        option="TrainConfig.scale_rewards",
        given={"rewards": "trajectory.reward", "group_ids": "the trajectory group"},
        gradient="data",
        note="a trajectory of advantage 0 is dropped",
        reason="part of its tokenizer's loop over trajectories, which no case recorded",
    ),
)

prime = partial(Row, "prime-rl", "advantage", option="orchestrator.algo.type", gradient="data")
NOT_RECORDED = "prime-rl's orchestrator is not on PyPI; tested by formula"
PRIME_RL = (
    prime(
        "grpo",
        Call("grpo_advantages", {"scale": "none"}),
        "r - mean, no division",
        given={"rewards": "trace.reward, less the length penalty", "group_ids": "the example"},
        defaults="the default",
        note="what other systems call Dr.GRPO",
        reason=NOT_RECORDED,
    ),
    prime(
        "hierarchical_grpo",
        Call("grpo_advantages", {"scale": "none"}),
        "r - mean of the agent's peers: within the episode for solvers, within the group for the proposer",
        given={"rewards": "trace.reward", "group_ids": "(agent, episode) or (agent, group)"},
        reason=NOT_RECORDED,
    ),
    prime(
        "max_rl",
        Call("maxrl_advantages"),
        "(r - mean) / mean, 0 where the mean is at most 0",
        given={"rewards": "trace.reward", "group_ids": "the example"},
        divisors="mean; no epsilon",
        note="SkyRL's maxrl divides by a negative mean too",
        reason=NOT_RECORDED,
    ),
    prime(
        "rae",
        Call("rae_advantages", {"decay": 0.95}),
        "r - running mean of the agent's rewards",
        given={"rewards": "trace.reward", "baselines": "kept by the orchestrator", "group_ids": "the agent"},
        defaults="decay 0.95",
        reason=NOT_RECORDED,
    ),
    prime(
        "echo",
        Call("grpo_advantages", {"scale": "none"}),
        "grpo on sampled tokens, and cross-entropy on tokens of the environment",
        given={"rewards": "trace.reward", "group_ids": "the example"},
        defaults="alpha 0.1 on tool responses",
        note="the cross-entropy is the policy loss ce",
        reason=NOT_RECORDED,
    ),
    prime("opd", None, "no advantage: the policy loss ref_kl", reason="the signal is in the policy loss ref_kl"),
    prime("opsd", None, "no advantage: the policy loss ref_kl", reason="the signal is in the policy loss ref_kl"),
    prime(
        "sft", None, "no advantage: the policy loss ce", reason="cross-entropy has no advantage; see the policy loss ce"
    ),
)

ROWS = (*SLIME, *OPENRLHF, *TRL, *OTHERS, *PRIME_RL)
