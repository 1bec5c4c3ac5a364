"""Metrics of the KL and of the mismatch with the sampler, masked statistics, and losses of a value function."""

from collections.abc import Mapping
from functools import partial

from kljax.systems._row import Call, Row, on

verl = partial(Row, "verl", "statistic", gradient="none")
PREFIX = "rollout_corr/"
# What the array that the call takes is there.
SAMPLER = {"rollout_log_probs": "rollout_log_probs"}
OF_TRAINER, OF_SAMPLER = {"log_probs": "old_log_probs"}, {"log_probs": "rollout_log_probs"}
BEHAVIOUR = {"behaviour_log_probs": "rollout_log_probs"}
TOKENS, ROWS_TOO = "n + 1e-8", "n_i + 1e-8, then all rows: one without a token counts as 1"
EMPTY_ZERO = "n_i + 1e-8, then all rows: one without a token counts as 0"
OFFPOLICY = (on("compute_offpolicy_metrics"),)


def _mismatch(
    name: str, call: Call, meaning: str, divisors: str, *, given: Mapping[str, str] = SAMPLER, clamps: str = "none"
) -> Row:
    return verl(
        f"{PREFIX}{name}",
        call,
        meaning,
        option="a metric of rollout_correction",
        given=given,
        divisors=divisors,
        clamps=clamps,
        goldens=OFFPOLICY,
    )


SQUARED = {"log_ratio_clip": 20.0}
VERL = (
    verl(
        "masked_mean",
        Call("masked_mean"),
        "mean over the mask",
        option="verl_F.masked_mean",
        divisors=TOKENS,
        gradient="1 / n",
        goldens=(on("masked_mean"),),
    ),
    verl(
        "masked_var",
        Call("masked_var"),
        "variance over the mask",
        option="verl_F.masked_var",
        given={"ddof": "unbiased"},
        divisors=f"{TOKENS}, times n / (n - 1) if unbiased",
        gradient="as its formula",
        defaults="unbiased",
        note="raises where fewer than two tokens are unmasked; 0 here",
        goldens=(on("masked_var"),),
    ),
    verl(
        "masked_whiten",
        Call("masked_whiten"),
        "(v - mean) / sqrt(var + 1e-8)",
        option="verl_F.masked_whiten",
        given={"shift_mean": "shift_mean"},
        divisors=f"sqrt(var + 1e-8), var with n - 1; {TOKENS} in mean and var",
        gradient="as its formula",
        note="masked positions are whitened too; 0 here. SkyRL and Trinity have the same code",
        goldens=(on("masked_whiten"),),
    ),
    verl(
        "actor/ppo_kl",
        Call("ppo_kl", {"log_ratio_clip": 20.0}),
        "mean of -d: k1 of KL(old || pi), can be negative",
        option="a metric of vanilla, dppo, sapo and cispo",
        clamps="d to [-20, 20]; not in gspo, geo_mean, dro, clip_cov",
        divisors=TOKENS,
        note="kl_cov logs the mean of |d| under the same name",
        goldens=(on("compute_policy_loss_vanilla"),),
    ),
    _mismatch("kl", Call("rollout_kl", {"estimator": "k1"}), "mean of log sampler - log trainer", TOKENS),
    _mismatch("k3_kl", Call("rollout_kl", {"estimator": "k3"}), "mean of r - 1 - log r", TOKENS),
    _mismatch(
        "training_ppl", Call("perplexity"), "mean over rows of exp(-mean log trainer)", ROWS_TOO, given=OF_TRAINER
    ),
    _mismatch(
        "training_log_ppl", Call("log_perplexity"), "mean over rows of -mean log trainer", EMPTY_ZERO, given=OF_TRAINER
    ),
    _mismatch(
        "rollout_ppl", Call("perplexity"), "mean over rows of exp(-mean log sampler)", ROWS_TOO, given=OF_SAMPLER
    ),
    _mismatch(
        "rollout_log_ppl", Call("log_perplexity"), "mean over rows of -mean log sampler", EMPTY_ZERO, given=OF_SAMPLER
    ),
    _mismatch("log_ppl_diff", Call("log_perplexity_diff"), "mean over rows of log ppl trainer - sampler", EMPTY_ZERO),
    _mismatch(
        "log_ppl_abs_diff",
        Call("log_perplexity_diff", {"absolute": True}),
        "mean over rows of |log ppl trainer - sampler|",
        EMPTY_ZERO,
    ),
    _mismatch("ppl_ratio", Call("perplexity_ratio"), "mean over rows of ppl trainer / ppl sampler", ROWS_TOO),
    _mismatch(
        "chi2_token",
        Call("chi_squared", SQUARED),
        "mean of r^2, less 1",
        TOKENS,
        given=BEHAVIOUR,
        clamps="log r to [-20, 20]",
    ),
    _mismatch(
        "chi2_seq",
        Call("chi_squared", {"level": "sequence", **SQUARED}),
        "mean over rows of the squared product of r, less 1",
        "all rows: one without a token counts as 0",
        given=BEHAVIOUR,
        clamps="the sum of log r to [-20, 20]",
    ),
    verl(
        "rollout_is_eff_sample_size",
        Call("effective_sample_size"),
        "1 / mean((w / mean w)^2), a share of the tokens",
        option="a metric of rollout_correction",
        given={"weights": "the importance weights"},
        clamps="w to [0, threshold]",
        divisors=f"{TOKENS}; mean w + 1e-8",
        note="the same share, between 0 and 1, without the epsilon",
        reason="its epsilons enter a ratio of means; the test of verl's weights compares it",
    ),
)

