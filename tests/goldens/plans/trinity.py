"""Trinity-RFT 0.6.0: every policy loss and advantage of its registries that can be called alone."""

from typing import Any

from tests.goldens.plan import BOTH, FAR_AWAY, REACHES_BOUND, RELEASE_DEFAULTS, RecordingPlan, grid

# Where the registry's names lead: module and class.
LOSS_CLASSES = {
    "ppo": "ppo_policy_loss.PPOPolicyLossFn",
    "gspo": "gspo_policy_loss.GSPOLossFn",
    "sapo": "sapo_policy_loss.SAPOPolicyLossFn",
    "topr": "topr_policy_loss.TOPRPolicyLossFn",
    "cispo": "cispo_policy_loss.CISPOPolicyLossFn",
    "importance_sampling": "importance_sampling_policy_loss.ImportanceSamplingLossFn",
    "opmd": "opmd_policy_loss.OPMDPolicyLossFn",
    "sppo": "sppo_loss_fn.sPPOPolicyLossFn",
    "sft": "sft_loss.SFTLossFn",
    "sft_is": "chord_policy_loss.SFTISLossFn",
    "sft_phi": "chord_policy_loss.SFTPhiLossFn",
    "rec": "rec_policy_loss.RECPolicyLossFn",
    "mix": "mix_policy_loss.MIXPolicyLossFn",
    "mix_chord": "chord_policy_loss.MIXCHORDPolicyLossFn",
    "dpo": "dpo_loss.DPOLossFn",
}
OVER_BATCHES = {
    "ppo": "ppo_advantage.PPOAdvantageFn",
    "reinforceplusplus": "reinforce_plus_plus_advantage.REINFORCEPLUSPLUSAdvantageFn",
    "remax": "remax_advantage.REMAXAdvantageFn",
    "rloo": "rloo_advantage.RLOOAdvantageFn",
    "grpo_verl": "grpo_advantage.GRPOAdvantageFn",
    "opmd_verl": "opmd_advantage.OPMDAdvantageFn",
    "asymre_verl": "asymre_advantage.ASYMREAdvantageFn",
    "on_policy_distill": "on_policy_distill_advantage.OnPolicyDistillAdvantage",
    "jsd": "jsd_advantage.JSDAdvantage",
    "clipb": "clipb_advantage.ClipBAdvantageFn",
    "clipv": "clipv_advantage.ClipVAdvantageFn",
}
OVER_EXPERIENCES = {
    "grpo": "grpo_advantage.GRPOGroupedAdvantage",
    "reinforce": "reinforce_advantage.REINFORCEGroupAdvantage",
    "opmd": "opmd_advantage.OPMDGroupAdvantage",
    "asymre": "asymre_advantage.ASYMREGroupAdvantage",
    "rec": "rec_advantage.RECGroupedAdvantage",
    "step_wise_grpo": "multi_step_grpo_advantage.StepWiseGRPOAdvantageFn",
    "gigpo": "gigpo_advantage.GiGPOAdvantageFn",
}
ADVANTAGE_CLASSES = {**OVER_BATCHES, **OVER_EXPERIENCES}

EDGES = ("base", "holes", "empty_row")
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def class_of(path: str) -> str:
    """The class of `module.Class`, which is what the cases call the function."""
    return path.split(".")[1]


DEFAULT = {"loss_agg_mode": "token-mean"}
CLIP = {"clip_range_low": 0.2, "clip_range_high": 0.28}
SEQUENCE_MASK = {"enable_sequence_masking": True, "delta_sequence_masking": 0.05}

