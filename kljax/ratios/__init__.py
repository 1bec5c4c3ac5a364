"""Importance ratios, the weights that correct for another sampler, and the masks that reject what is too far off."""

from kljax.ratios.correction import RolloutCorrection, correct_rollout
from kljax.ratios.divergence import divergence_mask, kl_rejection_mask, off_policy_sequence_mask
from kljax.ratios.levels import geometric_ratios, log_ratios, sequence_ratios, token_ratios
from kljax.ratios.levels import level_log_ratios as level_log_ratios
from kljax.ratios.levels import level_mask as level_mask
from kljax.ratios.proximal import loglinear_log_probs
from kljax.ratios.rejection import rejection_mask, veto_mask
from kljax.ratios.second_moment import second_moment_mask
from kljax.ratios.staleness import max_lag_mask
from kljax.ratios.weights import importance_weights, truncated_importance_weights

__all__ = [
    "RolloutCorrection",
    "correct_rollout",
    "divergence_mask",
    "geometric_ratios",
    "importance_weights",
    "kl_rejection_mask",
    "log_ratios",
    "loglinear_log_probs",
    "max_lag_mask",
    "off_policy_sequence_mask",
    "rejection_mask",
    "second_moment_mask",
    "sequence_ratios",
    "token_ratios",
    "truncated_importance_weights",
    "veto_mask",
]
