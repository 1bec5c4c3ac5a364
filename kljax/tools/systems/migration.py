"""The options of other trainers as fields of this one: the table, and the translation of a config.

A value may be a name of the table of systems, such as `trl/dapo`: the trainer knows its meaning.
"""

import dataclasses
import fnmatch
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kljax.systems._table import SYSTEMS

Values = Mapping[str, Any]
Convert = Callable[[Any, Values], Mapping[str, Any]]


class NotExpressed(Exception):
    """Why a value has no field."""


@dataclasses.dataclass(frozen=True)
class ForeignOption:
    """An option of another trainer.

    Attributes:
      name: its name there, dotted.
      fields: the fields of the trainer that mean it; empty where there is none.
      default: its value there where a config does not say.
      note: how the fields follow from it, or why there is none.
      convert: returns the fields from the value and the other values; None takes the value as it is.
    """

    name: str
    fields: tuple[str, ...] = ()
    default: Any = None
    note: str = ""
    convert: Convert | None = None


@dataclasses.dataclass(frozen=True)
class Translation:
    """A config of another trainer.

    Attributes:
      fields: the fields of this one, by dotted path.
      not_expressed: options that have no field for their value, each with the value and the reason.
      unknown: options of the file that the table does not have.
    """

    fields: Mapping[str, Any]
    not_expressed: tuple[tuple[str, Any, str], ...]
    unknown: tuple[str, ...]


def same(name: str, field: str, default: Any = None, note: str = "") -> ForeignOption:
    """An option whose value is that of a field; None sets nothing."""
    return ForeignOption(name, (field,), default, note, lambda value, _: {} if value is None else {field: value})


def missing(name: str, default: Any, note: str) -> ForeignOption:
    """An option without a field, which other values than the default need."""
    return ForeignOption(name, (), default, note)


def _unless(off: Any, field: str) -> Convert:
    """The value of a field, unless it is the number that switches it off."""
    return lambda value, _: {} if value is None or value == off else {field: value}


# The critics of the systems are models of their own; here it is a value head.
VALUE_HEAD = {"loss.value_coef": 0.5}


def _where(option: str, choices: tuple[str, ...], field: str) -> Convert:
    """The value of a field that some choices of another option have."""
    return lambda value, values: {field: value} if values[option] in choices else {}


def _clip(name: str, field: str, default: float, switch: str, losses: tuple[str, ...]) -> ForeignOption:
    """A bound that enters some of the losses that the option `switch` chooses."""
    fields = (f"loss.{field}",)
    note = "of " + ", ".join(f"`{loss}`" for loss in losses)
    return ForeignOption(name, fields, default, note, _where(switch, losses, fields[0]))


def _advantage(system: str, normalizes: str) -> Convert:
    """The estimator of a name; the option `normalizes` divides the advantages of GRPO by the deviation of a group."""

    def convert(value: Any, values: Values) -> Mapping[str, Any]:
        plain = value == "grpo" and not values[normalizes]
        name = f"{system}/{value}" + f"+{normalizes.rpartition('.')[2]}=false" * plain
        return {"advantage.type": name, **(VALUE_HEAD if value == "gae" else {})}

    return convert


def _updates(batch: str) -> Convert:
    """The updates of a batch, whose size is the option `batch`, from the size of an update."""

    def convert(value: Any, values: Values) -> Mapping[str, Any]:
        updates = values[batch] / value
        if updates != round(updates):
            raise NotExpressed(f"it does not divide {batch}")
        return {"optim.updates_per_batch": round(updates)} if updates > 1 else {}

    return convert


def _decay(value: Any, _: Values) -> Mapping[str, Any]:
    return {"optim.optimizer.weight_decay": value}


def _schedule(kind: Any, steps: Any, warmup: Any) -> Mapping[str, Any]:
    """The fall of the learning rate to 0 behind the warm-up."""
    name = str(kind).removesuffix("_with_warmup")
    if name == "constant":
        return {}
    if name not in ("linear", "cosine"):
        raise NotExpressed("optim.schedule.type has constant, linear, cosine and wsd")
    if not isinstance(steps, int) or steps <= 0:
        raise NotExpressed("the number of updates is not in the file; set optim.schedule.decay_steps to it")
    return {"optim.schedule": {"type": name, "decay_steps": max(steps - int(warmup or 0), 1), "end": 0.0}}


# TRL's GRPOConfig. The losses without clips are those that its epsilon does not enter.
TRL_WITHOUT_CLIPS = ("sapo", "vespo")
TRL_TOKEN_MEANS = ("dapo", "cispo", "vespo", "bnpo")


def _trl_loss(loss: Any, values: Values) -> Mapping[str, Any]:
    sequence = values["importance_sampling_level"] == "sequence" and loss not in ("cispo", *TRL_WITHOUT_CLIPS)
    fields = {
        "loss.type": "trl/grpo+importance_sampling_level=sequence" if sequence else f"trl/{loss}",
        "loss.aggregation": f"trl/{loss}",
    }
    if loss == "dr_grpo":
        fields["loss.max_length"] = values["max_completion_length"]
    return fields


