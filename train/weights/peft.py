"""Adapters as PEFT stores them: a folder of `adapter_config.json` and `adapter_model.safetensors`, in and out."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from train.models import Decoder, LoraConfig
from train.models.leaves import named_leaves
from train.models.lora import PROJECTIONS
from train.models.sharding import make_mesh
from train.rl.policy import abstract_adapter
from train.weights.files import new_directory, write_text_atomic
from train.weights.peft_config import CONFIG_FILE, read_config, targeted

Tree = Any

WEIGHTS_FILE = "adapter_model.safetensors"
# The decoder inside a causal language model, and inside the ones of Gemma 3 that take images too.
KEY = re.compile(
    r"base_model\.model\.((?:model\.|model\.language_model\.|language_model\.model\.)"
    r"layers\.(\d+)\.((?:self_attn|mlp)\.(\w+)))\.(lora_[AB])\.weight"
)
SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor of a file: its key, where it belongs, and its shape as the file has it ([rank, in] or [out, rank])."""

    key: str
    module: str
    layer: int
    leaf: str
    shape: tuple[int, ...]


def is_peft(path: str | Path) -> bool:
    """Whether a folder holds an adapter of PEFT."""
    return (Path(path) / CONFIG_FILE).is_file()


def base_model(path: str | Path) -> str | None:
    """The base model that a folder of PEFT names; None where it names none."""
    return read_config(path).get("base_model_name_or_path") or None


def read_peft_config(path: str | Path) -> LoraConfig:
    """Rank, alpha and targets of a PEFT folder: those projections that it has matrices for in some layer.

    Raises:
      FileNotFoundError: no adapter there.
      ValueError: it is not plain LoRA or rsLoRA on projections of a decoder, naming the field or the tensor.
    """
    raw = read_config(path)
    with _weights(path) as file:
        found = {tensor.leaf.split(".")[-2] for tensor in _stored(path, file)}
    targets = tuple(name for name in PROJECTIONS if name in found)
    return LoraConfig(int(raw["r"]), float(raw["lora_alpha"]), targets, bool(raw.get("use_rslora")))


def check_adapter(path: str | Path, model: Decoder) -> None:
    """Checks from the config and the file's header alone that `load_adapter` would fit; reads no tensor.

    Raises:
      FileNotFoundError: no adapter there.
      ValueError: naming what differs, with what the folder has and what the model's lora section says.
    """
    if model.config.lora is None:
        raise ValueError("adapter: the model has no lora section, so there is nothing to attach an adapter to")
    _check_lora(path, model.config.lora)
    raw = read_config(path)
    with _weights(path) as file:
        stored = _stored(path, file)
    problems = [*_misfits(stored, raw, model), *_gaps(stored, raw, model)]
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ValueError(f"adapter {path} does not fit the model: {'; '.join(problems[:SHOWN])}{more}")


