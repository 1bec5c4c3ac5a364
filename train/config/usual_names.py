"""The names that other trainers use for a field or a value, for the hint of an unknown one."""

from collections.abc import Mapping

_COEF = "kl.loss.coef"
_GROUP = "rollout.samples_per_prompt"
_LENGTH = "data.max_completion_length"
_PROMPTS = "rollout.prompts_per_step"
_ADVANTAGE = ("adv_estimator", "advantage_estimator", "algorithm.adv_estimator")

USUAL_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("learning_rate", "lr", "actor_learning_rate"), "optim.learning_rate"),
    **dict.fromkeys(
        ("beta", "kl_beta", "kl_coef", "kl_loss_coef", "init_kl_coef", "kl.coef", "kl.beta", "loss.beta"), _COEF
    ),
    **dict.fromkeys(("kl_loss_type", "kl_estimator", "kl_type", "loss.kl_type"), "kl.loss.estimator"),
    **dict.fromkeys(("num_generations", "group_size", "n_samples_per_prompt", "rollout_n", "rollout.n", "n"), _GROUP),
    **dict.fromkeys(("epsilon", "eps_clip", "clip_eps", "clip_range", "cliprange", "clip_ratio"), "loss.clip_low"),
    **dict.fromkeys(("loss.epsilon", "clip_ratio_low", "epsilon_low"), "loss.clip_low"),
    **dict.fromkeys(("epsilon_high", "eps_clip_high", "clip_ratio_high"), "loss.clip_high"),
    **dict.fromkeys(("loss_agg_mode", "loss_type"), "loss.aggregation"),
    **dict.fromkeys(("max_new_tokens", "max_tokens", "max_response_length", "response_length"), _LENGTH),
    **dict.fromkeys(("batch_size", "train_batch_size", "rollout_batch_size", "per_device_train_batch_size"), _PROMPTS),
    **dict.fromkeys(("max_steps", "num_steps", "total_steps", "num_train_steps"), "steps"),
    **dict.fromkeys(("grad_accumulation", "gradient_accumulation_steps", "micro_batches"), "optim.micro_batches"),
    **dict.fromkeys(("max_norm", "grad_clip", "clip_grad", "max_grad_norm"), "optim.max_grad_norm"),
    **dict.fromkeys(("entropy_coef", "entropy_coeff", "ent_coef"), "loss.entropy_coef"),
    **dict.fromkeys(("model_name", "model_path", "model_name_or_path", "pretrain", "model.name"), "model.path"),
    **dict.fromkeys(("output_dir", "save_dir"), "output"),
    **dict.fromkeys(("run_name", "experiment_name"), "name"),
    **dict.fromkeys(("wandb", "wandb_project", "report_to", "project_name"), "report.wandb"),
    **dict.fromkeys(("lora_r", "lora_rank", "lora.r"), "lora.rank"),
    **dict.fromkeys(("lora_alpha",), "lora.alpha"),
    **dict.fromkeys(("target_modules",), "lora.targets"),
    **dict.fromkeys(("scale_rewards", "norm_adv_by_std_in_grpo", "advantage.normalize"), "advantage.scale"),
    **dict.fromkeys(_ADVANTAGE, "advantage.type"),
    **dict.fromkeys(("advantage.epsilon",), "advantage.eps"),
    **dict.fromkeys(("num_iterations", "ppo_epochs"), "optim.epochs"),
    **dict.fromkeys(("adam_beta1", "optim.beta1", "optim.betas"), "optim.optimizer.b1"),
    **dict.fromkeys(("adam_beta2", "optim.beta2"), "optim.optimizer.b2"),
    **dict.fromkeys(("adam_epsilon", "optim.epsilon"), "optim.optimizer.eps"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), "optim.schedule.type"),
    **dict.fromkeys(("importance_sampling_level",), "loss.level"),
    **dict.fromkeys(("gradient_checkpointing", "enable_gradient_checkpointing"), "model.remat"),
    **dict.fromkeys(("attn_implementation",), "model.attention"),
    **dict.fromkeys(("save_steps", "save_freq", "save_interval", "checkpoint.steps"), "checkpoint.every"),
    **dict.fromkeys(("save_total_limit",), "checkpoint.keep"),
    **dict.fromkeys(("eval_steps", "test_freq", "eval_interval", "eval.steps"), "eval.every"),
    **dict.fromkeys(("reward_weights",), "rewards.weights"),
    **dict.fromkeys(("reward_funcs", "reward_function", "custom_reward_function"), "data.reward"),
    **dict.fromkeys(("train_file", "train_files", "dataset", "data.dataset", "data.path"), "data.train"),
    **dict.fromkeys(("val_files", "eval_file", "eval_dataset"), "data.eval"),
    **dict.fromkeys(("rollout.temperature", "sampling.temperature", "eval.temperature"), "temperature"),
    **dict.fromkeys(("vllm_server_base_url", "base_url"), "rollout.source.url"),
    **dict.fromkeys(("tensor_parallel_size", "tensor_model_parallel_size"), "mesh.tensor"),
    **dict.fromkeys(("fsdp_size",), "mesh.fsdp"),
    **dict.fromkeys(("warm_start.num_steps", "warm_start.max_steps"), "warm_start.steps"),
    "warm_start.lr": "warm_start.learning_rate",
    "reference.model": "reference.path",
    "delta": "loss.max_ratio",
    "algorithm.kl_ctrl.kl_coef": "kl.reward.coef",
}
"""A name in its usual spelling, alone or with its section, and the path of the field that means it here."""
AMBIGUOUS = {"beta", "n", "epsilon", "loss_type", "dataset"}
"""Names that mean something else in a section, such as an optimizer's."""

_ESTIMATORS = {"kl": "k1", "mse": "k2", "full": "exact"}
USUAL_VALUES: Mapping[str, Mapping[str, str | None]] = {
    "loss.type": {**dict.fromkeys(("grpo", "dapo", "dr_grpo", "bnpo", "vanilla", "clip"), "ppo"), "dpo": None},
    "loss.aggregation": {
        "grpo": "seq_mean_token_mean",
        "dapo": "token_mean",
        "bnpo": "token_mean",
        "dr_grpo": "seq_mean_token_sum_norm",
    },
    "correction.type": {"tis": "truncated_importance_weights", "is": "importance_weights"},
    "rollout.source.type": dict.fromkeys(("vllm", "sglang", "server", "http"), "openai"),
    "model.dtype": {"bf16": "bfloat16", "fp32": "float32", "float": "float32", "fp16": None, "float16": None},
    "kl.loss.estimator": _ESTIMATORS,
    "kl.reward.estimator": _ESTIMATORS,
}
"""Values of fields in their usual spelling, and the choice that means it here; None where there is none."""


def usual_field(path: str) -> str | None:
    """Returns the field that other trainers call by a name, with or without a section.

    Example:
        >>> usual_field("rollout.max_tokens"), usual_field("beta"), usual_field("optim.beta")
        ('data.max_completion_length', 'kl.loss.coef', None)
    """
    spelled = path.casefold().replace("-", "_")
    if spelled in USUAL_NAMES:
        return USUAL_NAMES[spelled]
    name = spelled.rpartition(".")[2]
    return None if name in AMBIGUOUS else USUAL_NAMES.get(name)
