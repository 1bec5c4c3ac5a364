"""Losses per token, unreduced: a reduction is `sum(loss * token_weights(...))`, the same for every term of a loss."""

from kljax.losses.covariance import clip_cov_loss, kl_cov_loss
from kljax.losses.distillation import (
    append_tail,
    distillation_loss,
    generalized_jsd,
    top_k_forward_kl,
    top_k_with_tail,
)
from kljax.losses.kl import reference_kl_loss, rollout_kl_loss
from kljax.losses.log_ratio_penalty import dro_loss, rec_loss
from kljax.losses.policy import cispo_loss, gspo_loss, ppo_clip_loss
from kljax.losses.policy_gradient import (
    cross_entropy_loss,
    gpg_loss,
    importance_sampling_loss,
    opmd_loss,
    reinforce_loss,
    topr_loss,
)
from kljax.losses.preference import dpo_loss, kto_loss, preference_loss
from kljax.losses.soft_clipping import gmpo_loss, sapo_loss, vespo_loss
from kljax.losses.squared_error import a2po_loss, flowrl_loss, gvpo_loss
from kljax.losses.trust_region import dppo_loss, dppo_mask, m2po_loss, sppo_loss
from kljax.losses.value import value_loss

__all__ = [
    "a2po_loss",
    "append_tail",
    "cispo_loss",
    "clip_cov_loss",
    "cross_entropy_loss",
    "distillation_loss",
    "dpo_loss",
    "dppo_loss",
    "dppo_mask",
    "dro_loss",
    "flowrl_loss",
    "generalized_jsd",
    "gmpo_loss",
    "gpg_loss",
    "gspo_loss",
    "gvpo_loss",
    "importance_sampling_loss",
    "kl_cov_loss",
    "kto_loss",
    "m2po_loss",
    "opmd_loss",
    "ppo_clip_loss",
    "preference_loss",
    "rec_loss",
    "reference_kl_loss",
    "reinforce_loss",
    "rollout_kl_loss",
    "sapo_loss",
    "sppo_loss",
    "top_k_forward_kl",
    "top_k_with_tail",
    "topr_loss",
    "value_loss",
    "vespo_loss",
]
