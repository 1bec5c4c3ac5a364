"""The settings of every stage of an update, read from the header of a dump.

A recipe is immutable: a cause is a recipe with other settings, and a replay remembers its results by them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import kljax
from kljax._checks import check_choice
from kljax.parity.dump import Dump, DumpError
from kljax.parity.fields import FIELDS
from kljax.systems import Call, Entry
from kljax.systems._call import parameters, steps
from kljax.systems._lookup import get_entry, require_call
from kljax.systems._table import SYSTEMS

Arguments = tuple[tuple[str, Any], ...]
PLACES = ("loss", "reward", "advantage")
# What a system adds to the number of tokens that a mean divides by: of the batch, of each row.
DIVISOR_EPS = {
    ("trinity", "token-mean"): (1e-8, 0.0),
    ("trinity", "seq-mean-token-mean"): (0.0, 1e-8),
    ("verl", "seq-mean-token-mean"): (0.0, 1e-8),
    ("openrlhf", "seq-mean-token-mean"): (0.0, 1e-8),
    ("art", "mean"): (1e-6, 0.0),
}
# Reductions of the KL term that do not follow that of the policy loss.
KL_REDUCTIONS = {"skyrl": "sequence_mean", "openrlhf": "token-mean"}


@dataclasses.dataclass(frozen=True)
class MaskRule:
    """Which tokens are trained: tokens of the completion, or with faults.

    Attributes:
      shift: how many positions to the right the mask is moved.
      prompt: whether prompt tokens are in it.
      pad: whether padding is in it.
      last: whether the last token of each row, the end-of-sequence token, is in it.
    """

    shift: int = 0
    prompt: bool = False
    pad: bool = False
    last: bool = True


@dataclasses.dataclass(frozen=True)
class LogProbRecipe:
    """How log-probs follow from logits.

    Attributes:
      temperature: divides the logits.
      softcap: bound of the logits, `cap * tanh(z / cap)`, before the temperature; None does not bound.
      logit_scale: multiplies the logits first.
      vocab_size: number of real ids; the columns after it are padding. None counts all columns.
      top_p: mass of the set that is renormalised over; None takes the whole vocabulary.
      shift: how many positions later than its own a token's logits are read.
      adapter: whether the adapter is on; off gives the log-probs of the other policy.
      logits_dtype: dtype that logits are rounded to before the softmax; None keeps the recorded one.
    """

    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    vocab_size: int | None = None
    top_p: float | None = None
    shift: int = 0
    adapter: bool = True
    logits_dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The importance ratio `exp(log_probs - old)`.

    Attributes:
      old: the array of the policy in the denominator.
      shift: how many positions to the right that array is moved.
      swapped: whether it is `exp(old - log_probs)`.
      recorded: whether the recorded ratio takes its place, after a fault without a cause.
    """

    old: str = "old_log_probs"
    shift: int = 0
    swapped: bool = False
    recorded: bool = False


@dataclasses.dataclass(frozen=True)
class Kl:
    """The KL term: `scale * estimate_kl(...)`, its coefficient and its place.

    Attributes:
      estimator: as in `estimate_kl`.
      gradient: the same.
      max_ratio: the same.
      log_ratio_clip: the same.
      value_clip: the same.
      corrected: whether it is multiplied by the importance ratio.
      scale: a constant factor of the estimate.
      coef: the coefficient.
      place: "loss", "reward" (summed over the row) or "advantage" (less than the mean of the batch, as in ART).
      policy: the array of the policy.
      reference: the array of the reference.
      shift: how many positions to the right the reference is moved.
      swapped: whether the direction is KL(ref || pi).
    """

    estimator: str = "k3"
    gradient: str = "value"
    max_ratio: float | None = None
    log_ratio_clip: float | None = None
    value_clip: float | None = None
    corrected: bool = False
    scale: float = 1.0
    coef: float = 0.0
    place: str = "loss"
    policy: str = "log_probs"
    reference: str = "ref_log_probs"
    shift: int = 0
    swapped: bool = False


@dataclasses.dataclass(frozen=True)
class RecipeStep:
    """A call of the library by the arguments that differ from the header's.

    Attributes:
      arguments: keyword arguments that override the header's; None leaves an argument at its default.
      sign: factor of the result.
      swapped: whether the two policies of a ratio are exchanged.
      groups: rows of a group: "recorded", "interleaved" or "batch".
      weights: power of the correction's weights in a policy loss.
    """

    arguments: Arguments = ()
    sign: float = 1.0
    swapped: bool = False
    groups: str = "recorded"
    weights: int = 1


