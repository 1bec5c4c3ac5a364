"""Where the defaults of the systems' options stand in their source.

A line is (prefix of the options, place, names): the option `prefix + name` stands at the place with `name` in its
braces. A place is `file:name`; `tests/goldens/systems/defaults.py` reads them, and lists the forms of a name.
"""

from collections.abc import Iterator, Mapping

_LOSS, _ADVANTAGE = "trinity/algorithm/policy_loss_fn/", "trinity/algorithm/advantage_fn/"
# Trinity-RFT passes `default_args` where the config sets no arguments.
_TRINITY = (
    ("policy_loss.ppo.", _LOSS + "ppo_policy_loss.py:PPOPolicyLossFn.default_args[{}]", "clip_range clip_ratio_c"),
    ("policy_loss.ppo.", _LOSS + "ppo_policy_loss.py:PPOPolicyLossFn.default_args[{}]", "delta_sequence_masking"),
    ("policy_loss.ppo.", _LOSS + "ppo_policy_loss.py:PPOPolicyLossFn.__init__({})", "clip_range_low clip_range_high"),
    ("policy_loss.gspo.", _LOSS + "gspo_policy_loss.py:GSPOLossFn.default_args[{}]", "clip_range_low clip_range_high"),
    (
        "policy_loss.cispo.",
        _LOSS + "cispo_policy_loss.py:CISPOPolicyLossFn.default_args[{}]",
        "clip_range_low clip_range_high mask_clip_range_low mask_clip_range_high",
    ),
    ("policy_loss.sapo.", _LOSS + "sapo_policy_loss.py:SAPOPolicyLossFn.default_args[{}]", "tau_pos tau_neg"),
    ("policy_loss.topr.", _LOSS + "topr_policy_loss.py:TOPRPolicyLossFn.default_args[{}]", "advantage_threshold"),
    ("policy_loss.opmd.", _LOSS + "opmd_policy_loss.py:OPMDPolicyLossFn.default_args[{}]", "tau"),
    ("policy_loss.sppo.", _LOSS + "sppo_loss_fn.py:sPPOPolicyLossFn.default_args[{}]", "epsilon"),
    (
        "policy_loss.rec.",
        _LOSS + "rec_policy_loss.py:RECPolicyLossFn.default_args[{}]",
        "epsilon_low epsilon_high epsilon_low_prime epsilon_high_prime weight regularizer regularizer_coef temp",
    ),
    ("policy_loss.dpo.", _LOSS + "dpo_loss.py:DPOLossFn.default_args[{}]", "beta label_smoothing"),
    ("policy_loss.sft_phi.", _LOSS + "chord_policy_loss.py:SFTPhiLossFn.default_args[{}]", "cutoff_prob"),
    ("advantage.ppo.", _ADVANTAGE + "ppo_advantage.py:PPOAdvantageFn.default_args[{}]", "gamma lam"),
    ("advantage.grpo.", _ADVANTAGE + "grpo_advantage.py:GRPOGroupedAdvantage.default_args[{}]", "epsilon"),
    ("advantage.grpo_verl.", _ADVANTAGE + "grpo_advantage.py:GRPOAdvantageFn.default_args[{}]", "epsilon"),
    (
        "advantage.step_wise_grpo.",
        _ADVANTAGE + "multi_step_grpo_advantage.py:StepWiseGRPOAdvantageFn.default_args[{}]",
        "epsilon enable_step_norm",
    ),
    (
        "advantage.reinforceplusplus.",
        _ADVANTAGE + "reinforce_plus_plus_advantage.py:REINFORCEPLUSPLUSAdvantageFn.default_args[{}]",
        "gamma",
    ),
    ("advantage.opmd.", _ADVANTAGE + "opmd_advantage.py:OPMDGroupAdvantage.default_args[{}]", "tau opmd_baseline"),
    ("advantage.opmd_verl.", _ADVANTAGE + "opmd_advantage.py:OPMDAdvantageFn.default_args[{}]", "tau opmd_baseline"),
    ("advantage.asymre.", _ADVANTAGE + "asymre_advantage.py:ASYMREGroupAdvantage.default_args[{}]", "baseline_shift"),
    ("advantage.asymre_verl.", _ADVANTAGE + "asymre_advantage.py:ASYMREAdvantageFn.default_args[{}]", "baseline_shift"),
    ("advantage.rec.", _ADVANTAGE + "rec_advantage.py:RECGroupedAdvantage.default_args[{}]", "epsilon"),
    ("advantage.clipb.", _ADVANTAGE + "clipb_advantage.py:ClipBAdvantageFn.default_args[{}]", "epsilon mu"),
    ("advantage.clipv.", _ADVANTAGE + "clipv_advantage.py:ClipVAdvantageFn.default_args[{}]", "epsilon mu max_frac"),
    (
        "distillation.on_policy_distill.",
        _ADVANTAGE + "on_policy_distill_advantage.py:OnPolicyDistillAdvantage.default_args[{}]",
        "kl_coef",
    ),
    ("distillation.jsd.", _ADVANTAGE + "jsd_advantage.py:JSDAdvantage.default_args[{}]", "lambda_coef kl_coef"),
    ("", "trinity/algorithm/kl_fn/kl_fn.py:KLFn.default_args[{}]", "kl_coef"),
    ("", "trinity/algorithm/kl_fn/kl_fn.py:KLFn.__init__({})", "target_kl horizon"),
    (
        "policy_loss.ppo.",
        _LOSS + "ppo_policy_loss.py:PPOPolicyLossFn.default_args[{}]",
        "enable_sequence_masking fallback_to_policy_gradient",
    ),
    ("policy_loss.cispo.", _LOSS + "cispo_policy_loss.py:CISPOPolicyLossFn.default_args[{}]", "enable_mask_clip"),
    ("", "trinity/common/config_validator.py:AlgorithmConfigValidator.validate[{}]", "kl_loss_fn loss_agg_mode"),
)