def load_adapter(path: str | Path, model: Decoder, mesh: Mesh) -> Tree:
    """The adapter of a PEFT folder in the model's layout, float32, each array made in its sharding.

    A layer that the folder leaves out (`layers_to_transform`, a regular expression) gets zeros in both matrices, which
    add nothing and have no gradient, so it stays as it is in training too.

    Args:
      path: the folder; model: with a lora section that says what the folder says (`read_peft_config`); mesh: the mesh.

    Returns:
      A [layers, in, rank] and B [layers, rank, out] of each target.

    Raises:
      FileNotFoundError, ValueError: as `check_adapter`, before anything is read.
    """
    check_adapter(path, model)
    with _weights(path) as file:
        keys = {(tensor.layer, tensor.leaf): tensor.key for tensor in _stored(path, file)}

        def load(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            values = np.zeros(leaf.shape, leaf.dtype)
            for layer in range(leaf.shape[0]):
                if (layer, name) in keys:
                    values[layer] = file.get_tensor(keys[layer, name]).T
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: values[index])

        abstract = abstract_adapter(model, mesh)
        leaves = [load(name, leaf) for name, leaf in named_leaves(abstract).items()]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def save_adapter(
    path: str | Path, model: Decoder, adapter: Tree, *, base_name: str | None, source: str | Path | None = None
) -> None:
    """Writes an adapter as a PEFT folder, whole or not at all, which PEFT, transformers and vLLM load.

    Args:
      path: the folder, which is not there yet, or empty.
      model: its lora section gives rank, alpha and targets; adapter: as `load_adapter` returns it.
      base_name: `base_model_name_or_path`: the folder or the hub's name of the base model.
      source: the Hugging Face folder of the base, which says whether the decoder is the text part of a larger model.

    Raises:
      FileExistsError: something is there already.
      ValueError: an adapter that does not fit the model.
    """
    lora, leaves = model.config.lora, named_leaves(adapter)
    got, expected = {name: leaf.shape for name, leaf in leaves.items()}, _shapes(model)
    if lora is None or got != expected:
        raise ValueError(f"adapter does not fit the model: got {got}, expected {expected}")
    prefix = f"base_model.model.{_prefix(source)}"
    with new_directory(Path(path)) as partial:
        tensors = {}
        for name, leaf in leaves.items():
            values = np.asarray(jax.device_get(leaf), np.float32)
            for layer, matrix in enumerate(values):
                key = f"{prefix}layers.{layer}.{name.removeprefix('layers.')}.weight"
                tensors[key] = np.ascontiguousarray(matrix.T)
        # `save_file` would leave it to its owner alone, and a server often is somebody else.
        (partial / WEIGHTS_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
        text = json.dumps(_peft_config(lora, base_name), indent=2, sort_keys=True)
        write_text_atomic(partial / CONFIG_FILE, f"{text}\n")


def _prefix(source: str | Path | None) -> str:
    """Where the layers are in the model that transformers makes of a folder: deeper in one that takes images too."""
    file = None if source is None else Path(source) / "config.json"
    nested = file is not None and file.is_file() and "text_config" in json.loads(file.read_text(encoding="utf-8"))
    return "model.language_model." if nested else "model."


def _peft_config(lora: LoraConfig, base_name: str | None) -> dict[str, Any]:
    """What PEFT 0.21 writes for such an adapter, but for the fields that say nothing."""
    return {
        "base_model_name_or_path": base_name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": sorted(lora.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": lora.rslora,
    }


def _check_lora(path: str | Path, lora: LoraConfig) -> None:
    """Raises ValueError naming each setting in which a folder and the model's lora section differ."""
    found = read_peft_config(path)
    wrong = [
        f"{theirs}: got {got!r}, but lora.{ours} of the config is {want!r}"
        for theirs, ours, got, want in (
            ("r", "rank", found.rank, lora.rank),
            ("lora_alpha", "alpha", found.alpha, float(lora.alpha)),
            ("use_rslora", "rslora", found.rslora, lora.rslora),
            ("target_modules", "targets", sorted(found.targets), sorted(lora.targets)),
        )
        if got != want
    ]
    if wrong:
        raise ValueError(f"adapter {path} does not fit the config: {'; '.join(wrong)}")


def _misfits(stored: list[Stored], raw: Mapping[str, Any], model: Decoder) -> Iterator[str]:
    """Tensors that have no place in the model, or another shape, or that PEFT would not load."""
    shapes, layers = _shapes(model), model.config.layers
    for tensor in stored:
        expected = shapes.get(tensor.leaf)
        if expected is None or tensor.layer >= layers:
            yield f"{tensor.key} is no part of the model, which has {layers} layers"
        elif tensor.shape != expected[:0:-1]:
            yield f"{tensor.key}: got shape {tensor.shape}, expected {expected[:0:-1]}"
        elif not targeted(raw, tensor.module):
            yield f"{tensor.key}: target_modules does not ask for it"


def _gaps(stored: list[Stored], raw: Mapping[str, Any], model: Decoder) -> Iterator[str]:
    """Matrices that the config asks for and the file does not have."""
    have = {(tensor.layer, tensor.leaf) for tensor in stored}
    prefix = stored[0].module.split("layers.")[0]
    for leaf in _shapes(model):
        module, _, name = leaf.removeprefix("layers.").rpartition(".")
        for layer in range(model.config.layers):
            if (layer, leaf) not in have and targeted(raw, f"{prefix}layers.{layer}.{module}"):
                yield f"layers.{layer}.{module}.{name} is missing"


@functools.cache
def _shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    """The shape of every matrix of the model's adapter, by dotted name."""
    return {name: leaf.shape for name, leaf in named_leaves(abstract_adapter(model, make_mesh())).items()}


@contextmanager
def _weights(path: str | Path) -> Iterator[Any]:
    """The tensors of a folder, opened; only the header is read."""
    file = Path(path) / WEIGHTS_FILE
    if not file.is_file():
        others = sorted(p.name for p in Path(path).glob("adapter_model*"))
        hint = f"; {others[0]} is not read, save it as safetensors with PEFT" if others else ""
        raise FileNotFoundError(f"adapter {path} has no {WEIGHTS_FILE}{hint}")
    try:
        with safe_open(file, framework="numpy") as opened:
            yield opened
    except SafetensorError as error:
        raise ValueError(f"{file}: not a whole safetensors file: {error}") from None


def _stored(path: str | Path, file: Any) -> list[Stored]:
    """Every tensor of an opened file; raises ValueError for one that is no matrix of a projection, and for none."""
    stored, strange = [], []
    for key in sorted(file.keys()):
        match = KEY.fullmatch(key)
        if match is None or match[4] not in PROJECTIONS:
            strange.append(key)
        else:
            leaf, shape = f"layers.{match[3]}.{match[5]}", tuple(file.get_slice(key).get_shape())
            stored.append(Stored(key, match[1], int(match[2]), leaf, shape))
    if strange or not stored:
        listed = ", ".join(strange[:SHOWN]) or "nothing"
        allowed = "layers.N.{self_attn,mlp}.PROJECTION.lora_{A,B}.weight, PROJECTION one of " + ", ".join(PROJECTIONS)
        raise ValueError(f"adapter {path}: got tensors {listed}; expected {allowed}")
    return stored
