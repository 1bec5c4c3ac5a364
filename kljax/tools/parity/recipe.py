"""The settings of every stage of an update, and how the header of a dump states them.

A recipe is immutable: a cause is a recipe with other settings, and a replay remembers its results by them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import kljax
from kljax._checks import check_choice
from kljax.systems import Call, Entry
from kljax.systems._call import parameters, steps
from kljax.systems._lookup import get_entry, require_call
from kljax.systems._table import SYSTEMS
from kljax.tools.parity.dump import FIELDS, SECTIONS, Dump, DumpError
from kljax.tools.parity.rounding import UNITS

PLACES = ("loss", "reward", "advantage")
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


@dataclasses.dataclass(frozen=True)
class MaskRule:
    """Which tokens are trained: the tokens of the completions, with the changes of the header or of a fault."""

    tools: bool | None = None  # whether the answers of tools are in it; None changes nothing
    truncated: bool | None = None  # whether rows that are cut at the limit are in it; None changes nothing
    shift: int = 0  # how many positions to the right it is moved
    prompt: bool = False
    left: bool = False  # padding on the left of the prompt
    pad: bool = False  # padding behind the completion
    extra: int = 0  # the number of tokens behind the completion that are in it
    last: str = "all"  # rows that have their last token in it: "all", "cut" (at the limit), "none"
    first: bool = True  # whether the first token of each row is in it


@dataclasses.dataclass(frozen=True)
class LogProbRecipe:
    """How log-probs follow from logits."""

    temperature: float = 1.0
    softcap: float | None = None  # `cap * tanh(z / cap)`, before the temperature
    logit_scale: float = 1.0  # multiplies the logits first
    vocab_size: int | None = None  # real ids; the columns after them are padding, and None counts all columns
    top_p: float | None = None  # mass of the set that is renormalised over
    forward: str | None = None  # dtype of a forward pass of its own, without padding; None: the logits were scored
    shift: int = 0  # how many positions later than its own a token's logits are read
    logits_dtype: str | None = None  # that logits are rounded to before the softmax
    moved: int = 0  # how many positions to the right the log-probs are moved
    source: str | None = None  # an array that takes their place


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The importance ratio `exp(log_probs - old)` of the policy loss and of the KL term."""

    old: str = "old_log_probs"
    shift: int = 0  # how many positions to the right the old policy is moved
    swapped: bool = False  # `exp(old - log_probs)`


@dataclasses.dataclass(frozen=True)
class Kl:
    """The KL term: `coef * scale * estimate_kl(...)`, with `estimate_kl`'s arguments."""

    estimator: str = "k3"
    gradient: str = "value"
    max_ratio: float | None = None
    log_ratio_clip: float | None = None
    value_clip: float | None = None
    corrected: bool = False  # multiplied by the importance ratio
    ratio: str = "token"  # that ratio is of the "token", or of the "row" in the geometric mean or as a "product"
    detached: bool = False  # that ratio is a constant
    scale: float = 1.0
    coef: float = 0.0
    place: str = ""  # "loss", "reward" (summed over the row), "advantage" (less than the batch's mean); "" is no term
    policy: str = "log_probs"
    reference: str = "ref_log_probs"
    shift: int = 0  # how many positions to the right the reference is moved
    swapped: bool = False  # KL(ref || pi)
    early: bool = False  # in the reward, taken off before rewards are compared where the system does so after
    centered: bool = True  # in the advantage, its mean is taken off


@dataclasses.dataclass(frozen=True)
class RecipeStep:
    """A call of the library with other arguments than the header's; None leaves one at its default."""

    arguments: tuple[tuple[str, Any], ...] = ()
    scale: float = 1.0  # of the result
    weights: int = 1  # power of the correction's weights


@dataclasses.dataclass(frozen=True)
class CorrectionStep(RecipeStep):
    """The weights of the rollout correction."""

    swapped: bool = False  # the two policies are exchanged
    shift: int = 0  # how many positions to the right the sampler is moved
    normalized: bool = False  # divided by their mean over the batch
    policy: str | None = None  # the array of the numerator; None takes the header's


@dataclasses.dataclass(frozen=True)
class AdvantageStep(RecipeStep):
    """From rewards to advantages."""

    groups: str = "recorded"  # a key of `advantages.GROUPINGS`
    center: str = "mean"  # a key of `advantages.CENTERS`; "mean" is the header's own
    root: bool = False  # epsilon is added to the variance, not to the standard deviation
    whiten: str = "none"  # what the advantages are normalised over once more: "none", "tokens" or "rows"
    whiten_ddof: int = 1
    whiten_eps: float = 1e-8
    per_length: bool = False  # divided by the length of their row
    discount: float = 1.0  # per token that follows in the row
    clip: float | None = None  # largest magnitude
    skip: str | None = None  # a function of the library that is left out
    reward_scale: float = 1.0
    kl_coef: float = 0.0  # of a KL in the reward besides the header's term
    kl_estimator: str = "k1"  # of that KL


