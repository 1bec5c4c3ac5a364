"""Policy losses of SkyRL. `d = log pi - log old`, `r = exp(d)`, `A` the advantage, `sg` a constant."""

from functools import partial

from kljax.systems._row import Call, Row, on

CLIPS = {"clip_low": 0.2, "clip_high": 0.2}
SAFE = {"log_ratio_clip": 20.0}
SAFETY = "d to [-20, 20]; r is computed in float32"
GIVEN = {"clip_low": "eps_clip_low", "clip_high": "eps_clip_high"}
PPO_GRADIENT = "-A r inside the bound that applies, else 0"
SUMMED = "a sum: the reduction is in the advantages"
NOT_LINEAR = "not linear in A, so the reduction in the advantages does not scale all of it"

skyrl = partial(Row, "skyrl", "policy_loss", option="trainer.algorithm.policy_loss_type", divisors=SUMMED)
ROWS = (
    skyrl(
        "regular",
        Call("ppo_clip_loss", {**CLIPS, **SAFE}),
        "PPO: max(-A r, -A clip(r))",
        given=GIVEN,
        clamps=SAFETY,
        gradient=PPO_GRADIENT,
        defaults="the default; 0.2, 0.2",
        note="no dual clip, unlike verl's vanilla",
        goldens=(on("ppo_policy_loss", name="regular"),),
    ),
    skyrl(
        "dual_clip",
        Call("ppo_clip_loss", {**CLIPS, "dual_clip": 3.0, **SAFE}),
        "PPO, at most -3 A where A < 0",
        given=GIVEN | {"dual_clip": "clip_ratio_c"},
        clamps=SAFETY,
        gradient=PPO_GRADIENT,
        defaults="0.2, 0.2, 3.0",
        goldens=(on("ppo_policy_loss", name="dual_clip"),),
    ),
    skyrl(
        "gspo",
        Call("gspo_loss", {**CLIPS, "gradient": "token", "max_log_ratio": 10.0}),
        "PPO with the length-normalised ratio s of the row, through the token's own log-prob",
        given=GIVEN,
        clamps="log s to at most 10",
        gradient="-A_t s inside the bound that applies, else 0",
        defaults="0.2, 0.2: far wider than the 3e-4, 4e-4 of the paper",
        goldens=(on("gspo_policy_loss"),),
    ),
    skyrl(
        "cispo",
        Call("cispo_loss", {"clip_low": 0.0, "clip_high": 5.0}),
        "-A sg(clip(r)) log pi",
        given={"clip_low": "cispo.cispo_eps_clip_low", "clip_high": "cispo.cispo_eps_clip_high"},
        clamps=SAFETY,
        gradient="-A clip(r)",
        defaults="0.0, 5.0, so r in [1, 6]: no weight below 1. Later (main of 2026-08): 1.0, 4.0, so [0, 5]",
        note="the bounds are offsets from 1, though their defaults in 0.3.0 read like bounds",
        goldens=(on("compute_policy_loss_cispo"),),
    ),
    skyrl(
        "rollout_is",
        Call(
            "reinforce_loss",
            times=(Call("importance_weights", {"level": "token", "mode": "mask", "lower": 0.8, "upper": 1.2}),),
        ),
        "-A sg(w) log pi with w = pi / sampler, 0 outside (1 - low, 1 + high)",
        given={
            "behaviour_log_probs": "rollout_logprobs",
            "lower": "1 - eps_clip_low",
            "upper": "1 + eps_clip_high",
        },
        clamps=SAFETY,
        gradient="-A w",
        defaults="0.2, 0.2",
        goldens=(on("rollout_is_policy_loss"),),
    ),
    skyrl(
        "dppo",
        Call("dppo_loss", {"divergence": "tv", **CLIPS, "through": "ratio", **SAFE}),
        "-A r where the probability has not moved too far",
        given={
            "clip_low": "dppo.delta_low",
            "clip_high": "dppo.delta_high",
            "old_log_probs": "rollout_logprobs, else the old ones",
        },
        clamps=SAFETY,
        gradient="-A r on kept tokens, else 0",
        defaults="binary_tv; 0.2, 0.2",
        goldens=(on("dppo_policy_loss", dppo_type="binary_tv"),),
    ),
    skyrl(
        "dppo+dppo_type=binary_kl",
        Call("dppo_loss", {"divergence": "kl", **CLIPS, "through": "ratio", **SAFE}),
        "as dppo, with the KL of the coins `this token or not`",
        given={
            "clip_low": "dppo.delta_low",
            "clip_high": "dppo.delta_high",
            "old_log_probs": "rollout_logprobs, else the old ones",
        },
        clamps=f"{SAFETY}; 1e-8 added to both 1 - p in the KL",
        gradient="-A r on kept tokens, else 0",
        defaults="0.2, 0.2; 0.05 is recommended",
        goldens=(on("dppo_policy_loss", dppo_type="binary_kl"),),
    ),
    skyrl(
        "sapo",
        Call("sapo_loss", {"tau_positive": 1.0, "tau_negative": 1.05, "through": "ratio", **SAFE}),
        "-A sigmoid(tau (r - 1)) 4 / tau",
        given={"tau_positive": "sapo.tau_pos", "tau_negative": "sapo.tau_neg"},
        clamps="d to [-20, 20]",
        gradient="through the gate; -A r at r = 1",
        defaults="1.0, 1.05",
        goldens=(on("sapo_policy_loss"),),
    ),
    skyrl(
        "clip_cov",
        Call("clip_cov_loss", {"fraction": 0.0002, "lower": 1.0, "upper": 5.0, **CLIPS}),
        "PPO without a few of the tokens whose covariance (A - mean)(log pi - mean) lies in (lower, upper), at random",
        given=GIVEN
        | {
            "fraction": "clip_cov.clip_ratio",
            "lower": "clip_cov.clip_cov_lb",
            "upper": "clip_cov.clip_cov_ub",
            "key": "torch.randperm",
        },
        gradient=f"{PPO_GRADIENT}; 0 on the tokens left out",
        defaults="0.0002, 1, 5",
        note=f"the covariance is of the scaled advantages: {NOT_LINEAR}",
        goldens=(on("compute_policy_loss_clip_cov"),),
    ),
    skyrl(
        "kl_cov",
        Call("kl_cov_loss", {"fraction": 0.2, "coef": 1.0}),
        "-A r, plus coef |d| on the tokens of highest covariance",
        given={"fraction": "kl_cov.kl_cov_frac", "coef": "kl_cov.ppo_kl_coef"},
        gradient="-A r, plus coef sign(d) on those tokens, 0 at d = 0",
        defaults="0.2, 1.0: a thousand times the tokens and ten times the weight of verl",
        note=f"coef |d| is summed over tokens: {NOT_LINEAR}",
        goldens=(on("compute_policy_loss_kl_cov"),),
    ),
    skyrl(
        "cross_entropy",
        Call("cross_entropy_loss"),
        "-log pi",
        divisors="a sum over tokens",
        gradient="-1",
        note="for supervised rows; the advantages are ignored, and with them the reduction",
        goldens=(on("cross_entropy_loss"),),
    ),
    skyrl(
        "importance_sampling",
        Call("importance_sampling_loss"),
        "-A r, nothing clipped",
        gradient="-A r",
        goldens=(on("importance_sampling_loss"),),
    ),
)
