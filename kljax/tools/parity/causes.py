"""A cause of a difference: a recipe with other settings of one stage."""

import dataclasses
from typing import Any

from kljax.tools.parity.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Cause:
    """A fault that may explain a difference.

    Attributes:
      stage: the stage of the recipe that it changes.
      name: a short name, unique with the stage.
      text: one sentence for the report.
      settings: settings of the stage.
      also: stages that share the fault, each with its settings.
      number: the number that was solved from the arrays; None for a choice.
      limits: the smallest and the largest number that agree as well, where they differ by more than rounding.
    """

    stage: str
    name: str
    text: str
    settings: tuple[tuple[str, Any], ...] = ()
    also: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    number: float | None = None
    limits: tuple[float, float] | None = None

    @property
    def key(self) -> str:
        """`stage: name`."""
        return f"{self.stage}: {self.name}"

    def apply(self, recipe: Recipe) -> Recipe:
        """Returns the recipe with the fault; arguments of a call are added to the arguments already changed."""
        for stage, settings in ((self.stage, self.settings), *self.also):
            if stage == "rounding":
                recipe = dataclasses.replace(recipe, rounding=(*recipe.rounding, *settings))
                continue
            if getattr(recipe, stage) is None:
                continue
            changes = dict(settings)
            if "arguments" in changes:
                changes["arguments"] = (*getattr(recipe, stage).arguments, *changes["arguments"])
            recipe = recipe.changed(stage, **changes)
        return recipe


def make(stage: str, name: str, text: str, **settings: Any) -> Cause:
    """Makes a cause of one stage from keyword settings."""
    return Cause(stage, name, text, tuple(settings.items()))