@dataclasses.dataclass(frozen=True)
class LossStep(RecipeStep):
    """The policy loss per token."""

    flipped: bool = False  # advantages and result are negated: the smaller of two losses is taken
    summed: bool = False  # the ratio of a row is the product of its ratios, not their geometric mean
    outside: str = "bound"  # beyond a clip: at the "bound", or left out, "masked"; "clipped" is that surrogate alone
    weight_gradient: bool = False  # the clipped ratio of CISPO is differentiated, too


@dataclasses.dataclass(frozen=True)
class ReductionRecipe:
    """From values per token to a scalar, with `token_weights`' arguments."""

    mode: str = "token_mean"
    max_length: float | None = None
    empty_rows: str = "drop"
    denominator: float | None = None  # None takes the recorded `divisor` where tokens are counted
    share: float = 1.0  # the part of the recorded `divisor` that falls to the rows of the dump
    groups: str = "group_ids"  # the ids of "prompt_mean"
    eps_batch: float = 0.0  # added to the number of tokens of the batch
    eps_row: float = 0.0  # added to the number of tokens of a row
    micro_batches: int = 1  # equal ones, whose means are combined; 0 is the recorded ones
    parts: str = "mean"  # how they are combined: "mean", "sum", or "rows", a mean weighted by their rows
    scale: float = 1.0
    rows: str = "all"  # that count; with "spread", groups of equal rewards are dropped


@dataclasses.dataclass(frozen=True)
class Entropy:
    """Terms of the recorded entropy, which has no gradient in the log-probs."""

    coef: float = 0.0  # of the bonus
    reduction: str = "loss"  # of the bonus: as the policy loss, or "token_mean" of a micro-batch
    quantile: float = 1.0  # the share of a micro-batch's tokens, of highest entropy, that have a loss and a bonus


@dataclasses.dataclass(frozen=True)
class Gradient:
    """How the loss is differentiated."""

    scale: float = 1.0
    through_kl: bool = True
    through_policy: bool = True


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The settings of all stages, in the order of the data, and the library's calls that the header names."""

    mask_rule: MaskRule = MaskRule()  # makes the recorded mask
    log_probs: LogProbRecipe = LogProbRecipe()
    reference: LogProbRecipe = LogProbRecipe()
    mask: MaskRule = MaskRule()  # of the loss, on top of the recorded mask
    ratio: Ratio = Ratio()
    correction: CorrectionStep = CorrectionStep()
    kl: Kl = Kl()
    advantage: AdvantageStep = AdvantageStep()
    loss: LossStep = LossStep()
    entropy: Entropy = Entropy()
    reduction: ReductionRecipe = ReductionRecipe()
    kl_reduction: ReductionRecipe | None = None
    kl_mask: MaskRule = MaskRule()
    gradient: Gradient = Gradient()
    rounding: tuple[tuple[str, str], ...] = ()  # fields, each with the dtype of all results from there on
    calls: Mapping[str, Call] = dataclasses.field(default_factory=dict, compare=False)  # by section
    # By section, the field that an argument of its call takes, where the names differ.
    arrays: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict, compare=False)

    def changed(self, stage: str, **settings: Any) -> "Recipe":
        """Returns the recipe with other settings of one stage; of arguments, those changed before remain."""
        before = getattr(self, stage)
        if "arguments" in settings:
            settings["arguments"] = (*before.arguments, *settings["arguments"])
        changes: dict[str, Any] = {stage: dataclasses.replace(before, **settings)}
        return dataclasses.replace(self, **changes)


def read_recipe(dump: Dump, system: str | None = None) -> Recipe:
    """Reads the settings of every stage from the header of a dump.

    Raises:
      ValueError: naming the key that is wrong.
    """
    system = system or dump.header.get("system")
    if system is not None:
        check_choice("header.system", system, SYSTEMS)
    sections: dict[str, dict[str, Any]] = {}
    for name in SECTIONS:
        section = dump.header.get(name, {})
        if not isinstance(section, dict):
            raise DumpError(f"header.{name}: got {section!r}, expected an object of arguments")
        sections[name] = dict(section)
    calls: dict[str, Call] = {}
    arrays: dict[str, dict[str, str]] = {}
    for name, kind in (("correction", "correction"), ("advantage", "advantage"), ("loss", "policy_loss")):
        if sections[name]:
            calls[name], arrays[name] = _call(system, name, kind, sections[name])
    for key in sections["mask"]:
        check_choice("header.mask", key, ("tools", "truncated"))
    kl_reduction = sections["kl"].pop("reduction", {"name": KL_REDUCTIONS[system]} if system in KL_REDUCTIONS else None)
    kl = _kl(system, sections["kl"])
    reduction = _reduction(system, "reduction", sections["reduction"])
    of_kl = reduction if kl_reduction is None else _reduction(system, "kl.reduction", kl_reduction)
    entropy = {"reduction": ENTROPY_REDUCTIONS.get(system or "", "loss"), **sections["entropy"]}
    check_choice("header.entropy.reduction", entropy["reduction"], ("loss", "token_mean"))
    recipe = Recipe(
        mask_rule=_settings(MaskRule, "mask", sections["mask"]),
        log_probs=_settings(LogProbRecipe, "log_probs", sections["log_probs"]),
        reference=_settings(LogProbRecipe, "reference", {**sections["log_probs"], **sections["reference"]}),
        ratio=Ratio(old=arrays.get("loss", {}).get("old_log_probs", "old_log_probs")),
        kl=kl,
        entropy=_settings(Entropy, "entropy", entropy),
        reduction=reduction,
        kl_reduction=of_kl if kl.place == "loss" else None,
        gradient=_settings(Gradient, "gradient", sections["gradient"]),
        calls=calls,
        arrays=arrays,
    )
    for name in ("log_probs", "reference"):
        if (forward := getattr(recipe, name).forward) is not None:
            check_choice(f"header.{name}.forward", forward, UNITS)
    return recipe


