"""SkyRL's configuration, with its sections `trainer` and `generator`."""

from collections.abc import Mapping
from typing import Any

from kljax.tools.systems.foreign.option import (
    ForeignOption,
    ForeignSystem,
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

_ALGORITHM = "trainer.algorithm"
_OPTIMIZER = "trainer.policy.optimizer_config"
_SAMPLING = "generator.sampling_params"
_LOSS = f"{_ALGORITHM}.policy_loss_type"
_CLIPPED = ("regular", "dual_clip", "gspo")
# Of its KL term, whatever the reduction of the policy loss is.
_KL_REDUCTION = {"kl.loss.aggregation": "seq_mean_token_mean", "kl.loss.empty_rows": "count"}


def _kl(value: Any, values: Values) -> Mapping[str, Any]:
    fields = {
        "kl.loss.coef": values[f"{_ALGORITHM}.kl_loss_coef"],
        "kl.loss.estimator": f"skyrl/{values[f'{_ALGORITHM}.kl_estimator_type']}",
    }
    return fields | _KL_REDUCTION if value else {}


def _correction(value: Any, values: Values) -> Mapping[str, Any]:
    if value is None:
        return {}
    cap = values[f"{_ALGORITHM}.off_policy_correction.{value}_tis_ratio_clip_high"]
    return {"correction": {"type": f"skyrl/tis_ratio_type={value}", "max_weight": cap}}


_OPTIONS = (
    ForeignOption(
        f"{_ALGORITHM}.advantage_estimator",
        ("advantage.type",),
        "grpo",
        "a name of the table",
        advantage("skyrl", f"{_ALGORITHM}.grpo_norm_by_std"),
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
    clip(f"{_ALGORITHM}.eps_clip_low", "clip_low", 0.2, _LOSS, _CLIPPED),
    clip(f"{_ALGORITHM}.eps_clip_high", "clip_high", 0.2, _LOSS, _CLIPPED),
    clip(f"{_ALGORITHM}.clip_ratio_c", "dual_clip", 3.0, _LOSS, ("dual_clip",)),
    clip(f"{_ALGORITHM}.cispo.cispo_eps_clip_low", "clip_low", 0.0, _LOSS, ("cispo",)),
    clip(f"{_ALGORITHM}.cispo.cispo_eps_clip_high", "clip_high", 5.0, _LOSS, ("cispo",)),
    ForeignOption(f"{_ALGORITHM}.use_kl_loss", ("kl.loss.coef", "kl.loss.estimator"), True, "", _kl),
    ForeignOption(f"{_ALGORITHM}.kl_loss_coef", ("kl.loss.coef",), 0.001, "", lambda *_: {}),
    ForeignOption(f"{_ALGORITHM}.kl_estimator_type", ("kl.loss.estimator",), "k3", "", lambda *_: {}),
    ForeignOption(f"{_ALGORITHM}.off_policy_correction.tis_ratio_type", ("correction",), None, "", _correction),
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
            where(f"{_ALGORITHM}.advantage_estimator", ("gae",), f"advantage.{field}"),
        )
        for name, field in (("gamma", "gamma"), ("lambd", "lam"))
    ),
    same("trainer.train_batch_size", "rollout.prompts_per_step", 1024),
    ForeignOption(
        "trainer.policy_mini_batch_size", ("optim.updates_per_batch",), 256, "", updates("trainer.train_batch_size")
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
    ForeignOption(f"{_OPTIMIZER}.weight_decay", ("optim.optimizer.weight_decay",), 0.01, "", decay),
    same(f"{_OPTIMIZER}.max_grad_norm", "optim.max_grad_norm", 1.0),
    ForeignOption(f"{_OPTIMIZER}.num_warmup_steps", ("optim.warmup_steps",), 0, "", unless(0, "optim.warmup_steps")),
    ForeignOption(
        f"{_OPTIMIZER}.scheduler",
        ("optim.schedule",),
        "constant_with_warmup",
        "",
        lambda kind, values: schedule(
            kind, values["trainer.max_training_steps"], values[f"{_OPTIMIZER}.num_warmup_steps"]
        ),
    ),
    same("trainer.max_prompt_length", "data.max_prompt_length", 512),
    same(f"{_SAMPLING}.max_generate_length", "data.max_completion_length", 1024),
    same(f"{_SAMPLING}.temperature", "temperature", 1.0),
    ForeignOption(f"{_SAMPLING}.top_p", ("rollout.top_p",), 1.0, "", unless(1.0, "rollout.top_p")),
    ForeignOption(f"{_SAMPLING}.top_k", ("rollout.top_k",), -1, "", unless(-1, "rollout.top_k")),
    ForeignOption(f"{_SAMPLING}.min_p", ("rollout.min_p",), 0.0, "", unless(0.0, "rollout.min_p")),
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
    ForeignOption("trainer.ckpt_interval", ("checkpoint.every",), 10, "", unless(-1, "checkpoint.every")),
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

# fmt: off
_QUIET = (
    "data*", "environment*", "trainer.placement*", "trainer.*_path", "trainer.log*", "trainer.project*",
    "*.fsdp_config*", "*megatron*", "generator.inference_engine*", "trainer.micro*", "trainer.critic*", "*_chunk*",
    "trainer.eval*", "trainer.dump*", "trainer.export*", "trainer.hf*", "trainer.resume*", "trainer.num_logger*",
    "generator.eval*", "trainer.ref.*", f"{_ALGORITHM}.kl_ctrl*", "trainer.strategy", "trainer.remove*",
)
# fmt: on

SYSTEM = ForeignSystem(
    file="its configuration, YAML",
    options=_OPTIONS,
    quiet=_QUIET,
)
