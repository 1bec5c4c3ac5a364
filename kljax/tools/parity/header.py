"""Reads the settings of every stage from the header of a dump."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import kljax
from kljax._checks import check_choice
from kljax.systems import Call, Entry
from kljax.systems._call import parameters, steps
from kljax.systems._lookup import get_entry, require_call
from kljax.systems._table import SYSTEMS
from kljax.tools.parity.dump import Dump, DumpError
from kljax.tools.parity.fields import FIELDS, SECTIONS
from kljax.tools.parity.recipe import (
    AdvantageStep,
    Entropy,
    Gradient,
    Kl,
    LogProbRecipe,
    MaskRule,
    Ratio,
    Recipe,
    RecipeStep,
    ReductionRecipe,
)
from kljax.tools.parity.rounding import UNITS

PLACES = ("loss", "reward", "advantage")
RATIOS = ("token", "row")
# What a system adds to the number of tokens that a mean divides by: of the batch, of each row.
DIVISOR_EPS = {
    ("trinity", "token-mean"): (1e-8, 0.0),
    ("trinity", "seq-mean-token-mean"): (0.0, 1e-8),
    ("verl", "seq-mean-token-mean"): (0.0, 1e-8),
    ("openrlhf", "seq-mean-token-mean"): (0.0, 1e-8),
    ("art", "mean"): (1e-6, 0.0),
}
# Reductions of the KL term and of the entropy that do not follow that of the policy loss.
KL_REDUCTIONS = {"skyrl": "sequence_mean", "openrlhf": "token-mean"}
ENTROPY_REDUCTIONS = {"trl": "token_mean"}
# The settings of the mask that a header may have; the others are faults.
MASK_SETTINGS = ("tools", "truncated")


@dataclasses.dataclass(frozen=True)
class RecipeCalls:
    """The calls of a dump: the recipe, and the library's calls that its steps change.

    `arrays` has for each section the field that an argument of its call takes, where the names differ.
    """

    system: str | None
    recipe: Recipe
    calls: Mapping[str, Call]
    arrays: Mapping[str, Mapping[str, str]]


def make_plan(dump: Dump, system: str | None = None) -> RecipeCalls:
    """Reads the settings of every stage from the header of a dump.

    Raises:
      DumpError: naming the key that is wrong.
    """
    header = dump.header
    system = system or header.get("system")
    if system is not None:
        _choice("header.system", system, SYSTEMS)
    sections: dict[str, dict[str, Any]] = {}
    for name in SECTIONS:
        section = header.get(name, {})
        if not isinstance(section, dict):
            raise DumpError(f"header.{name}: got {section!r}, expected an object of arguments")
        sections[name] = dict(section)
    calls: dict[str, Call] = {}
    arrays: dict[str, dict[str, str]] = {}
    steps: dict[str, Any] = {}
    for name, kind in (("correction", "correction"), ("advantage", "advantage"), ("loss", "policy_loss")):
        steps[name] = None
        if sections[name]:
            calls[name], arrays[name] = _call(system, name, kind, sections[name])
            steps[name] = AdvantageStep() if name == "advantage" else RecipeStep()
    log_probs = _settings(LogProbRecipe, "log_probs", sections["log_probs"])
    reference = _settings(LogProbRecipe, "reference", {**sections["log_probs"], **sections["reference"]})
    kl = _kl(system, sections["kl"])
    reduction = _reduction(system, "reduction", sections["reduction"])
    for name, settings in (("log_probs", log_probs), ("reference", reference)):
        if settings.forward is not None:
            _choice(f"header.{name}.forward", settings.forward, UNITS)
    for key in sections["mask"]:
        _choice("header.mask", key, MASK_SETTINGS)
    entropy = {"reduction": ENTROPY_REDUCTIONS.get(system or "", "loss"), **sections["entropy"]}
    _choice("header.entropy.reduction", entropy["reduction"], ("loss", "token_mean"))
    recipe = Recipe(
        mask_rule=_settings(MaskRule, "mask", sections["mask"]),
        log_probs=log_probs,
        reference=reference,
        ratio=Ratio(old=arrays.get("loss", {}).get("old_log_probs", "old_log_probs")),
        correction=steps["correction"],
        kl=kl,
        advantage=steps["advantage"],
        loss=steps["loss"],
        entropy=_settings(Entropy, "entropy", entropy),
        reduction=reduction,
        kl_reduction=_kl_reduction(system, sections["kl"], reduction) if kl and kl.place == "loss" else None,
        gradient=_settings(Gradient, "gradient", sections["gradient"]),
    )
    return RecipeCalls(system, recipe, calls, arrays)


def _choice(name: str, value: Any, allowed: Any) -> None:
    try:
        check_choice(name, value, allowed)
    except ValueError as error:
        raise DumpError(str(error)) from error


def _settings(kind: type, section: str, values: Mapping[str, Any]) -> Any:
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    for key, value in values.items():
        _choice(f"header.{section}", key, list(defaults))
        wanted = bool if kind is MaskRule else type(defaults[key])
        if wanted is bool and not isinstance(value, bool):
            raise DumpError(f"header.{section}.{key}: got {value!r}, expected true or false")
        if wanted in (int, float) and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise DumpError(f"header.{section}.{key}: got {value!r}, expected a number")
    return kind(**values)


def _entry(system: str | None, section: str, kind: str, name: str) -> Entry:
    if system is None:
        raise DumpError(f"header.{section}.name: names need a system; set header.system, or pass --system")
    try:
        return get_entry(f"{system}/{name}", kind)
    except ValueError as error:
        raise DumpError(f"header.{section}.name: {error}") from error


def _call(system: str | None, section: str, kind: str, values: dict[str, Any]) -> tuple[Call, dict[str, str]]:
    """Returns the call of a section, by `name` in a system or `function` here, and its `RecipeCalls.arrays`."""
    fields = dict(values)
    renamed = fields.pop("arrays", {})
    arrays = {"sampling_log_probs": "rollout_log_probs"}
    if "function" in fields:
        name = fields.pop("function")
        _choice(f"header.{section}.function", name, [n for n in kljax.__all__ if n.islower()])
        call = Call(name)
        if section == "correction":
            arrays["log_probs"] = "old_log_probs"
    elif "name" in fields:
        entry = _entry(system, section, kind, fields.pop("name"))
        try:
            call = require_call(entry)
        except ValueError as error:
            raise DumpError(f"header.{section}.name: {error}") from error
        arrays |= {name: field for name, text in entry.sources.items() if (field := _array_of(name, text))}
    else:
        raise DumpError(f"header.{section}: needs name (of a system) or function (of kljax); add one of them")
    known = sorted({name for step, _ in steps(call) for name in _parameters(step)})
    for key in fields:
        _choice(f"header.{section}", key, known)
    for parameter, array in renamed.items():
        _choice(f"header.{section}.arrays", parameter, known)
        _choice(f"header.{section}.arrays.{parameter}", array, FIELDS)
    return with_arguments(call, fields), {**arrays, **renamed}


def with_arguments(call: Call, arguments: Mapping[str, Any]) -> Call:
    """Returns the call with each argument on its function, or else on the functions combined with it."""
    accepted = {name: value for name, value in arguments.items() if name in _parameters(call)}
    rest = {name: value for name, value in arguments.items() if name not in accepted}
    times, plus, then = (
        tuple(with_arguments(step, rest) for step in steps) for steps in (call.times, call.plus, call.then)
    )
    return dataclasses.replace(call, arguments={**call.arguments, **accepted}, times=times, plus=plus, then=then)


def _parameters(call: Call) -> set[str]:
    return {parameter.name for parameter in parameters(call)}


def _array_of(name: str, text: str) -> str | None:
    """Returns the field that a source names, where it is another array than the argument's own."""
    if name == "advantages":
        return "rewards" if text.endswith("reward") else None
    if not name.endswith("log_probs"):
        return None
    if any(word in text for word in ("rollout", "inference", "original", "vLLM")):
        return "rollout_log_probs"
    if text == "stop_gradient(log_probs)":
        return "log_probs"
    return "old_log_probs" if "old" in text else None


