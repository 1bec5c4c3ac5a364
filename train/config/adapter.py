"""The shape of the adapter at `lora.path`, which its folder knows."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from train.config.json_text import parse_json
from train.config.regular_file import read_regular
from train.config.storage import is_address, small_file
from train.config.types import LoraTarget

# Longest header of a safetensors file.
MAX_HEADER = 100_000_000
PARAMETERS: Mapping[str, tuple[LoraTarget, ...]] = {
    "mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.experts.down_proj": ("down_proj",),
    "mlp.gate.weight": ("gate",),
    "mlp.router.weight": ("gate",),
}
"""The targets of the parameters of transformers 5 that are no modules: of experts, and routers."""


def parameters_of(targets: Iterable[str]) -> list[str]:
    """Lists the keys of `PARAMETERS` that have an adapter in some layer, from `target_parameters` of a config."""
    names = list(targets)
    return [
        parameter
        for parameter in PARAMETERS
        if any(f".{parameter}".endswith(f".{name}") or name.endswith(f".{parameter}") for name in names)
    ]


def with_adapter(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fills in rank, alpha, rslora and targets of a raw config from the PEFT folder at `lora.path`.

    Fields that are given stay; they are compared with the folder when it is read. A folder that cannot be read fills in
    nothing, and is refused there.
    """
    section = raw.get("lora")
    path = section.get("path") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(path, str):
        return dict(raw)
    try:
        shape = _shape(path)
    except (OSError, ValueError, RuntimeError):
        return dict(raw)
    except Exception:
        # Packages of stores have errors of their own.
        if not is_address(path):
            raise
        return dict(raw)
    return {**raw, "lora": {**shape, **section}}


def _shape(folder: str) -> dict[str, Any]:
    config = parse_json(read_regular(small_file(folder, "adapter_config.json")))
    header = _header(small_file(folder, "adapter_model.safetensors"))
    if not isinstance(config, dict) or not isinstance(header, dict):
        return {}
    modules = {part for name in header for part in name.split(".")}
    names = config.get("target_parameters")
    for parameter in parameters_of(name for name in names if isinstance(name, str)) if isinstance(names, list) else ():
        modules |= {*PARAMETERS[parameter]}
    shape = {
        "rank": config.get("r"),
        "alpha": config.get("lora_alpha"),
        "rslora": bool(config.get("use_rslora")),
        "targets": [target for target in get_args(LoraTarget) if target in modules] or None,
    }
    return {name: value for name, value in shape.items() if value is not None}


def _header(path: Path) -> Any:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return None if length > MAX_HEADER else parse_json(file.read(length))
