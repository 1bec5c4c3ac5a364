"""verl 0.9.1: the policy losses, advantages, corrections and controllers that the shared cases lack."""

from tests.goldens.plan import BOTH, FAR_AWAY, REACHES_BOUND, RELEASE_DEFAULTS, RecordingPlan, grid

EDGES = ("base", "holes", "empty_row")
CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}

# The share of tokens is so large that Clip-Cov drops every candidate, whatever the permutation; "some" drops a part.
CLIP_COV = {**CLIPS, "clip_cov_lb": 0.2, "clip_cov_ub": 3.0, "loss_agg_mode": "token-mean", "name": "clip_cov"}
KL_COV = [{"kl_cov_ratio": ratio, "ppo_kl_coef": coef} for ratio, coef in ((0.2, 1.0), (0.05, 0.1), (0.0002, 0.1))]

LOSSES = [
    RecordingPlan("compute_policy_loss_clip_cov", {**CLIP_COV, "clip_cov_ratio": 1.0}),
    RecordingPlan(
        "compute_policy_loss_clip_cov", {**CLIP_COV, "clip_cov_ratio": 0.05}, note="torch.randperm gives 0, 1, 2, ..."
    ),
    RecordingPlan(
        "compute_policy_loss_clip_cov", {**CLIP_COV, "clip_cov_ratio": 1.0, "clip_cov_lb": 90.0, "clip_cov_ub": 99.0}
    ),
    *[
        RecordingPlan("compute_policy_loss_kl_cov", {**p, "loss_agg_mode": "token-mean", "name": "kl_cov"})
        for p in KL_COV
    ],
    *[
        RecordingPlan("compute_policy_loss_dro", {"dro_beta": beta, "loss_agg_mode": mode, "name": "dro"})
        for beta, mode in ((0.5, "token-mean"), (0.1, "seq-mean-token-mean"))
    ],
    *[
        RecordingPlan(
            f"compute_policy_loss_{name}",
            {**CLIPS, **extra, "loss_agg_mode": "token-mean", "name": name, "weights": True},
        )
        for name, extra in (("vanilla", {"clip_ratio_c": 3.0}), ("geo_mean", {}), ("cispo", {}), ("gspo", {}))
    ],
    *[
        RecordingPlan(
            "compute_policy_loss_reinforce", {"loss_agg_mode": "seq-mean-token-sum", "weights": weights}, EDGES
        )
        for weights in (False, True)
    ],
    *[
        RecordingPlan(
            "compute_policy_loss_bypass_mode", {"name": "bypass_mode", "loss_agg_mode": "token-mean", **extra}
        )
        for extra in (
            {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 2.0},
            {
                "loss_type": "reinforce",
                "rollout_is": "sequence",
                "rollout_is_threshold": 2.0,
                "rollout_rs": "seq_mean_k1",
                "rollout_rs_threshold": "0.8_1.2",
            },
            {"loss_type": "ppo_clip", **CLIPS, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"},
        )
    ],
    *[
        RecordingPlan(
            "compute_value_loss", {"cliprange_value": 0.2, "loss_agg_mode": mode}, EDGES, gradient_of="values"
        )
        for mode in ("token-mean", "seq-mean-token-mean")
    ],
]

GLOBAL = {"dp_size": 2, "batch_num_tokens": 90, "global_batch_size": 11}
REDUCTIONS = [
    RecordingPlan("agg_loss", {"loss_agg_mode": mode, **GLOBAL}, EDGES, gradient_of="advantages")
    for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
]

ADVANTAGES = [
    *[
        RecordingPlan(
            f"compute_{name}_outcome_advantage", {"name": name, "norm_adv_by_std_in_grpo": norm}, gradient_of=None
        )
        for name in ("grpo", "grpo_vectorized")
        for norm in (True, False)
    ],
    # Only base: a group of one raises.
    *[
        RecordingPlan(
            "compute_grpo_passk_outcome_advantage",
            {"name": "grpo_passk", "norm_adv_by_std_in_grpo": norm},
            ("base",),
            None,
        )
        for norm in (True, False)
    ],
    *[
        RecordingPlan(f"compute_{name}_outcome_advantage", {"name": name}, gradient_of=None)
        for name in ("rloo", "rloo_vectorized", "opo", "gpg", "remax", "reinforce_plus_plus_baseline")
    ],
    *[
        RecordingPlan(
            "compute_gdpo_outcome_advantage",
            {"name": "gdpo", "gdpo_reward_weights": weights, "norm_adv_by_std_in_grpo": norm},
            gradient_of=None,
        )
        for weights, norm in ((None, True), ([1.0, 0.25], True), ([1.0, 0.25], False))
    ],
    *[
        RecordingPlan(
            f"compute_{name}_advantage", {"name": name, "handle_zero_tail": tail, "weights": weights}, gradient_of=None
        )
        for name in ("optimal_token_baseline", "multi_turn_optimal_token_baseline")
        for tail, weights in ((True, False), (False, False), (True, True))
    ],
    RecordingPlan("compute_gae_advantage_return", {"name": "gae", "gamma": 0.97, "lam": 0.9}, EDGES, None),
    RecordingPlan(
        "compute_reinforce_plus_plus_outcome_advantage", {"name": "reinforce_plus_plus", "gamma": 0.97}, EDGES, None
    ),
]

# Thresholds that reject some and keep some; a k1 threshold bounds the ratio rollout / training.
REJECTION = {
    "token_k1": "0.7_1.4",
    "token_k2": "0.05",
    "token_k3": "0.05",
    "seq_sum_k1": "0.5_2.0",
    "seq_sum_k2": "0.4",
    "seq_sum_k3": "0.4",
    "seq_mean_k1": "0.9_1.1",
    "seq_mean_k2": "0.055",
    "seq_mean_k3": "0.0555",
    "seq_max_k2": "0.2",
    "seq_max_k3": "0.2",
    "token_k1,seq_mean_k3": "0.6_1.6,0.1",
}
CORRECTIONS = [
    *[
        RecordingPlan(
            "compute_rollout_rejection_mask",
            {"rollout_rs": option, "rollout_rs_threshold": threshold},
            EDGES if "," in option else BOTH,
            None,
        )
        for option, threshold in REJECTION.items()
    ],
    *[
        RecordingPlan("compute_rollout_correction_weights", params, EDGES, None)
        for params in grid(
            rollout_is=("token", "sequence"),
            rollout_is_threshold=(1.5, "0.7_1.5"),
            rollout_is_batch_normalize=(False, True),
        )
    ],
    RecordingPlan(
        "compute_rollout_correction_and_rejection_mask",
        {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.05},
        gradient_of=None,
    ),
    RecordingPlan("compute_offpolicy_metrics", {}, ("empty_row",), None),
]

REWARDS = [
    RecordingPlan("apply_kl_penalty", {"kl_penalty": name, **controller}, EDGES if name == "kl" else BOTH, None)
    for name in ("kl", "low_var_kl")
    for controller in (
        {"type": "fixed", "kl_coef": 0.05},
        {"type": "adaptive", "kl_coef": 0.05, "target_kl": 0.1, "horizon": 1000},
    )
]
CONTROLLERS = [
    RecordingPlan(
        "AdaptiveKLController", {"init_kl_coef": 0.1, "target_kl": 0.1, "horizon": 10_000}, ("updates",), None
    ),
    RecordingPlan(
        "AdaptiveKLController", {"init_kl_coef": 0.001, "target_kl": 0.02, "horizon": 2000}, ("updates",), None
    ),
    RecordingPlan("FixedKLController", {"kl_coef": 0.001}, ("updates",), None),
]
DISTILLATION = [
    *[
        RecordingPlan(
            "distillation_loss", {"loss_mode": name, "use_policy_gradient": by_policy, "loss_max_clamp": clamp}
        )
        for name, by_policy, clamp in (
            ("kl", False, None),
            ("k2", False, 0.2),
            ("k3", False, None),
            ("k1", True, 0.5),
            ("k3", True, None),
        )
    ],
    *[
        RecordingPlan(
            "compute_forward_kl_topk",
            {"name": "forward_kl_topk", "topk": 3, "log_prob_min_clamp": bound},
            ("base",),
            "logits",
        )
        for bound in (None, -2.0)
    ],
]
# Between the statistics with a clamp at 19, 20 and 21.
AROUND_THE_CLAMP = {
    "token_k1": ("3e-9_3e8", "1.2e-9_8e8"),
    "token_k2": ("190", "210"),
    "token_k3": ("3e8", "9e8"),
    "seq_sum_k1": ("1.2e-9_8e8", "5e-10_2e9"),
    "seq_sum_k2": ("191", "211"),
    "seq_sum_k3": ("3e8", "9e8"),
    "seq_mean_k1": ("0.1_10", "0.09_11"),
    "seq_mean_k2": ("21.2", "23.5"),
    "seq_mean_k3": ("3.3e7", "9e7"),
    "seq_max_k2": ("190", "210"),
    "seq_max_k3": ("3e8", "9e8"),
}
TOKEN_MEAN = {"loss_agg_mode": "token-mean"}
BOUNDS = [
    *[
        RecordingPlan(f"compute_policy_loss_{name}", {**TOKEN_MEAN, "name": name}, ("base",), note=RELEASE_DEFAULTS)
        for name in ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "geo_mean", "cispo")
    ],
    *[
        RecordingPlan(
            f"compute_policy_loss_{name}",
            {**TOKEN_MEAN, "clip_ratio_c": FAR_AWAY, "name": name},
            ("huge",),
            note=REACHES_BOUND,
        )
        for name in ("vanilla", "dppo_tv", "dppo_kl", "sapo")
    ],
    RecordingPlan("compute_policy_loss_gspo", {**TOKEN_MEAN, "name": "gspo"}, ("far_rows",), note=REACHES_BOUND),
    RecordingPlan(
        "compute_policy_loss_cispo",
        {**TOKEN_MEAN, "clip_ratio_high": FAR_AWAY, "name": "cispo"},
        ("huge",),
        note=REACHES_BOUND,
    ),
    *[
        RecordingPlan(
            "compute_rollout_correction_weights",
            {"rollout_is": level, "rollout_is_threshold": FAR_AWAY, "rollout_is_batch_normalize": False},
            (batch,),
            None,
            REACHES_BOUND,
        )
        for level, batch in (("token", "huge"), ("sequence", "far_rows"))
    ],
    RecordingPlan("compute_offpolicy_metrics", {}, ("huge", "far_rows"), None, REACHES_BOUND),
    *[
        RecordingPlan(
            "compute_policy_loss_bypass_mode",
            {**TOKEN_MEAN, "name": "bypass_mode", "loss_type": name, **far},
            ("huge",),
            note=REACHES_BOUND,
        )
        for name, far in (
            ("ppo_clip", {**CLIPS, "clip_ratio_c": FAR_AWAY}),
            ("reinforce", {"rollout_is": "token", "rollout_is_threshold": FAR_AWAY}),
        )
    ],
    *[
        RecordingPlan(
            "compute_rollout_rejection_mask",
            {"rollout_rs": option, "rollout_rs_threshold": threshold},
            ("huge",),
            None,
            REACHES_BOUND,
        )
        for option, thresholds in AROUND_THE_CLAMP.items()
        for threshold in thresholds
    ],
]
LEFT_OUT = {
    "compute_policy_loss": "deprecated, the same as compute_policy_loss_vanilla",
    "compute_entropy_loss": "entropy of logits, no KL",
    "compute_pf_ppo_reweight_data": "draws rows at random",
    "kl_penalty full": "NotImplementedError in verl",
}
PLANS = (*LOSSES, *REDUCTIONS, *ADVANTAGES, *CORRECTIONS, *REWARDS, *CONTROLLERS, *DISTILLATION, *BOUNDS)
