"""TRL's GRPOConfig."""

from collections.abc import Mapping
from typing import Any

from kljax.tools.systems.foreign.option import (
    Convert,
    ForeignOption,
    ForeignSystem,
    NotExpressed,
    Values,
    decay,
    missing,
    same,
    schedule,
    unless,
    where,
)

# The losses that epsilon does not enter.
_WITHOUT_CLIPS = ("sapo", "vespo")
_TOKEN_MEANS = ("dapo", "cispo", "vespo", "bnpo")


def _loss(loss: Any, values: Values) -> Mapping[str, Any]:
    sequence = values["importance_sampling_level"] == "sequence" and loss not in ("cispo", *_WITHOUT_CLIPS)
    fields = {
        "loss.type": "trl/grpo+importance_sampling_level=sequence" if sequence else f"trl/{loss}",
        "loss.aggregation": f"trl/{loss}",
    }
    if loss == "dr_grpo":
        fields["loss.max_length"] = values["max_completion_length"]
    return fields


def _clip(field: str) -> Convert:
    def convert(value: Any, values: Values) -> Mapping[str, Any]:
        loss = values["loss_type"]
        if loss in _WITHOUT_CLIPS or (loss == "cispo" and field == "clip_low"):
            return {}
        if field == "clip_low":
            return {"loss.clip_low": value}
        bound = values["epsilon"] if value is None else value
        return {"loss.clip_high": round(bound - 1, 12) if loss == "cispo" else bound}

    return convert


def _kl(beta: Any, values: Values) -> Mapping[str, Any]:
    if not beta:
        return {}
    corrected = values["use_bias_correction_kl"]
    fields = {"kl.loss.coef": beta, "kl.loss.estimator": "trl/k3" + "+use_bias_correction_kl" * bool(corrected)}
    if corrected and values["importance_sampling_level"] == "sequence":
        fields["kl.loss.importance_level"] = "geometric"
    return fields


def _scale(value: Any, _: Values) -> Mapping[str, Any]:
    name = {True: "group", False: "none"}.get(value, value) if isinstance(value, bool) else value
    return {"advantage.type": f"trl/scale_rewards={name}"}


def _entropy(value: Any, values: Values) -> Mapping[str, Any]:
    if not value:
        return {}
    if values["loss_type"] in _TOKEN_MEANS:
        return {"loss.entropy_coef": value}
    return {"loss.entropy_coef": value, "loss.entropy_aggregation": "token_mean"}


def _adaptive(value: Any, values: Values) -> Mapping[str, Any]:
    if not value:
        return {}
    names = {"target": "target", "delta": "coef_delta", "min_coef": "coef_min", "max_coef": "coef_max"}
    return {
        "loss.entropy_controller": {
            "type": "adaptive",
            **{field: values[f"entropy_{name}"] for field, name in names.items()},
        }
    }


