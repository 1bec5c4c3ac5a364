"""The state of a replay: the recorded arrays, the calls of the header, and every result computed so far."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from kljax.systems import Call
from kljax.systems._call import parameters, steps
from kljax.tools.parity.calls import check_call, run_call, without_none
from kljax.tools.parity.dump import Dump, DumpError
from kljax.tools.parity.fields import METRIC, ORDER, STAGES_OF_METRICS, field_of
from kljax.tools.parity.header import RecipeCalls, with_arguments
from kljax.tools.parity.positions import apply_rule, layout_of
from kljax.tools.parity.recipe import AdvantageStep, Recipe, RecipeStep
from kljax.tools.parity.rounding import UNITS, narrowest_dtype

# Numbers that are remembered; beyond them results are computed again.
MEMORY = 1 << 24
# Numbers of one `[B, T]` array that are computed at a time.
BLOCK = 1 << 18
# Inputs that the stage of a section computes, or is given as a constant.
COMPUTED = {
    "correction": ("mask",),
    "advantage": ("mask", "kl", "coef", "num_groups", "token_rewards"),
    "loss": ("mask", "key", "advantages"),
}


class MissingFields(KeyError):
    """Arrays or parts of the header that a stage needs and the dump lacks, by name."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.names = tuple(dict.fromkeys(names))

    def __str__(self) -> str:
        return f"needs {', '.join(self.names)}"


class Prediction(NamedTuple):
    """A recomputed result.

    Attributes:
      value: `[B, T]`, `[B]` or a scalar, as the field of the dump.
      bound: how far rounding may move each number of it.
      at: the numbers that are compared, bool.
    """

    value: np.ndarray
    bound: np.ndarray
    at: np.ndarray


class RowArrays(Mapping[str, np.ndarray]):
    """The recorded arrays of some rows but for logits, hidden states and heads, each read at its first use."""

    def __init__(self, dump: Dump, rows: np.ndarray | None) -> None:
        self._dump, self._rows = dump, rows
        self._names = [name for name in dump if len(dump.stored(name).shape) < 3 and not name.endswith("head")]
        self._read: dict[str, np.ndarray] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise MissingFields(name)
        if name not in self._read:
            by_row = field_of(name).axes.startswith("B")
            self._read[name] = self._dump.read(name, self._rows if by_row else None)
        return self._read[name]