def _kl(system: str | None, values: Mapping[str, Any]) -> Kl | None:
    if not values:
        return None
    fields = dict(values)
    fields.pop("reduction", None)
    implied: dict[str, Any] = {}
    if "name" in fields:
        entry = _entry(system, "kl", "kl", fields.pop("name"))
        call = entry.call
        if call is None:
            raise DumpError(f"header.kl.name: {entry.key} has no call here: {entry.reason}")
        implied = {**call.arguments, "scale": call.scale, "corrected": "sampling_log_probs" in entry.sources}
        if call.function in ("rollout_kl_loss", "rollout_kl"):
            implied["reference"] = "rollout_log_probs"
    kl: Kl = _settings(Kl, "kl", {**implied, **fields})
    _choice("header.kl.place", kl.place, PLACES)
    _choice("header.kl.ratio", kl.ratio, RATIOS)
    if kl.place == "reward" and "policy" not in fields:
        kl = dataclasses.replace(kl, policy="old_log_probs")
    return kl


def _reduction(system: str | None, section: str, values: Mapping[str, Any]) -> ReductionRecipe:
    fields = dict(values)
    implied: dict[str, Any] = {}
    # The recorded micro-batches in place of a number of equal ones.
    if fields.get("micro_batches") is True:
        fields["micro_batches"] = 0
    if "name" in fields:
        name = fields.pop("name")
        entry = _entry(system, section, "reduction", name)
        assert entry.call is not None
        implied = dict(entry.call.arguments)
        # The padded length stands for the constant only where the system does the same.
        length = entry.sources.get("max_length", "padded length")
        if "padded length" not in length and "max_length" not in fields:
            raise DumpError(f"header.{section}.max_length: missing; {entry.key} divides by {length}, add it")
        implied["eps_batch"], implied["eps_row"] = DIVISOR_EPS.get((entry.system, name), (0.0, 0.0))
        if "micro-batch" in entry.sources.get("group_ids", ""):
            implied["groups"] = "micro_batch_ids"
    return _settings(ReductionRecipe, section, {**implied, **fields})


def _kl_reduction(system: str | None, values: Mapping[str, Any], shared: ReductionRecipe) -> ReductionRecipe:
    """Returns the reduction of the KL term: that of the policy loss, unless the header or the system has another."""
    section = values.get("reduction")
    if section is None and system in KL_REDUCTIONS:
        section = {"name": KL_REDUCTIONS[system]}
    return shared if section is None else _reduction(system, "kl.reduction", section)