def _trl_clip(field: str) -> Convert:
    def convert(value: Any, values: Values) -> Mapping[str, Any]:
        loss = values["loss_type"]
        if loss in TRL_WITHOUT_CLIPS or (loss == "cispo" and field == "clip_low"):
            return {}
        if field == "clip_low":
            return {"loss.clip_low": value}
        bound = values["epsilon"] if value is None else value
        return {"loss.clip_high": round(bound - 1, 12) if loss == "cispo" else bound}

    return convert


def _trl_kl(beta: Any, values: Values) -> Mapping[str, Any]:
    if not beta:
        return {}
    corrected = values["use_bias_correction_kl"]
    fields = {"kl.loss.coef": beta, "kl.loss.estimator": "trl/k3" + "+use_bias_correction_kl" * bool(corrected)}
    if corrected and values["importance_sampling_level"] == "sequence":
        fields["kl.loss.importance_level"] = "geometric"
    return fields


def _trl_scale(value: Any, _: Values) -> Mapping[str, Any]:
    name = {True: "group", False: "none"}.get(value, value) if isinstance(value, bool) else value
    return {"advantage.type": f"trl/scale_rewards={name}"}


def _trl_entropy(value: Any, values: Values) -> Mapping[str, Any]:
    if not value:
        return {}
    if values["loss_type"] in TRL_TOKEN_MEANS:
        return {"loss.entropy_coef": value}
    return {"loss.entropy_coef": value, "loss.entropy_aggregation": "token_mean"}


def _trl_adaptive(value: Any, values: Values) -> Mapping[str, Any]:
    if not value:
        return {}
    names = {"target": "target", "delta": "coef_delta", "min_coef": "coef_min", "max_coef": "coef_max"}
    return {
        "loss.entropy_controller": {
            "type": "adaptive",
            **{field: values[f"entropy_{name}"] for field, name in names.items()},
        }
    }


def _trl_prompts(value: Any, values: Values) -> Mapping[str, Any]:
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


def _trl_correction(value: Any, values: Values) -> Mapping[str, Any]:
    if not (value and values["use_vllm"]):
        return {}
    mode, upper, lower = (values[f"vllm_importance_sampling_{name}"] for name in ("mode", "clip_max", "clip_min"))
    limits = {"upper": upper, "lower": lower}
    return {"correction": {"type": f"trl/{mode}", **{name: x for name, x in limits.items() if x is not None}}}


def _trl_bnpo(value: Any, values: Values) -> Mapping[str, Any]:
    if value > 1 and values["loss_type"] == "bnpo":
        raise NotExpressed("bnpo divides each micro-batch by its own tokens; a micro-batch here never changes the loss")
    return {"optim.micro_batches": value} if value > 1 else {}


def _trl_max_ratio(value: Any, values: Values) -> Mapping[str, Any]:
    return {} if value is None or values["loss_type"] in ("cispo", *TRL_WITHOUT_CLIPS) else {"loss.max_ratio": value}


