"""Where the KL enters: in the reward, as a term of the loss, as a shift of the advantages, or against the sampler."""

from kljax.systems._row import Call, Row, on

IN_REWARD = "per token: reward - coef * kl, the score on the last token; the KL is between the old policy and ref"
AS_LOSS = "policy loss + coef * KL term"
SAME_TERM = "a sum of a KL estimate and a reduction: the cases of kind kl and reduction check both parts"
NAME = "any name of kind kl"

VERL = (
    Row(
        "verl",
        "placement",
        "use_kl_in_reward",
        Call("kl_shaped_rewards", {"coef": 0.001, "estimator": "k1"}),
        IN_REWARD,
        option="algorithm.use_kl_in_reward",
        given={"coef": "algorithm.kl_ctrl", "estimator": "algorithm.kl_penalty"},
        gradient="none",
        defaults="off; estimator kl, coefficient 0.001",
        goldens=(on("apply_kl_penalty"),),
    ),
    Row(
        "verl",
        "placement",
        "use_kl_loss",
        Call("reference_kl_loss", {"estimator": "low_var_kl", "gradient": "value"}),
        AS_LOSS,
        option="actor.use_kl_loss",
        given={"estimator": "actor.kl_loss_type"},
        divisors="the reduction of the policy loss",
        gradient="that of the estimator",
        defaults="off; estimator low_var_kl, coefficient 0.001",
        note="with use_kl_in_reward as well verl only prints a notice",
        reason=SAME_TERM,
    ),
)

TRINITY = (
    Row(
        "trinity",
        "placement",
        "kl_penalty_fn",
        Call("kl_shaped_rewards", {"coef": 0.001}),
        IN_REWARD,
        option="algorithm.kl_penalty_fn",
        given={"coef": "kl_coef", "estimator": NAME},
        gradient="none",
        defaults="none",
        note="read only by algorithms that compute advantages in the trainer (ppo, reinforceplusplus, rloo, "
        "on_policy_distill, jsd); grpo, gspo, cispo and others ignore it without a word",
        goldens=(on("apply_kl_penalty_to_reward"),),
    ),
    Row(
        "trinity",
        "placement",
        "kl_loss_fn",
        Call("reference_kl_loss", {"estimator": "k2", "gradient": "value"}),
        AS_LOSS,
        option="algorithm.kl_loss_fn",
        given={"estimator": NAME},
        divisors="loss_agg_mode, on the micro-batch",
        gradient="that of the estimator",
        defaults="k2, coefficient 0.001; none for sft, cpt, dapo, raft, asymre, sppo, on_policy_distill and jsd",
        goldens=(on("calculate_kl_loss"),),
    ),
)

SKYRL = (
    Row(
        "skyrl",
        "placement",
        "use_kl_in_reward",
        Call("kl_shaped_rewards", {"coef": 0.001, "estimator": "low_var_kl"}),
        IN_REWARD,
        option="trainer.algorithm.use_kl_in_reward",
        given={"coef": "kl_ctrl, at least 0", "estimator": "kl_estimator_type"},
        gradient="none",
        defaults="off; excludes use_kl_loss",
        goldens=(on("apply_reward_kl_penalty", kl_estimator_type="k3"),),
    ),
    Row(
        "skyrl",
        "placement",
        "use_kl_loss",
        Call("reference_kl_loss", {"estimator": "low_var_kl", "gradient": "value"}),
        AS_LOSS,
        option="trainer.algorithm.use_kl_loss",
        given={"estimator": "kl_estimator_type"},
        divisors="always seq_mean_token_mean with rows without a token counted, whatever loss_reduction says",
        gradient="that of the estimator",
        defaults="on; coefficient 0.001",
        note="weighted by rows under FSDP and by micro-batches under Megatron; before 2026-03-19 it had no gradient",
        reason=SAME_TERM,
    ),
    Row(
        "skyrl",
        "placement",
        "use_rollout_kl_loss",
        Call("rollout_kl_loss", {"estimator": "k2"}),
        "policy loss + coef * KL term against the sampler",
        option="pull request 1811, closed without being merged",
        given={"estimator": "rollout_kl_estimator_type", "rollout_log_probs": "rollout_logprobs"},
        divisors="seq_mean_token_mean, rows without a token counted",
        gradient="that of the estimator",
        defaults="off; coefficient 0.0, k2",
        note="its k3 is the clamped one: estimate_kl(log_probs, rollout_log_probs, estimator='low_var_kl')",
        goldens=(on("rollout_kl_loss"),),
        version="pull request 1811",
    ),
)

