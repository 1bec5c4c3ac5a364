"""Policy losses of Trinity-RFT. `d = log pi - log old`, `r = exp(d)`, `A` the advantage, `sg` a constant."""

from functools import partial

from kljax.systems._row import Call, Row, on

CLIPS = {"clip_low": 0.2, "clip_high": 0.2}
SAFE = {"log_ratio_clip": 20.0}
PPO = Call("ppo_clip_loss", {**CLIPS, "dual_clip": 3.0, **SAFE})
GIVEN = {"clip_low": "clip_range_low, else clip_range", "clip_high": "clip_range_high, else clip_range"}
PPO_GIVEN = GIVEN | {"dual_clip": "clip_ratio_c"}
REDUCED = "algorithm.loss_agg_mode"

trinity = partial(Row, "trinity", "policy_loss", option="algorithm.policy_loss_fn", divisors=REDUCED)
PPO_FAMILY = (
    trinity(
        "ppo",
        PPO,
        "PPO: max(-A r, -A clip(r)), at most -3 A where A < 0",
        given=PPO_GIVEN,
        clamps="d to [-20, 20]",
        gradient="-A r inside the bound that applies, else 0",
        defaults="0.2, 0.2, 3.0",
        note="the dual clip is always on",
        goldens=(on("PPOPolicyLossFn", enable_sequence_masking=None, fallback_to_policy_gradient=None),),
    ),
    trinity(
        "ppo+enable_sequence_masking",
        Call(PPO.function, PPO.arguments, times=(Call("off_policy_sequence_mask", {"max_kl": 0.1, **SAFE}),)),
        "ppo without tokens of A < 0 in rows whose mean of old - new exceeds the threshold",
        option="policy_loss_fn_args.enable_sequence_masking",
        given=PPO_GIVEN | {"max_kl": "delta_sequence_masking", "behaviour_log_probs": "old_logprob"},
        clamps="d to [-20, 20], also for the threshold",
        gradient="-A r inside the bound that applies, else 0",
        defaults="off; 0.1",
        goldens=(on("PPOPolicyLossFn", enable_sequence_masking=True, fallback_to_policy_gradient=None),),
    ),
    trinity(
        "ppo+fallback_to_policy_gradient",
        PPO,
        "-A with the gradient of -A log pi: the ratio is of pi to itself",
        option="policy_loss_fn_args.fallback_to_policy_gradient",
        given=PPO_GIVEN | {"old_log_probs": "stop_gradient(log_probs)"},
        gradient="-A",
        defaults="off",
        goldens=(on("PPOPolicyLossFn", fallback_to_policy_gradient=True),),
    ),
    trinity(
        "gspo",
        Call("gspo_loss", {"clip_low": 3e-4, "clip_high": 4e-4, "gradient": "token"}),
        "PPO with the length-normalised ratio s of the row, through the token's own log-prob",
        given=GIVEN,
        divisors="n_i + 1e-8 in s; loss_agg_mode token-mean overrides the seq-mean-token-mean that it asks for",
        gradient="-A_t s inside the bound that applies, else 0",
        defaults="3e-4, 4e-4",
        goldens=(on("GSPOLossFn"),),
    ),
    trinity(
        "cispo",
        Call("cispo_loss", {"clip_low": 1.0, "clip_high": 0.28}),
        "-A sg(clip(r)) log pi",
        given=GIVEN,
        gradient="-A clip(r)",
        defaults="1.0, 0.28: r in [0, 1.28]",
        goldens=(on("CISPOPolicyLossFn", enable_mask_clip=None),),
    ),
    trinity(
        "cispo+enable_mask_clip",
        Call("cispo_loss", {"clip_low": 1.0, "clip_high": 0.28, "mask_low": 1.0, "mask_high": 0.28}),
        "cispo without tokens that PPO would clip: A < 0 with r < 1 - low, A > 0 with r > 1 + high",
        option="policy_loss_fn_args.enable_mask_clip",
        given=GIVEN | {"mask_low": "mask_clip_range_low", "mask_high": "mask_clip_range_high"},
        gradient="-A clip(r) on kept tokens, else 0",
        defaults="off; 1.0, 0.28",
        goldens=(on("CISPOPolicyLossFn", enable_mask_clip=True),),
    ),
    trinity(
        "sapo",
        Call("sapo_loss", {"tau_positive": 1.0, "tau_negative": 1.05, "through": "log_prob"}),
        "-A sg(sigmoid(tau (r - 1)) 4 / tau) log pi",
        given={"tau_positive": "tau_pos", "tau_negative": "tau_neg"},
        gradient="-A times the gate: -2 A (A > 0) and -1.905 A at r = 1",
        defaults="1.0, 1.05",
        note="not the published loss, which differentiates the gate: at r = 1 that has half this gradient",
        goldens=(on("SAPOPolicyLossFn"),),
    ),
    trinity(
        "importance_sampling",
        Call("importance_sampling_loss", SAFE),
        "-A r",
        clamps="d to [-20, 20]",
        gradient="-A r",
        goldens=(on("ImportanceSamplingLossFn"),),
    ),
    trinity(
        "topr",
        Call("topr_loss", {"threshold": 0.0}),
        "-sg(w) A log pi with w = min(r, 1) where A <= threshold, else 1",
        given={"threshold": "advantage_threshold"},
        gradient="-w A",
        defaults="threshold 0",
        goldens=(on("TOPRPolicyLossFn"),),
    ),
    trinity(
        "opmd",
        Call("opmd_loss", {"tau": 1.0}),
        "-A log pi / (1 + tau)",
        given={"tau": "tau"},
        gradient="-A / (1 + tau)",
        defaults="tau 1",
        goldens=(on("OPMDPolicyLossFn"),),
    ),
    trinity(
        "sppo",
        Call("sppo_loss", {"clip": 0.3}),
        "-A d where 1 / (1 + epsilon) <= r <= 1 + epsilon, else 0",
        given={"clip": "epsilon"},
        gradient="-A inside the bounds, else 0",
        defaults="epsilon 0.3",
        goldens=(on("sPPOPolicyLossFn"),),
    ),
)
REC_GIVEN = {
    "clip_low": "epsilon_low",
    "clip_high": "epsilon_high",
    "ring_low": "epsilon_low_prime",
    "ring_high": "epsilon_high_prime",
    "weight": "weight",
    "regularizer": "regularizer",
    "coef": "regularizer_coef, doubled for k2",
    "temperature": "temp",
}
REC_KEPT = {
    "none": "every token",
    "one-side": "tokens that PPO would not clip",
    "two-side": "tokens with r in [0.8, 1.2], whatever the sign of A",
    "ring": "as two-side, and again where r has gone far the harmless way",
    "gspo-one-side": "rows that GSPO would not clip",
}


