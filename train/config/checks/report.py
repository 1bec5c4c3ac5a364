"""Records and traces that a run would not make."""

from collections.abc import Iterator

from train.config.checks.problem import Problem, problem
from train.config.schema import Config


def _traced_steps(config: Config) -> Iterator[Problem]:
    traced = config.profile.steps
    if traced is not None and traced[1] > config.steps:
        yield problem(f"got {list(traced)}, but the run has steps = {config.steps}", "profile.steps", "steps")


def _health(config: Config) -> Iterator[Problem]:
    report = config.report
    if report.unhealthy_after is not None and report.health_port is None:
        text = f"got {report.unhealthy_after:g}, but nothing asks for it; set report.health_port"
        yield problem(text, "report.unhealthy_after", "report.health_port")
    if report.health_port is not None and report.health_port == report.prometheus_port:
        text = f"got {report.health_port}, which is report.prometheus_port; set another one"
        yield problem(text, "report.health_port", "report.prometheus_port")


CHECKS = (_traced_steps, _health)
