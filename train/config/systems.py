"""Names of other systems in a config: `loss: verl/cispo`, `estimator: verl/low_var_kl` set all fields they imply.

The library is imported where a name is looked up: a config without one is checked before JAX is loaded.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from train.config.algorithms import ADVANTAGES, CORRECTIONS, LOSS_FUNCTIONS
from train.config.kl import AdvantageKL, LossKL, RewardKL
from train.config.types import Section

# In the reward and the advantages the KL is treated as a constant: gradient and correction have no effect.
ONLY_IN_THE_LOSS = ("gradient", "importance_corrected", "max_ratio")
# Steps after an estimator that the trainer takes itself: `kl.reward` has the KL, and every token its row's advantage.
KL_AND_TOKENS = ("broadcast_to_tokens", "subtract_kl", "reinforce_plus_plus_returns")
TERMS: Mapping[str, type[Section]] = {"reward": RewardKL, "loss": LossKL, "advantage": AdvantageKL}
RECORDED = ("rollout_log", "inference_log")
"""How the systems call the log-probs that the sampler recorded."""
Fields = dict[str, Any]
PLACEHOLDER: Fields = {"type": "veto_mask"}
"""Replaces an entry of a list whose name has no meaning, so that the others keep their numbers."""


def with_meanings(raw: Mapping[str, Any]) -> tuple[Fields, list[str], list[str]]:
    """Replaces each `system/name` by the fields it implies; also returns notes of the replacements, and problems.

    A name that cannot be replaced is removed, so that everything else is still checked.
    """
    result: Fields = copy.deepcopy(dict(raw))
    notes: list[str] = []
    problems: list[str] = []
    for path, section, field, meaning in _named(result):
        name = section.pop(field)
        try:
            fields = meaning(name)
        except ValueError as error:
            problems.append(f"{path}.{field}: got {name!r}; {error}")
            if path.startswith("correction["):
                section.clear()
                section.update(PLACEHOLDER)
            continue
        problems += [
            f"{path}.{key}: got {section[key]}, but {path}.{field} {name} means {_shown(value)}; set only one of them"
            for key, value in fields.items()
            if section.get(key, value) != value
        ]
        section.update(fields)
        notes.append(f"{path}: {name} means " + ", ".join(f"{key} {_shown(value)}" for key, value in fields.items()))
    return result, notes, problems


def _named(raw: Fields) -> Iterator[tuple[str, Fields, str, Callable[[str], Fields]]]:
    """Yields each section that holds such a name: path, section, field, and the function that looks the name up."""
    for family, lookup in (("loss", _loss_fields), ("advantage", _advantage_fields)):
        if _is_name(raw.get(family)):
            raw[family] = {"type": raw[family]}
        section = raw.get(family)
        if isinstance(section, dict) and _is_name(section.get("type")):
            yield family, section, "type", partial(lookup, section)
    kl = raw.get("kl")
    loss = raw.get("loss")
    for term, model in TERMS.items():
        section = kl.get(term) if isinstance(kl, dict) else None
        if isinstance(section, dict) and _is_name(section.get("estimator")):
            yield f"kl.{term}", section, "estimator", partial(_kl_fields, model)
    if isinstance(loss, dict) and _is_name(loss.get("aggregation")):
        yield "loss", loss, "aggregation", _reduction_fields
    yield from _named_corrections(raw)


def _named_corrections(raw: Fields) -> Iterator[tuple[str, Fields, str, Callable[[str], Fields]]]:
    """Yields each entry of the list of corrections that holds a name."""
    listed = raw.get("correction")
    if isinstance(listed, str | dict):
        listed = [listed]
    if not isinstance(listed, list):
        return
    listed = [{"type": entry} if _is_name(entry) else entry for entry in listed]
    raw["correction"] = listed = [part for entry in listed for part in (entry, *_weights_after(entry))]
    for number, entry in enumerate(listed):
        if isinstance(entry, dict) and _is_name(entry.get("type")):
            yield f"correction[{number}]", entry, "type", partial(_correction_fields, entry)


def _weights_after(entry: Any) -> list[Fields]:
    """Returns a second entry for a name that means a mask times the ratios of the tokens."""
    if not (isinstance(entry, dict) and _is_name(entry.get("type"))):
        return []
    from kljax import systems

    entries = systems.entries(kind="correction")
    call = next((item.call for item in entries if item.key == entry["type"]), None)
    return [{"type": "importance_weights"}] if call is not None and _times_ratios(call) else []


def _times_ratios(call: Any) -> bool:
    return [factor.function for factor in call.times] == ["token_ratios"]


def _is_name(value: Any) -> bool:
    """Whether a value is a name such as `slime/mis:token+mask`, and not a function, `path/mine.py:function`."""
    return isinstance(value, str) and "/" in value and ".py:" not in value


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _call_and_entry(name: str, kind: str) -> tuple[Any, Any]:
    """Looks a name up: the call of the library, and the entry of the table."""
    from kljax import systems

    return systems.get(name, kind=kind), _entry(name, kind)


def _entry(name: str, kind: str) -> Any:
    """Returns the entry of a name that the table has."""
    from kljax import systems

    return next(entry for entry in systems.entries(kind=kind) if entry.key == name)


def _kl_fields(model: type[Section], name: str) -> Fields:
    """Returns the fields of a KL section that a name implies, and the library's defaults for the rest."""
    from kljax import systems

    fields = {"gradient": "value", **systems.arguments(name, kind="kl")}
    fields["importance_corrected"] = "sampling_log_probs" in _entry(name, "kl").sources
    if model is not LossKL:
        fields = {key: value for key, value in fields.items() if key not in ONLY_IN_THE_LOSS}
    _check_known(fields, set(model.model_fields))
    return fields


