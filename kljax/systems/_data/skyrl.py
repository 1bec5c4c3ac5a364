"""The names of SkyRL."""

from functools import partial
from typing import Any

from kljax.systems._call import Call
from kljax.systems._entry import OF_LAYERS, TO_ROUTER, Entry, Golden, System, call, recorded

# Each entry is a paragraph: its name and call, its meaning, then the details; the formatter would make it a column.
# fmt: off
SYSTEM = System("skyrl", "SkyRL", "0.3.0", "its k3 (clamped) in the loss, coefficient 0.001")

ROW_REWARDS = {"rewards": "token_level_rewards summed over a row", "group_ids": "uid"}
CLIP_OPTIONS = {"clip_low": "eps_clip_low", "clip_high": "eps_clip_high"}
ARRAYS = {"log_probs": "old log-probs of the trainer", "sampling_log_probs": "rollout log-probs"}
DPPO_OPTIONS = {
    "clip_low": "dppo.delta_low", "clip_high": "dppo.delta_high",
    "old_log_probs": "rollout_logprobs, else the old ones"
}
NOT_FOR_KL = "the KL and entropy terms ignore it: always seq_mean_token_mean, rows without a token counted"
WHITENED = "(v - mean) / sqrt(var + 1e-8) over the unmasked tokens of the batch, var with n - 1"
D_CLAMP = "d to [-20, 20]; r is computed in float32"
LOG_RATIO_CLAMP = "log-ratios to [-20, 20]"
WHITEN = call("masked_whiten")

WEIGHTS_UNDER_THE_MASK = "the weights keep values under the mask, 0 here"

kl = partial(Entry, "skyrl", "kl", option="trainer.algorithm.kl_estimator_type",
    defaults="k3; kl_loss_coef 0.001, in the loss (use_kl_loss true)")
reduction = partial(Entry, "skyrl", "reduction", option="trainer.algorithm.loss_reduction",
    gradient="the advantages are multiplied by the weights before the loss, which is then a sum",
    defaults="token_mean")
advantage = partial(Entry, "skyrl", "advantage", option="trainer.algorithm.advantage_estimator", gradient="constant",
    defaults="grpo")
policy_loss = partial(Entry, "skyrl", "policy_loss", option="trainer.algorithm.policy_loss_type",
    divisors="a sum: the reduction is in the advantages")
correction = partial(Entry, "skyrl", "correction", gradient="constant")
controller = partial(Entry, "skyrl", "controller", option="trainer.algorithm.kl_ctrl.type")
placement = partial(Entry, "skyrl", "placement", gradient="that of the estimator")

def alone(**params: object) -> tuple[Golden, ...]:
    """Selects the recorded cases of one correction with all others off."""
    options = ("tis_ratio_type", "sequence_mask_metric", "outlier_token_is_threshold_low",
               "outlier_token_is_threshold_high", "token_mask_is_threshold_low")
    return recorded("compute_off_policy_correction", **{**dict.fromkeys(options), **params})

SAMPLER = {"old_log_probs": "logprobs of the sampler"}
ABSOLUTE = {"clip_low": "1 less clip_low_threshold", "clip_high": "clip_high_threshold less 1"}


def tinker(name: str, function: Call, meaning: str, **details: Any) -> Entry:
    """Makes the row of a loss of Tinker's interface, which ART sends to Tinker's servers as well."""
    return policy_loss(f"tinker:{name}", function, meaning, option="loss_fn of a forward_backward request",
        **{"divisors": "none: a sum over tokens, of the weights given", "version": "main of 2026-08, commit a956457",
            "reason": "an interface of the main branch; each is a call that other rows check", **details})


