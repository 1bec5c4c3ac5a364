"""`adapter_config.json` of PEFT: what of it is read, what changes nothing, and what is refused by name."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CONFIG_FILE = "adapter_config.json"

# Where an adapter comes from, or how it is trained and drawn: the weights in the file are used in the same way.
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
# The other ways to start (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA, MiCA) take something away from the base weights.
BASE_KEPT = (True, False, "gaussian", "eva", "orthogonal")
WHAT = {
    "alpha_pattern": "one lora_alpha for all modules",
    "bias": "'none'",
    "fan_in_fan_out": "false",
    "layer_replication": "the layers of the base model",
    "lora_bias": "false",
    "modules_to_save": "none: whole modules beside the adapter are not read",
    "rank_pattern": "one r for all modules",
    "trainable_token_indices": "none: the embedding has no adapter",
    "use_dora": "false: DoRA is not supported",
}


def read_config(path: str | Path) -> dict[str, Any]:
    """The mapping in `adapter_config.json` of a folder, with every field checked.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not JSON, or a field asks for something else than plain LoRA or rsLoRA, naming all such fields.
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
    """A field that is not known may change the meaning of the weights: only an empty one is passed over."""
    problems = []
    for name, value in sorted(raw.items()):
        if name == "init_lora_weights" and value not in BASE_KEPT and value is not None:
            problems.append(f"{name}: got {value!r}, which changes the base weights; save it as plain LoRA with PEFT")
        elif name not in NEUTRAL | READ and value and value != "none":
            expected = WHAT.get(name, "no such field, or an empty one")
            problems.append(f"{name}: got {json.dumps(value)[:80]}, expected {expected}")
    return problems


def targeted(raw: Mapping[str, Any], module: str) -> bool:
    """Whether a config asks for an adapter on a projection, such as `model.layers.0.self_attn.q_proj`, as PEFT decides.

    A list names modules by their full name or by its end; a string is a regular expression for the full name, or
    "all-linear". `layers_to_transform` applies to lists alone.
    """
    if _named(raw.get("exclude_modules") or [], module):
        return False
    targets = raw["target_modules"]
    if isinstance(targets, str):
        return targets.lower() == "all-linear" or _named(targets, module)
    layers = raw.get("layers_to_transform")
    if module in targets or not _named(targets, module) or layers in (None, []):
        return _named(targets, module)
    index = _layer(raw.get("layers_pattern"), module)
    return index in ([layers] if isinstance(layers, int) else layers)


def _named(names: str | list[str], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _layer(patterns: str | list[str] | None, module: str) -> int | None:
    """The index of the layer that a module is in, after the first name that `layers_pattern` allows."""
    if not patterns:
        match = re.match(r".*?\.[^.]*\.(\d+)\.", module)
    else:
        listed = [patterns] if isinstance(patterns, str) else patterns
        found = (re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module) for pattern in listed)
        match = next((one for one in found if one), None)
    return int(match[1]) if match else None
