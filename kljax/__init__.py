"""KL regularisation for RL post-training in JAX: one exact, documented meaning for every name.

Arrays are positional, everything else is keyword-only. Unless said otherwise they are `[B, T]`, and position `t` holds
the value of token `t` itself: its log-prob given the tokens before it. Position 0 is never trained.
"""

from kljax.advantages import (
    broadcast_to_tokens,
    centered_kl_advantages,
    gae,
    grpo_advantages,
    opo_advantages,
    reinforce_plus_plus_baseline_advantages,
    reinforce_plus_plus_returns,
    rloo_advantages,
)
from kljax.aggregation import WeightedSum, aggregate, token_weights
from kljax.controllers import (
    Controller,
    ControllerState,
    adaptive_kl,
    fixed_kl,
)
from kljax.diagnostics import (
    clip_fraction,
    dual_clip_fraction,
    effective_sample_size,
    explained_variance,
    log_prob_abs_diff,
    ppo_kl,
    reference_kl,
    rollout_kl,
)
from kljax.kl import abs_diff, estimate_kl, k1, k2, k3, low_var_kl
from kljax.log_probs import TokenStats, log_probs_from_hidden
from kljax.losses import (
    cispo_loss,
    clip_cov_loss,
    gspo_loss,
    kl_cov_loss,
    ppo_clip_loss,
    reference_kl_loss,
    rollout_kl_loss,
    value_loss,
)
from kljax.masking import (
    completion_mask,
    last_token_mask,
    masked,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    shift_right,
)
from kljax.ratios import (
    geometric_ratios,
    log_ratios,
    rejection_mask,
    sequence_ratios,
    token_ratios,
    truncated_importance_weights,
    veto_mask,
)
from kljax.reference import (
    Policy,
    adapter_reference,
    base_reference,
    check_tree,
    checkpoint_reference,
    fingerprint,
    restore_tree,
)
from kljax.rewards import (
    kl_shaped_rewards,
    place_rewards,
)

__all__ = [
    "Controller",
    "ControllerState",
    "Policy",
    "TokenStats",
    "WeightedSum",
    "abs_diff",
    "adapter_reference",
    "adaptive_kl",
    "aggregate",
    "base_reference",
    "broadcast_to_tokens",
    "centered_kl_advantages",
    "check_tree",
    "checkpoint_reference",
    "cispo_loss",
    "clip_cov_loss",
    "clip_fraction",
    "completion_mask",
    "dual_clip_fraction",
    "effective_sample_size",
    "estimate_kl",
    "explained_variance",
    "fingerprint",
    "fixed_kl",
    "gae",
    "geometric_ratios",
    "grpo_advantages",
    "gspo_loss",
    "k1",
    "k2",
    "k3",
    "kl_cov_loss",
    "kl_shaped_rewards",
    "last_token_mask",
    "log_prob_abs_diff",
    "log_probs_from_hidden",
    "log_ratios",
    "low_var_kl",
    "masked",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "opo_advantages",
    "place_rewards",
    "ppo_clip_loss",
    "ppo_kl",
    "reference_kl",
    "reference_kl_loss",
    "reinforce_plus_plus_baseline_advantages",
    "reinforce_plus_plus_returns",
    "rejection_mask",
    "restore_tree",
    "rloo_advantages",
    "rollout_kl",
    "rollout_kl_loss",
    "sequence_ratios",
    "shift_right",
    "token_ratios",
    "token_weights",
    "truncated_importance_weights",
    "value_loss",
    "veto_mask",
]
