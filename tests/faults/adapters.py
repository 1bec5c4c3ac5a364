"""PEFT folders that are damaged, senseless or hostile."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.faults.case import Fault, damaged
from tests.faults.folders import DEEP, GOLDENS, LONG, write_header
from train.config.errors import field_errors
from train.models import Decoder
from train.models.sharding import make_mesh
from train.weights import peft_config
from train.weights.huggingface.config import decoder_config
from train.weights.peft import check_adapter, load_adapter, read_peft_config
from train.weights.peft_config import CONFIG_FILE

WEIGHTS = "adapter_model.safetensors"
ADAPTER = GOLDENS / "models" / "qwen3" / "adapter"


def adapter(directory: Path) -> Path:
    """Copies an adapter."""
    return Path(shutil.copytree(ADAPTER, directory / "adapter"))


def check(path: Path) -> None:
    """Reads and checks an adapter as a run does before it starts."""
    with field_errors("lora.path"):
        model = Decoder(decoder_config(ADAPTER.parent, lora=read_peft_config(path)))
        check_adapter(path, model)
        load_adapter(path, model, make_mesh())


damaged_adapter = functools.partial(damaged, adapter, check, "lora.path")


def with_fields(*words: str, **fields: object) -> Callable[[Path], str]:
    """Makes a fault of other fields of `adapter_config.json`."""

    def change(path: Path) -> None:
        (path / CONFIG_FILE).write_text(json.dumps(json.loads((path / CONFIG_FILE).read_text()) | fields))

    return damaged_adapter(change, *words)


def with_text(text: str, *words: str) -> Callable[[Path], str]:
    """Makes a fault of another `adapter_config.json`."""
    return damaged_adapter(lambda path: (path / CONFIG_FILE).write_text(text), CONFIG_FILE, *words)


def hangs(name: str, **fields: object) -> Callable[[Path], str]:
    """Makes a fault of a regular expression that needs longer than the age of the universe."""

    def run(directory: Path) -> str:
        with mock.patch.object(peft_config, "EXPRESSION_SECONDS", 0.3):
            return with_fields(name, "the regular expression takes longer than 0.3 s", **fields)(directory)

    return run


def cut(path: Path) -> None:
    """Cuts the tensors in the middle."""
    content = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(content[: len(content) // 2])


def not_a_number(path: Path) -> None:
    """Puts NaN into a matrix."""
    tensors = load_file(path / WEIGHTS)
    next(iter(tensors.values())).flat[0] = np.nan
    save_file(tensors, path / WEIGHTS)


def deep(path: Path) -> None:
    """Nests the header of the tensors."""
    write_header(path / WEIGHTS, '{"a":' + DEEP, b"")


# A look ahead that tries every way to cut a name; a plain one ends at once where a letter is missing.
HANGS = "(?=(.|..|[a-z]+)+X).*"
CASES = {
    "config nested too deeply": with_text(DEEP, "nested too deeply"),
    "config with a number of 6,000 digits": with_text('{"r": ' + LONG + "}", "cannot be read"),
    "config that is not UTF-8": damaged_adapter(lambda path: (path / CONFIG_FILE).write_bytes(b'{"r": "\xff"}'), "utf"),
    "rank of -1": with_fields("r: got -1, expected a positive number", r=-1),
    "rank of 10 ** 30": with_fields("r: got 1000", r=10**30),
    "rank that is a float": with_fields("r: got 4.5", r=4.5),
    "alpha that is NaN": with_fields("lora_alpha: got nan", lora_alpha=float("nan")),
    "alpha of 1e300": with_fields("lora_alpha: got 1e+300", lora_alpha=1e300),
    "a regular expression that hangs": hangs("target_modules", target_modules=HANGS),
    "an exclusion that hangs": hangs("exclude_modules", exclude_modules=HANGS),
    "a pattern of layers that hangs": hangs(
        "layers_pattern",
        target_modules=["q_proj", "v_proj", "down_proj"],
        layers_to_transform=[0],
        layers_pattern=HANGS,
    ),
    "no regular expression": with_fields("target_modules", "which is no regular expression", target_modules="("),
    "a regular expression nested too deeply": with_fields("target_modules", target_modules="(" * 5000 + ")" * 5000),
    "a repetition that is too long": with_fields("target_modules", target_modules="a{99999999999}"),
    "a broken pattern of layers": with_fields("layers_pattern", layers_to_transform=[0], layers_pattern="("),
    "layers that are no numbers": with_fields("layers_to_transform: got 1.5", layers_to_transform=1.5),
    "modules that are no names": with_fields("target_modules: got [1", target_modules=[1, 2]),
    "weights cut off": damaged_adapter(cut, "not a complete safetensors file"),
    "NaN in a matrix": damaged_adapter(not_a_number, "not finite"),
    "header nested too deeply": damaged_adapter(deep, "not a complete safetensors file"),
}
FAULTS = [Fault("adapter folders", name, run) for name, run in CASES.items()]
