"""Losses per token, unreduced: a reduction is `sum(loss * token_weights(...))`, the same for every term of a loss."""

from kljax.losses.covariance import clip_cov_loss, kl_cov_loss
from kljax.losses.kl import reference_kl_loss, rollout_kl_loss
from kljax.losses.policy import cispo_loss, gspo_loss, ppo_clip_loss
from kljax.losses.value import value_loss

__all__ = [
    "cispo_loss",
    "clip_cov_loss",
    "gspo_loss",
    "kl_cov_loss",
    "ppo_clip_loss",
    "reference_kl_loss",
    "rollout_kl_loss",
    "value_loss",
]
