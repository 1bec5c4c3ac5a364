"""The numbers of every stage that follow from the arrays: coefficients, clips, caps, epsilons, discounts, factors."""

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np

import kljax
from kljax.systems import Call
from kljax.systems._call import steps
from kljax.tools.parity.advantages import cut_rows
from kljax.tools.parity.calls import scalar_parameters
from kljax.tools.parity.causes import Cause
from kljax.tools.parity.losses import drifts, mismatches, row_distances
from kljax.tools.parity.policies import declared_log_ratio_clip
from kljax.tools.parity.positions import over_tokens
from kljax.tools.parity.recipe import Kl, Recipe
from kljax.tools.parity.replay import Replay

# Values between which an argument of a call is looked for, by its name; a clip is a distance from 1.
SMALL = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8)
GRIDS: dict[str, tuple[float, ...]] = {
    "clip_low": (*SMALL, 0.9999),
    "clip_high": (*SMALL, 1.0, 2.0, 4.0, 8.0, 30.0, 1000.0),
    "dual_clip": (1.0001, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 30.0, 1000.0),
    "eps": (0.0, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0),
    "gamma": (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0),
    "lam": (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99, 1.0),
    "upper": (1e-2, 0.1, 0.5, 0.8, 0.9, 1.0, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 1e3, 1e6),
    "lower": (0.0, 1e-3, 1e-2, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.1),
    "log_ratio_clip": (1e-2, 0.1, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0),
}
GRIDS["max_ratio"] = GRIDS["max_weight"] = GRIDS["upper"]
GRIDS["bound"] = GRIDS["value_clip"] = GRIDS["max_log_ratio"] = GRIDS["log_ratio_clip"]
MULTIPLES = (1e-3, 1e-2, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.33, 2.0, 4.0, 10.0, 100.0, 1000.0)
KL_COEFFICIENTS = (-1.0, -0.1, 0.0, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.2, 0.5, 1.0, 3.0)
EVENLY = (-2.0, -1.5, -1.0, -0.75, -0.5, -0.25, -0.1, 0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
TEMPERATURES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


@dataclasses.dataclass(frozen=True)
class UnknownNumber:
    """A number of a stage that the arrays determine.

    Attributes:
      stage: the stage of the recipe.
      setting: its name among the settings of the stage, or among the arguments of the call.
      declared: its value by the header; None if it has none.
      grid: increasing values between which it is looked for; empty if the results are linear in it.
      argument: whether it is an argument of the call.
      settings: further settings of the stage that go with it.
      shared: stages that have the number, too.
      alone: whether it is too rare to be looked for together with other causes of a field.
    """

    stage: str
    setting: str
    declared: float | None
    grid: tuple[float, ...] = ()
    argument: bool = False
    settings: tuple[tuple[str, Any], ...] = ()
    shared: tuple[str, ...] = ()
    alone: bool = False

    def cause(self, recipe: Recipe, value: float, note: str = "") -> Cause:
        """Returns the cause that the number has a value.

        Args:
          recipe: the settings that the cause changes; shared stages keep the proportion of their numbers.
          note: the end of the text.
        """
        changed = (("arguments", ((self.setting, value),)),) if self.argument else ((self.setting, value),)
        header = "has none" if self.declared is None else f"says {self.declared:g}"
        beside = "".join(f" with {name} {word}" for name, word in self.settings)
        text = f"{self.stage}.{self.setting}: the header {header}, the arrays say {value:.6g}{beside}{note}"
        before = getattr(getattr(recipe, self.stage), self.setting) if self.shared else None
        also = []
        for stage in self.shared if before != value else ():
            if getattr(recipe, stage) is None:
                continue
            shared = getattr(getattr(recipe, stage), self.setting)
            proportional = shared * value / before if before and shared else value
            also.append((stage, ((self.setting, value if shared == before else proportional),)))
        name = f"{self.setting} {value:.6g}"
        return Cause(self.stage, name, text, (*changed, *self.settings), tuple(also), number=value)


def numbers_of(replay: Replay) -> list[UnknownNumber]:
    """Lists the numbers of a dump, in the order of the data."""
    numbers = [*_of_scores(replay), *_of_ratio(replay), *_of_correction(replay), *_of_kl(replay)]
    return [*numbers, *_of_advantage(replay), *_of_loss(replay), *_of_reduction(replay)]


def note_on_factor(replay: Replay, number: UnknownNumber, value: float) -> str:
    """Says what a factor of the loss or of its gradient may come from.

    Returns:
      The end of a text, empty for other numbers.
    """
    if (number.stage, number.setting) not in (("reduction", "scale"), ("gradient", "scale")):
        return ""
    factor = value / (number.declared or 1.0)
    tokens = int(replay.arrays["mask"].sum())
    if factor > 1 and factor == round(factor):
        return f": a sum over {factor:g} ranks or micro-batches, not their mean"
    inverse = round(1 / factor, 9) if factor else 0.0
    if inverse > 1 and inverse == round(inverse):
        return f": divided by {inverse:g} ranks or micro-batches once more"
    divisor = round(tokens / factor, 4) if factor else 0.0
    if number.stage == "reduction" and replay.plan.recipe.reduction.mode == "token_mean" and divisor == round(divisor):
        return f": divided by {divisor:g}, not by the {tokens} tokens of the batch"
    return ""


def _around(value: float) -> tuple[float, ...]:
    multiples = sorted(value * factor for factor in MULTIPLES)
    return (*(-x for x in reversed(multiples)), 0.0, *multiples) if value > 0 else (*multiples, 0.0)


def _of_scores(replay: Replay) -> Iterator[UnknownNumber]:
    for stage, side in (("log_probs", ""), ("reference", "ref_")):
        if f"{side}logits" in replay.dump or f"{side}hidden" in replay.dump:
            base = getattr(replay.plan.recipe, stage)
            yield UnknownNumber(stage, "temperature", base.temperature, TEMPERATURES)
            caps = tuple((base.softcap or 10.0) * factor for factor in (0.1, 0.2, *MULTIPLES[3:13]))
            yield UnknownNumber(stage, "softcap", base.softcap, caps)
            yield UnknownNumber(stage, "scale", base.scale)
            # Without a cap, the scale of the logits is a temperature.
            if base.logit_scale != 1 and base.softcap is not None:
                grid = tuple(base.logit_scale * x for x in MULTIPLES[2:13])
                yield UnknownNumber(stage, "logit_scale", base.logit_scale, grid)


def _of_ratio(replay: Replay) -> Iterator[UnknownNumber]:
    yield UnknownNumber("ratio", "factor", 1.0, MULTIPLES[2:13])
    # Of the loss alone, it is an argument of the loss.
    if "ratio" in replay.arrays:
        declared = declared_log_ratio_clip(replay.plan)
        yield UnknownNumber("ratio", "log_ratio_clip", declared, GRIDS["log_ratio_clip"])


def _of_correction(replay: Replay) -> Iterator[UnknownNumber]:
    if replay.plan.recipe.correction is not None:
        yield from _of_call("correction", replay.plan.calls["correction"])
        inputs, mask = replay.inputs("correction"), replay.arrays["mask"]
        if {"log_probs", "sampling_log_probs"} <= set(inputs):
            ratios = np.where(mask, np.exp(inputs["log_probs"] - inputs["sampling_log_probs"]), np.inf).min(1)
            yield UnknownNumber("correction", "veto", 0.0, (0.0, *_between(ratios[mask.any(1)])), alone=True)
        yield UnknownNumber("correction", "scale", 1.0)


def _of_kl(replay: Replay) -> Iterator[UnknownNumber]:
    kl = replay.plan.recipe.kl
    if kl is None:
        return
    # Of the loss alone, a factor of the estimate is one of the coefficient.
    if "kl" in replay.arrays:
        yield UnknownNumber("kl", "scale", kl.scale)
        yield UnknownNumber("kl", "offset", 0.0)
        values = replay.arrays["kl"][replay.arrays["mask"]]
        yield UnknownNumber("kl", "floor", None, _range_of(values))
    names = (
        "value_clip",
        *(("bound",) if kl.corrected else ()),
        "log_ratio_clip",
        *(("max_ratio",) if kl.corrected else ()),
    )
    for name in names:
        yield UnknownNumber("kl", name, getattr(kl, name), GRIDS[name])
    around = _around(abs(kl.coef) or 0.01)
    yield UnknownNumber("kl", "coef", float(kl.coef), () if kl.place == "loss" else around)


def _of_advantage(replay: Replay) -> Iterator[UnknownNumber]:
    if replay.plan.recipe.advantage is None:
        return
    call = replay.plan.calls["advantage"]
    names = set()
    for number in _of_call("advantage", call):
        # The coefficient of a KL that the call subtracts is that of the KL.
        if number.setting != "coef":
            names.add(number.setting)
            yield number
    yield UnknownNumber("advantage", "scale", 1.0)
    yield UnknownNumber("advantage", "clip", None, (1e-3, 1e-2, 0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0))
    yield UnknownNumber("advantage", "offset", 0.0)
    yield UnknownNumber("advantage", "reward_scale", 1.0, MULTIPLES)
    largest = float(np.abs(replay.arrays["rewards"]).max()) if "rewards" in replay.arrays else 0.0
    if largest:
        shares = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0)
        yield UnknownNumber("advantage", "floor", 0.0, tuple(largest * x for x in shares), alone=True)
        yield UnknownNumber("advantage", "length_penalty", 0.0, _around(largest), alone=True)
        longest = float(replay.layout.sizes.max(initial=1))
        # A buffer of few tokens is that number itself.
        buffers = {*map(float, range(1, min(int(longest), 16) + 1)), *(longest * x for x in shares if longest * x >= 1)}
        yield UnknownNumber("advantage", "buffer", None, tuple(sorted(buffers)), alone=True)
        yield UnknownNumber(
            "advantage", "reward_clip", None, tuple(largest * x for x in (0.01, 0.1, 0.3, 0.5, 0.8, 1.0))
        )
    if "gamma" not in names:
        yield UnknownNumber("advantage", "discount", None, GRIDS["gamma"][1:])
    values = over_tokens(replay.arrays.get("advantages", np.zeros(replay.shape)), replay.shape)[replay.arrays["mask"]]
    yield UnknownNumber("advantage", "low", None, _range_of(values))
    yield UnknownNumber("advantage", "high", None, _range_of(values))
    yield UnknownNumber("advantage", "negative", 1.0)
    if largest and cut_rows(replay).any():
        yield UnknownNumber("advantage", "cut_penalty", 0.0, _around(largest))
        yield UnknownNumber("advantage", "cut_reward", None, tuple(largest * x for x in EVENLY))
    if largest and "ref_log_probs" in replay.arrays and (replay.plan.recipe.kl or Kl()).place == "loss":
        for estimator in ("k1", "k2", "k3", "abs"):
            settings = (("kl_estimator", estimator),)
            yield UnknownNumber("advantage", "kl_coef", 0.0, KL_COEFFICIENTS, settings=settings)