@dataclasses.dataclass(frozen=True)
class ReductionRecipe:
    """From values per token to a scalar.

    Attributes:
      mode: as in `token_weights`.
      max_length: the same.
      empty_rows: the same.
      denominator: the same.
      groups: the ids of "prompt_mean": "group_ids" or "micro_batch_ids".
      eps_batch: added to the number of tokens of the batch.
      eps_row: added to the number of tokens of a row.
      micro_batches: number of equal micro-batches whose means are averaged; 1 is the whole batch, 0 the recorded ones.
      scale: a constant factor.
    """

    mode: str = "token_mean"
    max_length: float | None = None
    empty_rows: str = "drop"
    denominator: float | None = None
    groups: str = "group_ids"
    eps_batch: float = 0.0
    eps_row: float = 0.0
    micro_batches: int = 1
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Gradient:
    """How the loss is differentiated.

    Attributes:
      scale: a constant factor.
      through_kl: whether the KL term has a gradient.
      through_policy: whether the policy loss has one.
    """

    scale: float = 1.0
    through_kl: bool = True
    through_policy: bool = True


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The settings of all stages, in the order of the data.

    `rounding` is a stage and a dtype: from that stage on, results are rounded to that dtype.
    """

    mask_rule: MaskRule = MaskRule()
    log_probs: LogProbRecipe = LogProbRecipe()
    reference: LogProbRecipe = LogProbRecipe()
    mask: MaskRule = MaskRule()
    ratio: Ratio = Ratio()
    correction: RecipeStep | None = None
    kl: Kl | None = None
    advantage: RecipeStep | None = None
    loss: RecipeStep | None = None
    reduction: ReductionRecipe = ReductionRecipe()
    kl_reduction: ReductionRecipe | None = None
    gradient: Gradient = Gradient()
    rounding: tuple[tuple[str, str], ...] = ()

    def changed(self, stage: str, **settings: Any) -> "Recipe":
        """Returns the recipe with other settings of one stage.

        Args:
          stage: an attribute of the recipe that is not None.
          settings: attributes of that stage with their new values.
        """
        changes: dict[str, Any] = {stage: dataclasses.replace(getattr(self, stage), **settings)}
        return dataclasses.replace(self, **changes)


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

    Args:
      dump: the dump; only its header is read.
      system: the system whose names the header uses; None takes that of the header, or none.

    Returns:
      The `RecipeCalls`. A correction, KL, advantage or policy loss that the header leaves out is None in its recipe.

    Raises:
      DumpError: naming the key that is wrong.
    """
    header = dump.header
    system = system or header.get("system")
    if system is not None:
        _choice("header.system", system, SYSTEMS)
    sections: dict[str, dict[str, Any]] = {}
    for name in ("log_probs", "reference", "kl", "correction", "advantage", "loss", "reduction", "gradient"):
        section = header.get(name, {})
        if not isinstance(section, dict):
            raise DumpError(f"header.{name}: got {section!r}, expected an object of arguments")
        sections[name] = dict(section)
    calls: dict[str, Call] = {}
    arrays: dict[str, dict[str, str]] = {}
    steps: dict[str, RecipeStep | None] = {}
    for name, kind in (("correction", "correction"), ("advantage", "advantage"), ("loss", "policy_loss")):
        steps[name] = None
        if sections[name]:
            calls[name], arrays[name] = _call(system, name, kind, sections[name])
            steps[name] = RecipeStep()
    log_probs = _settings(LogProbRecipe, "log_probs", sections["log_probs"])
    reference = _settings(LogProbRecipe, "reference", {**sections["log_probs"], **sections["reference"]})
    kl = _kl(system, sections["kl"])
    reduction = _reduction(system, "reduction", sections["reduction"])
    recipe = Recipe(
        log_probs=log_probs,
        reference=reference,
        ratio=Ratio(old=arrays.get("loss", {}).get("old_log_probs", "old_log_probs")),
        correction=steps["correction"],
        kl=kl,
        advantage=steps["advantage"],
        loss=steps["loss"],
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
        wanted = type(defaults[key])
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
    return _with_arguments(call, fields), {**arrays, **renamed}


def _with_arguments(call: Call, arguments: Mapping[str, Any]) -> Call:
    """Returns the call with each argument on its function, or else on the functions combined with it."""
    accepted = {name: value for name, value in arguments.items() if name in _parameters(call)}
    rest = {name: value for name, value in arguments.items() if name not in accepted}
    times, plus, then = (
        tuple(_with_arguments(step, rest) for step in steps) for steps in (call.times, call.plus, call.then)
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
    if kl.place == "reward" and "policy" not in fields:
        kl = dataclasses.replace(kl, policy="old_log_probs")
    return kl


def _reduction(system: str | None, section: str, values: Mapping[str, Any]) -> ReductionRecipe:
    fields = dict(values)
    implied: dict[str, Any] = {}
    if "name" in fields:
        name = fields.pop("name")
        entry = _entry(system, section, "reduction", name)
        assert entry.call is not None
        implied = dict(entry.call.arguments)
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
