"""ART (openpipe-art 0.5.18): the options of its loss that the shared cases leave at their defaults."""

from tests.goldens.plan import RecordingPlan

PPO = {"ppo": True, "epsilon": 0.2, "epsilon_high": 0.28, "reduction": "mean"}
CISPO = {"ppo": False, "epsilon": 1.0, "epsilon_high": 4.0, "reduction": "mean"}
LEVELS = ("sequence", "average", "geometric_average")
OPTIONS = (
    *[{**PPO, "importance_sampling_level": level} for level in LEVELS],
    *[{**CISPO, "importance_sampling_level": level} for level in LEVELS],
    {**PPO, "kimi_k2_tau": 0.5},
    {**CISPO, "kimi_k2_tau": 0.5},
    {**CISPO, "kimi_k2_tau": 0.5, "kl_penalty_coef": 0.3},
    {**PPO, "mask_prob_ratio": True},
    {**CISPO, "epsilon": 0.2, "epsilon_high": 0.28, "mask_prob_ratio": True},
    {**PPO, "max_negative_advantage_importance_sampling_weight": 1.1},
    {**PPO, "truncated_importance_sampling": 1.2, "original": True},
    {**CISPO, "truncated_importance_sampling": 1.2, "original": True},
    {**CISPO, "epsilon_high": 0.1, "truncated_importance_sampling": 1.2, "original": False},
)
LEFT_OUT = {
    "weights other than 1": "a factor of the loss",
    "entropy": "no KL",
    "probs_corr": "a correlation of probabilities, no KL",
}
PLANS = tuple(RecordingPlan("loss_fn", params) for params in OPTIONS)
