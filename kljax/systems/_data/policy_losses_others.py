"""Policy losses of slime, OpenRLHF, TRL, ART and prime-rl. `d = log pi - log old`, `r = exp(d)`, `A` the advantage."""

from functools import partial

from kljax.systems._row import Call, Row, on

CLIPS = {"clip_low": 0.2, "clip_high": 0.2}
PPO_GRADIENT = "-A r inside the bound that applies, else 0"
GSPO_GRADIENT = "through s: every token of the row gets an equal share of the row's sum of -A s"

slime = partial(Row, "slime", "policy_loss", divisors="sum_of_sample_mean, or calculate_per_token_loss")
SLIME_CLIPS = {"clip_low": "--eps-clip", "clip_high": "--eps-clip-high, else --eps-clip"}
NO_PYPI = "slime is not on PyPI and its recorded cases hold no policy loss; tested by formula"
SLIME = (
    slime(
        "policy_loss",
        Call("ppo_clip_loss", CLIPS),
        "PPO: max(-A r, -A clip(r))",
        option="--loss-type policy_loss with every estimator but gspo and cispo",
        given=SLIME_CLIPS | {"dual_clip": "--eps-clip-c"},
        gradient=PPO_GRADIENT,
        defaults="the default; 0.2, 0.2, no dual clip",
        reason=NO_PYPI,
    ),
    slime(
        "gspo",
        Call("gspo_loss", {**CLIPS, "gradient": "sequence"}),
        "PPO with the length-normalised ratio s of the row",
        option="--advantage-estimator gspo",
        given=SLIME_CLIPS | {"dual_clip": "--eps-clip-c"},
        gradient=GSPO_GRADIENT,
        defaults="0.2, 0.2",
        note="verl, SkyRL and Trinity have the gradient of the token's own log-prob: another one where A varies",
        reason=NO_PYPI,
    ),
    slime(
        "cispo",
        Call("cispo_loss", CLIPS),
        "-A sg(clip(r)) log pi",
        option="--advantage-estimator cispo",
        given=SLIME_CLIPS,
        gradient="-A clip(r)",
        defaults="0.2, 0.2: r in [0.8, 1.2], with a warning",
        reason=NO_PYPI,
    ),
    slime(
        "sft_loss",
        Call("cross_entropy_loss"),
        "-log pi",
        option="--loss-type sft_loss",
        gradient="-1",
        reason=NO_PYPI,
    ),
)

openrlhf = partial(Row, "openrlhf", "policy_loss", option="--actor.policy_loss_type")
OPENRLHF_CLIPS = {"clip_low": "clip_eps_low", "clip_high": "clip_eps_high", "dual_clip": "dual_clip"}
OPENRLHF = (
    openrlhf(
        "ppo",
        Call("ppo_clip_loss", {**CLIPS, "log_ratio_clip": 20.0}),
        "PPO: max(-A r, -A clip(r))",
        given=OPENRLHF_CLIPS,
        clamps="d to [-20, 20]",
        divisors="--actor.loss_agg_mode",
        gradient=PPO_GRADIENT,
        defaults="the default; 0.2, 0.2, no dual clip",
        goldens=(on("PolicyLoss", policy_loss_type="ppo"),),
    ),
    openrlhf(
        "gspo",
        Call("gspo_loss", {**CLIPS, "gradient": "sequence"}),
        "PPO with the length-normalised ratio s of the row",
        given=OPENRLHF_CLIPS | {"old_log_probs": "old log-probs; the sampler's with a train-rollout correction"},
        divisors="max(n_i, 1) in s; always seq-mean-token-mean",
        gradient=GSPO_GRADIENT,
        defaults="0.2, 0.2: far wider than the 3e-4, 4e-4 of the paper",
        goldens=(on("PolicyLoss", policy_loss_type="gspo"),),
    ),
)

trl = partial(Row, "trl", "policy_loss", option="GRPOConfig.loss_type", divisors="the reduction of the same name")
TRL_CLIPS = {"clip_low": "epsilon", "clip_high": "epsilon_high, else epsilon", "max_ratio": "delta"}
TOKEN = {"importance_sampling_level": None}
SEQUENCE = {"importance_sampling_level": "sequence"}
TRL_PPO = Call("ppo_clip_loss", CLIPS)


def _trl_ppo(name: str, defaults: str = "0.2, 0.2, no delta") -> Row:
    return trl(
        name,
        TRL_PPO,
        "PPO: max(-A min(r, delta), -A clip(r))",
        given=TRL_CLIPS,
        gradient=PPO_GRADIENT,
        defaults=defaults,
        note="the name chooses the reduction; the loss per token is that of grpo",
        goldens=(on("GRPOTrainer._compute_loss", loss_type=name, **TOKEN),),
    )


