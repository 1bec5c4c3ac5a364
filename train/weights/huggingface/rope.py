"""Rope keys of `config.json`: `rope_theta` and `rope_scaling`, or `rope_parameters`, also per kind of layer."""

import math
from collections.abc import Mapping
from typing import Any

from train.models.config import LinearScaling, Llama3Scaling, Rope, RopeScaling, YarnScaling

# Keys of each type, besides the type and the base.
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
    """Reads a rope from its keys.

    Args:
      parameters: the keys; nulls count as absent.
      where: name of the mapping, for errors.
      theta: default base.
      length: `max_position_embeddings`, the default original length.

    Raises:
      ValueError: an unknown type or key, a missing key, or a value out of range.
    """
    keys = {key: value for key, value in parameters.items() if value is not None}
    kind = keys.pop("rope_type", None)
    old_kind = keys.pop("type", None)
    if kind is not None and old_kind is not None and kind != old_kind:
        raise ValueError(f"{where}: got rope_type {kind!r} and type {old_kind!r}, expected one of them")
    kind = kind or old_kind or "default"
    if not isinstance(kind, str) or kind not in TYPES:
        raise ValueError(f"{where}.rope_type: got {kind!r}, expected one of {', '.join(TYPES)}")
    base = _number(keys.pop("rope_theta", theta), f"{where}.rope_theta")
    rotary_factor = keys.pop("partial_rotary_factor", 1)
    if rotary_factor != 1:
        raise ValueError(f"{where}.partial_rotary_factor: got {rotary_factor!r}, expected 1.0")
    unknown = sorted(keys.keys() - TYPES[kind])
    if unknown:
        raise ValueError(f"{where}: rope_type {kind!r} is not known to read {', '.join(unknown)}")
    if kind == "default":
        return Rope(base)
    if "factor" not in keys:
        raise ValueError(f"{where}.factor: missing, expected a number as rope_type is {kind!r}")
    if not _number(keys["factor"], f"{where}.factor") >= 1:
        raise ValueError(f"{where}.factor: got {keys['factor']}, expected at least 1")
    name = "original_max_position_embeddings"
    original = keys.pop(name, length)
    if original is not None and (isinstance(original, bool) or not isinstance(original, int) or original < 1):
        raise ValueError(f"{where}.{name}: got {original!r}, expected a number of tokens (of max_position_embeddings)")
    return Rope(base, _scaling(kind, keys, original, where))


def _scaling(kind: str, keys: dict[str, Any], original: int | None, where: str) -> RopeScaling:
    truncate = keys.pop("truncate", True)
    numbers = {key: _number(value, f"{where}.{key}") for key, value in keys.items()}
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
    """Computes the default attention factor of YaRN."""

    def growth(scale: float) -> float:
        return 0.1 * scale * math.log(numbers["factor"]) + 1.0

    top = numbers.get("mscale")
    bottom = numbers.get("mscale_all_dim")
    return growth(top) / growth(bottom) if top and bottom else growth(1.0)


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: got {value!r}, expected a number")
    return float(value)


def write_rope(rope: Rope) -> dict[str, Any]:
    """Writes the `rope_parameters` of a rope, which `read_rope` reads back."""
    scaling = rope.scaling
    parameters = {"rope_type": "default", "rope_theta": rope.theta}
    if isinstance(scaling, LinearScaling):
        parameters |= {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, Llama3Scaling):
        parameters |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_length,
        }
    elif isinstance(scaling, YarnScaling):
        parameters |= {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_length,
            "attention_factor": scaling.attention_factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
        }
        parameters |= {} if scaling.truncate else {"truncate": False}
    return parameters
