"""Presets: configs of the algorithms of other systems, below the config of a run (`preset: trl/grpo`)."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from train.config.fields import known_fields
from train.config.installation import RECIPES
from train.config.messages import did_you_mean, show
from train.config.yaml_text import parse_yaml

DIRECTORY = RECIPES / "presets"
Fields = dict[str, Any]
# The sections that make an algorithm. `preset=` on the command line replaces those of the file.
OWNED = ("advantage", "loss", "kl", "correction")


@cache
def preset_names() -> tuple[str, ...]:
    """Lists the presets, `system/algorithm`."""
    paths = (path.relative_to(DIRECTORY).with_suffix("") for path in DIRECTORY.glob("*/*.yaml"))
    return tuple(sorted(name.as_posix() for name in paths))


def read_preset(name: str) -> Fields:
    """Reads the fields of a preset.

    Raises:
      LookupError: there is none of this name, with the names that exist.
    """
    if name not in preset_names():
        hint = did_you_mean(name, preset_names())
        raise LookupError(f"preset: got {show(name)}, expected one of {', '.join(preset_names())}{hint}")
    fields, _ = parse_yaml((DIRECTORY / f"{name}.yaml").read_text(encoding="utf-8"))
    return dict(fields)


def drop_replaced(raw: Fields, overrides: Sequence[str]) -> list[str]:
    """Removes the sections of a file that a preset on the command line replaces; returns their names."""
    chosen = [text for path, _, text in (override.partition("=") for override in overrides) if path == "preset"]
    if not chosen or chosen[-1] not in preset_names():
        return []
    return [section for section in OWNED if raw.pop(section, None) is not None]


def with_preset(raw: Mapping[str, Any]) -> tuple[Fields, list[str]]:
    """Puts the preset of a raw config below its fields; returns the whole, and problems.

    Where the config chooses another variant, the fields common to all stay: `loss=cispo` over a preset with
    `loss.type: ppo` keeps its aggregation and drops its clips.
    """
    name = raw.get("preset")
    if not isinstance(name, str):
        return dict(raw), []
    try:
        below = read_preset(name)
    except LookupError as error:
        return {key: value for key, value in raw.items() if key != "preset"}, [str(error)]
    return _merge(below, dict(raw), ""), []


def preset_fields(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Lists the dotted paths of the fields that the preset of a raw config leaves in it."""
    merged, problems = with_preset(raw)
    if problems or not isinstance(raw.get("preset"), str):
        return ()
    present = {path for path, _ in leaves(merged)}
    return tuple(path for path, _ in leaves(read_preset(raw["preset"])) if path in present)


def leaves(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted path and the value of every field in a nested mapping; the tag stands for a union's text."""
    for key, value in fields.items():
        path = f"{prefix}{key}"
        known = known_fields().get(path)
        if known is not None and known.tag is not None and isinstance(value, str):
            yield f"{path}.{known.tag}", value
        elif known is not None and known.section and isinstance(value, dict):
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def _merge(below: Fields, above: Fields, prefix: str) -> Fields:
    merged = copy.deepcopy(below)
    for key, value in above.items():
        path = f"{prefix}{key}"
        known = known_fields().get(path)
        under = merged.get(key)
        if known is None or not known.section or not isinstance(under, dict):
            merged[key] = value
            continue
        upper = {known.tag: value} if known.tag is not None and isinstance(value, str) else value
        if not isinstance(upper, dict):
            merged[key] = value
            continue
        chosen = upper.get(known.tag) if known.tag is not None else None
        if chosen is not None and chosen != under.get(known.tag or ""):
            under = {name: item for name, item in under.items() if _common(f"{path}.{name}")}
        merged[key] = _merge(under, upper, f"{path}.")
    return merged


def _common(path: str) -> bool:
    """Whether all variants of a union have a field."""
    known = known_fields().get(path)
    parent = known_fields()[path.rpartition(".")[0]]
    tag = known_fields()[f"{parent.path}.{parent.tag}"]
    return known is not None and set(known.variants) >= set(tag.variants)
