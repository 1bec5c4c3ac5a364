"""The state of a replay: the recorded arrays, the calls of the header, and every result computed so far."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kljax.systems import Call
from kljax.tools.parity.calls import check_call, run_call, without_none
from kljax.tools.parity.dump import Dump, DumpError
from kljax.tools.parity.fields import METRIC, ORDER, STAGES_OF_METRICS
from kljax.tools.parity.header import RecipeCalls, with_arguments
from kljax.tools.parity.positions import apply_rule, layout_of
from kljax.tools.parity.recipe import AdvantageStep, Recipe, RecipeStep
from kljax.tools.parity.rounding import UNITS, narrowest_dtype

# Numbers that are remembered; beyond them results are computed again.
MEMORY = 1 << 27


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A recomputed result.

    Attributes:
      value: `[B, T]`, `[B]` or a scalar, as the field of the dump.
      bound: how far rounding may move each number of it.
      at: the numbers that are compared, bool.
    """

    value: np.ndarray
    bound: np.ndarray
    at: np.ndarray


class Replay:
    """Recomputes results from the recorded inputs of their stage, and remembers them by the settings they depend on."""

    def __init__(
        self, dump: Dump, plan: RecipeCalls, stages: Mapping[str, "Stage"], metrics: Mapping[str, "Stage"]
    ) -> None:
        self.dump, self.plan = dump, plan
        self._stages = {**stages, **{METRIC + name: stage for name, stage in metrics.items()}}
        small = [name for name in dump if len(dump.stored(name).shape) < 3 and not name.endswith("head")]
        self.arrays = {name: dump.read(name) for name in small}
        self.shape: tuple[int, ...] = self.arrays["mask"].shape
        self.dtype = self._dtype()
        pad, eos = (_token_id(dump, name) for name in ("pad_id", "eos_id"))
        self.layout = layout_of(self.arrays["mask"], self.arrays, pad, eos)
        self._memo: dict[Any, Any] = {}
        self._check_inputs()
        self.notes: list[str] = []
        if plan.recipe.loss is not None and plan.recipe.ratio.old not in self.arrays:
            self.notes.append(f"{plan.recipe.ratio.old} are not recorded: the policy is its own old policy")

    @property
    def metrics(self) -> list[str]:
        """The metrics that can be recomputed."""
        return [name.removeprefix(METRIC) for name in self._stages if name.startswith(METRIC)]

    def predict(self, name: str, recipe: Recipe) -> Prediction:
        """Recomputes a result from the recorded inputs of its stage.

        Args:
          recipe: the settings of its stage and of the stages before it.

        Returns:
          The `Prediction`; it is remembered by the settings that it depends on.
        """
        stages = STAGES_OF_METRICS if name.startswith(METRIC) else ORDER[name]
        key = (name, recipe.rounding, *(getattr(recipe, stage) for stage in stages))
        prediction: Prediction = self.remember(key, lambda: self._stages[name](self, recipe))
        return prediction

    def old_log_probs(self, recipe: Recipe) -> np.ndarray:
        """Returns the log-probs of the old policy; without any in the dump, the policy is its own old policy.

        Returns:
          `[B, T]` in nats.
        """
        return self.arrays.get(recipe.ratio.old, self.arrays["log_probs"])

    def input(self, name: str, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
        """Returns the recorded array, exact, or the recomputed one with its bound.

        Args:
          name: a field of the dump, `[B, T]` or `[B]`.
          recipe: the settings to recompute it with.

        Returns:
          The array and its bounds, of one shape; the bounds of a recorded array are 0.
        """
        if name in self.arrays:
            return self.arrays[name], np.zeros(self.arrays[name].shape)
        prediction = self.predict(name, recipe)
        return prediction.value, prediction.bound

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """Returns the result of an earlier call with the key, or makes it.

        Args:
          key: hashable; all settings that the result depends on, and its name.
          make: computes the result.

        Returns:
          The result. Beyond `MEMORY` numbers all earlier results are forgotten.
        """
        if key not in self._memo:
            if len(self._memo) * math.prod(self.shape) > MEMORY:
                self._memo.clear()
            self._memo[key] = make()
        return self._memo[key]

    def unit(self, name: str, recipe: Recipe) -> float:
        """Returns the unit roundoff of a result: half the distance of 1 to the next number of its dtype.

        Args:
          recipe: its `rounding` names coarser dtypes, each from a field on.

        Returns:
          The roundoff of the dump's dtype, or the largest of the coarser ones that this result has.
        """
        order = list(ORDER)
        position = order.index(name) if name in ORDER else len(order)
        units = [UNITS[self.dtype]]
        for stage, dtype in recipe.rounding:
            # No array depends on the loss.
            if stage == name or (stage in ORDER and stage != "loss" and position >= order.index(stage)):
                units.append(UNITS[dtype])
        return max(units)

    def used_mask(self, recipe: Recipe) -> np.ndarray:
        """Returns the mask that weights, loss and reduction use: the recorded one by the recipe's rule.

        Args:
          recipe: its `mask` is the rule.

        Returns:
          `[B, T]` bool.
        """
        mask: np.ndarray = self.remember(
            ("used", recipe.mask), lambda: apply_rule(self.arrays["mask"], recipe.mask, self.layout)
        )
        return mask

    def call(self, section: str, step: RecipeStep) -> Call:
        """Returns the call of a section of the header with the changes of a step.

        Args:
          section: "correction", "advantage" or "loss".
          step: arguments that replace arguments of the header, where None removes one. Another function drops them all.
        """
        call: Call = self.remember(("call", section, step), lambda: self._make_call(section, step))
        return call

    def _make_call(self, section: str, step: RecipeStep) -> Call:
        call = self.plan.calls[section]
        changes = dict(step.arguments)
        function = changes.pop("function", call.function)
        if function != call.function:
            call = dataclasses.replace(call, function=function, arguments={})
        if isinstance(step, AdvantageStep) and step.skip is not None:
            call = dataclasses.replace(call, then=tuple(inner for inner in call.then if inner.function != step.skip))
        return without_none(with_arguments(call, changes))

    def run(self, section: str, step: RecipeStep, arrays: Mapping[str, Any], **keywords: Any) -> Any:
        """Runs the call of a section with the changes of a step; see `run_call`.

        Args:
          section: "correction", "advantage" or "loss".
          step: without changed arguments, the numbers of the header are checked, once.
          arrays: by the names of the call.
          keywords: further arguments; they are part of the program.
        """
        call = self.call(section, step)
        if not step.arguments:
            self.remember(("checked", section), lambda: check_call(section, call, arrays, **keywords))
        return run_call(section, call, arrays, **keywords)

    def array_name(self, section: str, name: str) -> str:
        """Returns the field that an argument of a call takes.

        Args:
          section: "correction", "advantage" or "loss", which the header has.
          name: an argument, such as `sampling_log_probs`.

        Returns:
          A field of the dump, which need not be recorded, or the name itself if the schema has no such array.
        """
        return self.plan.arrays[section].get(name, name)

    def inputs(self, section: str) -> dict[str, np.ndarray]:
        """Returns the recorded arrays that the call of a section requires.

        Args:
          section: "correction", "advantage" or "loss", which the header has.

        Returns:
          The arrays by argument, without unrecorded ones.
        """
        required = self.remember(("required", section), lambda: self.plan.calls[section].required)
        fields = {name: self.array_name(section, name) for name in required}
        arrays = {"old_log_probs": self.arrays["log_probs"], **self.arrays}
        return {name: arrays[field] for name, field in fields.items() if field in arrays}

    def _dtype(self) -> str:
        declared = self.dump.header.get("dtype")
        if declared is None:
            kinds = {narrowest_dtype(self.arrays[n]) for n in ("log_probs", "old_log_probs") if n in self.arrays}
            return kinds.pop() if len(kinds) == 1 else "float32"
        if declared not in UNITS:
            raise DumpError(f"header.dtype: got {declared!r}, expected one of {', '.join(UNITS)}")
        return str(declared)

    def _check_inputs(self) -> None:
        for name in ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs"):
            if name in self.arrays:
                bad = self.arrays["mask"] & ~np.isfinite(self.arrays[name])
                if bad.any():
                    where = tuple(int(i) for i in np.argwhere(bad)[0])
                    value = self.arrays[name][where]
                    raise DumpError(f"{name}: got {value} at (row, token) {where}, expected a finite number")


Stage = Callable[[Replay, Recipe], Prediction]
"""Recomputes one result from the recorded arrays of a replay under the settings of a recipe."""


def _token_id(dump: Dump, name: str) -> int | None:
    value = dump.header.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise DumpError(f"header.{name}: got {value!r}, expected a token id")
    return value
