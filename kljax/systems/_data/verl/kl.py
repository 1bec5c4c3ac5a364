"""KL estimators, reductions, controllers and placements of verl."""

from functools import partial

from kljax.systems._entry import Entry, call, recorded

# Each entry is a paragraph: its name and call, its meaning, then the details; the formatter would make it a column.
# fmt: off
TWO_CLAMPS = "x to [-20, 20], then the value to [-10, 10]"
SATURATED = "1 - exp(-x), and exactly 0 once a clamp is active: x < -2.61 (ref / pi > 13.6) or x > 11"
UNCLAMPED_X = "x for every x, no clamp touches it: the gradient of KL(pi || ref)"
RAISED_BEFORE_0_9 = "raised NotImplementedError before 0.9, although documented"

kl = partial(Entry, "verl", "kl", option="actor.kl_loss_type, algorithm.kl_penalty, distillation_loss.loss_mode",
    defaults="kl_loss_type low_var_kl (coef 0.001), kl_penalty kl")
reduction = partial(Entry, "verl", "reduction", option="actor.loss_agg_mode", gradient="the token weights",
    defaults="token-mean")
controller = partial(Entry, "verl", "controller", option="algorithm.kl_ctrl.type")
placement = partial(Entry, "verl", "placement")

ENTRIES = (
    # KL estimators. x = log pi - log ref.
    kl("kl", call("estimate_kl", estimator="k1"),
        "x", gradient="1; in expectation over sampled tokens 0: as a loss term it only adds noise",
        goldens=recorded("kl_penalty", kl_penalty="kl")),
    kl("k1", call("estimate_kl", estimator="k1"),
        "x, another spelling of kl",
        gradient="1; in expectation over sampled tokens 0: as a loss term it only adds noise",
        goldens=recorded("kl_penalty", kl_penalty="k1")),
    kl("abs", call("estimate_kl", estimator="abs"),
        "|x|", gradient="sign(x), 0 at x = 0", goldens=recorded("kl_penalty", kl_penalty="abs")),
    kl("mse", call("estimate_kl", estimator="k2"),
        "x^2 / 2", gradient="x: over tokens drawn from pi the gradient of KL(pi || ref)",
        goldens=recorded("kl_penalty", kl_penalty="mse")),
    kl("k2", call("estimate_kl", estimator="k2"),
        "x^2 / 2", gradient="x: over tokens drawn from pi the gradient of KL(pi || ref)",
        goldens=recorded("kl_penalty", kl_penalty="k2")),
    kl("low_var_kl", call("estimate_kl", estimator="low_var_kl"),
        "exp(-x) - 1 + x of the clamped x, clamped again", clamps=TWO_CLAMPS, gradient=SATURATED,
        goldens=recorded("kl_penalty", kl_penalty="low_var_kl")),
    kl("k3", call("estimate_kl", estimator="low_var_kl"),
        "another spelling of low_var_kl: clamped", clamps=TWO_CLAMPS, gradient=SATURATED,
        note="the same letters are unclamped in Trinity, slime and TRL",
        goldens=recorded("kl_penalty", kl_penalty="k3")),
    kl("kl+", call("estimate_kl", estimator="k1", gradient="k2"),
        "value of kl (x), straight-through gradient of k2", gradient=UNCLAMPED_X, note=RAISED_BEFORE_0_9,
        reason="the branch of verl's code that k1+ takes, whose cases check it"),
    kl("k1+", call("estimate_kl", estimator="k1", gradient="k2"),
        "value of k1 (x), straight-through gradient of k2", gradient=UNCLAMPED_X, note=RAISED_BEFORE_0_9,
        goldens=recorded("kl_penalty", kl_penalty="k1+")),
    kl("abs+", call("estimate_kl", estimator="abs", gradient="k2"),
        "value of abs (|x|), straight-through gradient of k2", gradient=UNCLAMPED_X, note=RAISED_BEFORE_0_9,
        goldens=recorded("kl_penalty", kl_penalty="abs+")),
    kl("mse+", call("estimate_kl", estimator="k2", gradient="k2"),
        "value of mse (x^2 / 2), straight-through gradient of k2", gradient=UNCLAMPED_X, note=RAISED_BEFORE_0_9,
        reason="the branch of verl's code that k2 takes, whose cases check it"),
    kl("k2+", call("estimate_kl", estimator="k2", gradient="k2"),
        "value of k2 (x^2 / 2), straight-through gradient of k2", gradient=UNCLAMPED_X, note=RAISED_BEFORE_0_9,
        reason="the branch of verl's code that k2 takes, whose cases check it"),
    kl("low_var_kl+", call("estimate_kl", estimator="low_var_kl", gradient="k2"),
        "value of low_var_kl (clamped k3), straight-through gradient of k2", clamps=TWO_CLAMPS, gradient=UNCLAMPED_X,
        note=RAISED_BEFORE_0_9, goldens=recorded("kl_penalty", kl_penalty="low_var_kl+")),
    kl("k3+", call("estimate_kl", estimator="low_var_kl", gradient="k2"),
        "value of k3 (clamped k3), straight-through gradient of k2", clamps=TWO_CLAMPS, gradient=UNCLAMPED_X,
        note=RAISED_BEFORE_0_9, goldens=recorded("kl_penalty", kl_penalty="k3+")),
    kl("full", None,
        "not written: the KL over the whole vocabulary",
        reason="verl raises NotImplementedError; the exact KL over the vocabulary is kljax.generalized_jsd with "
        "beta=1"),
    # Reductions. n_i is the number of tokens of row i.
    reduction("token-mean", call("token_weights", mode="token_mean"),
        "mean over tokens", divisors="batch_num_tokens / dp_size; no epsilon",
        note="computed from the whole mini-batch (batch_num_tokens, global_batch_size), or per micro-batch where not "
        "given; NaN in verl where nothing is unmasked, 0 here",
        goldens=recorded("agg_loss", loss_agg_mode="token-mean")),
    reduction("token-sum", call("token_weights", mode="token_sum"),
        "sum over tokens", divisors="1 / dp_size", goldens=recorded("agg_loss", loss_agg_mode="token-sum")),
    reduction("seq-mean-token-sum", call("token_weights", mode="seq_mean_token_sum", empty_rows="drop"),
        "mean over rows with a token of the sum over their tokens",
        divisors="global_batch_size / dp_size, or the rows with a token",
        note="Trinity and SkyRL count rows without a token too; NaN in verl where nothing is unmasked",
        goldens=recorded("agg_loss", loss_agg_mode="seq-mean-token-sum")),
    reduction("seq-mean-token-mean", call("token_weights", mode="seq_mean_token_mean", empty_rows="drop"),
        "mean over rows with a token of the mean over their tokens",
        divisors="n_i + 1e-8, then global_batch_size / dp_size, or the rows with a token",
        note="Trinity, SkyRL and TRL count rows without a token too; NaN in verl where nothing is unmasked",
        goldens=recorded("agg_loss", loss_agg_mode="seq-mean-token-mean")),
    reduction("seq-mean-token-sum-norm", call("token_weights", mode="seq_mean_token_sum_norm", empty_rows="drop"),
        "mean over rows with a token of the sum over their tokens, over a constant length",
        sources={"max_length": "actor.loss_scale_factor, or the padded length T"},
        divisors="(loss_scale_factor or T) * (global_batch_size / dp_size, or the rows with a token)",
        note="before 0.9 no division by the number of rows, as in Trinity still",
        goldens=recorded("agg_loss", loss_agg_mode="seq-mean-token-sum-norm")),
    # KL coefficients over time, and references that follow the policy.
    controller("fixed", call("fixed_kl", coef=0.001),
        "the coefficient stays what it is", sources={"coef": "algorithm.kl_ctrl.kl_coef"},
        defaults="the default; 0.001, of the KL in the reward",
        goldens=recorded("FixedKLController") + recorded("apply_kl_penalty", type="fixed")),
    controller("adaptive", call("adaptive_kl", coef=0.001, target=0.1, horizon=10_000),
        "coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon, n the rows of the batch",
        sources={"coef": "algorithm.kl_ctrl.kl_coef", "target": "algorithm.kl_ctrl.target_kl",
            "horizon": "algorithm.kl_ctrl.horizon"}, clamps="the relative error to [-0.2, 0.2]",
        defaults="target 0.1, horizon 10000; of the KL in the reward only",
        note="n > 5 horizon makes the coefficient negative there; here it stops at 0",
        goldens=recorded("AdaptiveKLController") + recorded("apply_kl_penalty", type="adaptive")),
    # Where the KL enters.
    placement("use_kl_in_reward", call("kl_shaped_rewards", coef=0.001, estimator="k1"),
        "per token: reward - coef * kl, the score on the last token; the KL is between the old policy and ref",
        option="algorithm.use_kl_in_reward", sources={"coef": "algorithm.kl_ctrl", "estimator": "algorithm.kl_penalty"},
        gradient="none", defaults="off; estimator kl, coefficient 0.001", goldens=recorded("apply_kl_penalty")),
    placement("use_kl_loss", call("reference_kl_loss", estimator="low_var_kl", gradient="value"),
        "policy loss + coef * KL term", option="actor.use_kl_loss", sources={"estimator": "actor.kl_loss_type"},
        divisors="the reduction of the policy loss", gradient="that of the estimator",
        defaults="off; estimator low_var_kl, coefficient 0.001",
        note="with use_kl_in_reward as well verl only prints a notice",
        reason="a sum of a KL estimate and a reduction: the cases of kind kl and reduction check both parts"),
)
