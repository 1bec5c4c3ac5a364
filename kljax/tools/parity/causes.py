"""A cause of a difference: a recipe with other settings of one stage."""

import dataclasses
from typing import Any

from kljax.tools.parity.recipe import Recipe
from kljax.tools.parity.replay import Replay


@dataclasses.dataclass(frozen=True)
class Cause:
    """A fault that may explain a difference.

    Attributes:
      stage: the stage of the recipe that it changes.
      name: a short name, unique with the stage.
      text: one sentence for the report.
      settings: settings of the stage.
      also: stages that share the fault, each with its settings.
      alone: whether it is too rare to be tried together with others.
      number: the number that was solved from the arrays; None for a choice.
      limits: the smallest and the largest number that agree as well, where they differ by more than rounding.
    """

    stage: str
    name: str
    text: str
    settings: tuple[tuple[str, Any], ...]
    also: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    alone: bool = False
    number: float | None = None
    limits: tuple[float, float] | None = None

    @property
    def key(self) -> str:
        """`stage: name`."""
        return f"{self.stage}: {self.name}"

    @property
    def arguments(self) -> tuple[tuple[str, Any], ...]:
        """Its settings and the arguments of a call among them, by name."""
        return tuple(
            item for name, value in self.settings for item in (value if name == "arguments" else ((name, value),))
        )

    def apply(self, recipe: Recipe) -> Recipe:
        """Returns the recipe with the fault; arguments of a call are added to the arguments already changed.

        Args:
          recipe: the settings; a stage that is None stays None.
        """
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

    def conflicts(self, other: "Cause") -> bool:
        """Tells whether both change the same setting, so that only one of them can hold.

        Returns:
          True if they share a stage and a setting, or an argument of a call.
        """
        return bool(self._touched() & other._touched())

    def _touched(self) -> set[tuple[str, str]]:
        touched = set()
        for stage, settings in ((self.stage, self.settings), *self.also):
            for name, value in settings:
                arguments = [key for key, _ in value] if name == "arguments" else [name]
                touched |= {(stage, str(argument)) for argument in arguments}
        return touched


def make(stage: str, name: str, text: str, **settings: Any) -> Cause:
    """Makes a cause from keyword settings.

    Args:
      name: a short name, unique with the stage.

    Returns:
      A `Cause` of one stage, which may be tried together with others.
    """
    return Cause(stage, name, text, tuple(settings.items()))


def rare(stage: str, name: str, text: str, **settings: Any) -> Cause:
    """Makes a cause that is not tried together with others.

    Args:
      name: a short name, unique with the stage.

    Returns:
      A `Cause` of one stage.
    """
    return Cause(stage, name, text, tuple(settings.items()), alone=True)


def rounding_causes(replay: Replay, field: str) -> list[Cause]:
    """Lists coarser dtypes that a field may have been computed in.

    Args:
      replay: the recorded arrays; its dtype is the finest.
      field: the first result with the coarser dtype; the results after it have it too.

    Returns:
      One cause per coarser dtype, named after it, the finest first; none for float16 and bfloat16.
    """
    coarser = {"float64": ("float32", "float16", "bfloat16"), "float32": ("float16", "bfloat16")}
    return [
        Cause("rounding", dtype, f"rounding of {dtype} from {field} on", ((field, dtype),))
        for dtype in coarser.get(replay.dtype, ())
    ]
