"""SkyRL 0.3.0: policy losses, advantages, reductions, off-policy correction and controllers."""

from typing import Any

from tests.goldens.plan import FAR_AWAY, REACHES_BOUND, RecordingPlan, grid

EDGES = ("base", "holes", "empty_row")
CLIP = {"eps_clip_low": 0.2, "eps_clip_high": 0.28}
TIS = {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.2}
CLIP_COV = {"clip_cov_lb": 0.2, "clip_cov_ub": 3.0}

LOSSES: dict[str, list[dict[str, Any]]] = {
    "regular": [CLIP, {**CLIP, **TIS, "sequence_mask_metric": "geometric", "geo_mask_low": 0.9, "geo_mask_high": 1.1}],
    "dual_clip": [{**CLIP, "clip_ratio_c": 3.0}, {**CLIP, "clip_ratio_c": 1.5}],
    "sapo": [{"tau_pos": 1.0, "tau_neg": 1.05}],
    "gspo": [CLIP, {"eps_clip_low": 0.05, "eps_clip_high": 0.05}],
    "cispo": [
        {"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": 4.0},
        {"cispo_eps_clip_low": 0.1, "cispo_eps_clip_high": 0.1},
    ],
    "rollout_is": [CLIP],
    "dppo": [
        {"dppo_type": kind, "delta_low": delta, "delta_high": delta, "anchor": anchor}
        for kind, delta in (("binary_tv", 0.05), ("binary_kl", 0.02))
        for anchor in ("rollout", "old")
    ],
    "clip_cov": [
        {**CLIP, **CLIP_COV, "clip_ratio": 1.0},
        {**CLIP, "clip_cov_lb": 90.0, "clip_cov_ub": 99.0, "clip_ratio": 1.0},
    ],
    "kl_cov": [{"kl_cov_frac": 0.2, "ppo_kl_coef": 1.0}, {"kl_cov_frac": 0.05, "ppo_kl_coef": 0.1}],
    "cross_entropy": [{}],
    "importance_sampling": [{}],
}
FUNCTIONS = {
    "regular": "ppo_policy_loss",
    "dual_clip": "ppo_policy_loss",
    "sapo": "sapo_policy_loss",
    "gspo": "gspo_policy_loss",
    "cispo": "compute_policy_loss_cispo",
    "rollout_is": "rollout_is_policy_loss",
    "dppo": "dppo_policy_loss",
    "clip_cov": "compute_policy_loss_clip_cov",
    "kl_cov": "compute_policy_loss_kl_cov",
    "cross_entropy": "cross_entropy_loss",
    "importance_sampling": "importance_sampling_loss",
}
ON_LOSSES = [
    RecordingPlan(
        FUNCTIONS[name], {"name": name, **params}, EDGES if name in ("regular", "kl_cov") else ("base", "holes")
    )
    for name, choices in LOSSES.items()
    for params in choices
]
VALUE = [RecordingPlan("ppo_critic_loss", {"value_clip": clip}, EDGES, "values") for clip in (0.2, None)]

ADVANTAGES = [
    *[
        RecordingPlan("compute_grpo_outcome_advantage", {"name": "grpo", "grpo_norm_by_std": norm}, gradient_of=None)
        for norm in (True, False)
    ],
    RecordingPlan("compute_rloo_outcome_advantage", {"name": "rloo"}, gradient_of=None),
    RecordingPlan("compute_maxrl_advantage", {"name": "maxrl"}, gradient_of=None),
    *[
        RecordingPlan(
            "compute_reinforce_plus_plus_outcome_advantage", {"name": "reinforce++", "gamma": gamma}, EDGES, None
        )
        for gamma in (1.0, 0.97)
    ],
    *[
        RecordingPlan("compute_gae_advantage_return", {"name": "gae", "gamma": 0.97, "lambd": lam}, EDGES, None)
        for lam in (1.0, 0.9)
    ],
    RecordingPlan(
        "_normalize_advantages",
        {"advantage_batch_normalize": True},
        gradient_of=None,
        note="token_mean of the whole batch after it",
    ),
]
REDUCTIONS = [
    RecordingPlan("apply_loss_reduction_to_advantages_minibatch", params, EDGES, None)
    for params in (
        {"loss_reduction": "token_mean_legacy", "micro_batch_size": 2, "max_seq_len": 64},
        {"loss_reduction": "token_mean_legacy", "micro_batch_size": 4, "max_seq_len": 64},
        {"loss_reduction": "prompt_mean", "micro_batch_size": 2, "max_seq_len": 64},
    )
]