def _of_loss(replay: Replay) -> Iterator[UnknownNumber]:
    recipe = replay.plan.recipe
    if recipe.loss is not None:
        call = replay.plan.calls["loss"]
        yield from _of_call("loss", call)
        if recipe.ratio.old in replay.arrays:
            yield UnknownNumber("loss", "max_drift", None, _between(drifts(replay, recipe)))
        if {"old_log_probs", "rollout_log_probs"} <= set(replay.arrays):
            yield UnknownNumber("loss", "max_mismatch", None, _between(mismatches(replay, recipe)), alone=True)
            yield UnknownNumber("loss", "max_row_distance", None, _between(row_distances(replay, recipe)), alone=True)
        if call.plus:
            yield UnknownNumber("loss", "added", 1.0)
        # Of the loss alone, the factor is that of the reduction.
        if "token_loss" in replay.arrays or recipe.kl is not None:
            yield UnknownNumber("loss", "scale", 1.0)


def _of_reduction(replay: Replay) -> Iterator[UnknownNumber]:
    recipe = replay.plan.recipe
    shared = ("kl_reduction",) if recipe.kl_reduction is not None else ()
    yield UnknownNumber("reduction", "scale", recipe.reduction.scale, shared=shared)
    yield UnknownNumber("reduction", "offset", 0.0)
    shared = shared if recipe.kl_reduction == recipe.reduction else ()
    if recipe.reduction.mode == "seq_mean_token_sum_norm":
        length = recipe.reduction.max_length or replay.shape[1]
        yield UnknownNumber("reduction", "max_length", float(length), _lengths(length), shared=shared)
    eps = "eps_row" if recipe.reduction.mode == "seq_mean_token_mean" else "eps_batch"
    if recipe.reduction.mode in ("token_mean", "seq_mean_token_mean"):
        declared = float(getattr(recipe.reduction, eps))
        yield UnknownNumber("reduction", eps, declared, (*GRIDS["eps"], 2.0, 10.0), shared=shared)
    if "entropy" in replay.arrays:
        yield UnknownNumber("entropy", "coef", float(recipe.entropy.coef))
    sampled = (("source", "sampled"),)
    yield UnknownNumber("entropy", "coef", float(recipe.entropy.coef), settings=sampled)
    yield UnknownNumber("gradient", "scale", recipe.gradient.scale)
    if "grad_log_probs" in replay.arrays and (norm := float(np.linalg.norm(replay.arrays["grad_log_probs"]))):
        largest = float(np.abs(replay.arrays["grad_log_probs"]).max())
        yield UnknownNumber("gradient", "clip", None, tuple(largest * x for x in (0.5, 0.9, 0.999, 1.001, 1.1)))
        yield UnknownNumber("gradient", "norm", None, tuple(norm * factor for factor in (0.5, 0.9, 1.1, 2.0)))
        if "micro_batch_ids" in replay.arrays:
            shares = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1)
            yield UnknownNumber("gradient", "part_norm", None, tuple(norm * factor for factor in shares), alone=True)