# A run of verl starts from this YAML.
_YAML = "verl/trainer/config/_generated_ppo_trainer.yaml:"
_ROLLOUT_CORRECTION = "verl/trainer/config/algorithm.py:RolloutCorrectionConfig"
_VERL = (
    ("actor.", _YAML + "actor_rollout_ref.actor.{}", "clip_ratio_low clip_ratio_high clip_ratio_c tau_pos tau_neg"),
    (
        "actor.",
        _YAML + "actor_rollout_ref.actor.{}",
        "kl_loss_type policy_loss.dro_beta policy_loss.loss_mode loss_agg_mode use_kl_loss",
    ),
    (
        "",
        _YAML + "actor_rollout_ref.actor.policy_loss.{}",
        "clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef",
    ),
    ("algorithm.", _YAML + "algorithm.{}", "gamma lam adv_estimator kl_penalty use_kl_in_reward"),
    ("algorithm.kl_ctrl.", _YAML + "algorithm.kl_ctrl.{}", "type kl_coef target_kl horizon"),
    ("", _YAML + "algorithm.rollout_correction.{}", "rollout_is rollout_is_threshold rollout_rs_threshold"),
    ("", _YAML + "critic.{}", "cliprange_value"),
    (
        "",
        _YAML + "distillation.distillation_loss.{}",
        "loss_max_clamp log_prob_min_clamp loss_mode use_policy_gradient",
    ),
    ("RolloutCorrectionConfig.", _ROLLOUT_CORRECTION + ".{}", "rollout_is"),
    ("icepop.", _ROLLOUT_CORRECTION + ".decoupled_token_icepop({})", "threshold threshold_lower"),
    (
        "optimal_token_baseline.",
        "verl/trainer/ppo/core_algos.py:compute_optimal_token_baseline_advantage({})",
        "handle_zero_tail",
    ),
    (
        "tir_optimal_token_baseline.",
        "verl/trainer/ppo/core_algos.py:compute_multi_turn_optimal_token_baseline_advantage({})",
        "handle_zero_tail",
    ),
    ("", "verl/utils/torch_functional.py:masked_var({})", "unbiased"),
    ("", "verl/utils/torch_functional.py:masked_whiten({})", "shift_mean"),
)