ENTRIES = (
    # KL estimators. x = log pi - log ref.
    kl("k1", call("estimate_kl", estimator="k1"),
        "x", gradient="1; in expectation over sampled tokens 0: as a loss term it only adds noise",
        goldens=recorded("compute_approx_kl", kl_estimator_type="k1")),
    kl("abs", call("estimate_kl", estimator="abs"),
        "|x|", gradient="sign(x), 0 at x = 0", goldens=recorded("compute_approx_kl", kl_estimator_type="abs")),
    kl("k2", call("estimate_kl", estimator="k2"),
        "x^2 / 2", gradient="x: over tokens drawn from pi the gradient of KL(pi || ref)",
        note="its gradient is NaN in SkyRL where a masked position holds -inf in both policies; 0 here",
        goldens=recorded("compute_approx_kl", kl_estimator_type="k2")),
    kl("k3", call("estimate_kl", estimator="low_var_kl"),
        "exp(-x) - 1 + x of the clamped x, clamped again: what verl and Trinity call low_var_kl",
        clamps="x to [-20, 20], then the value to [-10, 10]",
        gradient="1 - exp(-x), and exactly 0 once a clamp is active: x < -2.61 (ref / pi > 13.6) or x > 11",
        note="the same letters are unclamped in Trinity, slime and TRL",
        goldens=recorded("compute_approx_kl", kl_estimator_type="k3")),
    # Reductions. n_i is the number of tokens of row i.
    reduction("token_mean", call("token_weights", mode="token_mean"),
        "mean over the tokens of the mini-batch", divisors="max(number of tokens, 1)", note=NOT_FOR_KL,
        goldens=recorded("apply_loss_reduction_to_advantages_minibatch", loss_reduction="token_mean")),
    reduction("token_mean_legacy", call("token_weights", mode="prompt_mean", empty_rows="count"),
        "mean over micro-batches of the mean over their tokens",
        sources={"group_ids": "the micro-batch of each row: i // micro_batch_size",
            "num_groups": "mini-batch size // micro_batch_size"},
        divisors="max(tokens of the micro-batch, 1) * number of micro-batches",
        note="depends on the split; rows of an incomplete last micro-batch get weight 0",
        goldens=recorded("apply_loss_reduction_to_advantages_minibatch", loss_reduction="token_mean_legacy")),
    reduction("sequence_mean", call("token_weights", mode="seq_mean_token_mean", empty_rows="count"),
        "mean over all rows of the mean over their tokens",
        divisors="max(n_i, 1) * number of rows, those without a token included", note=NOT_FOR_KL,
        goldens=recorded("apply_loss_reduction_to_advantages_minibatch", loss_reduction="sequence_mean")),
    reduction("seq_mean_token_sum_norm", call("token_weights", mode="seq_mean_token_sum_norm", empty_rows="count"),
        "mean over all rows of the sum over their tokens, over a constant length",
        sources={"max_length": "trainer.algorithm.max_seq_len"},
        divisors="max_seq_len * number of rows, those without a token included",
        goldens=recorded("apply_loss_reduction_to_advantages_minibatch", loss_reduction="seq_mean_token_sum_norm")),
    reduction("prompt_mean", call("token_weights", mode="prompt_mean", empty_rows="count"),
        "mean over prompts of the mean over the tokens of all rows of the prompt",
        sources={"group_ids": "the prompt of each row", "num_groups": "number of prompts"},
        divisors="max(tokens of the prompt, 1) * number of prompts",
        goldens=recorded("apply_loss_reduction_to_advantages_minibatch", loss_reduction="prompt_mean")),
    # Advantages. r is the reward of a row, mean and std are of its group.
    advantage("gae", Call("gae", {"gamma": 1.0, "lam": 1.0, "masked_tokens": "none"}, then=(WHITEN,)),
        "GAE over all tokens, then whitened",
        sources={"rewards": "token_level_rewards", "gamma": "trainer.algorithm.gamma",
            "lam": "trainer.algorithm.lambd"}, divisors=WHITENED,
        note="values and rewards under the mask enter the recursion as they are; advantages and returns keep values "
        "under the mask, 0 here",
        goldens=recorded("compute_gae_advantage_return")),
    advantage("grpo", call("grpo_advantages", scale="std", ddof=1, eps=1e-6, singleton="reward"),
        "(r - mean) / std", sources=ROW_REWARDS, divisors="std (n - 1) + 1e-6",
        note="a row alone in its group keeps its reward / (1 + 1e-6)",
        goldens=recorded("compute_grpo_outcome_advantage", grpo_norm_by_std=True)),
    advantage("grpo+grpo_norm_by_std=false", call("grpo_advantages", scale="none", singleton="reward"),
        "r - mean: Dr.GRPO", option="trainer.algorithm.advantage_estimator grpo, grpo_norm_by_std false",
        sources=ROW_REWARDS, note="a row alone in its group keeps its reward",
        goldens=recorded("compute_grpo_outcome_advantage", grpo_norm_by_std=False)),
    advantage("rloo", call("rloo_advantages", singleton="zero"),
        "r - mean of the others", sources=ROW_REWARDS, divisors="n - 1",
        note="a row alone in its group gets 0; in verl and Trinity it keeps its reward",
        goldens=recorded("compute_rloo_outcome_advantage")),
    advantage("reinforce++",
        Call("reinforce_plus_plus_returns", {"gamma": 1.0, "masked_tokens": "reset"}, then=(WHITEN,)),
        "discounted returns, then whitened",
        sources={"token_rewards": "token_level_rewards", "gamma": "trainer.algorithm.gamma"}, divisors=WHITENED,
        note="a masked token cuts the row: credit from behind a tool's output does not reach the tokens before it; "
        "the returns keep values under the mask, 0 here",
        goldens=recorded("compute_reinforce_plus_plus_outcome_advantage")),
    advantage("maxrl", call("grpo_advantages", scale="mean", eps=1e-6, singleton="reward"),
        "(r - mean) / mean", sources=ROW_REWARDS, divisors="mean + 1e-6",
        note="a negative mean turns the sign; prime-rl's max_rl gives 0 there. a row alone in its group keeps its "
        "reward", goldens=recorded("compute_maxrl_advantage")),
    advantage("advantage_batch_normalize", None,
        "(A - mean) / std after the estimator", option="trainer.algorithm.advantage_batch_normalize",
        divisors="mean over all positions, padding included; std over unmasked tokens, var at least 1e-8, n not n - 1",
        defaults="off", goldens=recorded("_normalize_advantages"),
        reason="its mean depends on the padding; masked_whiten(A, mask, ddof=0) is what it means to be"),
    # Policy losses. d = log pi - log old, r = exp(d), A is the advantage, sg() a constant.
    policy_loss("regular", call("ppo_clip_loss", clip_low=0.2, clip_high=0.2, log_ratio_clip=20.0),
        "PPO: max(-A r, -A clip(r))", sources=CLIP_OPTIONS, clamps=D_CLAMP,
        gradient="-A r inside the bound that applies, else 0", defaults="the default; 0.2, 0.2",
        note="no dual clip, unlike verl's vanilla", goldens=recorded("ppo_policy_loss", name="regular")),
    policy_loss("dual_clip", call("ppo_clip_loss", clip_low=0.2, clip_high=0.2, dual_clip=3.0, log_ratio_clip=20.0),
        "PPO, at most -3 A where A < 0", sources=CLIP_OPTIONS | {"dual_clip": "clip_ratio_c"}, clamps=D_CLAMP,
        gradient="-A r inside the bound that applies, else 0", defaults="0.2, 0.2, 3.0",
        goldens=recorded("ppo_policy_loss", name="dual_clip")),
    policy_loss("gspo", call("gspo_loss", clip_low=0.2, clip_high=0.2, gradient="token", max_log_ratio=10.0),
        "PPO with the length-normalised ratio s of the row, through the token's own log-prob", sources=CLIP_OPTIONS,
        clamps="log s to at most 10", gradient="-A_t s inside the bound that applies, else 0",
        defaults="0.2, 0.2: far wider than the 3e-4, 4e-4 of the paper", goldens=recorded("gspo_policy_loss")),
    policy_loss("cispo", call("cispo_loss", clip_low=0.0, clip_high=5.0, log_ratio_clip=20.0),
        "-A sg(clip(r)) log pi",
        sources={"clip_low": "cispo.cispo_eps_clip_low", "clip_high": "cispo.cispo_eps_clip_high"}, clamps=D_CLAMP,
        gradient="-A clip(r)",
        defaults="0.0, 5.0, so r in [1, 6]: no weight below 1. Later (main of 2026-08): 1.0, 4.0, so [0, 5]",
        note="the bounds are offsets from 1, though their defaults in 0.3.0 read like bounds",
        goldens=recorded("compute_policy_loss_cispo")),
    policy_loss("cispo+cispo_anchor=rollout",
        call("cispo_loss", clip_low=1.0, clip_high=4.0, log_ratio_clip=20.0),
        "-A sg(clip(r)) log pi with r = pi / sampler", option="trainer.algorithm.cispo.cispo_anchor rollout",
        sources={"old_log_probs": "rollout_logprobs", "clip_low": "cispo.cispo_eps_clip_low of main",
            "clip_high": "cispo.cispo_eps_clip_high of main"}, clamps=D_CLAMP, gradient="-A clip(r)",
        defaults="the anchor is old; 1.0, 4.0, so r in [0, 5]", version="main of 2026-08, commit a956457",
        note="off_policy_correction.tis_ratio_type is refused beside it: the ratio corrects for the sampler already",
        reason="0.3.0, the release on PyPI, has no anchor; the formula is that of cispo, on another ratio"),
    policy_loss("rollout_is",
        Call("reinforce_loss", times=(call("importance_weights", level="token", mode="mask", lower=0.8, upper=1.2),)),
        "-A sg(w) log pi with w = pi / sampler, 0 outside (1 - low, 1 + high)",
        sources={"sampling_log_probs": "rollout_logprobs", "lower": "1 - eps_clip_low", "upper": "1 + eps_clip_high"},
        clamps=D_CLAMP, gradient="-A w", defaults="0.2, 0.2", goldens=recorded("rollout_is_policy_loss")),
    policy_loss("dppo",
        call("dppo_loss", divergence="tv", clip_low=0.2, clip_high=0.2, through="ratio", log_ratio_clip=20.0),
        "-A r where the probability has not moved too far", sources=DPPO_OPTIONS, clamps=D_CLAMP,
        gradient="-A r on kept tokens, else 0", defaults="binary_tv; 0.2, 0.2",
        goldens=recorded("dppo_policy_loss", dppo_type="binary_tv")),
    policy_loss("dppo+dppo_type=binary_kl",
        call("dppo_loss", divergence="kl", clip_low=0.2, clip_high=0.2, through="ratio", log_ratio_clip=20.0),
        "as dppo, with the KL of the coins `this token or not`", sources=DPPO_OPTIONS,
        clamps="d to [-20, 20]; r is computed in float32; 1e-8 added to both 1 - p in the KL",
        gradient="-A r on kept tokens, else 0", defaults="0.2, 0.2; 0.05 is recommended",
        goldens=recorded("dppo_policy_loss", dppo_type="binary_kl")),
    policy_loss("sapo", call("sapo_loss", tau_positive=1.0, tau_negative=1.05, through="ratio", log_ratio_clip=20.0),
        "-A sigmoid(tau (r - 1)) 4 / tau", sources={"tau_positive": "sapo.tau_pos", "tau_negative": "sapo.tau_neg"},
        clamps="d to [-20, 20]", gradient="through the gate; -A r at r = 1", defaults="1.0, 1.05",
        goldens=recorded("sapo_policy_loss")),
    policy_loss("clip_cov", call("clip_cov_loss", fraction=0.0002, lower=1.0, upper=5.0, clip_low=0.2, clip_high=0.2),
        "PPO without a few of the tokens whose covariance (A - mean)(log pi - mean) lies in (lower, upper), at random",
        sources=CLIP_OPTIONS | {"fraction": "clip_cov.clip_ratio", "lower": "clip_cov.clip_cov_lb",
            "upper": "clip_cov.clip_cov_ub", "key": "torch.randperm"},
        gradient="-A r inside the bound that applies, else 0; 0 on the tokens left out", defaults="0.0002, 1, 5",
        note="the covariance is of the scaled advantages: not linear in A, so the reduction in the advantages does "
        "not scale all of it", goldens=recorded("compute_policy_loss_clip_cov")),
    policy_loss("kl_cov", call("kl_cov_loss", fraction=0.2, coef=1.0),
        "-A r, plus coef |d| on the tokens of highest covariance",
        sources={"fraction": "kl_cov.kl_cov_frac", "coef": "kl_cov.ppo_kl_coef"},
        gradient="-A r, plus coef sign(d) on those tokens, 0 at d = 0",
        defaults="0.2, 1.0: a thousand times the tokens and ten times the weight of verl",
        note="coef |d| is summed over tokens: not linear in A, so the reduction in the advantages does not scale all "
        "of it", goldens=recorded("compute_policy_loss_kl_cov")),
    policy_loss("cross_entropy", call("cross_entropy_loss"),
        "-log pi", divisors="a sum over tokens", gradient="-1",
        note="for supervised rows; the advantages are ignored, and with them the reduction",
        goldens=recorded("cross_entropy_loss")),
    policy_loss("importance_sampling", call("importance_sampling_loss"),
        "-A r, nothing clipped", gradient="-A r", goldens=recorded("importance_sampling_loss")),
    tinker("cross_entropy", call("cross_entropy_loss"), "-w log pi", gradient="-w"),
    tinker("importance_sampling", call("importance_sampling_loss"), "-A r, r = pi / sampler, nothing clipped",
        sources=SAMPLER, gradient="-A r"),
    tinker("ppo", call("ppo_clip_loss", clip_low=0.2, clip_high=0.2),
        "-min(A r, A clip(r, low, high)), r = pi / sampler, with absolute bounds", sources=SAMPLER | ABSOLUTE,
        gradient="-A r inside the bound that applies, else 0", defaults="0.8, 1.2"),
    tinker("cispo", call("cispo_loss", clip_low=0.2, clip_high=0.2),
        "-A sg(clip(r, low, high)) log pi, r = pi / sampler, with absolute bounds", sources=SAMPLER | ABSOLUTE,
        gradient="-A clip(r)", defaults="0.8, 1.2"),
    tinker("gspo", call("gspo_loss", clip_low=0.2, clip_high=0.2, gradient="token", max_log_ratio=10.0),
        "gspo with absolute bounds, and the sampler as the old policy", sources=SAMPLER | ABSOLUTE,
        clamps="log s to at most 10", gradient="-A_t s inside the bound that applies, else 0", defaults="0.8, 1.2"),
    tinker("dppo", call("dppo_loss", divergence="tv", clip_low=0.2, clip_high=0.2, through="ratio",
        log_ratio_clip=20.0), "dppo with the sampler as the old policy",
        sources=SAMPLER | {"clip_low": "delta_low of the request", "clip_high": "delta_high of the request"},
        clamps="d to [-20, 20]", gradient="-A r on kept tokens, else 0", defaults="0.2, 0.2"),
    # Value losses.
    Entry("skyrl", "value_loss", "ppo_critic_loss", call("value_loss", clip=0.2),
        "max((V - R)^2, (clip(V, V_old -+ c) - R)^2) / 2", option="trainer.algorithm.value_clip",
        sources={"clip": "value_clip"}, divisors="max(n_i, 1), then all rows",
        gradient="V - R, 0 where the clipped error is larger", defaults="0.2",
        goldens=recorded("ppo_critic_loss", value_clip=0.2)),
    # Corrections. r = trainer / sampler.
    correction("tis_ratio_type=token",
        call("importance_weights", level="token", mode="truncate", upper=2.0, log_ratio_clip=20.0),
        "weights: r of each token, at most the threshold", option="off_policy_correction.tis_ratio_type",
        sources=ARRAYS | {"upper": "token_tis_ratio_clip_high"}, clamps=LOG_RATIO_CLAMP, defaults="off; 2.0",
        note=WEIGHTS_UNDER_THE_MASK, goldens=alone(tis_ratio_type="token")),
    correction("tis_ratio_type=sequence",
        call("importance_weights", level="sequence", mode="truncate", upper=5.0, log_ratio_clip=20.0),
        "weights: product of r over the row, at most the threshold", option="off_policy_correction.tis_ratio_type",
        sources=ARRAYS | {"upper": "sequence_tis_ratio_clip_high"}, clamps="log-ratios to [-20, 20], of the sum",
        defaults="off; 5.0", note=WEIGHTS_UNDER_THE_MASK, goldens=alone(tis_ratio_type="sequence")),
    correction("sequence_mask_metric=geometric", call("rejection_mask", level="geometric", lower=0.99, upper=1.01),
        "keeps rows whose geometric mean of r is within bounds", option="off_policy_correction.sequence_mask_metric",
        sources=ARRAYS | {"lower": "geo_mask_low", "upper": "geo_mask_high"}, clamps=LOG_RATIO_CLAMP,
        defaults="off; 0.99, 1.01",
        note="a masked token counts as zero loss: the weights of the reduction are made before",
        goldens=alone(sequence_mask_metric="geometric")),
    correction("sequence_mask_metric=product", call("rejection_mask", level="sequence", lower=0.5, upper=2.0),
        "keeps rows whose product of r is within bounds", option="off_policy_correction.sequence_mask_metric",
        sources=ARRAYS | {"lower": "product_mask_low", "upper": "product_mask_high"}, clamps=LOG_RATIO_CLAMP,
        defaults="off; 0.5, 2.0",
        note="a masked token counts as zero loss: the weights of the reduction are made before",
        goldens=alone(sequence_mask_metric="product")),
    correction("outlier_token_is_threshold", call("veto_mask", min_ratio=0.0001, max_ratio=100.0),
        "drops rows that hold a token with r outside bounds",
        option="off_policy_correction.outlier_token_is_threshold_low, _high",
        sources=ARRAYS | {"min_ratio": "outlier_token_is_threshold_low",
            "max_ratio": "outlier_token_is_threshold_high"}, clamps=LOG_RATIO_CLAMP,
        defaults="off; 1e-4 and 100 are suggested",
        note="the first step: token mask, weights and sequence mask see what it leaves",
        goldens=alone(outlier_token_is_threshold_low=0.6,
            outlier_token_is_threshold_high=1.7) + alone(outlier_token_is_threshold_high=1.5)),
    correction("token_mask_is_threshold", call("rejection_mask", level="token"),
        "drops tokens with r outside bounds", option="off_policy_correction.token_mask_is_threshold_low, _high",
        sources=ARRAYS | {"lower": "token_mask_is_threshold_low", "upper": "token_mask_is_threshold_high"},
        clamps=LOG_RATIO_CLAMP, defaults="off; needs both", goldens=alone(token_mask_is_threshold_low=0.8)),
    correction("moe_enable_routing_replay", None,
        "the experts of the sampler in updates, `routing.replay: rollout`",
        option="trainer.policy.megatron_config.moe_enable_routing_replay, "
        "generator.inference_engine.enable_return_routed_experts", gradient=TO_ROUTER,
        defaults="off", reason=OF_LAYERS, version="main of 2026"),
    correction("off_policy_correction", call("correct_rollout"),
        "several of them: outlier rows, then token mask, then weights, then sequence mask; each sees the mask so far",
        option="trainer.algorithm.off_policy_correction",
        sources={"log_probs": "old_log_probs", "steps": "the calls of those that are on, in this order"},
        defaults="all off", note="is_ratio_min, the metric, is 0 whenever anything is masked",
        reason="no case has several; tests/kljax/ratios compares the order with SkyRL's written as loops"),
    # KL coefficients over time, and references that follow the policy.
    controller("fixed", call("fixed_kl", coef=0.001),
        "the coefficient stays what it is", sources={"coef": "trainer.algorithm.kl_loss_coef"}, defaults="the default",
        goldens=recorded("FixedKLController")),
    controller("adaptive", call("adaptive_kl", coef=0.001, target=0.1, horizon=10_000),
        "coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon, n the rows of the batch",
        sources={"coef": "trainer.algorithm.kl_loss_coef", "target": "trainer.algorithm.kl_ctrl.kl_target",
            "horizon": "trainer.algorithm.kl_ctrl.horizon"},
        clamps="the relative error to [-0.2, 0.2]; the coefficient to at least 0 where it is used",
        defaults="target 0.1, horizon 10000; only with use_kl_in_reward", goldens=recorded("AdaptiveKLController")),
    # Where the KL enters.
    placement("use_kl_in_reward", call("kl_shaped_rewards", coef=0.001, estimator="low_var_kl"),
        "per token: reward - coef * kl, the score on the last token; the KL is between the old policy and ref",
        option="trainer.algorithm.use_kl_in_reward",
        sources={"coef": "kl_ctrl, at least 0", "estimator": "kl_estimator_type"}, gradient="none",
        defaults="off; excludes use_kl_loss", goldens=recorded("apply_reward_kl_penalty", kl_estimator_type="k3")),
    placement("use_kl_loss", call("reference_kl_loss", estimator="low_var_kl", gradient="value"),
        "policy loss + coef * KL term", option="trainer.algorithm.use_kl_loss",
        sources={"estimator": "kl_estimator_type"},
        divisors="always seq_mean_token_mean with rows without a token counted, whatever loss_reduction says",
        defaults="on; coefficient 0.001",
        note="weighted by rows under FSDP and by micro-batches under Megatron; before 2026-03-19 it had no gradient",
        reason="a sum of a KL estimate and a reduction: the cases of kind kl and reduction check both parts"),
    placement("use_rollout_kl_loss", call("rollout_kl_loss", estimator="k2"),
        "policy loss + coef * KL term against the sampler", option="pull request 1811, closed without being merged",
        sources={"estimator": "rollout_kl_estimator_type", "rollout_log_probs": "rollout_logprobs"},
        divisors="seq_mean_token_mean, rows without a token counted", defaults="off; coefficient 0.0, k2",
        note="its k3 is the clamped one: estimate_kl(log_probs, rollout_log_probs, estimator='low_var_kl')",
        goldens=recorded("rollout_kl_loss"), version="pull request 1811"),
)