def _settings(kind: type, section: str, values: Mapping[str, Any]) -> Any:
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    for key, value in values.items():
        check_choice(f"header.{section}", key, defaults)
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
        entry = get_entry(f"{system}/{name}", kind)
        require_call(entry)
    except ValueError as error:
        raise DumpError(f"header.{section}.name: {error}") from error
    return entry


def _call(system: str | None, section: str, kind: str, values: dict[str, Any]) -> tuple[Call, dict[str, str]]:
    """Returns the call of a section, by `name` in a system or `function` here, and its `Recipe.arrays`."""
    renamed = values.pop("arrays", {})
    arrays = {"sampling_log_probs": "rollout_log_probs"}
    if "function" in values:
        name = values.pop("function")
        check_choice(f"header.{section}.function", name, [n for n in kljax.__all__ if n.islower()])
        call = Call(name)
        if section == "correction":
            arrays["log_probs"] = "old_log_probs"
    elif "name" in values:
        entry = _entry(system, section, kind, values.pop("name"))
        call = require_call(entry)
        arrays |= {name: field for name, text in entry.sources.items() if (field := _array_of(name, text))}
    else:
        raise DumpError(f"header.{section}: needs name (of a system) or function (of kljax); add one of them")
    known = sorted({parameter.name for step, _ in steps(call) for parameter in parameters(step)})
    for key in values:
        check_choice(f"header.{section}", key, known)
    for argument, array in renamed.items():
        check_choice(f"header.{section}.arrays", argument, known)
        check_choice(f"header.{section}.arrays.{argument}", array, FIELDS)
    return with_arguments(call, values), {**arrays, **renamed}


def with_arguments(call: Call, arguments: Mapping[str, Any]) -> Call:
    """Returns the call with each argument on its function, or else on the functions combined with it."""
    known = {parameter.name for parameter in parameters(call)}
    rest = {name: value for name, value in arguments.items() if name not in known}
    inner: dict[str, Any] = {
        kind: tuple(with_arguments(step, rest) for step in getattr(call, kind)) for kind in ("times", "plus", "then")
    }
    own = {**call.arguments, **{name: value for name, value in arguments.items() if name in known}}
    return dataclasses.replace(call, arguments={name: x for name, x in own.items() if x is not None}, **inner)


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


def _kl(system: str | None, values: dict[str, Any]) -> Kl:
    if not values:
        return Kl()
    implied: dict[str, Any] = {"place": "loss"}
    if "name" in values:
        entry = _entry(system, "kl", "kl", values.pop("name"))
        call = require_call(entry)
        implied |= {**call.arguments, "scale": call.scale, "corrected": "sampling_log_probs" in entry.sources}
        if call.function in ("rollout_kl_loss", "rollout_kl"):
            implied["reference"] = "rollout_log_probs"
    implied |= {"policy": "old_log_probs"} if values.get("place") == "reward" else {}
    kl: Kl = _settings(Kl, "kl", {**implied, **values})
    check_choice("header.kl.place", kl.place, PLACES)
    check_choice("header.kl.ratio", kl.ratio, ("token", "row"))
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
        implied = dict(require_call(entry).arguments)
        # The padded length stands for the constant only where the system does the same.
        length = entry.sources.get("max_length", "padded length")
        if "padded length" not in length and "max_length" not in fields:
            raise DumpError(f"header.{section}.max_length: missing; {entry.key} divides by {length}, add it")
        implied["eps_batch"], implied["eps_row"] = DIVISOR_EPS.get((entry.system, name), (0.0, 0.0))
        if "micro-batch" in entry.sources.get("group_ids", ""):
            implied["groups"] = "micro_batch_ids"
    return _settings(ReductionRecipe, section, {**implied, **fields})
