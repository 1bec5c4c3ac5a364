"""Reading of `adapter_config.json` of PEFT; a field that would change the weights is an error."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CONFIG_FILE = "adapter_config.json"

# Origin, training and initialization of an adapter, which do not change the use of its weights.
NEUTRAL = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
READ = frozenset(
    {
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "target_modules",
        "use_rslora",
    }
)
# Other initializations (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA, MiCA) change the base weights.
SUPPORTED_INITS = (True, False, "gaussian", "eva", "orthogonal")
EXPECTED = {
    "alpha_pattern": "one lora_alpha for all modules",
    "bias": "'none'",
    "fan_in_fan_out": "false",
    "layer_replication": "the layers of the base model",
    "lora_bias": "false",
    "modules_to_save": "none: modules beside the adapter are not supported",
    "rank_pattern": "one r for all modules",
    "trainable_token_indices": "none: the embedding has no adapter",
    "use_dora": "false: DoRA is not supported",
}


def read_config(path: str | Path) -> dict[str, Any]:
    """Reads and checks `adapter_config.json` of a folder.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file is no JSON, or its fields are not plain LoRA or rsLoRA; names all wrong fields.
    """
    file = Path(path) / CONFIG_FILE
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"no PEFT adapter at {path}: it has no {CONFIG_FILE}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: got {type(raw).__name__}, expected a mapping of fields")
    problems = [*_missing(raw), *_refused(raw)]
    if problems:
        raise ValueError(f"{file}: {'; '.join(problems)}")
    return raw


def _missing(raw: Mapping[str, Any]) -> list[str]:
    problems = []
    if str(raw.get("peft_type")).upper() != "LORA":
        problems.append(f"peft_type: got {raw.get('peft_type')!r}, expected 'LORA'")
    for name, kinds in (("r", (int,)), ("lora_alpha", (int, float)), ("target_modules", (list, str))):
        value = raw.get(name)
        if not isinstance(value, kinds) or isinstance(value, bool) or not value:
            expected = "module names or a regular expression" if name == "target_modules" else "a positive number"
            problems.append(f"{name}: got {value!r}, expected {expected}")
    return problems + [f"{name}: got {value!r}, {reason}" for name, value, reason in _bad_patterns(raw)]


def _bad_patterns(raw: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name in ("target_modules", "exclude_modules"):
        value = raw.get(name)
        if isinstance(value, str):
            try:
                re.compile(value)
            except re.error as error:
                yield name, value, f"which is no regular expression: {error}"


def _refused(raw: Mapping[str, Any]) -> list[str]:
    """Lists unsupported fields; an unknown field may change the meaning of the weights, unless it is empty."""
    problems = []
    for name, value in sorted(raw.items()):
        if name == "init_lora_weights" and value not in SUPPORTED_INITS and value is not None:
            problems.append(f"{name}: got {value!r}, which changes the base weights; save it as plain LoRA with PEFT")
        elif name not in NEUTRAL | READ and value and value != "none":
            expected = EXPECTED.get(name, "no such field, or an empty one")
            problems.append(f"{name}: got {json.dumps(value)[:80]}, expected {expected}")
    return problems


def is_targeted(raw: Mapping[str, Any], module: str) -> bool:
    """Checks whether PEFT would put an adapter on a module, such as `model.layers.0.self_attn.q_proj`.

    A list has full names or suffixes of modules; a string is "all-linear" or a regular expression for the full name.
    `layers_to_transform` applies only to lists.
    """
    if _matches(raw.get("exclude_modules") or [], module):
        return False
    targets = raw["target_modules"]
    if isinstance(targets, str):
        return targets.lower() == "all-linear" or _matches(targets, module)
    layers = raw.get("layers_to_transform")
    if module in targets or not _matches(targets, module) or layers in (None, []):
        return _matches(targets, module)
    index = _layer(raw.get("layers_pattern"), module)
    return index in ([layers] if isinstance(layers, int) else layers)


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
        matches = (re.match(rf"(?:^|.*?\.){name}\.(\d+)\.", module) for name in names)
        match = next((match for match in matches if match), None)
    return int(match[1]) if match else None
