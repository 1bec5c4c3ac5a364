"""verl's resolved configuration, as its trainer prints and Hydra writes it."""

from collections.abc import Mapping
from typing import Any

from kljax.tools.systems.foreign.option import (
    ForeignOption,
    ForeignSystem,
    NotExpressed,
    Values,
    advantage,
    clip,
    decay,
    missing,
    same,
    schedule,
    unless,
    updates,
    where,
)

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"


def _kl_loss(value: Any, values: Values) -> Mapping[str, Any]:
    kind = values[f"{_ACTOR}.kl_loss_type"]
    coef = values[f"{_ACTOR}.kl_loss_coef"]
    return {"kl.loss.coef": coef, "kl.loss.estimator": f"verl/{kind}"} if value else {}


def _kl_reward(value: Any, values: Values) -> Mapping[str, Any]:
    if not value:
        return {}
    if values["algorithm.kl_ctrl.type"] != "fixed":
        raise NotExpressed("set kl.reward.controller to adaptive, with its target and horizon")
    coef = values["algorithm.kl_ctrl.kl_coef"]
    return {"kl.reward.coef": coef, "kl.reward.estimator": f"verl/{values['algorithm.kl_penalty']}"}


def _correction(value: Any, values: Values) -> Mapping[str, Any]:
    if value is None:
        return {}
    prefix = "algorithm.rollout_correction."
    name = f"verl/rollout_is={value}" + "+rollout_is_batch_normalize" * bool(
        values[f"{prefix}rollout_is_batch_normalize"]
    )
    return {"correction": {"type": name, "max_weight": values[f"{prefix}rollout_is_threshold"]}}


