"""Rotary embeddings in `config.json`: `rope_theta` and `rope_scaling`, or `rope_parameters`, also per kind of layer."""

import math
from collections.abc import Mapping
from typing import Any

from train.models.config import LinearScaling, Llama3Scaling, Rope, RopeScaling, YarnScaling

# What each type reads, besides the type and the base.
TYPES: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "beta_fast",
            "beta_slow",
            "truncate",
        }
    ),
}


def read_rope(parameters: Mapping[str, Any], *, where: str, theta: float, length: int | None) -> Rope:
    """A rope from its keys.

    Args:
      parameters: the keys, nulls as if absent.
      where: name of the mapping, for errors.
      theta: base where the keys have none.
      length: `max_position_embeddings`, the original length where the keys have none.

    Raises:
      ValueError: an unknown type, a key that the type does not read, one that it needs, or a value out of range.
    """
    found = {key: value for key, value in parameters.items() if value is not None}
    kind, old_kind = found.pop("rope_type", None), found.pop("type", None)
    if kind is not None and old_kind is not None and kind != old_kind:
        raise ValueError(f"{where}: got rope_type {kind!r} and type {old_kind!r}, expected one of them")
    kind = kind or old_kind or "default"
    if not isinstance(kind, str) or kind not in TYPES:
        raise ValueError(f"{where}.rope_type: got {kind!r}, expected one of {', '.join(TYPES)}")
    base = _number(found.pop("rope_theta", theta), f"{where}.rope_theta")
    if found.pop("partial_rotary_factor", 1) != 1:
        raise ValueError(f"{where}.partial_rotary_factor: only heads that are rotated whole (1.0) are supported")
    unknown = sorted(found.keys() - TYPES[kind])
    if unknown:
        raise ValueError(f"{where}: rope_type {kind!r} is not known to read {', '.join(unknown)}")
    if kind == "default":
        return Rope(base)
    if "factor" not in found:
        raise ValueError(f"{where}.factor: missing, expected a number as rope_type is {kind!r}")
    name = "original_max_position_embeddings"
    original = found.pop(name, length)
    if original is not None and (isinstance(original, bool) or not isinstance(original, int) or original < 1):
        raise ValueError(f"{where}.{name}: got {original!r}, expected a number of tokens (of max_position_embeddings)")
    return Rope(base, _scaling(kind, found, original, where))


def _scaling(kind: str, found: dict[str, Any], original: int | None, where: str) -> RopeScaling:
    truncate = found.pop("truncate", True)
    numbers = {key: _number(value, f"{where}.{key}") for key, value in found.items()}
    if kind == "linear":
        return LinearScaling(numbers["factor"])
    if original is None:
        raise ValueError(f"{where}.original_max_position_embeddings: missing, expected a number of tokens")
    if kind == "llama3":
        missing = sorted({"low_freq_factor", "high_freq_factor"} - numbers.keys())
        if missing:
            raise ValueError(f"{where}: missing {', '.join(missing)}, which rope_type 'llama3' needs")
        return Llama3Scaling(numbers["factor"], numbers["low_freq_factor"], numbers["high_freq_factor"], original)
    return YarnScaling(
        numbers["factor"],
        original,
        numbers.get("attention_factor", _attention_factor(numbers)),
        numbers.get("beta_fast") or 32.0,
        numbers.get("beta_slow") or 1.0,
        bool(truncate),
    )


def _attention_factor(numbers: Mapping[str, float]) -> float:
    """What queries and keys of YaRN grow by where the file does not say."""

    def growth(scale: float) -> float:
        return 0.1 * scale * math.log(numbers["factor"]) + 1.0

    top, bottom = numbers.get("mscale"), numbers.get("mscale_all_dim")
    return growth(top) / growth(bottom) if top and bottom else growth(1.0)


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: got {value!r}, expected a number")
    return float(value)


def write_rope(rope: Rope) -> dict[str, Any]:
    """`rope_parameters` of one rope; what `read_rope` gives back."""
    scaling, found = rope.scaling, {"rope_type": "default", "rope_theta": rope.theta}
    if isinstance(scaling, LinearScaling):
        found |= {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, Llama3Scaling):
        found |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_length,
        }
    elif isinstance(scaling, YarnScaling):
        found |= {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_length,
            "attention_factor": scaling.attention_factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
        }
        found |= {} if scaling.truncate else {"truncate": False}
    return found
