"""Reading of `adapter_config.json` of PEFT; a field that would change the weights is an error."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import regex
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from train.config.adapter import PARAMETERS
from train.config.json_text import parse_json
from train.config.regular_file import read_regular
from train.weights.peft_experts import PAIR_KEY, has_pairs

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 1_000_000
MAX_ALPHA = 1e30
EXPRESSION_SECONDS = 5.0
"""Time of the regular expressions of a config on all modules of a model."""

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
        "target_parameters",
        "use_rslora",
    }
)
# Other initializations (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA, MiCA) change the base weights.
SUPPORTED_INITS = (True, False, "gaussian", "eva", "orthogonal")
PATTERNS = f"or twice r and the same scale for {PAIR_KEY!r} of experts"
EXPECTED = {
    "alpha_pattern": f"one lora_alpha for all modules, {PATTERNS}",
    "bias": "'none'",
    "fan_in_fan_out": "false",
    "layer_replication": "the layers of the base model",
    "lora_bias": "false",
    "modules_to_save": "none: modules beside the adapter are not supported",
    "rank_pattern": f"one r for all modules, {PATTERNS}",
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
        raw = parse_json(read_regular(file))
    except FileNotFoundError:
        raise FileNotFoundError(f"no PEFT adapter at {path}: it has no {CONFIG_FILE}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: got {type(raw).__name__}, expected a mapping of fields")
    wrong = _wrong_types(raw)
    typed = {name: value for name, value in raw.items() if name not in wrong}
    bad = {name: f"expected {expected}" for name, expected in wrong.items()} | dict(_bad_patterns(typed))
    problems = [f"{name}: got {_shown(raw.get(name))}, {reason}" for name, reason in bad.items()]
    problems += _refused(raw)
    if problems:
        raise ValueError(f"{file}: {'; '.join(problems)}")
    return raw


class _Types(BaseModel):
    """The types of the fields that are read, each with a text for errors."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    peft_type: Annotated[str, Field(pattern="^(?i:lora)$"), "'LORA'"]
    r: Annotated[int, Field(ge=1, le=MAX_RANK), f"a positive number, whole and at most {MAX_RANK:,}"]
    lora_alpha: Annotated[float, Field(gt=0, le=MAX_ALPHA), f"a positive number of at most {MAX_ALPHA:g}"]
    target_modules: Annotated[str | list[str], Field(min_length=1), "module names or a regular expression"]
    exclude_modules: Annotated[str | list[str] | None, "module names or a regular expression"] = None
    layers_pattern: Annotated[str | list[str] | None, "a text or a list of texts"] = None
    layers_to_transform: Annotated[int | list[int] | None, "an integer or a list of integers"] = None
    target_parameters: Annotated[list[str] | None, "a list of names of parameters"] = None


def _wrong_types(raw: Mapping[str, Any]) -> dict[str, str]:
    """Lists the fields of a wrong type, with the type that is expected."""
    if raw.get("target_parameters") and raw.get("target_modules") in (None, []):
        raw = {**raw, "target_modules": raw["target_parameters"]}
    try:
        _Types.model_validate(raw)
    except ValidationError as error:
        fields = dict.fromkeys(str(problem["loc"][0]) for problem in error.errors())
        return {name: _Types.model_fields[name].metadata[-1] for name in fields}
    return {}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _expressions(raw: Mapping[str, Any]) -> dict[str, list[str]]:
    """Lists the regular expressions of a config by their field."""
    expressions = {}
    for name in ("target_modules", "exclude_modules"):
        value = raw.get(name)
        if isinstance(value, str) and value.lower() != "all-linear":
            expressions[name] = [value]
    names = raw.get("layers_pattern")
    if names and raw.get("layers_to_transform") is not None:
        expressions["layers_pattern"] = [
            _layer_expression(name) for name in ([names] if isinstance(names, str) else names)
        ]
    return expressions