def _prompts(value: Any, values: Values) -> Mapping[str, Any]:
    batch = values["generation_batch_size"]
    samples = values["num_generations"]
    batch = batch or values["per_device_train_batch_size"] * (value or values["gradient_accumulation_steps"])
    if batch % samples:
        raise NotExpressed(f"{batch} completions of a step are no whole number of groups of {samples}")
    fields = {"rollout.prompts_per_step": batch // samples}
    updates = (value or values["gradient_accumulation_steps"]) / values["gradient_accumulation_steps"]
    if updates != round(updates):
        raise NotExpressed("a step has no whole number of updates")
    if updates > 1:
        fields["optim.updates_per_batch"] = round(updates)
    return fields


def _correction(value: Any, values: Values) -> Mapping[str, Any]:
    if not (value and values["use_vllm"]):
        return {}
    mode, upper, lower = (values[f"vllm_importance_sampling_{name}"] for name in ("mode", "clip_max", "clip_min"))
    limits = {"upper": upper, "lower": lower}
    return {"correction": {"type": f"trl/{mode}", **{name: x for name, x in limits.items() if x is not None}}}


def _bnpo(value: Any, values: Values) -> Mapping[str, Any]:
    if value > 1 and values["loss_type"] == "bnpo":
        raise NotExpressed("bnpo divides each micro-batch by its own tokens; a micro-batch here never changes the loss")
    return {"optim.micro_batches": value} if value > 1 else {}


def _max_ratio(value: Any, values: Values) -> Mapping[str, Any]:
    return {} if value is None or values["loss_type"] in ("cispo", *_WITHOUT_CLIPS) else {"loss.max_ratio": value}


def _steps(value: Any, values: Values) -> Mapping[str, Any]:
    updates = values["num_iterations"] * max(
        (values["steps_per_generation"] or values["gradient_accumulation_steps"])
        // values["gradient_accumulation_steps"],
        1,
    )
    if value <= 0:
        raise NotExpressed("the run is as long as num_train_epochs; set steps")
    return {"steps": -(-value // updates)}


_OPTIONS = (
    ForeignOption("loss_type", ("loss.type", "loss.aggregation"), "dapo", "a name of the table of systems", _loss),
    ForeignOption("importance_sampling_level", ("loss.type",), "token", "`sequence` is GSPO's ratio", lambda *_: {}),
    ForeignOption("epsilon", ("loss.clip_low",), 0.2, "", _clip("clip_low")),
    ForeignOption(
        "epsilon_high", ("loss.clip_high",), None, "`epsilon` if unset; of `cispo` less 1", _clip("clip_high")
    ),
    ForeignOption("delta", ("loss.max_ratio",), None, "", _max_ratio),
    *(
        ForeignOption(
            f"sapo_temperature_{side[:3]}",
            (f"loss.tau_{side}",),
            at,
            "",
            where("loss_type", ("sapo",), f"loss.tau_{side}"),
        )
        for side, at in (("positive", 1.0), ("negative", 1.05))
    ),
    *(
        ForeignOption(
            f"vespo_{name}_{side[:3]}",
            (f"loss.{name}_{side}",),
            at,
            "",
            where("loss_type", ("vespo",), f"loss.{name}_{side}"),
        )
        for name, side, at in (
            *(("k", "positive", 2.0), ("lambda", "positive", 3.0)),
            *(("k", "negative", 3.0), ("lambda", "negative", 2.0)),
        )
    ),
    ForeignOption("beta", ("kl.loss.coef",), 0.0, "", _kl),
    ForeignOption("use_bias_correction_kl", ("kl.loss.importance_corrected",), True, "", lambda *_: {}),
    ForeignOption("scale_rewards", ("advantage.type",), "group", "", _scale),
    ForeignOption(
        "entropy_coef",
        ("loss.entropy_coef", "loss.entropy_aggregation"),
        0.0,
        "a mean over tokens, whatever the loss",
        _entropy,
    ),
    ForeignOption("use_adaptive_entropy", ("loss.entropy_controller",), False, "", _adaptive),
    ForeignOption("vllm_importance_sampling_correction", ("correction",), True, "with `use_vllm`", _correction),
    same("num_generations", "rollout.samples_per_prompt", 8),
    ForeignOption(
        "steps_per_generation",
        ("rollout.prompts_per_step", "optim.updates_per_batch"),
        None,
        "`generation_batch_size` / `num_generations`; rows are split in another order",
        _prompts,
    ),
    ForeignOption("gradient_accumulation_steps", ("optim.micro_batches",), 1, "", _bnpo),
    same("num_iterations", "optim.epochs", 1),
    ForeignOption("max_steps", ("steps",), -1, "RL steps, each of the updates of a generation batch", _steps),
    same("learning_rate", "optim.learning_rate", 1e-6),
    ForeignOption(
        "lr_scheduler_type",
        ("optim.schedule",),
        "linear",
        "falls to 0 over `max_steps` updates",
        lambda kind, values: schedule(kind, values["max_steps"], values["warmup_steps"]),
    ),
    ForeignOption("warmup_steps", ("optim.warmup_steps",), 0, "", unless(0, "optim.warmup_steps")),
    same("max_grad_norm", "optim.max_grad_norm", 1.0),
    same("adam_beta1", "optim.optimizer.b1", 0.9),
    same("adam_beta2", "optim.optimizer.b2", 0.999),
    same("adam_epsilon", "optim.optimizer.eps", 1e-8),
    ForeignOption("weight_decay", ("optim.optimizer.weight_decay",), 0.0, "here of norms and biases, too", decay),
    same("max_completion_length", "data.max_completion_length", 512),
    same("temperature", "temperature", 1.0),
    ForeignOption("top_p", ("rollout.top_p",), 1.0, "", unless(1.0, "rollout.top_p")),
    ForeignOption("top_k", ("rollout.top_k",), 0, "", unless(0, "rollout.top_k")),
    ForeignOption("min_p", ("rollout.min_p",), None, "", unless(0.0, "rollout.min_p")),
    same("seed", "seed", 42),
    ForeignOption(
        "bf16", ("model.dtype",), True, "", lambda value, _: {"model.dtype": "bfloat16" if value else "float32"}
    ),
    ForeignOption(
        "gradient_checkpointing", ("model.remat",), True, "", lambda on, _: {"model.remat": "full"} if on else {}
    ),
    ForeignOption("run_name", ("name",), None, "", lambda value, _: {"name": value} if value else {}),
    missing("mask_truncated_completions", False, "rows cut at the limit are trained; a reward may punish them"),
    missing("top_entropy_quantile", 1.0, "kljax.high_entropy_mask in a loss of your own (`loss.type: custom`)"),
    missing("multi_objective_aggregation", "sum_then_normalize", "rewards are summed first (`rewards.weights`)"),
    missing("reward_weights", None, "set rewards.weights, by the names of your reward functions"),
    missing("off_policy_mask_threshold", None, "add correction: trl/off_policy_mask_threshold"),
    missing("sync_ref_model", False, "reference.source ema and bema move the reference at every step"),
    missing("repetition_penalty", 1.0, "the sampler has none"),
    missing("router_aux_loss_coef", None, "the trainer has no balancing loss"),
    missing("num_train_epochs", 3.0, "set steps"),
    missing("optim", "adamw_torch_fused", "set optim.optimizer"),
    missing("use_vllm", False, "start vLLM and set rollout.source to openai and its url"),
)

# fmt: off
_QUIET = (
    "log*", "hub*", "push*", "save*", "eval*", "dataloader*", "ddp*", "fsdp*", "deepspeed", "report_to", "*_dir",
    "torch*", "trackio*", "disable_tqdm", "debug", "do_*", "*_eval_*", "*_eval", "vllm_*", "use_cpu", "project",
    "include_*", "skip_*", "ds3*", "resume*", "local_rank", "tf32", "fp16", "label_names", "remove_unused_columns",
    "ignore_data_skip", "restore_callback*", "load_best*", "metric_for*", "greater_*", "prediction_loss_only",
    "activation_checkpointing*", "gradient_checkpointing_kwargs", "accelerator_config", "parallelism_config",
    "full_determinism", "enable_jit*", "auto_find*", "bf16_full*", "*_to_print", "use_cache", "length_column*",
    "cache_implementation", "*continuous_batching*", "use_transformers*", "trust_remote_code", "batch_eval*",
    "average_tokens*", "data_seed", "pad_to_multiple_of", "train_sampling_strategy", "num_generations_eval",
    "use_liger*", "liger*", "model_init_kwargs", "entropy_*", "per_device_train_batch_size", "generation_batch_size",
    "ref_model_*", "shuffle_dataset", "max_tool_calling*",
)
# fmt: on

SYSTEM = ForeignSystem(
    file="the JSON of GRPOConfig.to_dict()",
    options=_OPTIONS,
    quiet=_QUIET,
    read_by_others={
        "generation_batch_size": None,
        "per_device_train_batch_size": 8,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
        "vllm_importance_sampling_clip_min": None,
        "entropy_target": 0.2,
        "entropy_coef_delta": 0.005,
        "entropy_coef_min": 0.0,
        "entropy_coef_max": 1.0,
    },
)