_LOSS = f"{_ACTOR}.policy_loss.loss_mode"
_CLIPPED = ("vanilla", "gspo", "cispo", "geo_mean", "dppo_tv", "dppo_kl", "clip_cov")
_OPTIONS = (
    ForeignOption(
        "algorithm.adv_estimator",
        ("advantage.type",),
        "gae",
        "a name of the table of systems",
        advantage("verl", "algorithm.norm_adv_by_std_in_grpo"),
    ),
    ForeignOption("algorithm.norm_adv_by_std_in_grpo", ("advantage.scale",), True, "", lambda *_: {}),
    ForeignOption(
        f"{_ACTOR}.policy_loss.loss_mode",
        ("loss.type",),
        "vanilla",
        "a name of the table of systems",
        lambda value, _: {"loss.type": f"verl/{value}"},
    ),
    ForeignOption(
        f"{_ACTOR}.loss_agg_mode",
        ("loss.aggregation",),
        "token-mean",
        "",
        lambda value, _: {"loss.aggregation": f"verl/{value}"},
    ),
    clip(f"{_ACTOR}.clip_ratio_low", "clip_low", 0.2, _LOSS, _CLIPPED),
    clip(f"{_ACTOR}.clip_ratio_high", "clip_high", 0.2, _LOSS, _CLIPPED),
    clip(f"{_ACTOR}.clip_ratio_c", "dual_clip", 3.0, _LOSS, ("vanilla",)),
    ForeignOption(f"{_ACTOR}.entropy_coeff", ("loss.entropy_coef",), 0, "", unless(0, "loss.entropy_coef")),
    ForeignOption(f"{_ACTOR}.use_kl_loss", ("kl.loss.coef", "kl.loss.estimator"), False, "", _kl_loss),
    ForeignOption(f"{_ACTOR}.kl_loss_coef", ("kl.loss.coef",), 0.001, "", lambda *_: {}),
    ForeignOption(f"{_ACTOR}.kl_loss_type", ("kl.loss.estimator",), "low_var_kl", "", lambda *_: {}),
    ForeignOption("algorithm.use_kl_in_reward", ("kl.reward.coef", "kl.reward.estimator"), False, "", _kl_reward),
    ForeignOption("algorithm.kl_ctrl.kl_coef", ("kl.reward.coef",), 0.001, "", lambda *_: {}),
    ForeignOption("algorithm.kl_ctrl.type", ("kl.reward.controller",), "fixed", "", lambda *_: {}),
    ForeignOption("algorithm.kl_penalty", ("kl.reward.estimator",), "kl", "", lambda *_: {}),
    *(
        ForeignOption(
            f"algorithm.{name}",
            (f"advantage.{name}",),
            1.0,
            "of `gae`",
            where("algorithm.adv_estimator", ("gae",), f"advantage.{name}"),
        )
        for name in ("gamma", "lam")
    ),
    ForeignOption("algorithm.rollout_correction.rollout_is", ("correction",), None, "", _correction),
    ForeignOption(
        "algorithm.rollout_correction.rollout_is_threshold", ("correction.max_weight",), 2.0, "", lambda *_: {}
    ),
    ForeignOption(
        "algorithm.rollout_correction.rollout_is_batch_normalize", ("correction.type",), False, "", lambda *_: {}
    ),
    same("data.train_batch_size", "rollout.prompts_per_step", 1024),
    ForeignOption(
        f"{_ACTOR}.ppo_mini_batch_size", ("optim.updates_per_batch",), 256, "", updates("data.train_batch_size")
    ),
    same(f"{_ACTOR}.ppo_epochs", "optim.epochs", 1),
    same(f"{_ROLLOUT}.n", "rollout.samples_per_prompt", 1),
    same(f"{_ACTOR}.optim.lr", "optim.learning_rate", 1e-6),
    ForeignOption(
        f"{_ACTOR}.optim.betas",
        ("optim.optimizer.b1", "optim.optimizer.b2"),
        (0.9, 0.999),
        "",
        lambda value, _: {"optim.optimizer.b1": value[0], "optim.optimizer.b2": value[1]},
    ),
    ForeignOption(f"{_ACTOR}.optim.weight_decay", ("optim.optimizer.weight_decay",), 0.01, "", decay),
    ForeignOption(f"{_ACTOR}.optim.lr_warmup_steps", ("optim.warmup_steps",), -1, "", unless(-1, "optim.warmup_steps")),
    ForeignOption(
        f"{_ACTOR}.optim.lr_scheduler_type",
        ("optim.schedule",),
        "constant",
        "",
        lambda kind, values: schedule(kind, values["trainer.total_training_steps"], 0),
    ),
    same(f"{_ACTOR}.grad_clip", "optim.max_grad_norm", 1.0),
    same("data.max_prompt_length", "data.max_prompt_length", 512),
    same("data.max_response_length", "data.max_completion_length", 512),
    same(f"{_ROLLOUT}.temperature", "temperature", 1.0),
    ForeignOption(f"{_ROLLOUT}.top_p", ("rollout.top_p",), 1, "", unless(1, "rollout.top_p")),
    ForeignOption(f"{_ROLLOUT}.top_k", ("rollout.top_k",), -1, "", unless(-1, "rollout.top_k")),
    same(f"{_MODEL}.path", "model.path"),
    ForeignOption(f"{_MODEL}.lora_rank", ("lora.rank",), 0, "", unless(0, "lora.rank")),
    ForeignOption(
        f"{_MODEL}.lora_alpha",
        ("lora.alpha",),
        16,
        "",
        lambda value, values: {"lora.alpha": value} if values[f"{_MODEL}.lora_rank"] else {},
    ),
    same("trainer.total_training_steps", "steps", None),
    ForeignOption("trainer.save_freq", ("checkpoint.every",), -1, "", unless(-1, "checkpoint.every")),
    ForeignOption("trainer.test_freq", ("eval.every",), -1, "", unless(-1, "eval.every")),
    same("trainer.experiment_name", "name"),
    missing("trainer.total_epochs", 30, "set steps"),
    missing(f"{_ACTOR}.loss_scale_factor", None, "set loss.max_length to it"),
    missing("algorithm.filter_groups.enable", False, "groups of equal rewards are not sampled again"),
    missing("algorithm.use_pf_ppo", False, "rows are not drawn again by their rewards"),
    missing("algorithm.rollout_correction.rollout_rs", None, "add a mask to correction: verl/token_k1 and others"),
    missing("algorithm.rollout_correction.bypass_mode", False, "set loss.old_log_probs to sampler"),
    missing(f"{_ACTOR}.policy_loss.dro_beta", None, "set loss.coef"),
    missing(f"{_ACTOR}.policy_loss.clip_cov_ratio", 0.0002, "set loss.fraction"),
    missing(f"{_ACTOR}.policy_loss.clip_cov_lb", 1.0, "set loss.lower"),
    missing(f"{_ACTOR}.policy_loss.clip_cov_ub", 5.0, "set loss.upper"),
    missing(f"{_ACTOR}.policy_loss.kl_cov_ratio", 0.0002, "set loss.fraction"),
    missing(f"{_ACTOR}.policy_loss.ppo_kl_coef", 0.1, "set loss.coef"),
    missing(f"{_ACTOR}.tau_pos", 1.0, "set loss.tau_positive"),
    missing(f"{_ACTOR}.tau_neg", 1.05, "set loss.tau_negative"),
    missing(f"{_ACTOR}.optim.lr_warmup_steps_ratio", 0.0, "set optim.warmup_steps"),
    missing(f"{_ACTOR}.optim.optimizer", "AdamW", "set optim.optimizer"),
)

# fmt: off
_QUIET = (
    "*_target_", "ray*", "critic*", "reward*", "trainer.*", "global_profiler*", "*profiler*", "transfer_queue*",
    "*.fsdp_config*", "*.ppo_micro*", "*.ppo_max_token*", "*.checkpoint*", "*.use_*", "*megatron*", "*.engine*",
    f"{_ROLLOUT}.*", "actor_rollout_ref.ref.*", f"{_MODEL}.*", "data.*", f"{_ACTOR}.optim.*", "*.router_replay*",
    "distillation*", "teacher*", "custom*", "*.strategy", "*.shuffle", "*.entropy_*", "*seed", "*.rollout_n",
    "algorithm.pf_ppo*", "algorithm.filter_groups.*", "algorithm.kl_ctrl.*", f"{_ACTOR}.ulysses*", "*.nccl_timeout",
    f"{_ACTOR}.qat*", f"{_ACTOR}.tau_*", f"{_ACTOR}.policy_loss.*", f"{_ACTOR}.clip_ratio", f"{_ACTOR}.calculate*",
    f"{_ACTOR}.freeze*", "actor_rollout_ref.hybrid*", "actor_rollout_ref.nccl*", "algorithm.rollout_correction.*",
    "model_engine", "engine*",
)
# fmt: on

SYSTEM = ForeignSystem(
    file="its resolved configuration, YAML",
    options=_OPTIONS,
    quiet=_QUIET,
)
