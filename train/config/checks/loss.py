"""Advantages and the loss."""

from collections.abc import Iterator

from train.config.checks.problem import Problem, problem
from train.config.schema import Config

GROUP_ESTIMATORS = ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline")


def _value_head(config: Config) -> Iterator[Problem]:
    loss, estimator = config.loss, config.advantage.estimator
    if config.has_value_head() and loss.value_coef == 0:
        yield problem(
            "got 0, but advantage.estimator gae learns a value head; expected a number > 0 such as 0.5",
            "loss.value_coef",
            "advantage.estimator",
        )
    if not config.has_value_head():
        for name, value in (("value_coef", loss.value_coef or None), ("value_clip", loss.value_clip)):
            if value is not None:
                off = "0.0" if name == "value_coef" else "null"
                yield problem(
                    f"got {value}, but advantage.estimator {estimator} has no value head; set it to {off} or use gae",
                    f"loss.{name}",
                    "advantage.estimator",
                )


def _policy_loss(config: Config) -> Iterator[Problem]:
    loss = config.loss
    if loss.dual_clip is not None and loss.policy != "ppo":
        yield problem(
            f"got {loss.dual_clip}, but only loss.policy ppo has it, not {loss.policy}; set it to null",
            "loss.dual_clip",
            "loss.policy",
        )
    constant = loss.aggregation == "seq_mean_token_sum_norm"
    if constant and loss.max_length is None:
        yield problem(
            "got null, but loss.aggregation seq_mean_token_sum_norm divides by it; expected an integer >= 1, such as "
            f"data.max_completion_length ({config.data.max_completion_length})",
            "loss.max_length",
            "loss.aggregation",
        )
    if not constant and loss.max_length is not None:
        yield problem(
            f"got {loss.max_length}, but loss.aggregation {loss.aggregation} does not use it; set it to null",
            "loss.max_length",
            "loss.aggregation",
        )


def _no_policy_loss(config: Config) -> Iterator[Problem]:
    """Without a policy loss nothing reads advantages, nor what enters the loss by way of them."""
    if config.loss.policy != "none":
        return
    kl = config.kl
    if not (kl.loss.coef or kl.rollout.coef or config.loss.entropy_coef):
        yield problem(
            "got none, so that nothing is trained on; expected a policy loss, or a term of the loss such as "
            "kl.loss.coef=1 (distillation: with kl.loss.estimator=exact)",
            "loss.policy",
            "kl.loss.coef",
            "kl.rollout.coef",
            "loss.entropy_coef",
        )
    for name, coef in (("reward", kl.reward.coef), ("advantage", kl.advantage.coef)):
        if coef > 0:
            yield problem(
                f"got {coef}, which enters the loss by way of the advantages, but loss.policy none uses none; expected "
                "0, or kl.loss.coef",
                f"kl.{name}.coef",
                "loss.policy",
            )
    if config.has_value_head():
        yield problem(
            "got gae, whose values and advantages loss.policy none does not use; expected another estimator",
            "advantage.estimator",
            "loss.policy",
        )


def _groups(config: Config) -> Iterator[Problem]:
    estimator, samples = config.advantage.estimator, config.rollout.samples_per_prompt
    if estimator in GROUP_ESTIMATORS and samples < 2 and config.loss.policy != "none":
        yield problem(
            f"got {samples}, but advantage.estimator {estimator} compares the completions of a prompt; expected >= 2",
            "rollout.samples_per_prompt",
            "advantage.estimator",
        )


CHECKS = (_value_head, _policy_loss, _no_policy_loss, _groups)
