"""Advantages and the loss."""

from collections.abc import Collection, Iterator

from train.config.algorithms import Algorithm, UserFunction
from train.config.checks.functions import function_problems
from train.config.checks.problem import Problem, problem
from train.config.plan import (
    ADVANTAGE_ARRAYS,
    CORRECTION_ARRAYS,
    LOSS_ARRAYS,
    Plan,
    advantage_signature,
    divides_by_length,
    is_on,
    switch_of,
)
from train.config.schema import Config


def user_functions(config: Config) -> Iterator[Problem]:
    """Checks the functions of the user from their source: that they exist, their arrays and their arguments."""
    chosen: list[tuple[str, Algorithm, Collection[str]]] = [
        ("loss", config.loss, LOSS_ARRAYS),
        ("advantage", config.advantage, ADVANTAGE_ARRAYS),
        *((f"correction[{number}]", entry, CORRECTION_ARRAYS) for number, entry in enumerate(config.correction)),
    ]
    for path, section, available in chosen:
        if isinstance(section, UserFunction):
            function = f"{path}.function"
            arguments = f"{path}.arguments"
            yield from function_problems(section.function, section.arguments, function, arguments, available)


def _value_head(config: Config) -> Iterator[Problem]:
    loss = config.loss
    estimator = config.advantage.type
    trained = Plan.of(config).value_head
    if trained and loss.value_coef == 0:
        yield problem(
            f"got 0, but advantage.type {estimator} learns a value head; expected a number > 0 such as 0.5",
            "loss.value_coef",
            "advantage.type",
        )
    if not trained and "values" not in advantage_signature(config):
        for name, value in (("value_coef", loss.value_coef or None), ("value_clip", loss.value_clip)):
            if value is not None:
                off = "0.0" if name == "value_coef" else "null"
                yield problem(
                    f"got {value}, but advantage.type {estimator} has no value head; set it to {off} or use gae",
                    f"loss.{name}",
                    "advantage.type",
                )


def _reduction(config: Config) -> Iterator[Problem]:
    loss = config.loss
    if loss.max_length is not None and not divides_by_length(config):
        yield problem(
            f"got {loss.max_length}, but loss.aggregation {loss.aggregation} does not use it; set it to null",
            "loss.max_length",
            "loss.aggregation",
        )


def _no_advantages(config: Config) -> Iterator[Problem]:
    """Checks what enters the loss by way of the advantages, if the loss reads none."""
    plan = Plan.of(config)
    kl = config.kl
    chosen = config.loss.type
    if plan.advantage is not None:
        return
    if plan.loss is None and not (is_on(kl.loss) or kl.rollout.coef or config.loss.has_entropy_term()):
        yield problem(
            "got none, so that nothing is trained on; expected a policy loss, or a term of the loss such as "
            "kl.loss.coef=1 (distillation: with kl.loss.estimator=exact)",
            "loss.type",
            "kl.loss.coef",
            "kl.rollout.coef",
            "loss.entropy_coef",
        )
    for name in ("reward", "advantage"):
        term = kl.terms()[name]
        if is_on(term):
            field, value = switch_of(term)
            off = "0" if field == "coef" else "fixed"
            yield problem(
                f"got {value}, which enters the loss by way of the advantages, but loss.type {chosen} uses none; "
                f"expected {off}, or kl.loss.{field}",
                f"kl.{name}.{field}",
                "loss.type",
            )
    if "values" in advantage_signature(config):
        yield problem(
            f"got {config.advantage.type}, whose values and advantages loss.type {chosen} does not use; expected "
            "another estimator",
            "advantage.type",
            "loss.type",
        )


def _groups(config: Config) -> Iterator[Problem]:
    advantage = Plan.of(config).advantage
    samples = config.rollout.samples_per_prompt
    if advantage is not None and "group_ids" in advantage and samples < 2:
        yield problem(
            f"got {samples}, but advantage.type {config.advantage.type} compares the completions of a prompt; "
            "expected >= 2",
            "rollout.samples_per_prompt",
            "advantage.type",
        )


def _rows_and_tokens(config: Config) -> Iterator[Problem]:
    """Checks the rows and the tokens that the advantages leave out."""
    section = config.advantage
    if section.empty_rows == "drop" and "group_ids" not in advantage_signature(config):
        yield problem(
            f"got drop, but advantage.type {section.type} compares no rows; leave it at count",
            "advantage.empty_rows",
            "advantage.type",
        )
    if section.zeros == "drop" and config.loss.rejected_tokens == "count":
        yield problem(
            "got drop, which takes tokens out of the denominators, but loss.rejected_tokens is count; set only one of "
            "them",
            "advantage.zeros",
            "loss.rejected_tokens",
        )


def _unfinished(config: Config) -> Iterator[Problem]:
    if config.loss.unfinished == "drop" and config.loss.rejected_tokens == "count":
        yield problem(
            "got drop, which takes completions out of the denominators, but loss.rejected_tokens is count; set only "
            "one of them",
            "loss.unfinished",
            "loss.rejected_tokens",
        )


def _entropy(config: Config) -> Iterator[Problem]:
    if config.loss.entropy_aggregation is not None and not config.loss.has_entropy_term():
        yield problem(
            f"got {config.loss.entropy_aggregation}, but loss.entropy_coef is 0, so there is no entropy bonus; set "
            "loss.entropy_coef, or leave it at null",
            "loss.entropy_aggregation",
            "loss.entropy_coef",
        )
    coef = config.loss.entropy_coef
    controller = config.loss.entropy_controller
    lowest = getattr(controller, "min_coef", coef)
    highest = getattr(controller, "max_coef", coef)
    if not lowest <= coef <= highest:
        yield problem(
            f"got {coef:g}, but the bounds of its controller are {lowest:g} to {highest:g}",
            "loss.entropy_coef",
            "loss.entropy_controller",
        )


def _balance(config: Config) -> Iterator[Problem]:
    section = config.advantage
    if section.balance != 0 and not section.scale_by_mean:
        yield problem(
            f"got {section.balance:g}, which acts before the division by the mean size of the advantages; set "
            "advantage.scale_by_mean=true, or advantage.balance=0",
            "advantage.balance",
            "advantage.scale_by_mean",
        )


def _whole_update(config: Config) -> Iterator[Problem]:
    parts = config.optim.micro_batches
    if Plan.of(config).whole_update and parts > 1:
        yield problem(
            f"got {parts}, but loss.type {config.loss.type} compares all tokens of an update; expected 1, with "
            "optim.updates_per_batch for smaller updates",
            "optim.micro_batches",
            "loss.type",
        )


CHECKS = (
    _value_head,
    _reduction,
    _no_advantages,
    _groups,
    _rows_and_tokens,
    _unfinished,
    _balance,
    _entropy,
    _whole_update,
)