def _trl_steps(value: Any, values: Values) -> Mapping[str, Any]:
    updates = values["num_iterations"] * max(
        (values["steps_per_generation"] or values["gradient_accumulation_steps"])
        // values["gradient_accumulation_steps"],
        1,
    )
    if value <= 0:
        raise NotExpressed("the run is as long as num_train_epochs; set steps")
    return {"steps": -(-value // updates)}


TRL = (
    ForeignOption("loss_type", ("loss.type", "loss.aggregation"), "dapo", "a name of the table of systems", _trl_loss),
    ForeignOption("importance_sampling_level", ("loss.type",), "token", "`sequence` is GSPO's ratio", lambda *_: {}),
    ForeignOption("epsilon", ("loss.clip_low",), 0.2, "", _trl_clip("clip_low")),
    ForeignOption(
        "epsilon_high", ("loss.clip_high",), None, "`epsilon` if unset; of `cispo` less 1", _trl_clip("clip_high")
    ),
    ForeignOption("delta", ("loss.max_ratio",), None, "", _trl_max_ratio),
    *(
        ForeignOption(
            f"sapo_temperature_{side[:3]}",
            (f"loss.tau_{side}",),
            at,
            "",
            _where("loss_type", ("sapo",), f"loss.tau_{side}"),
        )
        for side, at in (("positive", 1.0), ("negative", 1.05))
    ),
    *(
        ForeignOption(
            f"vespo_{name}_{side[:3]}",
            (f"loss.{name}_{side}",),
            at,
            "",
            _where("loss_type", ("vespo",), f"loss.{name}_{side}"),
        )
        for name, side, at in (
            *(("k", "positive", 2.0), ("lambda", "positive", 3.0)),
            *(("k", "negative", 3.0), ("lambda", "negative", 2.0)),
        )
    ),
    ForeignOption("beta", ("kl.loss.coef",), 0.0, "", _trl_kl),
    ForeignOption("use_bias_correction_kl", ("kl.loss.importance_corrected",), True, "", lambda *_: {}),
    ForeignOption("scale_rewards", ("advantage.type",), "group", "", _trl_scale),
    ForeignOption(
        "entropy_coef",
        ("loss.entropy_coef", "loss.entropy_aggregation"),
        0.0,
        "a mean over tokens, whatever the loss",
        _trl_entropy,
    ),
    ForeignOption("use_adaptive_entropy", ("loss.entropy_controller",), False, "", _trl_adaptive),
    ForeignOption("vllm_importance_sampling_correction", ("correction",), True, "with `use_vllm`", _trl_correction),
    same("num_generations", "rollout.samples_per_prompt", 8),
    ForeignOption(
        "steps_per_generation",
        ("rollout.prompts_per_step", "optim.updates_per_batch"),
        None,
        "`generation_batch_size` / `num_generations`; rows are split in another order",
        _trl_prompts,
    ),
    ForeignOption("gradient_accumulation_steps", ("optim.micro_batches",), 1, "", _trl_bnpo),
    same("num_iterations", "optim.epochs", 1),
    ForeignOption("max_steps", ("steps",), -1, "RL steps, each of the updates of a generation batch", _trl_steps),
    same("learning_rate", "optim.learning_rate", 1e-6),
    ForeignOption(
        "lr_scheduler_type",
        ("optim.schedule",),
        "linear",
        "falls to 0 over `max_steps` updates",
        lambda kind, values: _schedule(kind, values["max_steps"], values["warmup_steps"]),
    ),
    ForeignOption("warmup_steps", ("optim.warmup_steps",), 0, "", _unless(0, "optim.warmup_steps")),
    same("max_grad_norm", "optim.max_grad_norm", 1.0),
    same("adam_beta1", "optim.optimizer.b1", 0.9),
    same("adam_beta2", "optim.optimizer.b2", 0.999),
    same("adam_epsilon", "optim.optimizer.eps", 1e-8),
    ForeignOption("weight_decay", ("optim.optimizer.weight_decay",), 0.0, "here of norms and biases, too", _decay),
    same("max_completion_length", "data.max_completion_length", 512),
    same("temperature", "temperature", 1.0),
    ForeignOption("top_p", ("rollout.top_p",), 1.0, "", _unless(1.0, "rollout.top_p")),
    ForeignOption("top_k", ("rollout.top_k",), 0, "", _unless(0, "rollout.top_k")),
    ForeignOption("min_p", ("rollout.min_p",), None, "", _unless(0.0, "rollout.min_p")),
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


# verl's resolved configuration, as its trainer prints and Hydra writes it.
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"


def _verl_kl_loss(value: Any, values: Values) -> Mapping[str, Any]:
    kind = values[f"{_ACTOR}.kl_loss_type"]
    coef = values[f"{_ACTOR}.kl_loss_coef"]
    return {"kl.loss.coef": coef, "kl.loss.estimator": f"verl/{kind}"} if value else {}


def _verl_kl_reward(value: Any, values: Values) -> Mapping[str, Any]:
    if not value:
        return {}
    if values["algorithm.kl_ctrl.type"] != "fixed":
        raise NotExpressed("set kl.reward.controller to adaptive, with its target and horizon")
    coef = values["algorithm.kl_ctrl.kl_coef"]
    return {"kl.reward.coef": coef, "kl.reward.estimator": f"verl/{values['algorithm.kl_penalty']}"}


def _verl_correction(value: Any, values: Values) -> Mapping[str, Any]:
    if value is None:
        return {}
    prefix = "algorithm.rollout_correction."
    name = f"verl/rollout_is={value}" + "+rollout_is_batch_normalize" * bool(
        values[f"{prefix}rollout_is_batch_normalize"]
    )
    return {"correction": {"type": name, "max_weight": values[f"{prefix}rollout_is_threshold"]}}


_VERL_LOSS = f"{_ACTOR}.policy_loss.loss_mode"
VERL_CLIPPED = ("vanilla", "gspo", "cispo", "geo_mean", "dppo_tv", "dppo_kl", "clip_cov")
VERL = (
    ForeignOption(
        "algorithm.adv_estimator",
        ("advantage.type",),
        "gae",
        "a name of the table of systems",
        _advantage("verl", "algorithm.norm_adv_by_std_in_grpo"),
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
    _clip(f"{_ACTOR}.clip_ratio_low", "clip_low", 0.2, _VERL_LOSS, VERL_CLIPPED),
    _clip(f"{_ACTOR}.clip_ratio_high", "clip_high", 0.2, _VERL_LOSS, VERL_CLIPPED),
    _clip(f"{_ACTOR}.clip_ratio_c", "dual_clip", 3.0, _VERL_LOSS, ("vanilla",)),
    ForeignOption(f"{_ACTOR}.entropy_coeff", ("loss.entropy_coef",), 0, "", _unless(0, "loss.entropy_coef")),
    ForeignOption(f"{_ACTOR}.use_kl_loss", ("kl.loss.coef", "kl.loss.estimator"), False, "", _verl_kl_loss),
    ForeignOption(f"{_ACTOR}.kl_loss_coef", ("kl.loss.coef",), 0.001, "", lambda *_: {}),
    ForeignOption(f"{_ACTOR}.kl_loss_type", ("kl.loss.estimator",), "low_var_kl", "", lambda *_: {}),
    ForeignOption("algorithm.use_kl_in_reward", ("kl.reward.coef", "kl.reward.estimator"), False, "", _verl_kl_reward),
    ForeignOption("algorithm.kl_ctrl.kl_coef", ("kl.reward.coef",), 0.001, "", lambda *_: {}),
    ForeignOption("algorithm.kl_ctrl.type", ("kl.reward.controller",), "fixed", "", lambda *_: {}),
    ForeignOption("algorithm.kl_penalty", ("kl.reward.estimator",), "kl", "", lambda *_: {}),
    *(
        ForeignOption(
            f"algorithm.{name}",
            (f"advantage.{name}",),
            1.0,
            "of `gae`",
            _where("algorithm.adv_estimator", ("gae",), f"advantage.{name}"),
        )
        for name in ("gamma", "lam")
    ),
    ForeignOption("algorithm.rollout_correction.rollout_is", ("correction",), None, "", _verl_correction),
    ForeignOption(
        "algorithm.rollout_correction.rollout_is_threshold", ("correction.max_weight",), 2.0, "", lambda *_: {}
    ),
    ForeignOption(
        "algorithm.rollout_correction.rollout_is_batch_normalize", ("correction.type",), False, "", lambda *_: {}
    ),
    same("data.train_batch_size", "rollout.prompts_per_step", 1024),
    ForeignOption(
        f"{_ACTOR}.ppo_mini_batch_size", ("optim.updates_per_batch",), 256, "", _updates("data.train_batch_size")
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
    ForeignOption(f"{_ACTOR}.optim.weight_decay", ("optim.optimizer.weight_decay",), 0.01, "", _decay),
    ForeignOption(
        f"{_ACTOR}.optim.lr_warmup_steps", ("optim.warmup_steps",), -1, "", _unless(-1, "optim.warmup_steps")
    ),
    ForeignOption(
        f"{_ACTOR}.optim.lr_scheduler_type",
        ("optim.schedule",),
        "constant",
        "",
        lambda kind, values: _schedule(kind, values["trainer.total_training_steps"], 0),
    ),
    same(f"{_ACTOR}.grad_clip", "optim.max_grad_norm", 1.0),
    same("data.max_prompt_length", "data.max_prompt_length", 512),
    same("data.max_response_length", "data.max_completion_length", 512),
    same(f"{_ROLLOUT}.temperature", "temperature", 1.0),
    ForeignOption(f"{_ROLLOUT}.top_p", ("rollout.top_p",), 1, "", _unless(1, "rollout.top_p")),
    ForeignOption(f"{_ROLLOUT}.top_k", ("rollout.top_k",), -1, "", _unless(-1, "rollout.top_k")),
    same(f"{_MODEL}.path", "model.path"),
    ForeignOption(f"{_MODEL}.lora_rank", ("lora.rank",), 0, "", _unless(0, "lora.rank")),
    ForeignOption(
        f"{_MODEL}.lora_alpha",
        ("lora.alpha",),
        16,
        "",
        lambda value, values: {"lora.alpha": value} if values[f"{_MODEL}.lora_rank"] else {},
    ),
    same("trainer.total_training_steps", "steps", None),
    ForeignOption("trainer.save_freq", ("checkpoint.every",), -1, "", _unless(-1, "checkpoint.every")),
    ForeignOption("trainer.test_freq", ("eval.every",), -1, "", _unless(-1, "eval.every")),
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

# SkyRL's configuration, with its sections `trainer` and `generator`.
_ALGORITHM = "trainer.algorithm"
_OPTIMIZER = "trainer.policy.optimizer_config"
_SAMPLING = "generator.sampling_params"
_SKYRL_LOSS = f"{_ALGORITHM}.policy_loss_type"
SKYRL_CLIPPED = ("regular", "dual_clip", "gspo")
# Of its KL term, whatever the reduction of the policy loss is.
SKYRL_KL = {"kl.loss.aggregation": "seq_mean_token_mean", "kl.loss.empty_rows": "count"}


def _skyrl_kl(value: Any, values: Values) -> Mapping[str, Any]:
    fields = {
        "kl.loss.coef": values[f"{_ALGORITHM}.kl_loss_coef"],
        "kl.loss.estimator": f"skyrl/{values[f'{_ALGORITHM}.kl_estimator_type']}",
    }
    return fields | SKYRL_KL if value else {}


def _skyrl_correction(value: Any, values: Values) -> Mapping[str, Any]:
    if value is None:
        return {}
    cap = values[f"{_ALGORITHM}.off_policy_correction.{value}_tis_ratio_clip_high"]
    return {"correction": {"type": f"skyrl/tis_ratio_type={value}", "max_weight": cap}}


SKYRL = (
    ForeignOption(
        f"{_ALGORITHM}.advantage_estimator",
        ("advantage.type",),
        "grpo",
        "a name of the table",
        _advantage("skyrl", f"{_ALGORITHM}.grpo_norm_by_std"),
    ),
    ForeignOption(f"{_ALGORITHM}.grpo_norm_by_std", ("advantage.scale",), True, "", lambda *_: {}),
    ForeignOption(
        f"{_ALGORITHM}.policy_loss_type",
        ("loss.type",),
        "regular",
        "a name of the table of systems",
        lambda value, _: {"loss.type": f"skyrl/{value}"},
    ),
    ForeignOption(
        f"{_ALGORITHM}.loss_reduction",
        ("loss.aggregation",),
        "token_mean",
        "",
        lambda value, _: {"loss.aggregation": f"skyrl/{value}"},
    ),
    _clip(f"{_ALGORITHM}.eps_clip_low", "clip_low", 0.2, _SKYRL_LOSS, SKYRL_CLIPPED),
    _clip(f"{_ALGORITHM}.eps_clip_high", "clip_high", 0.2, _SKYRL_LOSS, SKYRL_CLIPPED),
    _clip(f"{_ALGORITHM}.clip_ratio_c", "dual_clip", 3.0, _SKYRL_LOSS, ("dual_clip",)),
    _clip(f"{_ALGORITHM}.cispo.cispo_eps_clip_low", "clip_low", 0.0, _SKYRL_LOSS, ("cispo",)),
    _clip(f"{_ALGORITHM}.cispo.cispo_eps_clip_high", "clip_high", 5.0, _SKYRL_LOSS, ("cispo",)),
    ForeignOption(f"{_ALGORITHM}.use_kl_loss", ("kl.loss.coef", "kl.loss.estimator"), True, "", _skyrl_kl),
    ForeignOption(f"{_ALGORITHM}.kl_loss_coef", ("kl.loss.coef",), 0.001, "", lambda *_: {}),
    ForeignOption(f"{_ALGORITHM}.kl_estimator_type", ("kl.loss.estimator",), "k3", "", lambda *_: {}),
    ForeignOption(f"{_ALGORITHM}.off_policy_correction.tis_ratio_type", ("correction",), None, "", _skyrl_correction),
    *(
        ForeignOption(
            f"{_ALGORITHM}.off_policy_correction.{level}_tis_ratio_clip_high",
            ("correction.max_weight",),
            cap,
            "",
            lambda *_: {},
        )
        for level, cap in (("token", 2.0), ("sequence", 5.0))
    ),
    ForeignOption(
        f"{_ALGORITHM}.use_entropy_loss",
        ("loss.entropy_coef",),
        False,
        "",
        lambda on, values: {"loss.entropy_coef": values[f"{_ALGORITHM}.entropy_loss_coef"]} if on else {},
    ),
    ForeignOption(f"{_ALGORITHM}.entropy_loss_coef", ("loss.entropy_coef",), 0.01, "", lambda *_: {}),
    *(
        ForeignOption(
            f"{_ALGORITHM}.{name}",
            (f"advantage.{field}",),
            1.0,
            "of `gae`",
            _where(f"{_ALGORITHM}.advantage_estimator", ("gae",), f"advantage.{field}"),
        )
        for name, field in (("gamma", "gamma"), ("lambd", "lam"))
    ),
    same("trainer.train_batch_size", "rollout.prompts_per_step", 1024),
    ForeignOption(
        "trainer.policy_mini_batch_size", ("optim.updates_per_batch",), 256, "", _updates("trainer.train_batch_size")
    ),
    same("trainer.update_epochs_per_batch", "optim.epochs", 1),
    same("generator.n_samples_per_prompt", "rollout.samples_per_prompt", 5),
    same(f"{_OPTIMIZER}.lr", "optim.learning_rate", 1e-6),
    ForeignOption(
        f"{_OPTIMIZER}.adam_betas",
        ("optim.optimizer.b1", "optim.optimizer.b2"),
        (0.9, 0.999),
        "",
        lambda value, _: {"optim.optimizer.b1": value[0], "optim.optimizer.b2": value[1]},
    ),
    ForeignOption(f"{_OPTIMIZER}.weight_decay", ("optim.optimizer.weight_decay",), 0.01, "", _decay),
    same(f"{_OPTIMIZER}.max_grad_norm", "optim.max_grad_norm", 1.0),
    ForeignOption(f"{_OPTIMIZER}.num_warmup_steps", ("optim.warmup_steps",), 0, "", _unless(0, "optim.warmup_steps")),
    ForeignOption(
        f"{_OPTIMIZER}.scheduler",
        ("optim.schedule",),
        "constant_with_warmup",
        "",
        lambda kind, values: _schedule(
            kind, values["trainer.max_training_steps"], values[f"{_OPTIMIZER}.num_warmup_steps"]
        ),
    ),
    same("trainer.max_prompt_length", "data.max_prompt_length", 512),
    same(f"{_SAMPLING}.max_generate_length", "data.max_completion_length", 1024),
    same(f"{_SAMPLING}.temperature", "temperature", 1.0),
    ForeignOption(f"{_SAMPLING}.top_p", ("rollout.top_p",), 1.0, "", _unless(1.0, "rollout.top_p")),
    ForeignOption(f"{_SAMPLING}.top_k", ("rollout.top_k",), -1, "", _unless(-1, "rollout.top_k")),
    ForeignOption(f"{_SAMPLING}.min_p", ("rollout.min_p",), 0.0, "", _unless(0.0, "rollout.min_p")),
    same("trainer.policy.model.path", "model.path"),
    same("trainer.max_training_steps", "steps"),
    same("trainer.seed", "seed", 42),
    ForeignOption(
        "trainer.gradient_checkpointing",
        ("model.remat",),
        True,
        "",
        lambda on, _: {"model.remat": "full"} if on else {},
    ),
    ForeignOption("trainer.ckpt_interval", ("checkpoint.every",), 10, "", _unless(-1, "checkpoint.every")),
    same("trainer.run_name", "name"),
    missing("trainer.epochs", 1, "set steps"),
    missing(f"{_ALGORITHM}.use_kl_in_reward", False, "set kl.reward.coef and kl.reward.estimator"),
    missing(f"{_ALGORITHM}.advantage_batch_normalize", False, "set advantage.whiten"),
    missing(f"{_ALGORITHM}.zero_variance_filter", False, "set advantage.zeros to drop"),
    missing(f"{_ALGORITHM}.dynamic_sampling.type", None, "groups of equal rewards are not sampled again"),
    missing(f"{_ALGORITHM}.use_tis", False, "set off_policy_correction.tis_ratio_type"),
    missing(f"{_ALGORITHM}.off_policy_correction.sequence_mask_metric", None, "add a mask to correction"),
    missing("generator.apply_overlong_filtering", False, "rows cut at the limit are trained"),
    missing("generator.zero_reward_on_non_stop", False, "a reward may look for the end of the completion"),
    missing(f"{_SAMPLING}.repetition_penalty", 1.0, "the sampler has none"),
    missing("trainer.update_ref_every_epoch", False, "set reference.refresh_every"),
)


# prime-rl's rl.toml, with its sections `trainer` and `orchestrator`.
def _prime_loss(value: Any, values: Values) -> Mapping[str, Any]:
    if value not in ("default", "ipo"):
        raise NotExpressed("a loss of your own: loss.type custom")
    fields = {"loss.type": "dppo", "loss.old_log_probs": "sampler", "loss.aggregation": "token_mean"}
    if value == "ipo":
        bound = values["trainer.loss.ipo_threshold"]
        return fields | {"loss.symmetric": True, "loss.clip_low": bound, "loss.clip_high": bound}
    low, high = (values[f"trainer.loss.dppo_mask_{side}"] for side in ("low", "high"))
    return fields | {"loss.clip_low": low, "loss.clip_high": high}


def _prime_advantage(value: Any, _: Values) -> Mapping[str, Any]:
    common = {"advantage.empty_rows": "drop", "advantage.zeros": "drop"}
    if value == "grpo":
        return {"advantage.type": "grpo", "advantage.scale": "none", **common}
    if value == "max_rl":
        return {"advantage.type": "maxrl", **common}
    raise NotExpressed("advantage.type has grpo and maxrl of its algorithms")


def _prime_prompts(value: Any, values: Values) -> Mapping[str, Any]:
    samples = values["orchestrator.group_size"]
    if value is None:
        raise NotExpressed("a batch of tokens; set rollout.prompts_per_step")
    if value % samples:
        raise NotExpressed(f"it is no whole number of groups of {samples}")
    return {"rollout.prompts_per_step": value // samples}


_PRIME_OPTIMIZER = "trainer.optim"
PRIME_RL = (
    ForeignOption("orchestrator.algo.type", ("advantage.type",), "grpo", "", _prime_advantage),
    ForeignOption("trainer.loss.type", ("loss.type",), "default", "", _prime_loss),
    ForeignOption("trainer.loss.dppo_mask_low", ("loss.clip_low",), 0.2, "", lambda *_: {}),
    ForeignOption("trainer.loss.dppo_mask_high", ("loss.clip_high",), 0.2, "", lambda *_: {}),
    ForeignOption("trainer.loss.ipo_threshold", ("loss.clip_low", "loss.clip_high"), 0.1, "", lambda *_: {}),
    ForeignOption(
        "trainer.loss.kl_tau",
        ("kl.rollout.coef",),
        1e-3,
        "twice of it: prime-rl's estimate has no half",
        lambda tau, _: {"kl.rollout": {"coef": 2 * tau, "estimator": "k2", "gradient": "value"}} if tau else {},
    ),
    missing("trainer.loss.adv_tau", 1.0, "the advantages have no factor"),
    same("orchestrator.group_size", "rollout.samples_per_prompt", 1),
    ForeignOption(
        "orchestrator.batch_size", ("rollout.prompts_per_step",), None, "`batch_size` / `group_size`", _prime_prompts
    ),
    ForeignOption(
        f"{_PRIME_OPTIMIZER}.type",
        ("optim.optimizer.type",),
        "adamw",
        "",
        lambda value, _: {"optim.optimizer.type": value},
    ),
    same(f"{_PRIME_OPTIMIZER}.lr", "optim.learning_rate", 1e-6),
    ForeignOption(f"{_PRIME_OPTIMIZER}.weight_decay", ("optim.optimizer.weight_decay",), 0.01, "", _decay),
    same(f"{_PRIME_OPTIMIZER}.max_norm", "optim.max_grad_norm", 1.0),
    ForeignOption(
        "trainer.scheduler.type",
        ("optim.schedule",),
        "constant",
        "",
        lambda kind, values: _schedule(kind, values["max_steps"], values["trainer.scheduler.warmup_steps"]),
    ),
    ForeignOption("trainer.scheduler.warmup_steps", ("optim.warmup_steps",), 10, "with a schedule", lambda *_: {}),
    same("max_steps", "steps"),
    same("model.name", "model.path"),
    ForeignOption("ckpt.interval", ("checkpoint.every",), None, "", _unless(None, "checkpoint.every")),
    missing("orchestrator.max_off_policy_steps", 8, "rollout.policy_lag is the lag of every row"),
)

OPTIONS: Mapping[str, tuple[ForeignOption, ...]] = {"trl": TRL, "verl": VERL, "skyrl": SKYRL, "prime-rl": PRIME_RL}
FILES = {
    "trl": "the JSON of GRPOConfig.to_dict()",
    "verl": "its resolved configuration, YAML",
    "skyrl": "its configuration, YAML",
    "prime-rl": "rl.toml",
}
# Options that no update depends on: logs, folders, devices, loaders, memory.
QUIET: Mapping[str, tuple[str, ...]] = {
    "trl": (
        *("log*", "hub*", "push*", "save*", "eval*", "dataloader*", "ddp*", "fsdp*", "deepspeed", "report_to", "*_dir"),
        *("torch*", "trackio*", "disable_tqdm", "debug", "do_*", "*_eval_*", "*_eval", "vllm_*", "use_cpu", "project"),
        *(
            "include_*",
            "skip_*",
            "ds3*",
            "resume*",
            "local_rank",
            "tf32",
            "fp16",
            "label_names",
            "remove_unused_columns",
        ),
        *("ignore_data_skip", "restore_callback*", "load_best*", "metric_for*", "greater_*", "prediction_loss_only"),
        *("activation_checkpointing*", "gradient_checkpointing_kwargs", "accelerator_config", "parallelism_config"),
        *("full_determinism", "enable_jit*", "auto_find*", "bf16_full*", "*_to_print", "use_cache", "length_column*"),
        *("cache_implementation", "*continuous_batching*", "use_transformers*", "trust_remote_code", "batch_eval*"),
        *("average_tokens*", "data_seed", "pad_to_multiple_of", "train_sampling_strategy", "num_generations_eval"),
        *("use_liger*", "liger*", "model_init_kwargs", "entropy_*"),
        *(
            "per_device_train_batch_size",
            "generation_batch_size",
            "ref_model_*",
            "shuffle_dataset",
            "max_tool_calling*",
        ),
    ),
    "verl": (
        *("*_target_", "ray*", "critic*", "reward*", "trainer.*", "global_profiler*", "*profiler*", "transfer_queue*"),
        *("*.fsdp_config*", "*.ppo_micro*", "*.ppo_max_token*", "*.checkpoint*", "*.use_*", "*megatron*", "*.engine*"),
        *(f"{_ROLLOUT}.*", "actor_rollout_ref.ref.*", f"{_MODEL}.*", "data.*", f"{_ACTOR}.optim.*", "*.router_replay*"),
        *("distillation*", "teacher*", "custom*", "*.strategy", "*.shuffle", "*.entropy_*", "*seed", "*.rollout_n"),
        *(
            "algorithm.pf_ppo*",
            "algorithm.filter_groups.*",
            "algorithm.kl_ctrl.*",
            f"{_ACTOR}.ulysses*",
            "*.nccl_timeout",
        ),
        *(
            f"{_ACTOR}.qat*",
            f"{_ACTOR}.tau_*",
            f"{_ACTOR}.policy_loss.*",
            f"{_ACTOR}.clip_ratio",
            f"{_ACTOR}.calculate*",
        ),
        *(
            f"{_ACTOR}.freeze*",
            "actor_rollout_ref.hybrid*",
            "actor_rollout_ref.nccl*",
            "algorithm.rollout_correction.*",
        ),
        *("model_engine", "engine*"),
    ),
    "skyrl": (
        *("data*", "environment*", "trainer.placement*", "trainer.*_path", "trainer.log*", "trainer.project*"),
        *(
            "*.fsdp_config*",
            "*megatron*",
            "generator.inference_engine*",
            "trainer.micro*",
            "trainer.critic*",
            "*_chunk*",
        ),
        *("trainer.eval*", "trainer.dump*", "trainer.export*", "trainer.hf*", "trainer.resume*", "trainer.num_logger*"),
        *("generator.eval*", "trainer.ref.*", f"{_ALGORITHM}.kl_ctrl*", "trainer.strategy", "trainer.remove*"),
    ),
    "prime-rl": (
        *("log*", "monitors*", "inference*", "*wandb*", "deployment*", "slurm*", "output_dir", "weight_broadcast*"),
        *("trainer.model*", "trainer.log*", "orchestrator.train*", "orchestrator.eval*", "orchestrator.concurrency*"),
        *("trainer.ckpt*", "orchestrator.ckpt*", "env_vars*", "clean*"),
    ),
}


# Options that only others read, with their defaults.
READ_BY_OTHERS: Mapping[str, Values] = {
    "trl": {
        **{"generation_batch_size": None, "per_device_train_batch_size": 8},
        **{"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0},
        **{"vllm_importance_sampling_clip_min": None},
        **{"entropy_target": 0.2, "entropy_coef_delta": 0.005, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0},
    }
}


def read_config(path: pathlib.Path) -> dict[str, Any]:
    """Reads a config of another trainer, JSON, YAML or TOML by its suffix.

    Raises:
      ValueError: it is no mapping, cannot be parsed, or YAML has no parser here.
    """
    suffix = path.suffix.lower()
    text = path.read_text(encoding="utf-8")
    if suffix == ".toml":
        import tomllib

        return tomllib.loads(text)
    if suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ImportError:
            raise ValueError(f"{path}: YAML needs PyYAML: pip install pyyaml, or write the config as JSON") from None
        try:
            read = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    else:
        try:
            read = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}; expected JSON, or a file called .yaml or .toml") from error
    if not isinstance(read, dict):
        raise ValueError(f"{path}: got a {type(read).__name__}, expected a mapping of options")
    return read


def flattened(config: Mapping[str, Any], known: frozenset[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the value of every option."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and name not in known:
            yield from flattened(value, known, f"{name}.")
        else:
            yield name, _number(value)


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-6 as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def translate(system: str, config: Mapping[str, Any]) -> Translation:
    """Translates a config of another trainer.

    Args:
      system: a key of `OPTIONS`.
      config: as its file says; what it leaves out has the default of the system.
    """
    options = OPTIONS[system]
    given = dict(flattened(config, frozenset(option.name for option in options)))
    values = {**READ_BY_OTHERS.get(system, {}), **{option.name: option.default for option in options}, **given}
    fields: dict[str, Any] = {}
    not_expressed: list[tuple[str, Any, str]] = []
    for option in options:
        value = values[option.name]
        if option.convert is None:
            if option.name in given and value != option.default and value is not None:
                not_expressed.append((option.name, value, option.note))
            continue
        try:
            fields |= option.convert(value, values)
        except NotExpressed as error:
            not_expressed.append((option.name, value, str(error)))
    names = {option.name for option in options}
    # An option that is off changes no update.
    asked = [name for name, value in given.items() if name not in names and value not in (None, False, 0, "", [], {})]
    unknown = [name for name in asked if not _is_quiet(system, name)]
    return Translation(fields, tuple(not_expressed), tuple(unknown))


def _is_quiet(system: str, name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in QUIET[system])


def as_yaml(system: str, translation: Translation) -> Iterator[str]:
    """Yields the lines of the trainer's config; what it leaves out is in comments."""
    unset = [field for field in ("task", "data", "model.path", "steps") if field not in translation.fields]
    yield f"# From {SYSTEMS[system].title}'s config. Set {', '.join(unset)}."
    for name, value, reason in translation.not_expressed:
        yield f"# not expressed: {name}: {json.dumps(value)}: {reason}"
    if translation.unknown:
        yield f"# not known: {', '.join(translation.unknown)}"
    tree: dict[str, Any] = {}
    for path, value in translation.fields.items():
        *sections, last = path.split(".")
        section = tree
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    yield from _yaml_lines(tree, "")


def _yaml_lines(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _yaml_lines(value, f"{indent}  ")
        else:
            yield f"{indent}{key}: {json.dumps(value)}"
