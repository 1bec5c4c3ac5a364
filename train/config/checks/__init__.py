"""Checks between fields. A field that would be ignored is a problem too."""

from collections.abc import Callable, Iterator

from train.config.checks import correction, data, guard, kl, layout, loss, optim, reference, report, rollout
from train.config.checks.problem import Problem
from train.config.plan import Plan, is_on, switch_of
from train.config.schema import Config

CHECKS: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    *kl.CHECKS,
    *loss.CHECKS,
    *correction.CHECKS,
    *data.CHECKS,
    *reference.CHECKS,
    *rollout.CHECKS,
    *layout.CHECKS,
    *guard.CHECKS,
    *optim.CHECKS,
    *report.CHECKS,
)


def cross_field_problems(config: Config) -> list[Problem]:
    """Lists the problems of a combination of fields that are each valid.

    An axis of -1 counts as its least size, until the devices are counted.
    """
    unreadable = list(loss.user_functions(config))
    if unreadable:  # without their signatures nothing can be said about arrays and passes
        return unreadable
    repeated = list(layout.one_remaining_axis(config))
    checks = CHECKS
    try:
        if config.mesh.is_filled() and not repeated:
            config = config.with_devices(config.mesh.parts().count)
            checks = (*CHECKS, *layout.OF_ALL_SIZES)
    except ValueError as error:
        repeated.append(Problem(("rollout.mesh", "mesh"), str(error)))
    smallest = layout.with_smallest_mesh(config)
    return [*repeated, *(problem for check in checks for problem in check(smallest))]


def cross_field_warnings(config: Config) -> list[str]:
    """Lists combinations that run but are probably a mistake."""
    warnings = []
    for name, term in config.kl.terms().items():
        if is_on(term) and term.estimator == "none":
            field, value = switch_of(term)
            warnings.append(f"kl.{name}.estimator: none makes this term 0 although kl.{name}.{field} is {value}")
    plan = Plan.of(config)
    if plan.exact_reward and not plan.exact_loss:
        warnings.append(
            "kl.reward.estimator: exact charges a token for the KL at later prefixes alone: that at its own does not "
            "depend on the token; kl.loss.estimator=exact with the same coefficient adds it"
        )
    if is_on(config.kl.loss) and config.kl.loss.gradient == "none":
        warnings.append("kl.loss.gradient: none makes the KL part of the reported loss, but it trains nothing")
    return [*warnings, *data.warnings(config), *correction.warnings(config)]
