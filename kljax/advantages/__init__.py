"""Advantages: by comparison within a group, over time, and the centred KL adjustment. No whitening happens inside."""

from kljax.advantages.centered import centered_kl_advantages
from kljax.advantages.group import (
    broadcast_to_tokens,
    grpo_advantages,
    opo_advantages,
    reinforce_plus_plus_baseline_advantages,
    rloo_advantages,
)
from kljax.advantages.temporal import gae, reinforce_plus_plus_returns

__all__ = [
    "broadcast_to_tokens",
    "centered_kl_advantages",
    "gae",
    "grpo_advantages",
    "opo_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "reinforce_plus_plus_returns",
    "rloo_advantages",
]