def _between(values: np.ndarray) -> tuple[float, ...]:
    """Returns numbers below, between and above some numbers, so that each leaves out others."""
    ordered = np.unique(values)
    return (float(ordered[0] - 1), *(float(x) for x in (ordered[1:] + ordered[:-1]) / 2)) if ordered.size else (0.0,)


def _range_of(values: np.ndarray) -> tuple[float, ...]:
    """Returns 0 and values between the smallest and the largest number and beyond both."""
    largest = float(np.abs(values).max(initial=0.0)) or 1.0
    return tuple(sorted({0.0, *(1.5 * largest * x for x in EVENLY)}))


def _lengths(length: float) -> tuple[float, ...]:
    return tuple(length * factor for factor in MULTIPLES[2:13])


def _of_call(stage: str, call: Call) -> Iterator[UnknownNumber]:
    """Yields the real arguments of a call and of the calls inside it, each name once."""
    seen: set[str] = set()
    for step, _ in steps(call):
        defaults = inspect.signature(getattr(kljax, step.function)).parameters
        for name in scalar_parameters(step):
            value = step.arguments.get(name, defaults[name].default)
            if name in seen or value is inspect.Parameter.empty:
                continue
            grid = _grid(step.function, name, value)
            if grid:
                seen.add(name)
                yield UnknownNumber(stage, name, None if value is None else float(value), grid, argument=True)


def _grid(function: str, name: str, value: Any) -> tuple[float, ...]:
    """Returns the values between which an argument is looked for; empty if there is no hint where it lies."""
    if name in ("mask_low", "mask_high", "min_ratio") and value is None:
        return ()
    if function == "cispo_loss" and name in ("clip_low", "clip_high"):
        grid = GRIDS[name]
        return (*grid, 1.0) if name == "clip_low" else (*sorted(-x for x in GRIDS["clip_low"]), 0.0, *grid)
    if name in GRIDS:
        return GRIDS[name]
    if isinstance(value, (int, float)) and value > 0:
        return tuple(value * factor for factor in MULTIPLES)
    return ()