OFF_POLICY: list[dict[str, Any]] = [
    {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.2},
    {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.5},
    {"sequence_mask_metric": "geometric", "geo_mask_low": 0.92, "geo_mask_high": 1.08},
    {"sequence_mask_metric": "product", "product_mask_low": 0.6, "product_mask_high": 1.8},
    {"outlier_token_is_threshold_low": 0.6, "outlier_token_is_threshold_high": 1.7},
    {"outlier_token_is_threshold_high": 1.5},
    {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.25},
]
EVERYTHING: dict[str, Any] = {
    "outlier_token_is_threshold_low": 0.3,
    "outlier_token_is_threshold_high": 4.0,
    "token_mask_is_threshold_low": 0.7,
    "token_mask_is_threshold_high": 1.4,
    "tis_ratio_type": "sequence",
    "sequence_tis_ratio_clip_high": 1.1,
    "sequence_mask_metric": "geometric",
    "geo_mask_low": 0.85,
    "geo_mask_high": 1.08,
}
CORRECTIONS = [
    *[RecordingPlan("compute_off_policy_correction", params, gradient_of=None) for params in OFF_POLICY],
    RecordingPlan("compute_off_policy_correction", EVERYTHING, EDGES, None),
]
KL_IN_REWARD: list[tuple[str, dict[str, Any]]] = [("k3", {}), ("k1", {"kl_target": 0.1, "horizon": 1000})]
REWARDS = [
    RecordingPlan(
        "apply_reward_kl_penalty", {"kl_estimator_type": name, "kl_loss_coef": 0.05, **adaptive}, gradient_of=None
    )
    for name, adaptive in KL_IN_REWARD
]
CONTROLLERS = [
    *[
        RecordingPlan("AdaptiveKLController", params, ("updates",), None)
        for params in grid(init_kl_coef=(0.1,), target=(0.1,), horizon=(10_000, 2000))
    ],
    RecordingPlan("FixedKLController", {"kl_coef": 0.001}, ("updates",), None),
]
FAR_LOSSES: list[tuple[str, str, dict[str, Any]]] = [
    ("regular", "huge", CLIP),
    ("dual_clip", "huge", {**CLIP, "clip_ratio_c": FAR_AWAY}),
    ("gspo", "far_rows", CLIP),
    ("cispo", "huge", {"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": FAR_AWAY}),
    *[
        ("dppo", "huge", {"dppo_type": kind, "delta_low": 0.2, "delta_high": 0.2, "anchor": "old"})
        for kind in ("binary_tv", "binary_kl")
    ],
]
BOUNDS = [
    *[
        RecordingPlan(FUNCTIONS[name], {"name": name, **params}, (batch,), note=REACHES_BOUND)
        for name, batch, params in FAR_LOSSES
    ],
    *[
        RecordingPlan(
            "compute_off_policy_correction",
            {"tis_ratio_type": level, f"{level}_tis_ratio_clip_high": FAR_AWAY},
            ("far_sampler",),
            None,
            REACHES_BOUND,
        )
        for level in ("token", "sequence")
    ],
]
LEFT_OUT = {
    "clip_cov with a part of its candidates": "torch.randperm decides which; verl's case checks how many",
    "token_mean, sequence_mean, seq_mean_token_sum_norm": "in the shared cases",
}
PLANS = (*ON_LOSSES, *VALUE, *ADVANTAGES, *REDUCTIONS, *CORRECTIONS, *REWARDS, *CONTROLLERS, *BOUNDS)
