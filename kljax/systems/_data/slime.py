"""The names of slime."""

from functools import partial

from kljax.systems._call import Call
from kljax.systems._entry import OF_LAYERS, TO_ROUTER, Entry, System, call, recorded

# Each entry is a paragraph: its name and call, its meaning, then the details; the formatter would make it a column.
# fmt: off
SYSTEM = System("slime", "slime", "0.3.1, commit 624b824", "none; type k1 once a coefficient is set")

TIS_BOUNDS = {
    "log_probs": "old log-probs of the trainer", "sampling_log_probs": "rollout log-probs",
    "lower": "tis_lower_bound, or 1 / tis_upper_bound", "upper": "tis_upper_bound"
}
RS_BOUNDS = {
    "log_probs": "old log-probs of the trainer", "sampling_log_probs": "rollout log-probs", "lower": "rs_lower_bound",
    "upper": "rs_upper_bound"
}
ARRAYS = {"log_probs": "old log-probs of the trainer", "sampling_log_probs": "rollout log-probs"}
OLD_LOG_PROBS = {"sampling_log_probs": "old log-probs (rollout log-probs with --use-rollout-logprobs)"}
GROUP_REWARDS = {"rewards": "raw reward", "group_ids": "i // n_samples_per_prompt"}
CLIP_OPTIONS = {"clip_low": "--eps-clip", "clip_high": "--eps-clip-high, else --eps-clip"}
LOSS_ONLY = "in the loss only; the KL in the reward has no ratio"
STD = "std (n - 1) + 1e-6; none with --disable-grpo-std-normalization"
NOT_RECORDED = "slime is not on PyPI and its recorded cases do not hold this one"
NO_LOSS_RECORDED = "slime is not on PyPI and its recorded cases hold no policy loss; tested by formula"
NO_CORRECTION_RECORDED = "slime is not on PyPI and its recorded cases hold no correction; tested by formula"
LOG_RATIO_CLAMP = "log-ratios to [-20, 20]"
EXAMPLE_SCRIPT = "an example script, not a default"
NUMERATOR_ONLY = "the numerator only: the denominators stay those of the rollout"
NUMERATOR_ONLY_TRAINER = (
    "the numerator only: the denominators stay those of the rollout; bounds trainer / sampler, unlike the k1 names "
    "of verl"
)
WHITEN = call("masked_whiten")
BEFORE_WHITENING = "the advantages before --normalize-advantages, the name normalize_advantages"

kl = partial(Entry, "slime", "kl", defaults="k1; kl_coef 0 and kl_loss_coef 0, and not both above 0")
reduction = partial(Entry, "slime", "reduction", gradient="the token weights")
advantage = partial(Entry, "slime", "advantage", option="--advantage-estimator", gradient="constant")
policy_loss = partial(Entry, "slime", "policy_loss", divisors="sum_of_sample_mean, or calculate_per_token_loss")
correction = partial(Entry, "slime", "correction", gradient="constant")
controller = partial(Entry, "slime", "controller")
placement = partial(Entry, "slime", "placement")

