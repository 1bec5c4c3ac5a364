"""One bit flipped in any file of a folder that `train.export` wrote: weights, config, tokenizer, template, adapter."""

import functools
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.faults.adapters import check as check_adapter_folder
from tests.faults.case import Fault, damaged
from tests.faults.flips import flip_bit
from tests.faults.folders import GOLDENS
from train.config.errors import field_errors
from train.data.tokenizers.files import load_folder
from train.models import Decoder
from train.models.sharding import make_mesh
from train.weights.huggingface import load_params
from train.weights.huggingface.config import decoder_config
from train.weights.tensor_digests import write_tensor_digests

AREA = "exported folders"
FLIPS = 4
"""Of each file."""


def exported(directory: Path, name: str) -> Path:
    """Copies a recorded export, with the digests that an export has."""
    folder = Path(shutil.copytree(GOLDENS / "exports" / name, directory / name))
    write_tensor_digests(folder)
    return folder


@functools.cache
def _decoder() -> Decoder:
    return Decoder(decoder_config(GOLDENS / "exports" / "merged"))


def check(folder: Path) -> None:
    """Reads weights and tokenizer as a run does before it starts."""
    with field_errors("model.path"):
        load_params(folder, _decoder(), make_mesh())
        load_folder(folder)


def _flip(name: str, seed: int) -> Callable[[Path], object]:
    return lambda folder: flip_bit(folder / name, random.Random(seed))


def _files(name: str) -> list[str]:
    return sorted(path.name for path in (GOLDENS / "exports" / name).iterdir())


FAULTS = [
    Fault(
        AREA,
        f"{name}/{file}, flip {seed}",
        damaged(functools.partial(exported, name=name), reads, label, _flip(file, seed)),
    )
    for name, reads, label in (("merged", check, "model.path"), ("adapter", check_adapter_folder, "lora.path"))
    for file in _files(name)
    for seed in range(FLIPS)
]