def _bad_patterns(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, expressions in _expressions(raw).items():
        for expression in expressions:
            try:
                regex.compile(expression)
            except (regex.error, RecursionError, OverflowError) as error:
                yield name, f"which is no regular expression: {error}"


def _refused(raw: Mapping[str, Any]) -> list[str]:
    """Lists unsupported fields; an unknown field may change the meaning of the weights, unless it is empty."""
    problems = []
    for name, value in sorted(raw.items()):
        if name == "init_lora_weights" and value not in SUPPORTED_INITS and value is not None:
            problems.append(f"{name}: got {value!r}, which changes the base weights; save it as plain LoRA with PEFT")
        elif name in ("rank_pattern", "alpha_pattern") and has_pairs(raw):
            continue
        elif name not in NEUTRAL | READ and value and value != "none":
            expected = EXPECTED.get(name, "no such field, or an empty one")
            problems.append(f"{name}: got {json.dumps(value)[:80]}, expected {expected}")
    return problems


def targeted(raw: Mapping[str, Any], modules: Iterable[str]) -> set[str]:
    """Lists the modules and the parameters of `PARAMETERS` that PEFT would put an adapter on.

    Raises:
      ValueError: a regular expression of the config takes too long.
    """
    names = set(modules)
    parameters = {name for name in names if name.endswith(tuple(PARAMETERS))}
    chosen = {
        name for name in parameters for end in raw.get("target_parameters") or [] if f".{name}".endswith(f".{end}")
    }
    return chosen | _targeted_modules(raw, sorted(names - parameters))


def _targeted_modules(raw: Mapping[str, Any], names: list[str]) -> set[str]:
    end = time.monotonic() + EXPRESSION_SECONDS
    try:
        return {name for name in names if _is_targeted(raw, name, end)}
    except TimeoutError:
        listed = " and ".join(_expressions(raw))
        raise ValueError(
            f"{listed}: the regular expression takes longer than {EXPRESSION_SECONDS:g} s; give names of modules"
        ) from None


def _is_targeted(raw: Mapping[str, Any], module: str, end: float) -> bool:
    """Checks whether PEFT would put an adapter on a module, such as `model.layers.0.self_attn.q_proj`.

    A list has full names or suffixes of modules; a string is "all-linear" or a regular expression for the full name.
    `layers_to_transform` applies only to lists.

    Raises:
      TimeoutError: a regular expression is not done at the monotonic time `end`.
    """
    if _matches(raw.get("exclude_modules") or [], module, end):
        return False
    targets = raw.get("target_modules") or []
    if isinstance(targets, str):
        return targets.lower() == "all-linear" or _matches(targets, module, end)
    layers = raw.get("layers_to_transform")
    is_named = _matches(targets, module, end)
    if module in targets or not is_named or layers in (None, []):
        return is_named
    index = _layer(raw.get("layers_pattern"), module, end)
    return index in ([layers] if isinstance(layers, int) else layers)


def _matches(names: str | list[str], module: str, end: float) -> bool:
    if isinstance(names, str):
        return regex.fullmatch(names, module, timeout=_seconds(end)) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _layer(patterns: str | list[str] | None, module: str, end: float) -> int | None:
    """Finds the layer index of a module, after the first match of `layers_pattern`."""
    names = [patterns] if isinstance(patterns, str) else patterns
    expressions = [_layer_expression(name) for name in names] if names else [r".*?\.[^.]*\.(\d+)\."]
    for expression in expressions:
        match = regex.match(expression, module, timeout=_seconds(end))
        if match:
            return int(match[1]) if match[1] and match[1].isdecimal() else None
    return None


def _layer_expression(name: str) -> str:
    """Returns the regular expression that finds the layer index after a name of `layers_pattern`."""
    return rf"(?:^|.*?\.){name}\.(\d+)\."


def _seconds(end: float) -> float:
    """Returns the time that is left; `regex` takes 0 for no limit."""
    return max(end - time.monotonic(), 1e-3)