ENTRIES = (
    # KL estimators. x = log pi - log ref.
    kl("k1", call("estimate_kl", estimator="k1"),
        "x", option="--kl-loss-type",
        gradient="1; in expectation over sampled tokens 0: as a loss term it only adds noise",
        note="both log-probs are cast to float32 first",
        goldens=recorded("compute_approx_kl", kl_loss_type="k1", importance_ratio=None)),
    kl("k2", call("estimate_kl", estimator="k2"),
        "x^2 / 2", option="--kl-loss-type", gradient="x: over tokens drawn from pi the gradient of KL(pi || ref)",
        note="both log-probs are cast to float32 first",
        goldens=recorded("compute_approx_kl", kl_loss_type="k2", importance_ratio=None)),
    kl("k3", call("estimate_kl", estimator="k3"),
        "exp(-x) - 1 + x, nothing clamped", option="--kl-loss-type",
        gradient="1 - exp(-x): in expectation that of KL(ref || pi)",
        note="infinite, with an infinite gradient, where exp(-x) overflows: x < -88.7 in float32; both log-probs are "
        "cast to float32 first", goldens=recorded("compute_approx_kl", kl_loss_type="k3", importance_ratio=None)),
    kl("low_var_kl", call("estimate_kl", estimator="k3", value_clip=10.0),
        "exp(-x) - 1 + x, clamped at the end only", option="--kl-loss-type", clamps="the value to [-10, 10]",
        gradient="1 - exp(-x), 0 where the clamp is active",
        note="x itself is not clamped, unlike in verl and Trinity: below -88.7 slime's gradient is NaN, here it is 0",
        goldens=recorded("compute_approx_kl", kl_loss_type="low_var_kl", importance_ratio=None)),
    kl("k1+use_unbiased_kl", call("estimate_kl", estimator="k1"),
        "w * (x), w differentiated and not clamped", option="--kl-loss-type with --use-unbiased-kl",
        sources=OLD_LOG_PROBS, gradient="w (x + 1): in expectation over the old policy that of KL(pi || ref)",
        note=LOSS_ONLY,
        goldens=recorded("compute_approx_kl", kl_loss_type="k1", importance_ratio="exp(log_probs-old_log_probs)")),
    kl("k2+use_unbiased_kl", call("estimate_kl", estimator="k2"),
        "w * (x^2 / 2), w differentiated and not clamped", option="--kl-loss-type with --use-unbiased-kl",
        sources=OLD_LOG_PROBS, gradient="w (x^2 / 2 + x)", note=LOSS_ONLY,
        goldens=recorded("compute_approx_kl", kl_loss_type="k2", importance_ratio="exp(log_probs-old_log_probs)")),
    kl("k3+use_unbiased_kl", call("estimate_kl", estimator="k3"),
        "w * (exp(-x) - 1 + x), w differentiated and not clamped", option="--kl-loss-type with --use-unbiased-kl",
        sources=OLD_LOG_PROBS, gradient="w x: that of KL(pi || ref), off-policy too", note=LOSS_ONLY,
        goldens=recorded("compute_approx_kl", kl_loss_type="k3", importance_ratio="exp(log_probs-old_log_probs)")),
    kl("low_var_kl+use_unbiased_kl", call("estimate_kl", estimator="k3", value_clip=10.0),
        "w * (exp(-x) - 1 + x), w differentiated and not clamped", option="--kl-loss-type with --use-unbiased-kl",
        sources=OLD_LOG_PROBS, clamps="the value to [-10, 10], after the product",
        gradient="w x, 0 where the clamp is active", note=LOSS_ONLY,
        goldens=recorded("compute_approx_kl", kl_loss_type="low_var_kl",
            importance_ratio="exp(log_probs-old_log_probs)")),
    # Reductions. n_i is the number of tokens of row i.
    reduction("sum_of_sample_mean", call("token_weights", mode="prompt_mean", empty_rows="count"),
        "mean over rollouts of the mean over the tokens of all samples of the rollout",
        option="--calculate-per-token-loss absent",
        sources={"group_ids": "rollout_id of each sample", "num_groups": "number of rollouts of the step"},
        divisors="max(tokens of the rollout, 1) * rollouts of the step", defaults="the default",
        note="one sample a rollout makes it seq_mean_token_mean; for all terms: policy, KL and entropy",
        reason="slime is not on PyPI and its recorded cases hold no reduction"),
    reduction("calculate_per_token_loss", call("token_weights", mode="token_mean"),
        "mean over the tokens of the step", option="--calculate-per-token-loss",
        divisors="sum over samples of max(n_i, 1): a sample without a token still adds 1",
        reason="slime is not on PyPI and its recorded cases hold no reduction"),
    # Advantages. r is the reward of a row, mean and std are of its group.
    advantage("grpo", call("grpo_advantages", scale="std", ddof=1, eps=1e-6),
        "(r - mean) / std, done with the rewards after the rollout", sources=GROUP_REWARDS, divisors=STD,
        defaults="the default",
        note="NaN there for a group of one, 0 here; one group for the whole batch where samples are missing; kl_coef "
        "has no effect", reason=NOT_RECORDED),
    advantage("gspo", call("grpo_advantages", scale="std", ddof=1, eps=1e-6),
        "(r - mean) / std, done with the rewards after the rollout", sources=GROUP_REWARDS, divisors=STD,
        note="NaN there for a group of one, 0 here; one group for the whole batch where samples are missing; kl_coef "
        "has no effect; the gspo policy loss", reason=NOT_RECORDED),
    advantage("cispo", call("grpo_advantages", scale="std", ddof=1, eps=1e-6),
        "(r - mean) / std, done with the rewards after the rollout", sources=GROUP_REWARDS, divisors=STD,
        note="NaN there for a group of one, 0 here; one group for the whole batch where samples are missing; kl_coef "
        "has no effect; the cispo policy loss", reason=NOT_RECORDED),
    advantage("ppo", call("gae", gamma=1.0, lam=1.0, masked_tokens="skip"),
        "GAE over the response, of rewards with the KL subtracted",
        sources={"mask": "the positions of the response, not the loss mask", "rewards": "see the placement kl_coef",
            "gamma": "--gamma", "lam": "--lambd"}, divisors="none; whitened with --normalize-advantages",
        note="knows no loss mask: tool outputs count like tokens, and the reward lands on the last position",
        goldens=recorded("ppo_kl_shaped_gae")),
    advantage("reinforce_plus_plus", call("reinforce_plus_plus_returns", gamma=1.0, masked_tokens="zero"),
        "discounted returns of rewards with the KL subtracted",
        sources={"token_rewards": "see the placement kl_coef", "gamma": "--gamma"}, part=BEFORE_WHITENING,
        divisors="none; --normalize-advantages is required with it", note="a row without a token raises there",
        goldens=recorded("get_reinforce_plus_plus_returns")),
    advantage("reinforce_plus_plus_baseline",
        Call("reinforce_plus_plus_baseline_advantages", then=(call("broadcast_to_tokens"), call("subtract_kl"))),
        "r - mean, then - kl_coef * KL per token",
        sources=GROUP_REWARDS | {"kl": "compute_approx_kl of old and ref", "coef": "--kl-coef"}, part=BEFORE_WHITENING,
        divisors="none; --normalize-advantages is required with it",
        note="the KL is subtracted at masked positions as well",
        goldens=recorded("get_reinforce_plus_plus_baseline_advantages")),
    advantage("normalize_advantages", WHITEN,
        "whitens the advantages of the batch", option="--normalize-advantages", sources={"values": "the advantages"},
        divisors="sqrt(var + 1e-8), var with n - 1", defaults="off",
        note="var = E[v^2] - E[v]^2 in one float32 pass: slightly negative, so NaN, for near-constant advantages",
        reason=NOT_RECORDED),
    # Policy losses. d = log pi - log old, r = exp(d), A is the advantage, sg() a constant.
    policy_loss("policy_loss", call("ppo_clip_loss", clip_low=0.2, clip_high=0.2),
        "PPO: max(-A r, -A clip(r))", option="--loss-type policy_loss with every estimator but gspo and cispo",
        sources=CLIP_OPTIONS | {"dual_clip": "--eps-clip-c"}, gradient="-A r inside the bound that applies, else 0",
        defaults="the default; 0.2, 0.2, no dual clip", reason=NO_LOSS_RECORDED),
    policy_loss("gspo", call("gspo_loss", clip_low=0.2, clip_high=0.2, gradient="sequence"),
        "PPO with the length-normalised ratio s of the row", option="--advantage-estimator gspo",
        sources=CLIP_OPTIONS | {"dual_clip": "--eps-clip-c"},
        gradient="through s: every token of the row gets an equal share of the row's sum of -A s", defaults="0.2, 0.2",
        note="verl, SkyRL and Trinity have the gradient of the token's own log-prob: another one where A varies",
        reason=NO_LOSS_RECORDED),
    policy_loss("cispo", call("cispo_loss", clip_low=0.2, clip_high=0.2),
        "-A sg(clip(r)) log pi", option="--advantage-estimator cispo", sources=CLIP_OPTIONS, gradient="-A clip(r)",
        defaults="0.2, 0.2: r in [0.8, 1.2], with a warning", reason=NO_LOSS_RECORDED),
    policy_loss("sft_loss", call("cross_entropy_loss"),
        "-log pi", option="--loss-type sft_loss", gradient="-1", reason=NO_LOSS_RECORDED),
    # Value losses.
    Entry("slime", "value_loss", "value_loss_function", Call("value_loss", {"clip": 0.2}, scale=2.0),
        "max((V - R)^2, (clip(V, V_old -+ c) - R)^2), without the half", option="--value-clip",
        sources={"clip": "value_clip"}, divisors="the reduction of the policy loss",
        gradient="2 (V - R), 0 where the clipped error is larger", defaults="0.2",
        note="twice the loss of the other systems",
        reason="slime is not on PyPI and its recorded cases hold no value loss; tested by formula"),
    # Corrections. r = trainer / sampler.
    correction("vanilla_tis", call("importance_weights", level="token", mode="clip", lower=0.0, upper=2.0),
        "weights: r of each token, clipped", option="--use-tis",
        sources=ARRAYS | {"lower": "--tis-clip-low", "upper": "--tis-clip"}, defaults="off; 0, 2.0",
        reason=NO_CORRECTION_RECORDED),
    correction("icepop", call("importance_weights", level="token", mode="mask", lower=0.0, upper=2.0),
        "weights: r of each token, 0 outside the bounds", option="--custom-tis-function-path icepop_function",
        sources=ARRAYS | {"lower": "--tis-clip-low", "upper": "--tis-clip"}, defaults="off; 0, 2.0",
        reason=NO_CORRECTION_RECORDED),
    correction("opsm", call("off_policy_sequence_mask", max_kl=0.0001),
        "drops tokens of A < 0 in rows whose mean of old - new exceeds delta", option="--use-opsm",
        sources={"sampling_log_probs": "old log-probs", "max_kl": "--opsm-delta"}, divisors="max(n_i, 1)",
        defaults="off; 1e-4", note="the numerator only: the denominators stay those of the rollout; 0.1 in Trinity",
        reason=NO_CORRECTION_RECORDED),
    correction("use_rollout_routing_replay", None,
        "the experts of the sampler in scoring and updates, `routing.replay: rollout`",
        option="--use-rollout-routing-replay", gradient=TO_ROUTER, defaults="off", reason=OF_LAYERS),
    correction("use_routing_replay", None,
        "the experts of the pass that scored the old log-probs, `routing.replay: old_policy`",
        option="--use-routing-replay", gradient=TO_ROUTER, defaults="off", reason=OF_LAYERS),
    correction("mis:token+truncate", call("importance_weights", level="token", mode="truncate", log_ratio_clip=20.0),
        "weights: r of each token, at most the bound",
        option="--custom-tis-function-path mis.py, tis_level token, tis_mode truncate",
        sources=ARRAYS | {"upper": "tis_upper_bound"}, clamps=LOG_RATIO_CLAMP, defaults=EXAMPLE_SCRIPT,
        reason=NO_CORRECTION_RECORDED),
    correction("mis:token+clip", call("importance_weights", level="token", mode="clip", log_ratio_clip=20.0),
        "weights: r of each token, clipped to the bounds",
        option="--custom-tis-function-path mis.py, tis_level token, tis_mode clip", sources=TIS_BOUNDS,
        clamps=LOG_RATIO_CLAMP, defaults=EXAMPLE_SCRIPT, reason=NO_CORRECTION_RECORDED),
    correction("mis:token+mask", call("importance_weights", level="token", mode="mask", log_ratio_clip=20.0),
        "weights: r of each token, 0 outside the bounds",
        option="--custom-tis-function-path mis.py, tis_level token, tis_mode mask", sources=TIS_BOUNDS,
        clamps=LOG_RATIO_CLAMP, defaults=EXAMPLE_SCRIPT, note=NUMERATOR_ONLY, reason=NO_CORRECTION_RECORDED),
    correction("mis:sequence+truncate",
        call("importance_weights", level="sequence", mode="truncate", log_ratio_clip=20.0),
        "weights: product of r over the row, at most the bound",
        option="--custom-tis-function-path mis.py, tis_level sequence, tis_mode truncate",
        sources=ARRAYS | {"upper": "tis_upper_bound"}, clamps=LOG_RATIO_CLAMP, defaults=EXAMPLE_SCRIPT,
        reason=NO_CORRECTION_RECORDED),
    correction("mis:sequence+clip", call("importance_weights", level="sequence", mode="clip", log_ratio_clip=20.0),
        "weights: product of r over the row, clipped to the bounds",
        option="--custom-tis-function-path mis.py, tis_level sequence, tis_mode clip", sources=TIS_BOUNDS,
        clamps=LOG_RATIO_CLAMP, defaults=EXAMPLE_SCRIPT, reason=NO_CORRECTION_RECORDED),
    correction("mis:sequence+mask", call("importance_weights", level="sequence", mode="mask", log_ratio_clip=20.0),
        "weights: product of r over the row, 0 outside the bounds",
        option="--custom-tis-function-path mis.py, tis_level sequence, tis_mode mask", sources=TIS_BOUNDS,
        clamps=LOG_RATIO_CLAMP, defaults=EXAMPLE_SCRIPT, note=NUMERATOR_ONLY, reason=NO_CORRECTION_RECORDED),
    correction("mis:geometric+truncate",
        call("importance_weights", level="geometric", mode="truncate", log_ratio_clip=20.0),
        "weights: geometric mean of r, at most the bound",
        option="--custom-tis-function-path mis.py, tis_level geometric, tis_mode truncate",
        sources=ARRAYS | {"upper": "tis_upper_bound"}, clamps=LOG_RATIO_CLAMP, defaults=EXAMPLE_SCRIPT,
        reason=NO_CORRECTION_RECORDED),
    correction("mis:geometric+clip", call("importance_weights", level="geometric", mode="clip", log_ratio_clip=20.0),
        "weights: geometric mean of r, clipped to the bounds",
        option="--custom-tis-function-path mis.py, tis_level geometric, tis_mode clip", sources=TIS_BOUNDS,
        clamps=LOG_RATIO_CLAMP, defaults=EXAMPLE_SCRIPT, reason=NO_CORRECTION_RECORDED),
    correction("mis:geometric+mask", call("importance_weights", level="geometric", mode="mask", log_ratio_clip=20.0),
        "weights: geometric mean of r, 0 outside the bounds",
        option="--custom-tis-function-path mis.py, tis_level geometric, tis_mode mask", sources=TIS_BOUNDS,
        clamps=LOG_RATIO_CLAMP, defaults=EXAMPLE_SCRIPT, note=NUMERATOR_ONLY, reason=NO_CORRECTION_RECORDED),
    correction("mis:rs_level=token", call("rejection_mask", level="token"),
        "keeps what has r within bounds", option="--custom-tis-function-path mis.py, use_rs, rs_level token",
        sources=RS_BOUNDS, clamps=LOG_RATIO_CLAMP, note=NUMERATOR_ONLY_TRAINER, reason=NO_CORRECTION_RECORDED),
    correction("mis:rs_level=sequence", call("rejection_mask", level="sequence"),
        "keeps what has r within bounds", option="--custom-tis-function-path mis.py, use_rs, rs_level sequence",
        sources=RS_BOUNDS, clamps=LOG_RATIO_CLAMP, note=NUMERATOR_ONLY_TRAINER, reason=NO_CORRECTION_RECORDED),
    correction("mis:rs_level=geometric", call("rejection_mask", level="geometric"),
        "keeps what has r within bounds", option="--custom-tis-function-path mis.py, use_rs, rs_level geometric",
        sources=RS_BOUNDS, clamps=LOG_RATIO_CLAMP, note=NUMERATOR_ONLY_TRAINER, reason=NO_CORRECTION_RECORDED),
    correction("mis:rs_veto_threshold", call("veto_mask"),
        "drops rows that hold a token with r below the threshold",
        option="--custom-tis-function-path mis.py, rs_veto_threshold",
        sources=ARRAYS | {"min_ratio": "rs_veto_threshold"}, note=NUMERATOR_ONLY, reason=NO_CORRECTION_RECORDED),
    correction("mis:tis_batch_normalize",
        call("importance_weights", level="token", normalize="tokens", log_ratio_clip=20.0),
        "weights over their mean: over tokens at token level, over rows (normalize='rows') at sequence level",
        option="--custom-tis-function-path mis.py, tis_batch_normalize", sources=ARRAYS | {"upper": "tis_upper_bound"},
        clamps=LOG_RATIO_CLAMP, divisors="the mean weight", note="raises ValueError there at geometric level",
        reason=NO_CORRECTION_RECORDED),
    # KL coefficients over time, and references that follow the policy.
    controller("fixed", call("fixed_kl", coef=0.0),
        "the coefficient stays what it is", option="--kl-coef, --kl-loss-coef",
        sources={"coef": "--kl-coef, --kl-loss-coef"}, defaults="0.0; the only kind",
        reason="a constant: there is nothing to record"),
    controller("ref_update_interval", call("refreshed_reference"),
        "ref = policy every so many rollout steps", option="--ref-update-interval",
        sources={"every": "--ref-update-interval"}, defaults="None: never",
        reason="a copy of parameters: tested by formula"),
    # Where the KL enters.
    placement("kl_coef", call("kl_shaped_rewards", coef=0.0, estimator="k1"),
        "per token: reward - coef * kl, the score on the last token; the KL is between the old policy and ref",
        option="--kl-coef",
        sources={"coef": "--kl-coef", "estimator": "--kl-loss-type", "value_clip": "10 with the type low_var_kl, a k3"},
        gradient="none", defaults="0.0",
        note="in ppo and reinforce_plus_plus; reinforce_plus_plus_baseline subtracts it from the advantages; grpo, "
        "gspo and cispo ignore it without a word",
        goldens=recorded("ppo_kl_shaped_gae") + recorded("get_reinforce_plus_plus_returns")),
    placement("use_kl_loss", call("reference_kl_loss", estimator="k1", gradient="value"),
        "policy loss + coef * KL term", option="--use-kl-loss",
        sources={"estimator": "--kl-loss-type", "sampling_log_probs": "with --use-unbiased-kl, the old log-probs"},
        divisors="the reduction of the policy loss",
        gradient="that of the estimator: for k1, the default type, noise; kljax refuses it without a ratio",
        defaults="off; coefficient 0.0",
        reason="a sum of a KL estimate and a reduction: the cases of kind kl and reduction check both parts"),
    # Distillation. x = log pi - log teacher at a sampled token.
    Entry("slime", "distillation", "use_opd", call("distillation_advantages", coef=1.0),
        "A - opd_kl_coef * (log student - log teacher), on top of any estimator", option="--use-opd",
        sources={"teacher_log_probs": "teacher log-probs", "log_probs": "log-probs, or rollout log-probs",
            "coef": "--opd-kl-coef"}, gradient="constant", defaults="off; 1.0", note="neither centred nor masked there",
        reason="slime is not on PyPI and its recorded cases hold no distillation; tested by formula"),
    # Metrics and masked statistics.
    Entry("slime", "statistic", "train_rollout_logprob_abs_diff",
        call("log_prob_abs_diff", mode="seq_mean_token_mean"),
        "mean of |log trainer - log sampler|", option="a metric", sources={"rollout_log_probs": "rollout log-probs"},
        divisors="the reduction of the loss", gradient="none", reason="a metric that no case recorded"),
)