TRL = (
    *(_trl_ppo(name) for name in ("grpo", "bnpo", "dr_grpo")),
    _trl_ppo("dapo", "the default; 0.2, 0.2, no delta"),
    _trl_ppo("luspo"),
    trl(
        "grpo+importance_sampling_level=sequence",
        Call("gspo_loss", {**CLIPS, "gradient": "sequence"}),
        "PPO with the length-normalised ratio s of the row: GSPO; also for bnpo, dr_grpo, dapo and luspo",
        option="GRPOConfig.importance_sampling_level sequence",
        given=TRL_CLIPS,
        gradient=GSPO_GRADIENT,
        defaults="level token",
        goldens=tuple(on("GRPOTrainer._compute_loss", loss_type=name, **SEQUENCE) for name in ("grpo", "luspo")),
    ),
    trl(
        "cispo",
        Call("cispo_loss", {"clip_low": 1.0, "clip_high": -0.8}),
        "-A sg(min(r, epsilon_high)) log pi",
        given={"clip_high": "epsilon_high - 1, else epsilon - 1"},
        gradient="-A min(r, epsilon_high)",
        defaults="epsilon_high is epsilon = 0.2 unless given: every weight is at most 0.2",
        note="epsilon_high is the bound itself; elsewhere it is added to 1",
        goldens=(on("GRPOTrainer._compute_loss", loss_type="cispo", **TOKEN),),
    ),
    trl(
        "sapo",
        Call("sapo_loss", {"tau_positive": 1.0, "tau_negative": 1.05, "through": "ratio"}),
        "-A sigmoid(tau (r - 1)) 4 / tau",
        given={"tau_positive": "sapo_temperature_pos", "tau_negative": "sapo_temperature_neg"},
        gradient="through the gate; -A r at r = 1",
        defaults="1.0, 1.05",
        goldens=(on("GRPOTrainer._compute_loss", loss_type="sapo", **TOKEN),),
    ),
    trl(
        "vespo",
        Call(
            "vespo_loss",
            {
                "k_positive": 2.0,
                "lambda_positive": 3.0,
                "k_negative": 3.0,
                "lambda_negative": 2.0,
                "log_ratio_clip": 20.0,
            },
        ),
        "-A phi(w) log pi with phi(w) = exp(lambda (1 - w)) w^k of the row's product w, as a constant",
        given={
            "k_positive": "vespo_k_pos",
            "lambda_positive": "vespo_lambda_pos",
            "k_negative": "vespo_k_neg",
            "lambda_negative": "vespo_lambda_neg",
            "weights": "importance_sampling_ratio of vLLM",
        },
        clamps="d to [-20, 20], log w to [log 1e-8, 20]",
        gradient="-A phi(w)",
        defaults="2, 3 where A >= 0; 3, 2 where A < 0",
        goldens=(on("GRPOTrainer._compute_loss", loss_type="vespo"),),
    ),
    trl(
        "gmpo",
        Call("gmpo_loss", {"clip_low": 0.4, "clip_high": 0.4}),
        "-A exp(mean d'), d' clipped in nats on the side that applies",
        option="GMPOTrainer (experimental)",
        given={"clip_low": "epsilon", "clip_high": "epsilon_high, else epsilon"},
        divisors="max(n_i, 1), then all rows",
        gradient="-A s / n where d' is not clipped",
        defaults="0.4, 0.4",
        note="a row without a token adds its -A to the value there, a constant; 0 here",
        goldens=tuple(on("GMPOTrainer._compute_loss", batch=batch) for batch in ("base", "holes")),
    ),
    trl(
        "rloo",
        Call("ppo_clip_loss", {**CLIPS, "level": "sequence"}),
        "PPO with the product of r over the row",
        option="RLOOTrainer",
        given={"clip_low": "epsilon", "clip_high": "epsilon_high, else epsilon"},
        divisors="rows of the micro-batch: one loss a row, seq_mean_token_mean here",
        gradient="through the product: -A r for every token of the row",
        defaults="0.2, 0.2",
        goldens=(on("RLOOTrainer._compute_loss"),),
    ),
)

ART_CLIPS = {"clip_low": "epsilon", "clip_high": "epsilon_high, else epsilon"}
art = partial(Row, "art", "policy_loss", divisors="number of tokens + 1e-6, weighted by `weights`")
ART_TOKEN = {
    "importance_sampling_level": None,
    "mask_prob_ratio": None,
    "max_negative_advantage_importance_sampling_weight": None,
}


def _art_level(ppo: bool, level: str) -> Row:
    """The ratio of a sequence of tokens, or a mean of it and the token's own."""
    name, low, high = ("ppo", 0.2, 0.2) if ppo else ("cispo", 1.0, 4.0)
    ours = {"sequence": "geometric"}.get(level, level)
    what = {
        "sequence": "the geometric mean of r over the sequence",
        "average": "the mean of r and of its geometric mean over the sequence",
        "geometric_average": "the geometric mean of r and of its geometric mean over the sequence",
    }
    return art(
        f"{name}+importance_sampling_level={level}",
        Call("ppo_clip_loss" if ppo else "cispo_loss", {"clip_low": low, "clip_high": high, "level": ours}),
        f"{name} with {what[level]} in place of r",
        option="TrainConfig.importance_sampling_level",
        given=ART_CLIPS,
        gradient="through all ratios of the sequence, within the bound" if ppo else "-A times the clipped ratio",
        defaults="level token",
        goldens=(on("loss_fn", ppo=ppo, importance_sampling_level=level),),
    )