LOSSES: dict[str, list[dict[str, Any]]] = {
    "ppo": [
        *[{**CLIP, "loss_agg_mode": mode} for mode in MODES],
        {"clip_range": 0.2, "clip_ratio_c": 1.5, **DEFAULT},
        {"clip_range": 0.2, **SEQUENCE_MASK, **DEFAULT},
        {"clip_range": 0.2, "fallback_to_policy_gradient": True, **DEFAULT},
    ],
    "gspo": [{"clip_range": 0.1, "loss_agg_mode": mode} for mode in ("seq-mean-token-mean", "token-mean")],
    "sapo": [{"tau_pos": 1.0, "tau_neg": 1.05, **DEFAULT}, {"tau_pos": 0.5, "tau_neg": 3.0, **DEFAULT}],
    "topr": [{"advantage_threshold": threshold, **DEFAULT} for threshold in (0.0, 0.5)],
    "cispo": [
        {"clip_range_low": 1.0, "clip_range_high": 0.28, **DEFAULT},
        {"clip_range_low": 0.3, "clip_range_high": 0.1, **DEFAULT},
        {"enable_mask_clip": True, "mask_clip_range_low": 0.2, "mask_clip_range_high": 0.28, **DEFAULT},
    ],
    "importance_sampling": [DEFAULT],
    "opmd": [{"tau": 1.0, **DEFAULT}, {"tau": 0.25, "loss_agg_mode": "seq-mean-token-sum"}],
    "sppo": [{"epsilon": 0.3, **DEFAULT}],
    "sft": [DEFAULT],
    "sft_is": [DEFAULT],
    "sft_phi": [DEFAULT, {"cutoff_prob": 0.6, **DEFAULT}],
    "rec": [
        *[{"clip_mode": mode} for mode in ("none", "one-side", "two-side", "ring", "gspo-one-side")],
        {"clip_mode": "none", "weight": "importance_sampling"},
        {"clip_mode": "gspo-one-side", "weight": "gspo_importance_sampling"},
        {"clip_mode": "one-side", "weight": "importance_sampling", "regularizer": "k2", "regularizer_coef": 0.3},
        {"clip_mode": "two-side", "weight": "advantage", "temp": 2.0},
        {"clip_mode": "ring", "regularizer": "forward-kl", "regularizer_coef": 0.3},
    ],
    "dpo": [{"beta": 0.1}, {"beta": 0.5, "label_smoothing": 0.1}],
    "mix": [{"mu": 0.1, "clip_range": 0.2, **DEFAULT}],
    "mix_chord": [
        {"mu_peak": 0.3, "clip_range": 0.2, "enable_phi_function": phi, **steps, **DEFAULT}
        for phi, steps in (
            (True, {"mu_valley": 0.3}),
            (False, {"mu_warmup_steps": 8, "mu_decay_steps": 10, "mu_valley": 0.1}),
        )
    ],
}
NOTES = {"mix_chord": "at step 5", "dpo": "one pair of sums over all tokens of all pairs, not a mean over pairs"}
ON_TWO = [
    RecordingPlan(
        class_of(LOSS_CLASSES[name]),
        {"name": name, **params},
        EDGES if name in ("ppo", "sft", "opmd") else BOTH,
        note=NOTES.get(name),
    )
    for name, choices in LOSSES.items()
    for params in choices
]
# The log-ratios of this batch leave every clip; the losses without a clip of the log-ratio overflow there.
FAR = [
    RecordingPlan(class_of(LOSS_CLASSES[name]), {"name": name, **params}, ("huge",))
    for name, params in (("ppo", {"clip_range": 0.2}), ("importance_sampling", {}))
]

ADVANTAGES: dict[str, list[dict[str, Any]]] = {
    "ppo": [{"gamma": 1.0, "lam": 1.0}, {"gamma": 0.97, "lam": 0.9}],
    "reinforceplusplus": [{"gamma": 1.0}, {"gamma": 0.97}],
    "remax": [{}],
    "rloo": [{}],
    "grpo_verl": [{"epsilon": 1e-6}],
    "opmd_verl": [{"opmd_baseline": "mean"}, {"opmd_baseline": "logavgexp", "tau": 0.5}],
    "asymre_verl": [{"baseline_shift": -0.1}],
    "grpo": [{"std_cal_level": "group"}, {"std_cal_level": "batch"}],
    "reinforce": [{}],
    "opmd": [{"opmd_baseline": "mean"}, {"opmd_baseline": "logavgexp", "tau": 0.5}],
    "asymre": [{"baseline_shift": -0.1}],
    "rec": [{"std_normalize": False}, {"std_normalize": True}],
    "step_wise_grpo": [{"std_cal_level": "group"}, {"std_cal_level": "batch", "enable_step_norm": True}],
    "gigpo": grid(fnorm=("none", "std"), omega=(0.5,), gamma=(0.9,)),
    "on_policy_distill": [{"kl_coef": 0.5}],
    "jsd": [{"lambda_coef": coef, "kl_coef": 0.5} for coef in (0.0, 0.3, 1.0)]
    + [{"lambda_coef": 0.5, "temperature": 2.0}],
    "clipb": [{"mu": 0.5}],
    "clipv": [{"mu": 0.5, "max_frac": 1.0}, {"mu": 0.5, "max_frac": 0.05}],
}
# Trinity's "rec" fails on a group of one; "holes" has such a group.
GROUPS_OF_TWO = ("rec",)
ON_ADVANTAGES = [
    RecordingPlan(
        class_of(ADVANTAGE_CLASSES[name]), {"name": name, **params}, ("base",) if name in GROUPS_OF_TWO else BOTH, None
    )
    for name, choices in ADVANTAGES.items()
    for params in choices
]
DEFAULTS = [
    RecordingPlan(f"{name}LossFn", {"loss_agg_mode": "token-mean"}, ("base",), note=RELEASE_DEFAULTS)
    for name in ("PPOPolicy", "CISPOPolicy", "SAPOPolicy", "TOPRPolicy", "OPMDPolicy", "sPPOPolicy", "GSPO")
]
# The mean KL of a row is 2.09 with a clamp at 20, 1.98 at 19 and 2.20 at 21.
BOUNDS = [
    RecordingPlan(
        "PPOPolicyLossFn",
        {"name": "ppo", "clip_range": 0.2, "clip_ratio_c": FAR_AWAY, **masking, **DEFAULT},
        ("huge",),
        note=REACHES_BOUND,
    )
    for masking in ({}, *({"enable_sequence_masking": True, "delta_sequence_masking": kl} for kl in (2.03, 2.15)))
]
LEFT_OUT = {
    "grpo with rank_penalty": "centres rewards by the mean of the penalised ones, but does not penalise the rewards",
    "grpo with std_threshold": "drops experiences, which is the caller's choice of rows",
    "rec with drop": "drops experiences at random",
    "jsd with chunk_size": "the same numbers in pieces",
    "rec with weight gspo_importance_sampling, other clip_mode": "fails: UnboundLocalError",
}
PLANS = (*ON_TWO, *FAR, *ON_ADVANTAGES, *DEFAULTS, *BOUNDS)
