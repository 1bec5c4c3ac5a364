"""The names of OpenRLHF."""

from functools import partial

from kljax.systems._call import Call
from kljax.systems._entry import Entry, System, call, recorded

# Each entry is a paragraph: its name and call, its meaning, then the details; the formatter would make it a column.
# fmt: off
# Flags of 0.9 have no dot. The others set arguments of functions, which the recorded cases have.
ALIASES = {
    "--kl_estimator": ("--algo.kl.estimator",), "--init_kl_coef": ("--algo.kl.init_coef",),
    "--use_kl_loss": ("--algo.kl.use_loss",), "--kl_target": ("--algo.kl.target",),
    "--kl_horizon": ("--algo.kl.horizon",), "--advantage_estimator": ("--algo.advantage.estimator",),
    "--actor.eps_clip": ("clip_eps_low", "clip_eps_high"),
    "--actor.eps_clip_low_high": ("clip_eps_low", "clip_eps_high"),
    "--vllm_is_truncated_threshold": ("is_correction_threshold",),
    "--enable_vllm_is_correction": ("--algo.advantage.is_correction_level",)
}
SYSTEM = System("openrlhf", "OpenRLHF", "0.11.2", "k1 in the reward, coefficient 0.01", ALIASES)

GROUP_REWARDS = {
    "rewards": "reward model score", "group_ids": "i // n_samples_per_prompt",
    "kl": "the KL per token that experience_maker adds", "coef": "the controller's value, at least 0"
}
TO_RETURNS = (call("subtract_kl"), call("reinforce_plus_plus_returns", gamma=1.0, masked_tokens="zero"))
WHITEN = call("masked_whiten", ddof=0, eps=0.0)
WITHOUT_CLIP = (
    "all but --reward.clip_range, which bounds the rewards by -10 and 10 after the baseline and before the KL"
)
GATE = {
    "log_probs": "old log-probs of the trainer", "sampling_log_probs": "rollout log-probs",
    "max_divergence": "is_correction_threshold, one number"
}
BOUNDS = {
    "log_probs": "old log-probs of the trainer", "sampling_log_probs": "rollout log-probs",
    "lower": "is_correction_threshold", "upper": "is_correction_threshold"
}
UNBIASED_OPTION = "--algo.kl.estimator with --algo.kl.unbiased_gradient"
VALUE_AND_RATIO_CLAMP = "the value to [-10, 10]; w to at most 10"
UNBIASED_GRADIENT = "min(w, 10) x for every x: that of KL(pi || ref), off-policy too"
RATIO_IN_GRADIENT = "the ratio enters the gradient only; in slime, TRL and Trinity it multiplies the value as well"
WHITENED = "(v - mean) / sqrt(max(var, 1e-8)) over the tokens of the rollout batch, var with n"
SURVIVORS = "survivors keep their unclamped r; rejected tokens count as zero loss. GSPO ignores it"
RATIOS = Call("token_ratios", renamed={"old_log_probs": "sampling_log_probs"})
PROBABILITY_CLAMP = "probabilities to [1e-6, 1 - 1e-6]"

kl = partial(Entry, "openrlhf", "kl", defaults="k1; init_coef 0.01, in the reward unless --algo.kl.use_loss")
reduction = partial(Entry, "openrlhf", "reduction", option="--actor.loss_agg_mode", gradient="the token weights")
advantage = partial(Entry, "openrlhf", "advantage", option="--algo.advantage.estimator", gradient="constant")
policy_loss = partial(Entry, "openrlhf", "policy_loss", option="--actor.policy_loss_type")
correction = partial(Entry, "openrlhf", "correction", gradient="constant", defaults="off")
controller = partial(Entry, "openrlhf", "controller")
placement = partial(Entry, "openrlhf", "placement")

