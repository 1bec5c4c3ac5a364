"""Worker module: tells which modules an `adapter_config.json` names, whose regular expressions may take for ever."""

import re
from collections.abc import Mapping
from typing import Any

from train.data.workers.serve import serve

MEMORY = 1 << 30
# The fields that decide it.
FIELDS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")


def is_targeted(fields: Mapping[str, Any], module: str) -> bool:
    """Checks whether PEFT would put an adapter on a module, such as `model.layers.0.self_attn.q_proj`.

    A list has full names or suffixes of modules; a string is "all-linear" or a regular expression for the full name.
    `layers_to_transform` applies only to lists.
    """
    if _matches(fields.get("exclude_modules") or [], module):
        return False
    targets = fields.get("target_modules") or []
    if isinstance(targets, str):
        return targets.lower() == "all-linear" or _matches(targets, module)
    layers = fields.get("layers_to_transform")
    if module in targets or not _matches(targets, module) or layers in (None, []):
        return _matches(targets, module)
    index = _layer(fields.get("layers_pattern"), module)
    return index in ([layers] if isinstance(layers, int) else layers)


def layer_expression(name: str) -> str:
    """Returns the regular expression that finds the layer index after a name of `layers_pattern`."""
    return rf"(?:^|.*?\.){name}\.(\d+)\."


def _matches(names: str | list[str], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _layer(patterns: str | list[str] | None, module: str) -> int | None:
    """Finds the layer index of a module, after the first match of `layers_pattern`."""
    if not patterns:
        match = re.match(r".*?\.[^.]*\.(\d+)\.", module)
    else:
        names = [patterns] if isinstance(patterns, str) else patterns
        matches = (re.match(layer_expression(name), module) for name in names)
        match = next((match for match in matches if match), None)
    return int(match[1]) if match and match[1] and match[1].isdecimal() else None


def reply(question: Any) -> list[bool]:
    """Answers `{"fields", "modules"}` with whether each module is targeted."""
    if question is None:
        return []
    return [is_targeted(question["fields"], module) for module in question["modules"]]


if __name__ == "__main__":
    serve(reply, memory=MEMORY)
