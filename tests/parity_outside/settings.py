"""Every setting of a step with its neutral value, and the stage and kind of cause that a wrong value is."""

from __future__ import annotations

from typing import Any

Settings = dict[str, Any]

# setting: (neutral value, stage, kind of cause)
_TABLE: dict[str, tuple[Any, str, str]] = {
    # Scoring
    "temperature": (1.0, "log_probs", "temperature"),
    "policy_temperature": (None, "log_probs", "temperature"),
    "old_temperature": (None, "ratio", "old_temperature"),
    "rollout_temperature": (None, "weights", "rollout_temperature"),
    "ref_temperature": (None, "ref_log_probs", "reference_temperature"),
    "softcap": (None, "log_probs", "softcap"),
    "policy_softcap": (None, "log_probs", "softcap"),
    "ref_softcap": (None, "ref_log_probs", "softcap"),
    "vocabulary": ("real", "log_probs", "padded_vocabulary"),
    "ref_vocabulary": ("real", "ref_log_probs", "reference_padded_vocabulary"),
    "normalizer": (None, "log_probs", "normalizer"),
    "ref_normalizer": (None, "ref_log_probs", "reference_normalizer"),
    "log_probs_shift": (0, "log_probs", "log_probs_shift"),
    "old_shift": (0, "ratio", "old_shift"),
    "ref_shift": (0, "ref_log_probs", "reference_shift"),
    "rollout_shift": (0, "weights", "rollout_shift"),
    "reference": ("reference", "ref_log_probs", "wrong_reference"),
    "ref_rows": ("same", "ref_log_probs", "reference_rows"),
    # Masks
    "mask": ("completion", "mask", "mask"),
    "loss_mask": (None, "loss", "loss_mask"),
    "kl_mask": (None, "loss", "kl_mask"),
    # Rewards and advantages
    "reward_scale": (1.0, "advantages", "reward_scale"),
    "reward_clip": (None, "advantages", "reward_clip"),
    "overlong_penalty": (0.0, "advantages", "overlong_penalty"),
    "truncated_reward": (None, "advantages", "truncated_reward"),
    "reward_column": ("last token", "advantages", "reward_column"),
    "kl_reward_coef": (0.0, "advantages", "kl_coefficient"),
    "kl_reward_mask": (None, "advantages", "kl_reward_mask"),
    "kl_reward_place": ("token", "advantages", "kl_reward_place"),
    "kl_reward_order": ("late", "advantages", "kl_reward_order"),
    "advantage": ("group", "advantages", "advantage_function"),
    "center": ("mean", "advantages", "group_center"),
    "scale": ("std", "advantages", "group_scale"),
    "ddof": (1, "advantages", "ddof"),
    "eps": (1e-6, "advantages", "advantage_epsilon"),
    "eps_inside": (False, "advantages", "advantage_epsilon_inside"),
    "members": ("all", "advantages", "group_members"),
    "groups": ("prompt", "advantages", "group_ids"),
    "gamma": (1.0, "advantages", "gamma"),
    "lam": (1.0, "advantages", "lambda"),
    "masked_steps": ("skip", "advantages", "gae_mask"),
    "values_shift": (0, "advantages", "values_shift"),
    "gae_returns": (False, "advantages", "gae_returns"),
    "whiten": (None, "advantages", "whitening"),
    "whiten_ddof": (1, "advantages", "whitening_ddof"),
    "whiten_mean": ("mask", "advantages", "whitening_mean"),
    "whiten_parts": ("both", "advantages", "whitening_parts"),
    "row_whitening": (False, "advantages", "row_whitening"),
    "advantage_clip": (None, "advantages", "advantage_clip"),
    "advantage_min": (None, "advantages", "advantage_floor"),
    "advantage_max": (None, "advantages", "advantage_ceiling"),
    "advantage_sign": (False, "advantages", "advantage_sign"),
    "advantage_norm": (None, "advantages", "advantage_norm"),
    "negative_factor": (1.0, "advantages", "negative_factor"),
    "advantage_factor": (1.0, "advantages", "advantage_factor"),
    "advantage_offset": (0.0, "advantages", "advantage_offset"),
    "advantage_spread": (False, "advantages", "advantage_spread"),
    "advantage_decay": (1.0, "advantages", "advantage_decay"),
    # Ratio and rollout correction
    "old": ("old", "ratio", "old_policy"),
    "ratio_level": ("token", "ratio", "ratio_level"),
    "ratio_inverse": (False, "ratio", "ratio_inverse"),
    "log_ratio_factor": (1.0, "ratio", "log_ratio_factor"),
    "ratio_gradient": ("value", "gradient", "ratio_gradient"),
    "log_ratio_clip": (None, "ratio", "log_ratio_clip"),
    "correction": (None, "weights", "correction_mode"),
    "correction_from": ("old", "weights", "correction_policy"),
    "correction_level": ("token", "weights", "correction_level"),
    "correction_upper": (None, "weights", "correction_cap"),
    "correction_lower": (None, "weights", "correction_floor"),
    "correction_inverse": (False, "weights", "correction_inverse"),
    "correction_mean_one": (False, "weights", "correction_normalized"),
    "correction_times": (1, "weights", "correction_twice"),
    "correction_on_kl": (False, "loss", "correction_on_kl"),
    # KL in the advantage or the loss
    "kl_advantage": (None, "kl", "kl_estimator"),
    "kl_advantage_coef": (0.0, "token_loss", "kl_coefficient"),
    "kl_centered": (True, "token_loss", "kl_centering"),
    "kl": (None, "kl", "kl_estimator"),
    "kl_reward": (None, "kl", "kl_estimator"),
    "kl_swapped": (False, "kl", "kl_direction"),
    "kl_from": ("policy", "kl", "kl_policy"),
    "kl_against": ("reference", "kl", "kl_against"),
    "kl_dtype": (None, "kl", "kl_log_ratio_dtype"),
    "kl_offset": (0.0, "kl", "kl_offset"),
    "kl_floor": (None, "kl", "kl_floor"),
    "kl_value_clip": (None, "kl", "kl_value_clip"),
    "kl_scale": (1.0, "kl", "kl_factor"),
    "kl_gradient": ("value", "gradient", "kl_gradient"),
    "kl_ratio": (False, "kl", "kl_importance_ratio"),
    "kl_ratio_cap": (None, "kl", "kl_ratio_cap"),
    "kl_ratio_detached": (False, "gradient", "kl_ratio_gradient"),
    "kl_coef": (0.0, "loss", "kl_coefficient"),
    "kl_reduction": (None, "loss", "kl_reduction"),
    # Policy loss
    "loss": ("ppo", "token_loss", "loss_function"),
    "advantage_axis": ("rows", "token_loss", "advantage_axis"),
    "sequence_mask": (None, "token_loss", "sequence_mask"),
    "clip_low": (0.2, "token_loss", "clip_lower"),
    "clip_high": (0.2, "token_loss", "clip_upper"),
    "dual_clip": (None, "token_loss", "dual_clip"),
    "optimistic": (False, "token_loss", "clip_optimistic"),
    "tau_positive": (1.0, "token_loss", "sapo_tau_positive"),
    "tau_negative": (1.05, "token_loss", "sapo_tau_negative"),
    "loss_sign": (1.0, "token_loss", "loss_sign"),
    "token_loss_factor": (1.0, "token_loss", "token_loss_factor"),
    "drop_zero_rows": (False, "loss", "rows_dropped"),
    # Loss and gradient
    "entropy_coef": (0.0, "loss", "entropy_bonus"),
    "reduction": ("token_mean", "loss", "reduction"),
    "max_length": (None, "loss", "max_length"),
    "empty_rows": ("drop", "loss", "empty_rows"),
    "micro_batches": (False, "loss", "micro_batches"),
    "divisor_eps": (0.0, "loss", "divisor_epsilon"),
    "loss_factor": (1.0, "loss", "loss_factor"),
    "loss_offset": (0.0, "loss", "loss_offset"),
    "gradient_factor": (1.0, "gradient", "gradient_factor"),
    "gradient_clip": (None, "gradient", "gradient_value_clip"),
    "gradient_rows": ("all", "gradient", "gradient_rows"),
    "gradient_norm": (None, "gradient", "gradient_norm_clip"),
    # Fields: {field: value}
    "coarse": ({}, "field", "field_dtype"),
    "noise": ({}, "field", "unknown"),
    "field_rows": ({}, "field", "field_rows"),
    "field_factor": ({}, "field", "field_factor"),
}

NEUTRAL: Settings = {name: neutral for name, (neutral, _, _) in _TABLE.items()}
STAGES = {name: stage for name, (_, stage, _) in _TABLE.items()}
KINDS = {name: kind for name, (_, _, kind) in _TABLE.items()}


def merge(*layers: Settings) -> Settings:
    """The neutral settings, changed by each layer in turn; a name that is not a setting is an error."""
    merged = dict(NEUTRAL)
    for layer in layers:
        unknown = sorted(set(layer) - set(NEUTRAL))
        if unknown:
            raise KeyError(f"settings: got {unknown}, expected names of settings.py")
        merged.update(layer)
    return merged