ENTRIES = (
    # KL estimators. x = log pi - log ref.
    kl("k1", call("estimate_kl", estimator="k1", value_clip=10.0),
        "x, clamped", option="--algo.kl.estimator", clamps="the value to [-10, 10]", gradient="1 for |x| <= 10, else 0",
        note="the only system that clamps k1; both log-probs are cast to float32 first",
        goldens=recorded("compute_approx_kl", kl_estimator="k1", unbiased_gradient=None)),
    kl("k2", call("estimate_kl", estimator="k2", value_clip=10.0),
        "x^2 / 2, clamped", option="--algo.kl.estimator", clamps="the value to [-10, 10]",
        gradient="x for |x| <= 4.47, else 0", note="the only system that clamps k2",
        goldens=recorded("compute_approx_kl", kl_estimator="k2", unbiased_gradient=None)),
    kl("k3", call("estimate_kl", estimator="k3", value_clip=10.0),
        "exp(-x) - 1 + x, clamped", option="--algo.kl.estimator",
        clamps="x from below at -10 (since 0.11), the value to [-10, 10]",
        gradient="1 - exp(-x), 0 for x < -2.61 or x > 11", note="before 0.11 the gradient was NaN for x < -88.7",
        goldens=recorded("compute_approx_kl", kl_estimator="k3", unbiased_gradient=None)),
    kl("k1+unbiased_gradient",
        call("estimate_kl", estimator="k1", value_clip=10.0, gradient="weighted_k2", max_ratio=10.0),
        "value of k1 (x, clamped), gradient of w_const x^2 / 2", option=UNBIASED_OPTION,
        sources={"sampling_log_probs": "old log-probs"}, clamps=VALUE_AND_RATIO_CLAMP, gradient=UNBIASED_GRADIENT,
        note=RATIO_IN_GRADIENT, goldens=recorded("compute_approx_kl", kl_estimator="k1", unbiased_gradient=True)),
    kl("k2+unbiased_gradient",
        call("estimate_kl", estimator="k2", value_clip=10.0, gradient="weighted_k2", max_ratio=10.0),
        "value of k2 (x^2 / 2, clamped), gradient of w_const x^2 / 2", option=UNBIASED_OPTION,
        sources={"sampling_log_probs": "old log-probs"}, clamps=VALUE_AND_RATIO_CLAMP, gradient=UNBIASED_GRADIENT,
        note=RATIO_IN_GRADIENT, goldens=recorded("compute_approx_kl", kl_estimator="k2", unbiased_gradient=True)),
    kl("k3+unbiased_gradient",
        call("estimate_kl", estimator="k3", value_clip=10.0, gradient="weighted_k2", max_ratio=10.0),
        "value of k3 (exp(-x) - 1 + x, clamped), gradient of w_const x^2 / 2", option=UNBIASED_OPTION,
        sources={"sampling_log_probs": "old log-probs"}, clamps=VALUE_AND_RATIO_CLAMP, gradient=UNBIASED_GRADIENT,
        note=RATIO_IN_GRADIENT, goldens=recorded("compute_approx_kl", kl_estimator="k3", unbiased_gradient=True)),
    # Reductions. n_i is the number of tokens of row i.
    reduction("token-mean", call("token_weights", mode="token_mean"),
        "mean over the tokens of the optimizer step", divisors="tokens of the step; no epsilon", defaults="token-mean",
        note="the KL and entropy terms always use it, whatever the policy loss does; NaN where nothing is unmasked",
        goldens=recorded("aggregate_loss", token_level_loss=True)),
    reduction("seq-mean-token-mean", call("token_weights", mode="seq_mean_token_mean", empty_rows="drop"),
        "mean over rows with a token of the mean over their tokens", divisors="n_i + 1e-8, then the rows with a token",
        note="always used by the GSPO loss", goldens=recorded("aggregate_loss", token_level_loss=False)),
    # Advantages. r is the reward of a row, mean and std are of its group.
    advantage("gae",
        Call("gae", {"gamma": 1.0, "lam": 1.0, "masked_tokens": "zero"}, then=(WHITEN,)),
        "GAE with rewards and values 0 under the mask, then whitened",
        sources={"rewards": "see the placement compute_reward", "gamma": "gamma", "lam": "lambd"}, divisors=WHITENED,
        defaults="the default; gamma 1, lambd 1",
        goldens=recorded("compute_advantages_and_returns", name="gae",
            no_std_norm=None) + recorded("get_advantages_and_returns")),
    advantage("reinforce",
        Call("reinforce_plus_plus_returns", {"gamma": 1.0, "masked_tokens": "zero"}, then=(WHITEN,)),
        "discounted returns, then whitened: REINFORCE++",
        sources={"token_rewards": "see the placement compute_reward", "gamma": "gamma"}, divisors=WHITENED,
        goldens=recorded("compute_advantages_and_returns", name="reinforce",
            no_std_norm=None) + recorded("get_cumulative_returns")),
    advantage("rloo", Call("rloo_advantages", then=TO_RETURNS),
        "r - mean of the others; then the KL is subtracted per token and the rewards are summed to returns: gamma 1",
        sources=GROUP_REWARDS, part=WITHOUT_CLIP, divisors="n - 1", note="a group of one is refused",
        goldens=recorded("compute_advantages_and_returns", name="rloo")),
    advantage("reinforce_baseline",
        Call("reinforce_plus_plus_baseline_advantages", then=(*TO_RETURNS, WHITEN)),
        "r - mean; then the KL is subtracted per token and the rewards are summed to returns: gamma 1; then whitened",
        sources=GROUP_REWARDS, part=WITHOUT_CLIP, divisors=WHITENED,
        note="a group of one is refused; --algo.advantage.no_std_norm centres only",
        goldens=recorded("compute_advantages_and_returns", name="reinforce_baseline", no_std_norm=None)),
    advantage("group_norm",
        Call("grpo_advantages", {"scale": "std", "ddof": 1, "eps": 1e-9}, then=TO_RETURNS),
        "(r - mean) / std: GRPO; then the KL is subtracted per token and the rewards are summed to returns: gamma 1",
        sources=GROUP_REWARDS, part=WITHOUT_CLIP, divisors="std (n - 1) + 1e-9", note="a group of one is refused",
        goldens=recorded("compute_advantages_and_returns", name="group_norm")),
    advantage("dr_grpo", Call("grpo_advantages", {"scale": "none"}, then=TO_RETURNS),
        "r - mean; then the KL is subtracted per token and the rewards are summed to returns: gamma 1",
        sources=GROUP_REWARDS, part=WITHOUT_CLIP, note="a group of one is refused",
        goldens=recorded("compute_advantages_and_returns", name="dr_grpo")),
    advantage("flash_reinforce",
        Call("grpo_advantages", {"scale": "none", "num_groups": 1}, then=TO_RETURNS),
        "r - mean of the batch; then the KL is subtracted per token and the rewards are summed to returns: gamma 1",
        sources=GROUP_REWARDS | {"group_ids": "0 for every row: the batch is one group"}, part=WITHOUT_CLIP,
        goldens=recorded("compute_advantages_and_returns", name="flash_reinforce")),
    # Policy losses. d = log pi - log old, r = exp(d), A is the advantage, sg() a constant.
    policy_loss("ppo", call("ppo_clip_loss", clip_low=0.2, clip_high=0.2, log_ratio_clip=20.0),
        "PPO: max(-A r, -A clip(r))",
        sources={"clip_low": "clip_eps_low", "clip_high": "clip_eps_high", "dual_clip": "dual_clip"},
        clamps="d to [-20, 20]", divisors="--actor.loss_agg_mode",
        gradient="-A r inside the bound that applies, else 0", defaults="the default; 0.2, 0.2, no dual clip",
        goldens=recorded("PolicyLoss", policy_loss_type="ppo")),
    policy_loss("gspo", call("gspo_loss", clip_low=0.2, clip_high=0.2, gradient="sequence"),
        "PPO with the length-normalised ratio s of the row",
        sources={"clip_low": "clip_eps_low", "clip_high": "clip_eps_high", "dual_clip": "dual_clip",
            "old_log_probs": "old log-probs; the sampler's with a train-rollout correction"},
        divisors="max(n_i, 1) in s; always seq-mean-token-mean",
        gradient="through s: every token of the row gets an equal share of the row's sum of -A s",
        defaults="0.2, 0.2: far wider than the 3e-4, 4e-4 of the paper",
        goldens=recorded("PolicyLoss", policy_loss_type="gspo")),
    # Value losses.
    Entry("openrlhf", "value_loss", "ValueLoss", call("value_loss", clip=0.5),
        "max((V - R)^2, (clip(V, V_old -+ c) - R)^2) / 2", option="--critic.value_clip", sources={"clip": "clip_eps"},
        divisors="the reduction of the policy loss", gradient="V - R, 0 where the clipped error is larger",
        defaults="0.5", goldens=recorded("ValueLoss", clip_eps=0.2)),
    # Corrections. r = trainer / sampler.
    correction("token+clip+ratio", call("importance_weights", level="token", mode="clip", lower=0.5, upper=5.0),
        "weights: r of each token, clipped: TIS",
        option="--algo.advantage.is_correction_level token, is_correction_mode clip", sources=BOUNDS,
        defaults="off; 0.5, 5.0", note="GSPO ignores it, and compares with the sampler in place of the old policy",
        goldens=recorded("PolicyLoss", is_correction_level="token", is_correction_mode="clip")),
    correction("token+mask+ratio", call("importance_weights", level="token", mode="mask", lower=0.5, upper=5.0),
        "weights: r of each token, 0 outside the bounds: IcePop", option="--algo.advantage.is_correction_level token",
        sources=BOUNDS, defaults="off; 0.5, 5.0", note="a single threshold is an upper bound",
        goldens=recorded("PolicyLoss", is_correction_level="token", is_correction_mode="mask",
            is_correction_gating="ratio")),
    correction("seq+mask+ratio",
        Call("rejection_mask", {"level": "geometric", "lower": 0.5, "upper": 5.0}, times=(RATIOS,)),
        "weights: r of each token, 0 in rows whose geometric mean of r is outside the bounds: seq-mask-tis",
        option="--algo.advantage.is_correction_level seq", sources=BOUNDS, defaults="off; 0.5, 5.0", note=SURVIVORS,
        goldens=recorded("PolicyLoss", is_correction_level="seq", is_correction_mode="mask",
            is_correction_gating="ratio")),
    correction("token+mask+binary_kl",
        Call("divergence_mask", {"divergence": "kl", "level": "token"}, times=(RATIOS,)),
        "weights: r of each token, 0 where the binary_kl of the sampled token, of each token, exceeds the threshold",
        option="--algo.advantage.is_correction_level token, is_correction_mode mask, is_correction_gating binary_kl",
        sources=GATE, clamps=PROBABILITY_CLAMP, note=SURVIVORS,
        goldens=recorded("PolicyLoss", is_correction_level="token", is_correction_mode="mask",
            is_correction_gating="binary_kl")),
    correction("token+mask+tv",
        Call("divergence_mask", {"divergence": "tv", "level": "token"}, times=(RATIOS,)),
        "weights: r of each token, 0 where the tv of the sampled token, of each token, exceeds the threshold",
        option="--algo.advantage.is_correction_level token, is_correction_mode mask, is_correction_gating tv",
        sources=GATE, clamps=PROBABILITY_CLAMP, note=SURVIVORS,
        goldens=recorded("PolicyLoss", is_correction_level="token", is_correction_mode="mask",
            is_correction_gating="tv")),
    correction("seq+mask+binary_kl",
        Call("divergence_mask", {"divergence": "kl", "level": "sequence"}, times=(RATIOS,)),
        "weights: r of each token, 0 where the binary_kl of the sampled token, averaged over the row, exceeds the "
        "threshold",
        option="--algo.advantage.is_correction_level seq, is_correction_mode mask, is_correction_gating binary_kl",
        sources=GATE, clamps=PROBABILITY_CLAMP, note=SURVIVORS,
        goldens=recorded("PolicyLoss", is_correction_level="seq", is_correction_mode="mask",
            is_correction_gating="binary_kl")),
    correction("seq+mask+tv",
        Call("divergence_mask", {"divergence": "tv", "level": "sequence"}, times=(RATIOS,)),
        "weights: r of each token, 0 where the tv of the sampled token, averaged over the row, exceeds the threshold",
        option="--algo.advantage.is_correction_level seq, is_correction_mode mask, is_correction_gating tv",
        sources=GATE, clamps=PROBABILITY_CLAMP, note=SURVIVORS,
        goldens=recorded("PolicyLoss", is_correction_level="seq", is_correction_mode="mask",
            is_correction_gating="tv")),
    # KL coefficients over time, and references that follow the policy.
    controller("fixed", call("fixed_kl", coef=0.01),
        "the coefficient stays what it is", option="--algo.kl.target absent", sources={"coef": "--algo.kl.init_coef"},
        defaults="the default; of the KL in the reward and of the KL loss", goldens=recorded("FixedKLController")),
    controller("adaptive", call("adaptive_kl", coef=0.01, horizon=10_000),
        "coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon, n = rollout.batch_size * n_samples_per_prompt",
        option="--algo.kl.target",
        sources={"coef": "--algo.kl.init_coef", "target": "--algo.kl.target", "horizon": "--algo.kl.horizon"},
        clamps="the relative error to [-0.2, 0.2]; the coefficient to at least 0 where it is used",
        defaults="no target, horizon 10000", note="multiplies the KL loss as well",
        goldens=recorded("AdaptiveKLController")),
    # Where the KL enters.
    placement("compute_reward", call("kl_shaped_rewards", coef=0.01, estimator="k1", value_clip=10.0),
        "per token: reward - coef * kl, the score on the last token; the KL is between the old policy and ref",
        option="--algo.kl.init_coef, --algo.kl.use_loss absent",
        sources={"coef": "the controller's value, at least 0", "estimator": "--algo.kl.estimator"},
        clamps="the estimate to [-10, 10]; the score to --reward.clip_range (-10, 10), after baseline or group "
        "normalisation", gradient="none", defaults="on; coefficient 0.01",
        note="the KL at masked positions stays in until the returns mask it; the score of a row without a token lands "
        "on its last column there and nowhere here", goldens=recorded("compute_reward")),
    placement("use_loss", call("reference_kl_loss", estimator="k1", gradient="value", value_clip=10.0),
        "policy loss + coef * KL term", option="--algo.kl.use_loss", sources={"estimator": "--algo.kl.estimator"},
        divisors="always the token mean of the step",
        gradient="that of the estimator: for k1 noise, and kljax refuses it; see the names +unbiased_gradient",
        defaults="off; the coefficient is the controller's value",
        reason="a sum of a KL estimate and a reduction: the cases of kind kl and reduction check both parts"),
)
