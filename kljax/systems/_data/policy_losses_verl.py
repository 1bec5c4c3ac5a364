"""Policy losses of verl. `d = log pi - log old`, `r = exp(d)`, `A` the advantage, `sg` a constant."""

from functools import partial

from kljax.systems._row import Call, Row, on

CLIPS = {"clip_low": 0.2, "clip_high": 0.2}
SAFE = {"log_ratio_clip": 20.0}
SAFETY = "d to [-20, 20]"
GIVEN = {"clip_low": "actor.clip_ratio_low", "clip_high": "actor.clip_ratio_high"}
PPO_GRADIENT = "-A r inside the bound that applies, else 0"
REDUCED = "actor.loss_agg_mode"

verl = partial(Row, "verl", "policy_loss", option="actor.policy_loss.loss_mode", divisors=REDUCED)
ROWS = (
    verl(
        "vanilla",
        Call("ppo_clip_loss", {**CLIPS, "dual_clip": 3.0, **SAFE}),
        "PPO: max(-A r, -A clip(r)), at most -3 A where A < 0",
        given=GIVEN | {"dual_clip": "actor.clip_ratio_c"},
        clamps=SAFETY,
        gradient=PPO_GRADIENT,
        defaults="the default; 0.2, 0.2, 3.0",
        note="the dual clip is always on; only Trinity does that as well",
        goldens=(on("compute_policy_loss_vanilla"),),
    ),
    verl(
        "dppo_tv",
        Call("dppo_loss", {"divergence": "tv", **CLIPS, "through": "log_prob", "max_ratio": 3.0, **SAFE}),
        "-A sg(min(r, c)) log pi where the probability has not moved too far",
        given=GIVEN | {"max_ratio": "actor.clip_ratio_c"},
        clamps=SAFETY,
        gradient="-A min(r, c) on kept tokens, else 0",
        defaults="0.2, 0.2; c 3.0, since the coded fallback of 20 is never reached",
        note="against the old policy; SkyRL and prime-rl compare with the sampler and differentiate r",
        goldens=(on("compute_policy_loss_dppo_tv"),),
    ),
    verl(
        "dppo_kl",
        Call("dppo_loss", {"divergence": "kl", **CLIPS, "through": "log_prob", "max_ratio": 3.0, **SAFE}),
        "as dppo_tv, with the KL of the coins `this token or not`",
        given=GIVEN | {"max_ratio": "actor.clip_ratio_c"},
        clamps=f"{SAFETY}; 1e-8 added to both 1 - p in the KL",
        gradient="-A min(r, c) on kept tokens, else 0",
        defaults="0.2, 0.2; c 3.0",
        goldens=(on("compute_policy_loss_dppo_kl"),),
    ),
    verl(
        "gspo",
        Call("gspo_loss", {**CLIPS, "gradient": "token", "max_log_ratio": 10.0}),
        "PPO with the length-normalised ratio s of the row, through the token's own log-prob",
        given=GIVEN,
        clamps="log s to at most 10",
        gradient="-A_t s inside the bound that applies, else 0",
        defaults="0.2, 0.2: far wider than the 3e-4, 4e-4 of the paper",
        note="seq-mean-token-mean was forced before 0.9",
        goldens=(on("compute_policy_loss_gspo"),),
    ),
    verl(
        "sapo",
        Call("sapo_loss", {"tau_positive": 1.0, "tau_negative": 1.05, "through": "ratio", **SAFE}),
        "-A sigmoid(tau (r - 1)) 4 / tau",
        given={"tau_positive": "actor.tau_pos", "tau_negative": "actor.tau_neg"},
        clamps=SAFETY,
        divisors="always seq-mean-token-mean",
        gradient="through the gate; -A r at r = 1",
        defaults="1.0, 1.05",
        note="Trinity's sapo multiplies the gate, as a constant, into log pi: another loss",
        goldens=(on("compute_policy_loss_sapo"),),
    ),
    verl("gpg", Call("gpg_loss"), "-A log pi", gradient="-A", goldens=(on("compute_policy_loss_gpg"),)),
    verl(
        "clip_cov",
        Call("clip_cov_loss", {"fraction": 0.0002, "lower": 1.0, "upper": 5.0, **CLIPS}),
        "PPO without a few of the tokens whose covariance (A - mean)(log pi - mean) lies in (lower, upper), at random",
        given=GIVEN
        | {"fraction": "clip_cov_ratio", "lower": "clip_cov_lb", "upper": "clip_cov_ub", "key": "torch.randperm"},
        gradient=f"{PPO_GRADIENT}; 0 on the tokens left out",
        defaults="0.0002, 1, 5",
        goldens=(
            on("compute_policy_loss_clip_cov", clip_cov_ratio=1.0),
            on("compute_policy_loss_clip_cov", clip_cov_lb=90.0),
        ),
    ),
    verl(
        "kl_cov",
        Call("kl_cov_loss", {"fraction": 0.0002, "coef": 0.1}),
        "-A r, plus coef |d| on the tokens of highest covariance",
        given={"fraction": "kl_cov_ratio", "coef": "ppo_kl_coef"},
        gradient="-A r, plus coef sign(d) on those tokens, 0 at d = 0",
        defaults="0.0002, 0.1; its docstring says 1",
        note="its metric ppo_kl is the mean of |d|",
        goldens=(on("compute_policy_loss_kl_cov"),),
    ),
    verl(
        "geo_mean",
        Call("gmpo_loss", CLIPS),
        "GMPO: -mean A exp(mean d'), d' clipped in nats on the side that applies",
        given=GIVEN,
        divisors="n_i + 1e-8, then all rows of the micro-batch whatever loss_agg_mode says",
        gradient="-A s / n where d' is not clipped",
        defaults="0.2, 0.2; 0.4 in the paper",
        goldens=(on("compute_policy_loss_geo_mean"),),
    ),
    verl(
        "dro",
        Call("dro_loss"),
        "-(A log pi - beta d^2 / 2)",
        given={"coef": "actor.policy_loss.dro_beta"},
        gradient="-A + beta d",
        defaults="no beta: it has to be given",
        goldens=(on("compute_policy_loss_dro"),),
    ),
    verl(
        "cispo",
        Call("cispo_loss", CLIPS),
        "-A sg(clip(r)) log pi",
        given=GIVEN,
        clamps=SAFETY,
        gradient="-A clip(r)",
        defaults="0.2, 0.2: r in [0.8, 1.2]; [0, 5] in ART, [0, 1.28] in Trinity, at most 0.2 in TRL",
        goldens=(on("compute_policy_loss_cispo"),),
    ),
    verl(
        "bypass_mode",
        Call("ppo_clip_loss", {**CLIPS, "dual_clip": 3.0, **SAFE}),
        "vanilla against the sampler, over the tokens that rollout_rs keeps",
        given=GIVEN | {"old_log_probs": "rollout_log_probs", "dual_clip": "actor.clip_ratio_c"},
        clamps=SAFETY,
        gradient=PPO_GRADIENT,
        defaults="loss_type ppo_clip; used with rollout_correction.bypass_mode",
        note="importance weights are metrics only: the ratio has them in already",
        goldens=(on("compute_policy_loss_bypass_mode", loss_type="ppo_clip"),),
    ),
    verl(
        "bypass_mode+loss_type=reinforce",
        Call(
            "reinforce_loss",
            times=(Call("importance_weights", {"level": "sequence", "mode": "truncate", "upper": 2.0, **SAFE}),),
        ),
        "-A sg(w) log pi with truncated weights w = pi / sampler",
        option="rollout_correction.loss_type",
        given={
            "behaviour_log_probs": "rollout_log_probs",
            "level": "rollout_is",
            "upper": "rollout_is_threshold",
        },
        clamps="log w to [-20, 20]",
        gradient="-A w",
        defaults="rollout_is sequence, threshold 2.0",
        goldens=(on("compute_policy_loss_bypass_mode", loss_type="reinforce"),),
    ),
    verl(
        "reinforce",
        Call("reinforce_loss"),
        "-A log pi, times whatever weights it is given",
        option="compute_policy_loss_reinforce, which bypass_mode calls",
        gradient="-A",
        note="no name of loss_mode",
        goldens=(on("compute_policy_loss_reinforce"),),
    ),
)
