"""Advantages: by comparison within a group, over time, from a teacher. No whitening happens inside."""

from kljax.advantages.balance import balanced_advantages
from kljax.advantages.baselines import asymre_advantages, opmd_advantages, rae_advantages, remax_advantages
from kljax.advantages.centered import centered_kl_advantages
from kljax.advantages.distillation import (
    distillation_advantages,
    iw_opd_advantages,
    jsd_advantages,
    kimi_advantages,
    topd_advantages,
)
from kljax.advantages.dynamic_sampling import groups_with_spread
from kljax.advantages.entropy_clip import clip_b_mask, clip_v_mask
from kljax.advantages.entropy_mask import high_entropy_mask
from kljax.advantages.group import (
    broadcast_to_tokens,
    grpo_advantages,
    opo_advantages,
    reinforce_plus_plus_baseline_advantages,
    rloo_advantages,
)
from kljax.advantages.group_scaling import gpg_advantages, maxrl_advantages, pass_at_k_advantages
from kljax.advantages.multi_reward import gdpo_advantages
from kljax.advantages.temporal import gae, reinforce_plus_plus_returns
from kljax.advantages.token_baseline import otb_advantages
from kljax.advantages.trajectories import broadcast_to_steps
from kljax.advantages.turn_credit import turn_credit_advantages

__all__ = [
    "asymre_advantages",
    "balanced_advantages",
    "broadcast_to_steps",
    "broadcast_to_tokens",
    "centered_kl_advantages",
    "clip_b_mask",
    "clip_v_mask",
    "distillation_advantages",
    "gae",
    "gdpo_advantages",
    "gpg_advantages",
    "groups_with_spread",
    "grpo_advantages",
    "high_entropy_mask",
    "iw_opd_advantages",
    "jsd_advantages",
    "kimi_advantages",
    "maxrl_advantages",
    "opmd_advantages",
    "opo_advantages",
    "otb_advantages",
    "pass_at_k_advantages",
    "rae_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "reinforce_plus_plus_returns",
    "remax_advantages",
    "rloo_advantages",
    "topd_advantages",
    "turn_credit_advantages",
]
