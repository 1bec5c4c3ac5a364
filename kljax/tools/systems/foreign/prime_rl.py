"""prime-rl's rl.toml, with its sections `trainer` and `orchestrator`."""

from collections.abc import Mapping
from typing import Any

from kljax.tools.systems.foreign.option import (
    ForeignOption,
    ForeignSystem,
    NotExpressed,
    Values,
    decay,
    missing,
    same,
    schedule,
    unless,
)


def _loss(value: Any, values: Values) -> Mapping[str, Any]:
    if value not in ("default", "ipo"):
        raise NotExpressed("a loss of your own: loss.type custom")
    fields = {"loss.type": "dppo", "loss.old_log_probs": "sampler", "loss.aggregation": "token_mean"}
    if value == "ipo":
        bound = values["trainer.loss.ipo_threshold"]
        return fields | {"loss.symmetric": True, "loss.clip_low": bound, "loss.clip_high": bound}
    low, high = (values[f"trainer.loss.dppo_mask_{side}"] for side in ("low", "high"))
    return fields | {"loss.clip_low": low, "loss.clip_high": high}


def _advantage(value: Any, _: Values) -> Mapping[str, Any]:
    common = {"advantage.empty_rows": "drop", "advantage.zeros": "drop"}
    if value == "grpo":
        return {"advantage.type": "grpo", "advantage.scale": "none", **common}
    if value == "max_rl":
        return {"advantage.type": "maxrl", **common}
    raise NotExpressed("advantage.type has grpo and maxrl of its algorithms")


def _prompts(value: Any, values: Values) -> Mapping[str, Any]:
    samples = values["orchestrator.group_size"]
    if value is None:
        raise NotExpressed("a batch of tokens; set rollout.prompts_per_step")
    if value % samples:
        raise NotExpressed(f"it is no whole number of groups of {samples}")
    return {"rollout.prompts_per_step": value // samples}


_OPTIMIZER = "trainer.optim"
_OPTIONS = (
    ForeignOption("orchestrator.algo.type", ("advantage.type",), "grpo", "", _advantage),
    ForeignOption("trainer.loss.type", ("loss.type",), "default", "", _loss),
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
        "orchestrator.batch_size", ("rollout.prompts_per_step",), None, "`batch_size` / `group_size`", _prompts
    ),
    ForeignOption(
        f"{_OPTIMIZER}.type",
        ("optim.optimizer.type",),
        "adamw",
        "",
        lambda value, _: {"optim.optimizer.type": value},
    ),
    same(f"{_OPTIMIZER}.lr", "optim.learning_rate", 1e-6),
    ForeignOption(f"{_OPTIMIZER}.weight_decay", ("optim.optimizer.weight_decay",), 0.01, "", decay),
    same(f"{_OPTIMIZER}.max_norm", "optim.max_grad_norm", 1.0),
    ForeignOption(
        "trainer.scheduler.type",
        ("optim.schedule",),
        "constant",
        "",
        lambda kind, values: schedule(kind, values["max_steps"], values["trainer.scheduler.warmup_steps"]),
    ),
    ForeignOption("trainer.scheduler.warmup_steps", ("optim.warmup_steps",), 10, "with a schedule", lambda *_: {}),
    same("max_steps", "steps"),
    same("model.name", "model.path"),
    ForeignOption("ckpt.interval", ("checkpoint.every",), None, "", unless(None, "checkpoint.every")),
    missing(
        "orchestrator.max_off_policy_steps", 8, "set rollout.ahead, and add correction: {type: max_lag, max_lag: 8}"
    ),
)

# fmt: off
_QUIET = (
    "log*", "monitors*", "inference*", "*wandb*", "deployment*", "slurm*", "output_dir", "weight_broadcast*",
    "trainer.model*", "trainer.log*", "orchestrator.train*", "orchestrator.eval*", "orchestrator.concurrency*",
    "trainer.ckpt*", "orchestrator.ckpt*", "env_vars*", "clean*",
)
# fmt: on

SYSTEM = ForeignSystem(
    file="rl.toml",
    options=_OPTIONS,
    quiet=_QUIET,
)