def _rec(clip_mode: str) -> Row:
    bounds = {"clip_low": 0.2, "clip_high": 0.2, "ring_low": 0.6, "ring_high": 2.0}
    return trinity(
        "rec" if clip_mode == "none" else f"rec+clip_mode={clip_mode}",
        Call("rec_loss", {"clip_mode": clip_mode.replace("-", "_"), **bounds, "coef": 0.0, "temperature": 1.0}),
        f"-w A log pi on {REC_KEPT[clip_mode]}, + coef * regularizer on all",
        option=f"policy_loss_fn rec, clip_mode {clip_mode}",
        given=REC_GIVEN,
        divisors="seq-mean-token-mean"
        if clip_mode == "gspo-one-side"
        else "tokens + 1e-8, whatever loss_agg_mode says",
        gradient="-w A on kept tokens; the weight w (1, r, s or exp(A / temp)) is a constant",
        defaults="0.2, 0.2; ring 0.6, 2 (0.4, 0.4 in the constructor); weight and regularizer none",
        note="its k2 has no half; gspo_importance_sampling raises UnboundLocalError without gspo-one-side",
        goldens=(on("RECPolicyLossFn", clip_mode=clip_mode),),
    )


REC = tuple(_rec(clip_mode) for clip_mode in REC_KEPT)

SUPERVISED = (
    trinity("sft", Call("cross_entropy_loss"), "-log pi", gradient="-1", goldens=(on("SFTLossFn"),)),
    trinity(
        "sft_is",
        Call("cross_entropy_loss", {"weight": "probability"}),
        "-sg(pi) log pi",
        gradient="-pi",
        goldens=(on("SFTISLossFn"),),
    ),
    trinity(
        "sft_phi",
        Call("cross_entropy_loss", {"weight": "uncertainty"}),
        "-sg(pi (1 - pi)) log pi",
        given={"max_probability": "cutoff_prob"},
        gradient="-pi (1 - pi), 0 above the cutoff",
        defaults="cutoff_prob 1.0: none",
        goldens=(on("SFTPhiLossFn"),),
    ),
    trinity(
        "mix",
        None,
        "(1 - mu) ppo over the policy's rows + mu sft over the expert's, each scaled by its share of rows",
        defaults="mu 0.1",
        goldens=(on("MIXPolicyLossFn"),),
        reason="a weighted sum of two calls over two masks: ppo_clip_loss and cross_entropy_loss",
    ),
    trinity(
        "mix_chord",
        None,
        "mix with sft_phi (or sft) and a mu that warms up and decays by a cosine",
        defaults="mu 0.1 throughout, enable_phi_function true",
        goldens=(on("MIXCHORDPolicyLossFn"),),
        reason="a weighted sum of two calls over two masks: ppo_clip_loss and cross_entropy_loss; mu is a schedule",
    ),
    trinity(
        "dpo",
        Call("dpo_loss", {"coef": 0.1, "label_smoothing": 0.0}),
        "-log sigmoid(beta * (chosen log-ratio - rejected log-ratio))",
        divisors="none: it sums over all pairs before the sigmoid",
        given={
            "log_probs": "those of the even rows of a micro-batch, joined into one",
            "rejected_log_probs": "those of the odd rows, joined into one; likewise the reference and the masks",
            "coef": "beta",
            "label_smoothing": "label_smoothing",
        },
        gradient="-beta sigmoid(-beta h) at chosen tokens, the opposite at rejected ones",
        defaults="beta 0.1, label_smoothing 0",
        note="with more than one pair in a micro-batch 0.6.0 is not the DPO of each pair",
        goldens=(on("DPOLossFn"),),
    ),
)

ROWS = (*PPO_FAMILY, *REC, *SUPERVISED)
