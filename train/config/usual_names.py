"""The names that other trainers use for a field, for the hint of an unknown one."""

from collections.abc import Mapping

_COEF, _GROUP = "kl.loss.coef", "rollout.samples_per_prompt"
_LENGTH, _PROMPTS = "data.max_completion_length", "rollout.prompts_per_step"

USUAL_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("lr", "actor_learning_rate"), "optim.learning_rate"),
    **dict.fromkeys(("beta", "kl_beta", "kl_coef", "kl_loss_coef", "init_kl_coef", "kl.coef", "kl.beta"), _COEF),
    **dict.fromkeys(("kl_loss_type", "kl_estimator", "kl_type"), "kl.loss.estimator"),
    **dict.fromkeys(("num_generations", "group_size", "n_samples_per_prompt", "rollout_n", "rollout.n", "n"), _GROUP),
    **dict.fromkeys(("epsilon", "eps_clip", "clip_eps", "clip_range", "cliprange", "clip_ratio"), "loss.clip_low"),
    **dict.fromkeys(("epsilon_high", "eps_clip_high", "clip_ratio_high"), "loss.clip_high"),
    **dict.fromkeys(("loss_agg_mode", "loss_type"), "loss.aggregation"),
    **dict.fromkeys(("max_new_tokens", "max_tokens", "max_response_length", "response_length"), _LENGTH),
    **dict.fromkeys(("batch_size", "train_batch_size", "rollout_batch_size", "per_device_train_batch_size"), _PROMPTS),
    **dict.fromkeys(("max_steps", "num_steps", "total_steps", "num_train_steps"), "steps"),
    **dict.fromkeys(("grad_accumulation", "gradient_accumulation_steps", "micro_batches"), "optim.micro_batches"),
    **dict.fromkeys(("max_norm", "grad_clip", "clip_grad", "max_grad_norm"), "optim.max_grad_norm"),
    **dict.fromkeys(("entropy_coef", "entropy_coeff", "ent_coef"), "loss.entropy_coef"),
    **dict.fromkeys(("model_name", "model_path", "model_name_or_path", "pretrain"), "model.path"),
    **dict.fromkeys(("output_dir", "save_dir"), "output"),
    **dict.fromkeys(("wandb", "wandb_project", "report_to"), "report.wandb"),
    "num_iterations": "optim.epochs",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
}
"""A name in its usual spelling, and the path of the field that means it here."""
