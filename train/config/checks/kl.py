"""The four placements of KL."""

from collections.abc import Iterator

from train.config.checks.problem import Problem, problem
from train.config.kl import DEFAULT_CONTROLLER, LossKL
from train.config.plan import is_on
from train.config.schema import Config


def _kl_loss(config: Config) -> Iterator[Problem]:
    loss = config.kl.loss
    if is_on(loss) and loss.estimator == "k1" and loss.gradient == "value" and not loss.importance_corrected:
        yield problem(
            "got k1 with kl.loss.gradient value, which trains on noise: the gradient of log pi - log ref is that of "
            "log pi, and E[grad log pi] = 0 on samples of pi. Set kl.loss.gradient=k2 (the gradient of "
            "KL(pi || ref)), another estimator (k2, k3), or kl.loss.importance_corrected=true",
            "kl.loss.estimator",
            "kl.loss.gradient",
            "kl.loss.coef",
            "kl.loss.importance_corrected",
        )
    if loss.max_ratio is not None and not loss.importance_corrected:
        yield problem(
            f"got {loss.max_ratio}, but there is no ratio to bound; set null, or kl.loss.importance_corrected=true",
            "kl.loss.max_ratio",
            "kl.loss.importance_corrected",
        )
    if loss.importance_level != "token":
        yield from _row_ratio(loss)


def _row_ratio(loss: LossKL) -> Iterator[Problem]:
    """The ratio of a row multiplies the estimate with its gradient, and nothing bounds it."""
    got = f"got {loss.importance_level}, but"
    if not loss.importance_corrected:
        text = f"{got} the term has no importance ratio; set token, or kl.loss.importance_corrected=true"
        yield problem(text, "kl.loss.importance_level", "kl.loss.importance_corrected")
    elif loss.gradient != "value":
        text = f"{got} the gradient {loss.gradient} has the ratio of the token; set token, or kl.loss.gradient=value"
        yield problem(text, "kl.loss.importance_level", "kl.loss.gradient")
    elif loss.max_ratio is not None:
        text = f"{got} kl.loss.max_ratio caps the ratio of a token; set it to null"
        yield problem(text, "kl.loss.importance_level", "kl.loss.max_ratio")


def _exact(config: Config) -> Iterator[Problem]:
    """The exact KL samples nothing: it has one gradient, and nothing to correct or to bound."""
    loss = config.kl.loss
    reward = config.kl.reward
    wrong: list[tuple[str, object, str]] = []
    if loss.estimator == "exact":
        if loss.gradient != "value":
            wrong.append(("loss.gradient", loss.gradient, "is differentiated itself; expected value, or leave it out"))
        if loss.importance_corrected:
            wrong.append(("loss.importance_corrected", "true", "is no mean over drawn tokens; expected false"))
        if loss.log_ratio_clip is not None:
            wrong.append(
                ("loss.log_ratio_clip", loss.log_ratio_clip, "has no outliers of a sample to bound; expected null")
            )
        if loss.value_clip is not None:
            wrong.append(("loss.value_clip", loss.value_clip, "has no outliers of a sample to bound; expected null"))
    if reward.estimator == "exact" and reward.value_clip is not None:
        wrong.append(("reward.value_clip", reward.value_clip, "has no outliers of a sample to bound; expected null"))
    for name, got, reason in wrong:
        estimator = f"kl.{name.partition('.')[0]}.estimator"
        yield problem(f"got {got}, but {estimator} exact {reason}", f"kl.{name}", estimator)


def _direction(config: Config) -> Iterator[Problem]:
    loss = config.kl.loss
    if loss.direction != "reverse" and loss.estimator != "exact":
        yield problem(
            f"got {loss.direction}, but kl.loss.estimator {loss.estimator} is of drawn tokens, which are the policy's "
            "and not the reference's; expected reverse, or kl.loss.estimator=exact",
            "kl.loss.direction",
            "kl.loss.estimator",
        )


def _own_reduction(config: Config) -> Iterator[Problem]:
    term = config.kl.loss
    if term.aggregation is None and term.empty_rows != "drop":
        yield problem(
            f"got {term.empty_rows}, but kl.loss.aggregation null takes the reduction of the loss; set loss.empty_rows "
            "or kl.loss.aggregation",
            "kl.loss.empty_rows",
            "kl.loss.aggregation",
        )


def _controller(config: Config) -> Iterator[Problem]:
    for name, term in config.kl.terms().items():
        if term.coef == 0 and term.controller.type != DEFAULT_CONTROLLER.type and not is_on(term):
            yield problem(
                f"got 0 with the {term.controller.type} controller, which multiplies it and so never moves it; "
                "expected a number > 0",
                f"kl.{name}.coef",
                f"kl.{name}.controller",
            )


def _controller_gains(config: Config) -> Iterator[Problem]:
    for name, term in config.kl.terms().items():
        gains = term.controller.options()
        if term.controller.type == "pi" and gains["kp"] == gains["ki"] == 0:
            field = f"kl.{name}.controller"
            yield problem("got kp 0 and ki 0, with which the coefficient never moves; set one of them > 0", field)


def _controller_bounds(config: Config) -> Iterator[Problem]:
    for name, term in config.kl.terms().items():
        lowest = getattr(term.controller, "min_coef", 0.0)
        highest = getattr(term.controller, "max_coef", None)
        if not lowest <= term.coef <= (term.coef if highest is None else highest):
            bounds = f">= {lowest:g}" if highest is None else f"{lowest:g} to {highest:g}"
            yield problem(
                f"got {term.coef:g}, but the bounds of its controller are {bounds}",
                f"kl.{name}.coef",
                f"kl.{name}.controller",
            )


CHECKS = (_kl_loss, _exact, _direction, _own_reduction, _controller, _controller_gains, _controller_bounds)
