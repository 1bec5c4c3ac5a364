"""The names of ART (openpipe-art)."""

from functools import partial

from kljax.systems._entry import Entry, System, call, recorded

# Each entry is a paragraph: its name and call, its meaning, then the details; the formatter would make it a column.
# fmt: off
SYSTEM = System("art", "ART (openpipe-art)", "0.5.18", "none; centred k1 in the advantages once a coefficient is set")

CLIP_OPTIONS = {"clip_low": "epsilon", "clip_high": "epsilon_high, else epsilon"}
ALL_RATIOS = "through all ratios of the sequence, within the bound"

reduction = partial(Entry, "art", "reduction", option="loss_fn(reduction=...)", gradient="the token weights")
advantage = partial(Entry, "art", "advantage", option="TrainConfig.scale_rewards", gradient="constant")
policy_loss = partial(Entry, "art", "policy_loss", option="TrainConfig.importance_sampling_level",
    divisors="number of tokens + 1e-6, weighted by `weights`", defaults="level token")

ENTRIES = (
    # KL estimators. x = log pi - log ref.
    Entry("art", "kl", "k1", call("estimate_kl", estimator="k1", gradient="none"),
        "x, as a constant: it only shifts advantages, see kl_penalty_coef", option="TrainConfig.kl_penalty_coef",
        gradient="none", defaults="coefficient 0.0", goldens=recorded("loss_fn", kl_penalty_coef=0.3)),
    # Reductions. n_i is the number of tokens of row i.
    reduction("mean", call("token_weights", mode="token_mean"),
        "mean over the assistant tokens of a packed row", divisors="number of tokens + 1e-6",
        defaults="mean; the Megatron backend sums and divides by the tokens of the step",
        goldens=recorded("loss_fn", reduction="mean", mask_prob_ratio=None)),
    reduction("sum", call("token_weights", mode="token_sum"),
        "sum over the assistant tokens", goldens=recorded("loss_fn", reduction="sum")),
    # Advantages. r is the reward of a row, mean and std are of its group.
    advantage("kimi_k2_tau", call("kimi_advantages"),
        "A - tau * (log pi - log old), at every update anew, on top of any estimator", option="kimi_k2_tau",
        sources={"old_log_probs": "old log-probs", "tau": "kimi_k2_tau"}, defaults="None: off",
        note="before the KL of kl_penalty_coef; there at masked tokens too, which the loss leaves out",
        goldens=recorded("loss_fn", kimi_k2_tau=0.5)),
    advantage("advantage_balance", call("balanced_advantages", balance=0.0),
        "b > 0: A <= 0 times 1 - b; b < 0: A >= 0 times 1 + b; then over the weighted mean of |A|",
        option="dev.TrainConfig.advantage_balance", sources={"balance": "advantage_balance", "weights": "weights"},
        divisors="mean over the assistant tokens of |A| w, with w over its mean", defaults="0.0",
        reason="part of a function that packs tokens; tested as it is written"),
    advantage("scale_rewards", call("grpo_advantages", scale="std", ddof=0, eps=1e-6),
        "(r - mean) / std with n, not n - 1",
        sources={"rewards": "trajectory.reward", "group_ids": "the trajectory group"},
        divisors="std (n) + 1e-6; then, when packed, the mean of |A| over assistant tokens", defaults="on",
        note="a trajectory of advantage 0 is dropped; the population std, unlike everywhere else",
        reason="part of its tokenizer's loop over trajectories, which no case recorded"),
    advantage("scale_rewards=false", call("grpo_advantages", scale="none"),
        "r - mean", sources={"rewards": "trajectory.reward", "group_ids": "the trajectory group"},
        note="a trajectory of advantage 0 is dropped",
        reason="part of its tokenizer's loop over trajectories, which no case recorded"),
    # Policy losses. d = log pi - log old, r = exp(d), A is the advantage, sg() a constant.
    policy_loss("cispo", call("cispo_loss", clip_low=1.0, clip_high=4.0),
        "-A sg(clip(r)) log pi", option="TrainConfig.ppo false", sources=CLIP_OPTIONS, gradient="-A clip(r)",
        defaults="the default; 1.0, 4.0: r in [0, 5]",
        goldens=recorded("loss_fn", ppo=False, importance_sampling_level=None, mask_prob_ratio=None,
            max_negative_advantage_importance_sampling_weight=None)),
    policy_loss("ppo", call("ppo_clip_loss", clip_low=0.2, clip_high=0.2),
        "PPO: max(-A r, -A clip(r))", option="TrainConfig.ppo", sources=CLIP_OPTIONS,
        gradient="-A r inside the bound that applies, else 0", defaults="0.2, 0.2",
        goldens=recorded("loss_fn", ppo=True, importance_sampling_level=None, mask_prob_ratio=None,
            max_negative_advantage_importance_sampling_weight=None)),
    policy_loss("cispo+importance_sampling_level=sequence",
        call("cispo_loss", clip_low=1.0, clip_high=4.0, level="geometric"),
        "cispo with the geometric mean of r over the sequence in place of r", sources=CLIP_OPTIONS,
        gradient="-A times the clipped ratio",
        goldens=recorded("loss_fn", ppo=False, importance_sampling_level="sequence")),
    policy_loss("cispo+importance_sampling_level=average",
        call("cispo_loss", clip_low=1.0, clip_high=4.0, level="average"),
        "cispo with the mean of r and of its geometric mean over the sequence in place of r", sources=CLIP_OPTIONS,
        gradient="-A times the clipped ratio",
        goldens=recorded("loss_fn", ppo=False, importance_sampling_level="average")),
    policy_loss("cispo+importance_sampling_level=geometric_average",
        call("cispo_loss", clip_low=1.0, clip_high=4.0, level="geometric_average"),
        "cispo with the geometric mean of r and of its geometric mean over the sequence in place of r",
        sources=CLIP_OPTIONS, gradient="-A times the clipped ratio",
        goldens=recorded("loss_fn", ppo=False, importance_sampling_level="geometric_average")),
    policy_loss("ppo+importance_sampling_level=sequence",
        call("ppo_clip_loss", clip_low=0.2, clip_high=0.2, level="geometric"),
        "ppo with the geometric mean of r over the sequence in place of r", sources=CLIP_OPTIONS, gradient=ALL_RATIOS,
        goldens=recorded("loss_fn", ppo=True, importance_sampling_level="sequence")),
    policy_loss("ppo+importance_sampling_level=average",
        call("ppo_clip_loss", clip_low=0.2, clip_high=0.2, level="average"),
        "ppo with the mean of r and of its geometric mean over the sequence in place of r", sources=CLIP_OPTIONS,
        gradient=ALL_RATIOS, goldens=recorded("loss_fn", ppo=True, importance_sampling_level="average")),
    policy_loss("ppo+importance_sampling_level=geometric_average",
        call("ppo_clip_loss", clip_low=0.2, clip_high=0.2, level="geometric_average"),
        "ppo with the geometric mean of r and of its geometric mean over the sequence in place of r",
        sources=CLIP_OPTIONS, gradient=ALL_RATIOS,
        goldens=recorded("loss_fn", ppo=True, importance_sampling_level="geometric_average")),
    policy_loss("ppo+max_negative_advantage_importance_sampling_weight",
        call("ppo_clip_loss", clip_low=0.2, clip_high=0.2),
        "PPO with min(r, bound) in place of r, in both terms",
        option="TrainConfig.max_negative_advantage_importance_sampling_weight",
        sources={"clip_low": "epsilon", "max_ratio": "the option", "clip_high": "min(epsilon_high, the option - 1)"},
        gradient="-A r inside the bound that applies, else 0", defaults="None: off",
        note="despite its name it bounds the ratio of every token, whatever the sign of A",
        goldens=recorded("loss_fn", max_negative_advantage_importance_sampling_weight=1.1)),
    policy_loss("mask_prob_ratio", None,
        "the loss with r = 0 outside (1 - epsilon, 1 + epsilon_high), clipped after that",
        option="TrainConfig.mask_prob_ratio", defaults="off",
        note="the clip raises the 0 to 1 - epsilon, which is 0 only at the CISPO default epsilon = 1",
        goldens=recorded("loss_fn", mask_prob_ratio=True),
        reason="an accident of the order of mask and clip; to drop the tokens, reject them: rejection_mask(...)"),
    # Corrections. r = trainer / sampler.
    Entry("art", "correction", "truncated_importance_sampling",
        call("importance_weights", level="token", mode="truncate"),
        "weights: old / original, at most the bound", option="TrainConfig.truncated_importance_sampling",
        sources={"log_probs": "old log-probs", "sampling_log_probs": "original log-probs", "upper": "the option"},
        gradient="constant", defaults="None: off",
        note="without original log-probs it takes new / old, which CISPO has in already: counted twice",
        goldens=recorded("loss_fn", truncated_importance_sampling=1.2)),
    # KL coefficients over time, and references that follow the policy.
    Entry("art", "controller", "fixed", call("fixed_kl", coef=0.0),
        "the coefficient stays what it is", option="kl_penalty_coef", sources={"coef": "kl_penalty_coef"},
        defaults="0.0; the only kind", reason="a constant: there is nothing to record"),
    # Where the KL enters.
    Entry("art", "placement", "kl_penalty_coef", call("centered_kl_advantages", coef=0.0, estimator="k1"),
        "A + coef * (mean of x - x), x of the learner as it is now", option="TrainConfig.kl_penalty_coef",
        sources={"coef": "kl_penalty_coef"}, divisors="the mean over n + 1e-6 tokens of the packed row",
        gradient="none", defaults="0.0; a negative one is ignored",
        note="the mean is of one packed row, so it depends on the packing; the Megatron backend of 0.5.18 ignores it; "
        "a NaN in the reference under the mask makes the loss NaN there and not here",
        goldens=recorded("loss_fn", mask_prob_ratio=None)),
    # Metrics and masked statistics.
    Entry("art", "statistic", "kl_policy_ref", call("masked_mean"),
        "mean of x over the packed row", option="the metric loss/kl_policy_ref",
        sources={"values": "log_probs - ref_log_probs"}, divisors="n + 1e-6", gradient="none",
        goldens=recorded("loss_fn", kl_penalty_coef=0.3)),
)