class Replay:
    """Recomputes results from the recorded inputs of their stage, and remembers them by the settings they depend on.

    Attributes:
      dump: the file.
      plan: the settings and calls of its header.
      rows: the numbers of the rows that are replayed, `[B]`.
      whole: the replay of all rows, for what depends on the batch: divisors, groups, quantiles.
      arrays: the recorded arrays of these rows.
    """

    def __init__(
        self,
        dump: Dump,
        plan: RecipeCalls,
        stages: Mapping[str, "Stage"],
        *,
        rows: np.ndarray | None = None,
        batch: "Replay | None" = None,
    ) -> None:
        self.dump, self.plan, self.stages = dump, plan, stages
        self.batch = self if batch is None else batch
        self.rows = np.arange(dump.sizes["B"]) if rows is None else rows
        self.arrays = RowArrays(dump, rows)
        self.shape = (len(self.rows), dump.sizes["T"])
        self._memo: dict[Any, Any] = {}
        if batch is None:
            self.dtype = self._dtype()
            eos = dump.header.get("eos_id")
            eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
            self.layout = layout_of(self.arrays["mask"], self.arrays, dump.header.get("pad_id"), eos)
        else:
            self.dtype, self.layout = batch.dtype, batch.layout.of_rows(self.rows)

    def part(self, rows: np.ndarray) -> "Replay":
        """Returns the replay of some rows of the batch.

        Args:
          rows: `[R]` numbers of rows; all of them give this replay.
        """
        if len(rows) == len(self.rows):
            return self
        return Replay(self.dump, self.plan, self.stages, rows=rows, batch=self.batch)

    def parts(self) -> Iterator["Replay"]:
        """Yields replays of a few rows each, which together are the batch."""
        step = max(1, BLOCK // self.shape[1])
        for start in range(0, self.shape[0], step):
            yield self.part(self.rows[start : start + step])

    def predict(self, name: str, recipe: Recipe) -> Prediction:
        """Recomputes a result from the recorded inputs of its stage."""
        stages = STAGES_OF_METRICS if name.startswith(METRIC) else ORDER[name]
        key = (name, recipe.rounding, *(getattr(recipe, stage) for stage in stages))
        prediction: Prediction = self.remember(key, lambda: self.stages[name](self, recipe))
        return prediction

    def input(self, name: str, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
        """Returns the recorded array, exact, or the recomputed one with its bound.

        Raises:
          MissingFields: if it is neither recorded nor the result of a stage.
        """
        if name in self.arrays:
            return self.arrays[name], np.zeros(self.arrays[name].shape)
        if name not in ORDER:
            raise MissingFields(name)
        prediction = self.predict(name, recipe)
        return prediction.value, prediction.bound

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """Returns the result of an earlier call with the key, or makes it."""
        if key not in self._memo:
            if len(self._memo) * math.prod(self.shape) > MEMORY:
                self._memo.clear()
            self._memo[key] = make()
        return self._memo[key]

    def unit(self, name: str, recipe: Recipe) -> float:
        """Returns the unit roundoff of a result: half the distance of 1 to the next number of its dtype."""
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

        Returns `[B, T]` bool.
        """
        mask: np.ndarray = self.remember(
            ("used", recipe.mask), lambda: apply_rule(self.arrays["mask"], recipe.mask, self.layout)
        )
        return mask

    def call(self, section: str, step: RecipeStep) -> Call:
        """Returns the call of a section of the header with the changes of a step.

        Raises:
          MissingFields: if the header has no such section.
        """
        if section not in self.plan.calls:
            raise MissingFields(f"header.{section}")
        call = self.plan.calls[section]
        changes = dict(step.arguments)
        function = changes.pop("function", call.function)
        if function != call.function:
            call = dataclasses.replace(call, function=function, arguments={})
        if isinstance(step, AdvantageStep) and step.skip is not None:
            call = dataclasses.replace(call, then=tuple(inner for inner in call.then if inner.function != step.skip))
        return without_none(with_arguments(call, changes))

    def run(self, section: str, step: RecipeStep, arrays: Mapping[str, Any], **keywords: Any) -> np.ndarray:
        """Runs the call of a section with the changes of a step; see `run_call`."""
        call = self.call(section, step)
        if not step.arguments:
            self.batch.remember(("checked", section), lambda: check_call(section, call, arrays, **keywords))
        return run_call(section, call, arrays, **keywords)

    def array_name(self, section: str, name: str) -> str:
        """Returns the field that an argument of a call takes."""
        return self.plan.arrays[section].get(name, name)

    def inputs(self, section: str) -> dict[str, np.ndarray]:
        """Returns the recorded arrays that the call of a section requires, by argument.

        Raises:
          MissingFields: naming arrays and arguments that the call needs, but for results of its stage.
        """
        if section not in self.plan.calls:
            raise MissingFields(f"header.{section}")
        required = self.plan.calls[section].required
        settings = _settings(self.plan.calls[section])
        inputs = {}
        missing = []
        for name in required:
            field = self.array_name(section, name)
            if field == "old_log_probs" and field not in self.arrays:
                field = "log_probs"
            if section == "advantage" and field == "advantages":
                missing.append(f"advantages before {self.plan.calls[section].function}")
            elif field in self.arrays:
                inputs[name] = self.arrays[field]
            elif name not in COMPUTED[section]:
                missing.append(f"header.{section}.{name}" if name in settings else field)
        if self.plan.calls[section].function == "gdpo_advantages":
            missing.append("rewards of each reward function")
        if section == "correction" and not {"log_probs", "sampling_log_probs"} <= set(required):
            missing.append("a function of log_probs and sampling_log_probs")
        if missing:
            raise MissingFields(*missing)
        return inputs

    def _dtype(self) -> str:
        declared = self.dump.header.get("dtype")
        if declared is None:
            kinds = {narrowest_dtype(self.arrays[n]) for n in ("log_probs", "old_log_probs") if n in self.arrays}
            return kinds.pop() if len(kinds) == 1 else "float32"
        if declared not in UNITS:
            raise DumpError(f"header.dtype: got {declared!r}, expected one of {', '.join(UNITS)}")
        return str(declared)


Stage = Callable[[Replay, Recipe], Prediction]
"""Recomputes one result from the recorded arrays of a replay under the settings of a recipe."""


def _settings(call: Call) -> set[str]:
    """Returns the arguments of a call that are numbers or words, which the header can hold."""
    return {
        parameter.name
        for step, _ in steps(call)
        for parameter in parameters(step)
        if parameter.kind is parameter.KEYWORD_ONLY
        and not re.search("ArrayLike|Mask|Sequence", str(parameter.annotation))
    }