SLIME = (
    Row(
        "slime",
        "placement",
        "kl_coef",
        Call("kl_shaped_rewards", {"coef": 0.0, "estimator": "k1"}),
        IN_REWARD,
        option="--kl-coef",
        given={"coef": "--kl-coef", "estimator": "--kl-loss-type", "value_clip": "10 with the type low_var_kl, a k3"},
        gradient="none",
        defaults="0.0",
        note="in ppo and reinforce_plus_plus; reinforce_plus_plus_baseline subtracts it from the advantages; grpo, "
        "gspo and cispo ignore it without a word",
        goldens=(on("ppo_kl_shaped_gae"), on("get_reinforce_plus_plus_returns")),
    ),
    Row(
        "slime",
        "placement",
        "use_kl_loss",
        Call("reference_kl_loss", {"estimator": "k1", "gradient": "value"}),
        AS_LOSS,
        option="--use-kl-loss",
        given={"estimator": "--kl-loss-type", "sampling_log_probs": "with --use-unbiased-kl, the old log-probs"},
        divisors="the reduction of the policy loss",
        gradient="that of the estimator: for k1, the default type, noise; kljax refuses it without a ratio",
        defaults="off; coefficient 0.0",
        reason=SAME_TERM,
    ),
)

OPENRLHF = (
    Row(
        "openrlhf",
        "placement",
        "compute_reward",
        Call("kl_shaped_rewards", {"coef": 0.01, "estimator": "k1", "value_clip": 10.0}),
        IN_REWARD,
        option="--algo.kl.init_coef, --algo.kl.use_loss absent",
        given={"coef": "the controller's value, at least 0", "estimator": "--algo.kl.estimator"},
        clamps="the estimate to [-10, 10]; the score to --reward.clip_range (-10, 10), after baseline or group "
        "normalisation",
        gradient="none",
        defaults="on; coefficient 0.01",
        note="the KL at masked positions stays in until the returns mask it; the score of a row without a token lands "
        "on its last column there and nowhere here",
        goldens=(on("compute_reward"),),
    ),
    Row(
        "openrlhf",
        "placement",
        "use_loss",
        Call("reference_kl_loss", {"estimator": "k1", "gradient": "value", "value_clip": 10.0}),
        AS_LOSS,
        option="--algo.kl.use_loss",
        given={"estimator": "--algo.kl.estimator"},
        divisors="always the token mean of the step",
        gradient="that of the estimator: for k1 noise, and kljax refuses it; see the names +unbiased_gradient",
        defaults="off; the coefficient is the controller's value",
        reason=SAME_TERM,
    ),
)

TRL = (
    Row(
        "trl",
        "placement",
        "beta",
        Call("reference_kl_loss", {"estimator": "k3", "gradient": "value"}),
        "per-token policy loss + beta * k3, reduced together",
        option="GRPOConfig.beta",
        given={"sampling_log_probs": "with use_bias_correction_kl, old_per_token_logps"},
        divisors="the reduction of the loss type",
        gradient="w x with the correction (the default since 1.16), else 1 - exp(-x)",
        defaults="0.0",
        note="added after the off-policy mask and the sampler's weights: a dropped sequence still pays its KL",
        goldens=(
            on("GRPOTrainer._compute_loss", beta=0.1, importance_sampling_level=None),
            on("GMPOTrainer._compute_loss", beta=0.1, batch="base"),
            on("GMPOTrainer._compute_loss", beta=0.1, batch="holes"),
        ),
    ),
    Row(
        "trl",
        "placement",
        "rloo_beta",
        Call("kl_shaped_rewards", {"coef": 0.05, "estimator": "k1"}),
        "reward - beta * sum over tokens of (log old - log ref), before the leave-one-out baseline",
        option="RLOOConfig.beta",
        given={"coef": "beta"},
        gradient="none",
        defaults="0.05",
        goldens=(on("rloo_advantages", beta=0.1),),
    ),
)

OTHERS = (
    Row(
        "art",
        "placement",
        "kl_penalty_coef",
        Call("centered_kl_advantages", {"coef": 0.0, "estimator": "k1"}),
        "A + coef * (mean of x - x), x of the learner as it is now",
        option="TrainConfig.kl_penalty_coef",
        given={"coef": "kl_penalty_coef"},
        divisors="the mean over n + 1e-6 tokens of the packed row",
        gradient="none",
        defaults="0.0; a negative one is ignored",
        note="the mean is of one packed row, so it depends on the packing; the Megatron backend of 0.5.18 ignores it; "
        "a NaN in the reference under the mask makes the loss NaN there and not here",
        goldens=(on("loss_fn", mask_prob_ratio=None),),
    ),
    Row(
        "prime-rl",
        "placement",
        "kl_tau",
        Call("rollout_kl_loss", {"estimator": "k2"}, scale=2.0),
        "policy loss + kl_tau * (log trainer - log sampler)^2",
        option="trainer.loss.kl_tau",
        given={"rollout_log_probs": "inference_logprobs"},
        divisors="the tokens of the component in the step",
        gradient="2 x",
        defaults="0.001",
        goldens=(on("default_loss_fn"), on("ref_kl_loss_fn")),
    ),
)

ROWS = (*VERL, *TRINITY, *SKYRL, *SLIME, *OPENRLHF, *TRL, *OTHERS)
