"""OpenRLHF 0.11.2: KL with its unbiased gradient, losses, gates, reductions, advantages and controllers."""

from tests.goldens.plan import BOTH, RecordingPlan

EDGES = ("base", "holes", "empty_row")
CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}

KL = [
    RecordingPlan(
        "compute_approx_kl", {"kl_estimator": name, "unbiased_gradient": unbiased, "old": old}, ("base", "huge")
    )
    for name in ("k1", "k2", "k3")
    for unbiased, old in ((False, False), (True, False), (True, True))
]


def gate(level: str, mode: str, gating: str, *threshold: float) -> dict[str, object]:
    """The arguments of a train-rollout gate."""
    names = ("is_correction_level", "is_correction_mode", "is_correction_gating")
    return {**dict(zip(names, (level, mode, gating), strict=True)), "is_correction_threshold": list(threshold)}


GATES = [
    gate("token", "clip", "ratio", 0.8, 1.3),
    gate("token", "mask", "ratio", 0.8, 1.3),
    gate("seq", "mask", "ratio", 0.92, 1.08),
    gate("token", "mask", "binary_kl", 0.0, 0.02),
    gate("token", "mask", "tv", 0.0, 0.05),
    gate("seq", "mask", "binary_kl", 0.0, 0.03),
    gate("seq", "mask", "tv", 0.0, 0.07),
]
LOSSES = [
    RecordingPlan("PolicyLoss", {"policy_loss_type": "ppo", **CLIP}, EDGES),
    RecordingPlan("PolicyLoss", {"policy_loss_type": "ppo", **CLIP, "token_level_loss": False}, EDGES),
    RecordingPlan("PolicyLoss", {"policy_loss_type": "ppo", **CLIP, "dual_clip": 1.5}),
    RecordingPlan("PolicyLoss", {"policy_loss_type": "ppo", **CLIP}, ("huge",)),
    RecordingPlan("PolicyLoss", {"policy_loss_type": "ppo", **CLIP, "dp_size": 2, "batch_num_tokens": 90.0}),
    RecordingPlan("PolicyLoss", {"policy_loss_type": "gspo", **CLIP}, EDGES),
    RecordingPlan(
        "PolicyLoss",
        {"policy_loss_type": "gspo", **CLIP, **GATES[1]},
        note="with a correction GSPO's ratio is to the rollout",
    ),
    *[RecordingPlan("PolicyLoss", {"policy_loss_type": "ppo", **CLIP, **arguments}) for arguments in GATES],
    *[
        RecordingPlan("ValueLoss", {"clip_eps": eps, "token_level_loss": token}, BOTH, "values")
        for eps, token in ((0.2, True), (None, False))
    ],
]
REDUCTIONS = [
    RecordingPlan("aggregate_loss", params, EDGES, "advantages")
    for params in (
        {"token_level_loss": True},
        {"token_level_loss": False},
        {"token_level_loss": True, "dp_size": 2, "batch_num_tokens": 90.0},
        {"token_level_loss": False, "dp_size": 2, "global_batch_size": 11.0},
    )
]
# Groups of two, as the reshape of the release wants them.
ADVANTAGES = [
    RecordingPlan(
        "compute_advantages_and_returns",
        {"name": name, "kl_coef": 0.05, "reward_clip_range": [-1.0, 1.0], **extra},
        ("base",),
        None,
    )
    for name, extra in (
        ("gae", {"gamma": 0.97, "lambd": 0.9}),
        ("gae", {"gamma": 1.0, "lambd": 1.0, "no_std_norm": True}),
        ("reinforce", {"gamma": 0.97}),
        ("rloo", {}),
        ("reinforce_baseline", {}),
        ("group_norm", {}),
        ("dr_grpo", {}),
        ("flash_reinforce", {}),
    )
]
OVER_HOLES = [
    RecordingPlan("get_advantages_and_returns", {"gamma": 0.97, "lambd": 0.9}, EDGES, None),
    RecordingPlan("get_cumulative_returns", {"gamma": 0.97}, EDGES, None),
    RecordingPlan("compute_reward", {"kl_coef": 0.05, "reward_clip_range": [-0.5, 0.5]}, gradient_of=None),
]
CONTROLLERS = [
    RecordingPlan("AdaptiveKLController", {"init_kl_coef": 0.01, "target": 0.1, "horizon": 10_000}, ("updates",), None),
    RecordingPlan("FixedKLController", {"kl_coef": 0.01}, ("updates",), None),
]
LEFT_OUT = {
    "masked_normalize": "used by no estimator",
    "groups of one": "asserted away by the release",
    "PPO with an empty row and a gate per sequence": "NaN, the mean over no token",
}
PLANS = (*KL, *LOSSES, *REDUCTIONS, *ADVANTAGES, *OVER_HOLES, *CONTROLLERS)
