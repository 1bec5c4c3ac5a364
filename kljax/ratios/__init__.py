"""Importance ratios, the weights that correct for another sampler, and the masks that reject what is too far off."""

from kljax.ratios.levels import geometric_ratios, log_ratios, sequence_ratios, token_ratios
from kljax.ratios.levels import level_log_ratios as level_log_ratios
from kljax.ratios.rejection import rejection_mask, veto_mask
from kljax.ratios.weights import truncated_importance_weights

__all__ = [
    "geometric_ratios",
    "log_ratios",
    "rejection_mask",
    "sequence_ratios",
    "token_ratios",
    "truncated_importance_weights",
    "veto_mask",
]
