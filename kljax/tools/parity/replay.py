"""The state of a replay: the recorded arrays, the calls of the header, and every result computed so far."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kljax.systems import Call
from kljax.systems._call import parameters, run, steps
from kljax.tools.parity.dump import Dump, DumpError, field_of
from kljax.tools.parity.positions import apply_rule, layout_of
from kljax.tools.parity.recipe import Recipe, with_arguments
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
# A program runs a few times: its compilation costs more than its execution.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_PROGRAMS: dict[str, Callable[..., Any]] = {}


class MissingFields(KeyError):
    """Arrays or parts of the header that a stage needs and the dump lacks, by name."""

    def __init__(self, *names: str) -> None:
        super().__init__(f"needs {', '.join(dict.fromkeys(names))}")

    def __str__(self) -> str:
        return str(self.args[0])


class Prediction(NamedTuple):
    """A recomputed result, `[B, T]`, `[B]` or a scalar, as the field of the dump."""

    value: np.ndarray
    bound: np.ndarray  # how far rounding may move each number
    at: np.ndarray  # the numbers that are compared, bool


class Stage(NamedTuple):
    """How a result is recomputed, and the settings of the recipe that it may depend on."""

    compute: Callable[["Replay", Recipe], Prediction]
    settings: tuple[str, ...]


class RowArrays(Mapping[str, np.ndarray]):
    """The recorded arrays of some rows but for logits, hidden states and heads, each read at its first use."""

    def __init__(self, dump: Dump, rows: np.ndarray | None) -> None:
        self._dump = dump
        self._rows = rows
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
      recipe: the settings of its header.
      stages: how each result is recomputed, in the order of the data.
      rows: the numbers of the rows that are replayed, `[B]`.
      batch: the replay of all rows, for what depends on them: divisors, groups, quantiles.
      arrays: the recorded arrays of these rows.
    """

    def __init__(
        self,
        dump: Dump,
        recipe: Recipe,
        stages: Mapping[str, Stage],
        *,
        rows: np.ndarray | None = None,
        batch: "Replay | None" = None,
    ) -> None:
        self.dump = dump
        self.recipe = recipe
        self.stages = stages
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
            self.dtype = batch.dtype
            self.layout = batch.layout.of_rows(self.rows)

    def part(self, rows: np.ndarray) -> "Replay":
        """Returns the replay of some rows of the batch, by their numbers; of all of them, this replay."""
        if len(rows) == len(self.rows):
            return self
        return Replay(self.dump, self.recipe, self.stages, rows=rows, batch=self.batch)

    def parts(self) -> Iterator["Replay"]:
        """Yields replays of a few rows each, which together are the batch."""
        step = max(1, BLOCK // self.shape[1])
        for start in range(0, self.shape[0], step):
            yield self.part(self.rows[start : start + step])

    def predict(self, name: str, recipe: Recipe) -> Prediction:
        """Recomputes a result from the recorded inputs of its stage."""
        stage = self.stages[name]
        key = (name, recipe.rounding, *(getattr(recipe, setting) for setting in stage.settings))
        prediction: Prediction = self.remember(key, lambda: stage.compute(self, recipe))
        return prediction

    def input(self, name: str, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
        """Returns the recorded array, exact, or the recomputed one with its bound.

        Raises:
          MissingFields: if it is neither recorded nor the result of a stage.
        """
        if name in self.arrays:
            return self.arrays[name], np.zeros(self.arrays[name].shape)
        if name not in self.stages:
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
        order = list(self.stages)
        units = [UNITS[self.dtype]]
        for stage, dtype in recipe.rounding:
            # No array depends on a scalar.
            if stage == name or (self.arrays[stage].ndim and order.index(name) >= order.index(stage)):
                units.append(UNITS[dtype])
        return max(units)

    def used_mask(self, recipe: Recipe) -> np.ndarray:
        """Returns the mask that weights, loss and reduction use, `[B, T]`: the recorded one by the recipe's rule."""
        mask: np.ndarray = self.remember(
            ("used", recipe.mask), lambda: apply_rule(self.arrays["mask"], recipe.mask, self.layout)
        )
        return mask

    def call(self, section: str, recipe: Recipe) -> Call:
        """Returns the call of a section of the header with the changes of a recipe.

        Raises:
          MissingFields: if the header has no such section.
        """
        if section not in recipe.calls:
            raise MissingFields(f"header.{section}")
        call = recipe.calls[section]
        changes = dict(getattr(recipe, section).arguments)
        function = changes.pop("function", call.function)
        if function != call.function:
            call = dataclasses.replace(call, function=function, arguments={})
        if section == "advantage" and recipe.advantage.skip is not None:
            then = tuple(inner for inner in call.then if inner.function != recipe.advantage.skip)
            call = dataclasses.replace(call, then=then)
        return with_arguments(call, changes)

    def run(
        self,
        section: str,
        recipe: Recipe,
        arrays: Mapping[str, Any],
        cotangent: np.ndarray | None = None,
        **keywords: Any,
    ) -> np.ndarray:
        """Runs the call of a section with the changes of a recipe; see `run_call`."""
        call = self.call(section, recipe)
        if not getattr(recipe, section).arguments:
            # A program does not see the numbers, so that the function cannot refuse them.
            shaped = functools.partial(jax.eval_shape, lambda x: run(call, x, **keywords), dict(arrays))
            self.batch.remember(("checked", section), lambda: _refusing(section, shaped))
        return run_call(section, call, arrays, cotangent, **keywords)

    def array_name(self, section: str, name: str) -> str:
        """Returns the field that an argument of a call takes."""
        return self.recipe.arrays[section].get(name, name)

    def inputs(self, section: str) -> dict[str, np.ndarray]:
        """Returns the recorded arrays that the call of a section requires, by argument.

        Raises:
          MissingFields: naming arrays and arguments that the call needs, but for results of its stage.
        """
        call = self.call(section, self.recipe)
        # Arguments that are numbers or words, which the header can hold.
        settings = {
            parameter.name
            for step, _ in steps(call)
            for parameter in parameters(step)
            if parameter.kind is parameter.KEYWORD_ONLY
            and not re.search("ArrayLike|Mask|Sequence", str(parameter.annotation))
        }
        inputs = {}
        missing = []
        for name in call.required:
            field = self.array_name(section, name)
            if field == "old_log_probs" and field not in self.arrays:
                field = "log_probs"
            if section == "advantage" and field == "advantages":
                missing.append(f"advantages before {call.function}")
            elif field in self.arrays:
                inputs[name] = self.arrays[field]
            elif name not in COMPUTED[section]:
                missing.append(f"header.{section}.{name}" if name in settings else field)
        if call.function == "gdpo_advantages":
            missing.append("rewards of each reward function")
        if section == "correction" and not {"log_probs", "sampling_log_probs"} <= set(call.required):
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


def remembered(key: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the program of an earlier call with the key, or makes one of this function."""
    if key not in _PROGRAMS:
        _PROGRAMS[key] = jax.jit(function, compiler_options=QUICK)
    return _PROGRAMS[key]


def run_call(
    section: str, call: Call, arrays: Mapping[str, Any], cotangent: np.ndarray | None = None, **keywords: Any
) -> np.ndarray:
    """Runs a call on arrays, or with a cotangent `[B, T]` differentiates it by `log_probs`.

    The program is compiled once for all numbers of the arguments.

    Raises:
      DumpError: naming the section, if the function refuses its arguments.
    """
    numbers: list[float] = []

    def take_numbers(step: Call) -> dict[str, Any]:
        """Takes the numbers out of a step; an ellipsis marks where they were."""
        scalars = scalar_parameters(step)
        numeric = {name: x for name, x in step.arguments.items() if name in scalars and isinstance(x, int | float)}
        taken = {name: x for name, x in numeric.items() if not isinstance(x, bool)}
        numbers.extend(map(float, taken.values()))
        return {**step.arguments, **dict.fromkeys(taken, ...)}

    fixed = _each_step(call, take_numbers)

    def compute(arrays: Mapping[str, Any], numbers: list[Any], cotangent: Any) -> Any:
        rest = iter(numbers)

        def put_back(step: Call) -> dict[str, Any]:
            return {name: next(rest) if value is ... else value for name, value in step.arguments.items()}

        with_numbers = _each_step(fixed, put_back)

        def values(log_probs: Any) -> Any:
            given = arrays if log_probs is None else {**arrays, "log_probs": log_probs}
            result = run(with_numbers, given, **keywords)
            return result[0] if isinstance(result, tuple) else result

        def by_token(log_probs: Any) -> Any:
            result = values(log_probs)
            return jnp.broadcast_to(result if result.ndim > 1 else result[:, None], cotangent.shape)

        return values(None) if cotangent is None else jax.vjp(by_token, arrays["log_probs"])[1](cotangent)[0]

    # A program copies all of its arguments to the device.
    taken = {step.renamed.get(p.name, p.name) for step, after in steps(call) for p in parameters(step, after)}
    inputs = {name: array for name, array in arrays.items() if name in (*taken, "log_probs")}
    program = remembered(f"{fixed!r} {keywords!r}", compute)
    return np.asarray(_refusing(section, program, inputs, numbers, cotangent), np.float64)


def scalar_parameters(call: Call) -> list[str]:
    """Lists the parameters of a call's function that are real numbers, such as a clip or an epsilon."""
    return [parameter.name for parameter in parameters(call) if str(parameter.annotation).startswith("float")]


def _each_step(call: Call, arguments: Callable[[Call], Mapping[str, Any]]) -> Call:
    """Returns a call whose steps, itself first, have other arguments."""
    own = arguments(call)
    inner: dict[str, Any] = {
        kind: tuple(_each_step(step, arguments) for step in getattr(call, kind)) for kind in ("times", "plus", "then")
    }
    return dataclasses.replace(call, arguments=own, **inner)


def _refusing(section: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Names the section of the header whose arguments a function refuses."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise DumpError(f"header.{section}: {error}") from error
