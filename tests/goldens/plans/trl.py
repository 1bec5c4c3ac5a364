"""TRL 1.16: the GRPO, GMPO and RLOO losses, their advantages and corrections, and the distillation divergences."""

from typing import Any

from tests.goldens.batches import VOCABULARY
from tests.goldens.plan import BOTH, FAR_AWAY, REACHES_BOUND, RecordingPlan, grid

EDGES = ("base", "holes", "empty_row")
EPSILON = {"epsilon": 0.2, "epsilon_high": 0.28}
SEQUENCE: dict[str, Any] = {"importance_sampling_level": "sequence"}
VESPO: dict[str, Any] = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}


def loss(batches: tuple[str, ...] = BOTH, **arguments: Any) -> RecordingPlan:
    """A call of `GRPOTrainer._compute_loss`; what is not named has the default of the release."""
    return RecordingPlan("GRPOTrainer._compute_loss", {**EPSILON, **arguments}, batches)


GRPO = [
    *[loss(EDGES, loss_type=name) for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")],
    loss(loss_type="cispo", epsilon_high=1.2),
    loss(loss_type="cispo", epsilon_high=0.2),
    loss(loss_type="sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05),
    loss(loss_type="vespo", **VESPO),
    loss(loss_type="vespo", use_vllm=True, **VESPO),
    loss(loss_type="grpo", delta=1.5),
    loss(loss_type="dapo", per_token_advantages=True),
    loss(loss_type="grpo", **SEQUENCE),
    loss(loss_type="luspo", **SEQUENCE),
    loss(loss_type="dapo", gradient_accumulation_steps=4, steps_per_generation=8),
    loss(loss_type="grpo", gradient_accumulation_steps=4),
    *[
        loss(loss_type=name, beta=0.1, use_bias_correction_kl=correction)
        for name in ("grpo", "dapo")
        for correction in (True, False)
    ],
    loss(loss_type="grpo", beta=0.1, use_bias_correction_kl=True, **SEQUENCE),
    loss(loss_type="luspo", beta=0.1, use_bias_correction_kl=False, **SEQUENCE),
    loss(loss_type="grpo", beta=0.1, use_bias_correction_kl=True, delta=1.2),
    loss(loss_type="grpo", off_policy_mask_threshold=0.02),
    loss(loss_type="grpo", beta=0.1, use_bias_correction_kl=False, off_policy_mask_threshold=0.02),
    loss(loss_type="grpo", use_vllm=True),
]
OTHER_LOSSES = [
    RecordingPlan("GMPOTrainer._compute_loss", {"epsilon": 0.4, "epsilon_high": 0.4, "beta": beta}, EDGES)
    for beta in (0.0, 0.1)
]
ASYNC = [
    *[
        RecordingPlan("AsyncGRPOTrainer.compute_loss", {**EPSILON, "gradient_accumulation_steps": steps}, BOTH)
        for steps in (1, 4)
    ],
    *[
        RecordingPlan("async_advantages", {"partial": partial}, ("base",), None, "part of the rollout worker")
        for partial in (False, True)
    ],
]
RLOO_LOSS = [RecordingPlan("RLOOTrainer._compute_loss", EPSILON)]

MASKS = [
    RecordingPlan("get_off_policy_mask", {"off_policy_threshold": threshold}, EDGES, None)
    for threshold in (0.02, 0.055)
]
RATIOS = [
    RecordingPlan(
        "vllm_importance_sampling",
        {
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_max": 1.4,
            "vllm_importance_sampling_clip_min": low,
        },
        gradient_of=None,
        note="part of _generate_and_score_completions",
    )
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    for low in (None, 0.7)
]
# Groups of two, as the view of the release wants them.
ADVANTAGES = [
    *[
        RecordingPlan(
            "advantages",
            {**params, "multi_objective_aggregation": "sum_then_normalize"},
            ("base",),
            None,
            "part of GRPOTrainer",
        )
        for params in grid(scale_rewards=("group", "batch", "none"))
    ],
    *[
        RecordingPlan(
            "advantages",
            {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": weights},
            ("base",),
            None,
            "part of GRPOTrainer",
        )
        for weights in ([1.0, 1.0], [1.0, 0.25])
    ],
    *[
        RecordingPlan(
            "advantages", {**params, "partial": True}, ("base",), None, "part of GRPOTrainer; NaN is no reward"
        )
        for params in (
            {"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"},
            {"scale_rewards": "batch", "multi_objective_aggregation": "sum_then_normalize"},
            {"reward_weights": [1.0, 0.25], "multi_objective_aggregation": "normalize_then_sum"},
        )
    ],
    *[
        RecordingPlan(
            "rloo_advantages", {"normalize_advantages": normalize, "beta": beta}, ("base",), None, "part of RLOOTrainer"
        )
        for normalize, beta in ((False, 0.0), (True, 0.0), (False, 0.1))
    ],
]
DISTILLATION = [
    *[
        RecordingPlan("generalized_jsd_loss", {"beta": beta, "temperature": temperature}, gradient_of="logits")
        for beta, temperature in ((0.0, 1.0), (0.3, 1.0), (0.5, 2.0), (1.0, 1.0))
    ],
    *[RecordingPlan("compute_divergence", {"alpha": alpha}, ("base",), "logits") for alpha in (0.0, 0.3, 1.0)],
    *[
        RecordingPlan("compute_topk_self_distillation_loss", params, ("base",), "logits")
        for params in grid(distillation_topk=(3,), distillation_alpha=(0.5, 1.0), distillation_add_tail=(True, False))
    ],
    RecordingPlan(
        "add_tail_bucket", {"first": 3}, ("base",), "logits", "only the tail, of the first log-probs of each row"
    ),
    RecordingPlan("apply_importance_sampling_clipping", {"clip_coeff": 1.2}, gradient_of="advantages"),
]
BOUNDS = [
    RecordingPlan("add_tail_bucket", {"first": VOCABULARY}, ("base",), "logits", REACHES_BOUND),
    RecordingPlan(
        "apply_importance_sampling_clipping", {"clip_coeff": FAR_AWAY}, ("huge",), "advantages", REACHES_BOUND
    ),
]
PAIRS: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired")],
    *[(name, {}) for name in ("apo_zero", "apo_down", "sft", "sigmoid_norm")],
    *[(name, {"label_smoothing": 0.1}) for name in ("exo_pair", "robust", "aot")],
    *[("discopop", {"discopop_tau": tau}) for tau in (0.05, 0.5)],
]
PREFERENCES = [
    *[
        RecordingPlan("DPOTrainer._compute_loss", {"loss_type": name, "beta": 0.3, **params}, note="part of it")
        for name, params in PAIRS
    ],
    *[
        RecordingPlan(
            "KTOTrainer._compute_loss",
            {"loss_type": name, "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5},
            note="part of it",
        )
        for name in ("kto", "apo_zero_unpaired")
    ],
    *[
        RecordingPlan("cpo_loss", {"loss_type": name, "beta": 0.3, "label_smoothing": 0.1, "simpo_gamma": 0.5})
        for name in ("sigmoid", "hinge", "ipo", "simpo")
    ],
    *[
        RecordingPlan(
            "OnlineDPOTrainer.training_step",
            {"loss_type": name, "beta": 0.3, "missing_eos_penalty": None},
            BOTH,
            note="part of it",
        )
        for name in ("sigmoid", "ipo")
    ],
    RecordingPlan("odds_ratio_loss", {"beta": 0.3}),
    *[
        RecordingPlan(
            "TPOTrainer._compute_loss",
            {"loss_type": name, "beta": 0.3, "label_smoothing": 0.1, "tpo_l_gamma": 0.5},
            note="part of it",
        )
        for name in ("sigmoid", "hinge", "ipo", "tpo-l")
    ],
    RecordingPlan("A2POTrainer.compute_loss", {"beta2": 0.3}),
]
LEFT_OUT = {
    "top_entropy_quantile": "a mask from the entropies, which is the caller's",
    "entropy bonus": "no KL",
    "compute_sampled_token_self_distillation_loss": "needs token ids; a policy gradient",
    "DPO with another f_divergence_type, ld_alpha or use_weighting": "other scores, or weights, of the same losses",
    "AlphaPO": "other scores of the same loss",
    "use_liger_kernel": "another package, the same k3",
}
PLANS = (*GRPO, *OTHER_LOSSES, *ASYNC, *RLOO_LOSS, *MASKS, *RATIOS, *ADVANTAGES, *DISTILLATION, *BOUNDS, *PREFERENCES)