OTHERS = (
    Row(
        "slime",
        "statistic",
        "train_rollout_logprob_abs_diff",
        Call("log_prob_abs_diff", {"mode": "seq_mean_token_mean"}),
        "mean of |log trainer - log sampler|",
        option="a metric",
        given={"other_log_probs": "rollout log-probs"},
        divisors="the reduction of the loss",
        gradient="none",
        reason="a metric that no case recorded",
    ),
    Row(
        "prime-rl",
        "statistic",
        "mismatch_kl",
        Call("rollout_kl", {"estimator": "k3"}),
        "mean of r - 1 - log r with r = trainer / sampler",
        option="a metric",
        given={"rollout_log_probs": "inference_logprobs"},
        divisors="max(n, 1)",
        gradient="none",
        reason="a metric that no case recorded",
    ),
    Row(
        "art",
        "statistic",
        "kl_policy_ref",
        Call("masked_mean"),
        "mean of x over the packed row",
        option="the metric loss/kl_policy_ref",
        given={"values": "log_probs - ref_log_probs"},
        divisors="n + 1e-6",
        gradient="none",
        goldens=(on("loss_fn", kl_penalty_coef=0.3),),
    ),
)

CLIPPED = "max((V - R)^2, (clip(V, V_old -+ c) - R)^2) / 2"
VALUE_LOSSES = (
    Row(
        "verl",
        "value_loss",
        "compute_value_loss",
        Call("value_loss", {"clip": 0.5}),
        CLIPPED,
        option="critic.cliprange_value",
        given={"clip": "cliprange_value"},
        divisors="critic.loss_agg_mode",
        gradient="V - R, 0 where the clipped error is larger",
        defaults="0.5",
        note="Trinity trains its critic with it",
        goldens=(on("compute_value_loss"),),
    ),
    Row(
        "skyrl",
        "value_loss",
        "ppo_critic_loss",
        Call("value_loss", {"clip": 0.2}),
        CLIPPED,
        option="trainer.algorithm.value_clip",
        given={"clip": "value_clip"},
        divisors="max(n_i, 1), then all rows",
        gradient="V - R, 0 where the clipped error is larger",
        defaults="0.2",
        goldens=(on("ppo_critic_loss", value_clip=0.2),),
    ),
    Row(
        "openrlhf",
        "value_loss",
        "ValueLoss",
        Call("value_loss", {"clip": 0.5}),
        CLIPPED,
        option="--critic.value_clip",
        given={"clip": "clip_eps"},
        divisors="the reduction of the policy loss",
        gradient="V - R, 0 where the clipped error is larger",
        defaults="0.5",
        goldens=(on("ValueLoss", clip_eps=0.2),),
    ),
    Row(
        "slime",
        "value_loss",
        "value_loss_function",
        Call("value_loss", {"clip": 0.2}, scale=2.0),
        "max((V - R)^2, (clip(V, V_old -+ c) - R)^2), without the half",
        option="--value-clip",
        given={"clip": "value_clip"},
        divisors="the reduction of the policy loss",
        gradient="2 (V - R), 0 where the clipped error is larger",
        defaults="0.2",
        note="twice the loss of the other systems",
        reason="slime is not on PyPI and its recorded cases hold no value loss; tested by formula",
    ),
)

ROWS = (*VERL, *OTHERS)