def _loss_fields(section: Fields, name: str) -> Fields:
    """Returns the fields of the loss that a name implies; an option of the system may be set beside the name."""
    call, entry = _call_and_entry(name, "policy_loss")
    denominator = entry.sources.get("old_log_probs", "old")
    sampler = denominator.startswith(RECORDED)
    if not (sampler or denominator.startswith("old")):
        raise ValueError(f"its ratio is to {denominator}, where loss.type compares with the old policy")
    fields = _without_options(_function_fields(call, LOSS_FUNCTIONS), section, entry)
    return fields | {"old_log_probs": "sampler"} if sampler else fields


def _correction_fields(section: Fields, name: str) -> Fields:
    """Returns the fields of one correction that a name implies; options of the system as for the loss."""
    call, entry = _call_and_entry(name, "correction")
    mask = dataclasses.replace(call, times=()) if _times_ratios(call) else call
    return _without_options(_function_fields(mask, CORRECTIONS), section, entry)


def _advantage_fields(section: Fields, name: str) -> Fields:
    """Returns the fields of the advantage estimator that a name implies; options of the system as for the loss."""
    call, entry = _call_and_entry(name, "advantage")
    return {"whiten": False, **_without_options(_function_fields(call, ADVANTAGES), section, entry)}


def _without_options(fields: Fields, section: Fields, entry: Any) -> Fields:
    return {key: value for key, value in fields.items() if not (key in entry.sources and key in section)}


def _function_fields(call: Any, table: Mapping[str, str]) -> Fields:
    """Returns the fields of a call of one function, with a whitening after it.

    Raises:
      ValueError: the call has parts that a section has no fields for.
    """
    names = {target.rpartition(":")[2]: name for name, target in table.items()}
    then = [step for step in call.then if step.function not in KL_AND_TOKENS]
    whitens = [step.function == "masked_whiten" and not step.arguments for step in then] == [True]
    plain = call.scale == 1 and not call.times and not call.plus and (whitens or not then)
    if call.function not in names or not plain or "num_groups" in call.arguments:
        raise ValueError(f"it is {call!r}, which one choice of type does not express")
    fields = {"type": names[call.function], **call.arguments}
    return fields | {"whiten": True} if whitens else fields


def _reduction_fields(name: str) -> Fields:
    from kljax import systems

    fields = {"empty_rows": "drop", **systems.arguments(name, kind="reduction")}
    fields["aggregation"] = fields.pop("mode")
    _check_known(fields, {"aggregation", "empty_rows"})
    return fields


def _check_known(fields: Fields, known: set[str]) -> None:
    needed = ", ".join(f"{key}={fields[key]}" for key in fields if key not in known)
    if needed:
        raise ValueError(f"it needs {needed}, which this section has no field for")