_CONFIG = "skyrl/train/config/config.py:"
_SKYRL = (
    ("", _CONFIG + "AlgorithmConfig.{}", "eps_clip_low eps_clip_high clip_ratio_c value_clip kl_estimator_type"),
    ("", _CONFIG + "AlgorithmConfig.{}", "policy_loss_type advantage_estimator loss_reduction"),
    ("", _CONFIG + "AlgorithmConfig.{}", "use_kl_in_reward use_kl_loss advantage_batch_normalize"),
    ("", _CONFIG + "OffPolicyCorrectionConfig.{}", "tis_ratio_type sequence_mask_metric"),
    ("trainer.algorithm.", _CONFIG + "AlgorithmConfig.{}", "gamma lambd kl_loss_coef"),
    ("trainer.algorithm.kl_ctrl.", _CONFIG + "KLCtrlConfig.{}", "type kl_target horizon"),
    ("cispo.", _CONFIG + "CISPOConfig.{}", "cispo_eps_clip_low cispo_eps_clip_high"),
    ("dppo.", _CONFIG + "DPPOConfig.{}", "delta_low delta_high"),
    ("sapo.", _CONFIG + "SAPOConfig.{}", "tau_pos tau_neg"),
    ("clip_cov.", _CONFIG + "ClipCovConfig.{}", "clip_ratio clip_cov_lb clip_cov_ub"),
    ("kl_cov.", _CONFIG + "KLCovConfig.{}", "kl_cov_frac ppo_kl_coef"),
    ("", _CONFIG + "OffPolicyCorrectionConfig.{}", "token_tis_ratio_clip_high sequence_tis_ratio_clip_high"),
    ("", _CONFIG + "OffPolicyCorrectionConfig.{}", "geo_mask_low geo_mask_high product_mask_low product_mask_high"),
    ("", _CONFIG + "OffPolicyCorrectionConfig.{}", "token_mask_is_threshold_low token_mask_is_threshold_high"),
)

_OPENRLHF = (
    (
        "--actor.",
        "openrlhf/cli/train_ppo_ray.py:--actor.{}",
        "eps_clip eps_clip_low_high dual_clip policy_loss_type loss_agg_mode",
    ),
    ("--critic.", "openrlhf/cli/train_ppo_ray.py:--critic.{}", "value_clip"),
    ("--algo.advantage.", "openrlhf/cli/train_ppo_ray.py:--algo.advantage.{}", "gamma lambd estimator"),
    (
        "--algo.advantage.",
        "openrlhf/cli/train_ppo_ray.py:--algo.advantage.{}",
        "is_correction_threshold is_correction_level",
    ),
    ("--algo.kl.", "openrlhf/cli/train_ppo_ray.py:--algo.kl.{}", "init_coef target horizon estimator use_loss"),
)

_GRPO, _EXPERIMENTAL = "trl/trainer/grpo_config.py:GRPOConfig.{}", "trl/experimental/"
_TRL = (
    ("GRPOConfig.", _GRPO, "beta epsilon epsilon_high delta sapo_temperature_pos sapo_temperature_neg"),
    ("GRPOConfig.", _GRPO, "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg ref_model_mixup_alpha"),
    ("GRPOConfig.", _GRPO, "vllm_importance_sampling_clip_min vllm_importance_sampling_clip_max"),
    (
        "GRPOConfig.",
        _GRPO,
        "off_policy_mask_threshold loss_type scale_rewards vllm_importance_sampling_mode sync_ref_model",
    ),
    (
        "GRPOConfig.",
        _GRPO,
        "use_adaptive_entropy entropy_coef entropy_target entropy_coef_delta entropy_coef_min entropy_coef_max",
    ),
    (
        "BEMACallback.",
        "trl/trainer/callbacks.py:BEMACallback.__init__({})",
        "ema_power bias_power multiplier lag min_ema_multiplier",
    ),
    ("RLOOConfig.", "trl/trainer/rloo_config.py:RLOOConfig.{}", "beta epsilon epsilon_high"),
    ("AsyncGRPOConfig.", _EXPERIMENTAL + "async_grpo/async_grpo_config.py:AsyncGRPOConfig.{}", "epsilon epsilon_high"),
    ("GMPOConfig.", _EXPERIMENTAL + "gmpo/gmpo_config.py:GMPOConfig.{}", "epsilon epsilon_high"),
    ("DPOConfig.", "trl/trainer/dpo_config.py:DPOConfig.{}", "beta label_smoothing discopop_tau"),
    ("OnlineDPOConfig.", _EXPERIMENTAL + "online_dpo/online_dpo_config.py:OnlineDPOConfig.{}", "beta"),
    ("KTOConfig.", "trl/trainer/kto_config.py:KTOConfig.{}", "beta desirable_weight undesirable_weight"),
    ("CPOConfig.", _EXPERIMENTAL + "cpo/cpo_config.py:CPOConfig.{}", "beta label_smoothing simpo_gamma"),
    ("ORPOConfig.", _EXPERIMENTAL + "orpo/orpo_config.py:ORPOConfig.{}", "beta"),
    ("TPOConfig.", _EXPERIMENTAL + "tpo/tpo_config.py:TPOConfig.{}", "beta label_smoothing tpo_l_gamma"),
    ("A2POConfig.", _EXPERIMENTAL + "a2po/a2po_config.py:A2POConfig.{}", "beta2"),
    ("GKDConfig.", _EXPERIMENTAL + "gkd/gkd_config.py:GKDConfig.{}", "beta"),
    ("GOLDConfig.", _EXPERIMENTAL + "gold/gold_config.py:GOLDConfig.{}", "beta"),
    ("DistillationConfig.", "trl/trainer/distillation_config.py:DistillationConfig.{}", "beta"),
    (
        "ServerDistillationConfig.",
        _EXPERIMENTAL + "server_distillation/server_distillation_config.py:ServerDistillationConfig.{}",
        "beta",
    ),
    (
        "AsyncDistillationConfig.",
        _EXPERIMENTAL + "async_distillation/async_distillation_config.py:AsyncDistillationConfig.{}",
        "beta",
    ),
    ("IWOPDConfig.", _EXPERIMENTAL + "iw_opd/iw_opd_config.py:IWOPDConfig.{}", "iw_opd_gamma"),
    ("SDPOConfig.", _EXPERIMENTAL + "sdpo/sdpo_config.py:SDPOConfig.{}", "distillation_alpha distillation_is_clip"),
    ("SDFTConfig.", _EXPERIMENTAL + "sdft/sdft_config.py:SDFTConfig.{}", "distillation_alpha distillation_is_clip"),
)

