"""Combinations of optimizer fields whose first update is not a number."""

from collections.abc import Iterator

from train.config.checks.problem import Problem, problem
from train.config.schema import Config


def _centered_rmsprop(config: Config) -> Iterator[Problem]:
    """Refuses corrected moments of a first update, whose variance is `g^2 - g^2`: its rounding is often below 0."""
    values = config.optim.optimizer.model_dump()
    if values.get("centered") and values.get("bias_correction") and not values.get("initial_scale"):
        text = (
            "got true with centered: true and initial_scale: 0, which divides the first update by the square root of "
            "g^2 - g^2; set bias_correction or centered to false, or initial_scale above 0"
        )
        yield problem(
            text, "optim.optimizer.bias_correction", "optim.optimizer.centered", "optim.optimizer.initial_scale"
        )


CHECKS = (_centered_rmsprop,)