ART = (
    art(
        "cispo",
        Call("cispo_loss", {"clip_low": 1.0, "clip_high": 4.0}),
        "-A sg(clip(r)) log pi",
        option="TrainConfig.ppo false",
        given=ART_CLIPS,
        gradient="-A clip(r)",
        defaults="the default; 1.0, 4.0: r in [0, 5]",
        goldens=(on("loss_fn", ppo=False, **ART_TOKEN),),
    ),
    art(
        "ppo",
        Call("ppo_clip_loss", CLIPS),
        "PPO: max(-A r, -A clip(r))",
        option="TrainConfig.ppo",
        given=ART_CLIPS,
        gradient=PPO_GRADIENT,
        defaults="0.2, 0.2",
        goldens=(on("loss_fn", ppo=True, **ART_TOKEN),),
    ),
    *(_art_level(ppo, level) for ppo in (False, True) for level in ("sequence", "average", "geometric_average")),
    art(
        "ppo+max_negative_advantage_importance_sampling_weight",
        Call("ppo_clip_loss", CLIPS),
        "PPO with min(r, bound) in place of r, in both terms",
        option="TrainConfig.max_negative_advantage_importance_sampling_weight",
        given={"clip_low": "epsilon", "max_ratio": "the option", "clip_high": "min(epsilon_high, the option - 1)"},
        gradient=PPO_GRADIENT,
        defaults="None: off",
        note="despite its name it bounds the ratio of every token, whatever the sign of A",
        goldens=(on("loss_fn", max_negative_advantage_importance_sampling_weight=1.1),),
    ),
    art(
        "mask_prob_ratio",
        None,
        "the loss with r = 0 outside (1 - epsilon, 1 + epsilon_high), clipped after that",
        option="TrainConfig.mask_prob_ratio",
        defaults="off",
        note="the clip raises the 0 to 1 - epsilon, which is 0 only at the CISPO default epsilon = 1",
        goldens=(on("loss_fn", mask_prob_ratio=True),),
        reason="an accident of the order of mask and clip; to drop the tokens, reject them: rejection_mask(...)",
    ),
)

prime = partial(Row, "prime-rl", "policy_loss", divisors="a sum over tokens, over those of the component in the step")
SAMPLER = {"old_log_probs": "inference_logprobs", "rollout_log_probs": "inference_logprobs"}
TRUST = Call("dppo_loss", {"divergence": "tv", **CLIPS, "through": "ratio"})
DRIFT = Call("rollout_kl_loss", {"estimator": "k2"}, scale=0.002)
PRIME_RL = (
    prime(
        "default",
        Call(TRUST.function, TRUST.arguments, plus=(DRIFT,)),
        "-A r where the probability has not moved too far, + kl_tau d^2 everywhere; r and d are to the sampler",
        option="trainer.loss.type default",
        given=SAMPLER
        | {
            "clip_low": "dppo_mask_low",
            "clip_high": "dppo_mask_high",
            "scale": "2 kl_tau",
            "advantages": "adv_tau * A",
        },
        gradient="-A r on kept tokens + 2 kl_tau d",
        defaults="the default; 0.2, 0.2, adv_tau 1.0, kl_tau 1e-3",
        note="the documentation bounds r, the code does not; a token of A = 0 is tested as a negative one",
        goldens=(on("default_loss_fn"),),
    ),
    prime(
        "ipo",
        Call(
            "dppo_loss",
            {"divergence": "tv", "clip_low": 0.1, "clip_high": 0.1, "symmetric": True, "through": "ratio"},
            plus=(DRIFT,),
        ),
        "as default, with |pi - sampler| bounded whatever the sign of A",
        option="trainer.loss.type ipo",
        given=SAMPLER | {"clip_low": "ipo_threshold", "clip_high": "ipo_threshold", "scale": "2 kl_tau"},
        gradient="-A r on kept tokens + 2 kl_tau d",
        defaults="0.1, kl_tau 1e-3",
        reason="prime-rl is not on PyPI and its recorded cases hold the default only; tested by formula",
    ),
    prime(
        "ref_kl",
        Call(
            "dppo_loss",
            {"divergence": "tv", "clip_low": 0.2, "clip_high": float("inf"), "symmetric": True, "through": "ratio"},
            plus=(DRIFT,),
        ),
        "on-policy distillation: sg(log ref - log pi) in place of A, tokens dropped whose probability fell by over 0.2",
        option="the algorithms opd and opsd",
        given=SAMPLER | {"advantages": "stop_gradient(ref_log_probs - log_probs)"},
        gradient="(log pi - log ref) r on kept tokens + 2e-3 d",
        defaults="0.2 and 1e-3 are written into the code",
        goldens=(on("ref_kl_loss_fn"),),
    ),
    prime(
        "ce",
        Call("cross_entropy_loss"),
        "-log pi",
        option="the algorithms sft and echo",
        gradient="-1",
        reason="prime-rl is not on PyPI and its recorded cases do not hold it; tested by formula",
    ),
)

ROWS = (*SLIME, *OPENRLHF, *TRL, *ART, *PRIME_RL)