_ART = (
    ("ppo.", "art/loss.py:loss_fn if ppo: {}_default", "epsilon epsilon_high"),
    ("cispo.", "art/loss.py:loss_fn if not ppo: {}_default", "epsilon epsilon_high"),
    (
        "",
        "art/loss.py:loss_fn.get({})",
        "ppo mask_prob_ratio kl_penalty_coef kimi_k2_tau truncated_importance_sampling",
    ),
    ("", "art/preprocessing/pack.py:packed_tensors_from_tokenized_results({})", "advantage_balance"),
    ("", "art/loss.py:loss_fn.get({})", "max_negative_advantage_importance_sampling_weight"),
)

_SLIME = (
    ("", "slime/utils/arguments.py:{}", "--eps-clip --eps-clip-high --eps-clip-c --value-clip --gamma --lambd"),
    ("", "slime/utils/arguments.py:{}", "--kl-coef --kl-loss-coef --kl-loss-type --ref-update-interval"),
    (
        "",
        "slime/utils/arguments.py:{}",
        "--advantage-estimator --loss-type --use-kl-loss --normalize-advantages --use-tis --use-opsm --use-opd",
    ),
    ("", "slime/utils/arguments.py:{}", "--tis-clip --tis-clip-low --opsm-delta --opd-kl-coef"),
)

_CONFIGS = "packages/prime-rl-configs/src/prime_rl/configs/"
_PRIME_RL = (
    ("default.", _CONFIGS + "trainer.py:DefaultLossConfig.{}", "dppo_mask_low dppo_mask_high kl_tau"),
    ("ipo.", _CONFIGS + "trainer.py:IPOLossConfig.{}", "ipo_threshold kl_tau"),
    ("", _CONFIGS + "algorithm.py:RAEAlgoConfig.{}", "decay"),
)

_LINES = {
    "trinity": _TRINITY,
    "verl": _VERL,
    "skyrl": _SKYRL,
    "openrlhf": _OPENRLHF,
    "trl": _TRL,
    "art": _ART,
    "slime": _SLIME,
    "prime-rl": _PRIME_RL,
}


def _expanded(lines: tuple[tuple[str, str, str], ...]) -> Iterator[tuple[str, str]]:
    for prefix, position, names in lines:
        for name in names.split():
            yield prefix + name, position.format(name)


# System -> option -> place.
PLACES: Mapping[str, Mapping[str, str]] = {system: dict(_expanded(lines)) for system, lines in _LINES.items()}
