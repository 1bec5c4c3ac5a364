"""Loading and saving of PEFT adapters: folders of `adapter_config.json` and `adapter_model.safetensors`."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save

from kljax.checkpoint import first_five, named_leaves
from train.config.interpreter import python_command
from train.distributed.exchange import on_leader
from train.distributed.global_arrays import to_host
from train.distributed.peers import is_leader
from train.models import Decoder, LoraConfig
from train.models.blocks import split_path
from train.models.config import PROJECTIONS, ROUTER
from train.models.sharding import make_mesh
from train.rl.policy import abstract_adapter
from train.weights.files import new_directory, write_text_atomic
from train.weights.huggingface.safetensors import open_tensors
from train.weights.peft_config import CONFIG_FILE, read_config, targeted
from train.weights.tensor_digests import check_tensors, write_tensor_digests

Tree = Any

WEIGHTS_FILE = "adapter_model.safetensors"
# The decoder inside a causal language model, or inside a multimodal Gemma 3.
KEY = re.compile(
    r"base_model\.model\.((?:model\.|model\.language_model\.|language_model\.model\.)"
    r"layers\.(\d+)\.((?:self_attn|mlp)\.(\w+)))\.(lora_[AB])\.weight"
)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: its key, module, layer and name there, and its shape, [rank, in] or [out, rank]."""

    key: str
    module: str
    layer: int
    name: str
    shape: tuple[int, ...]


def is_peft(path: str | Path) -> bool:
    """Checks whether a folder has a PEFT adapter."""
    return (Path(path) / CONFIG_FILE).is_file()


def base_model(path: str | Path) -> str | None:
    """Reads the name of the base model from a PEFT folder; None if it has no name."""
    return read_config(path).get("base_model_name_or_path") or None


def read_peft_config(path: str | Path) -> LoraConfig:
    """Reads rank, alpha and targets of a PEFT folder; targets are the projections with a matrix in some layer.

    Raises:
      FileNotFoundError: there is no adapter.
      ValueError: the adapter is no plain LoRA or rsLoRA on projections of a decoder; names the field or tensor.
    """
    raw = read_config(path)
    with _open_weights(path) as file:
        projections = {tensor.name.split(".")[-2] for tensor in _list_tensors(path, file)}
    targets = tuple(name for name in PROJECTIONS if name in projections)
    return LoraConfig(int(raw["r"]), float(raw["lora_alpha"]), targets, bool(raw.get("use_rslora")))


def check_adapter(path: str | Path, model: Decoder) -> None:
    """Checks an adapter against the model from its config and header, without reading tensors.

    Raises:
      FileNotFoundError: there is no adapter.
      ValueError: the folder differs from the model or its lora section; names each difference.
    """
    if model.config.lora is None:
        raise ValueError("lora: got null, expected a lora section for the adapter; set lora.rank")
    _check_lora(path, model.config.lora)
    raw = read_config(path)
    with _open_weights(path) as file:
        stored = _list_tensors(path, file)
    problems = [*_mismatches(stored, raw, model), *_missing_matrices(stored, raw, model)]
    if problems:
        raise ValueError(f"adapter {path} does not fit the model: {first_five(problems)}")


def load_adapter(path: str | Path, model: Decoder, mesh: Mesh, *, allow_nonfinite: bool = False) -> Tree:
    """Loads the adapter of a PEFT folder in the layout of the model, float32 and sharded.

    A layer without an adapter (`layers_to_transform`, a regular expression) gets zeros in both matrices. They add
    nothing and have zero gradient, so training does not change the layer.

    Args:
      path: the folder.
      model: the decoder, with a lora section equal to the folder's (`read_peft_config`).
      mesh: the devices.
      allow_nonfinite: whether weights may have NaN and infinity.

    Returns:
      A [layers, in, rank] and B [layers, rank, out] of each target.

    Raises:
      FileNotFoundError: as `check_adapter`.
      ValueError: as `check_adapter`, before any tensor is read; or a value is not finite.
    """
    check_adapter(path, model)
    on_leader("adapter", lambda: check_tensors(path))
    with _open_weights(path) as file:
        keys = {(tensor.layer, tensor.name): tensor.key for tensor in _list_tensors(path, file)}

        def load(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            values = np.zeros(leaf.shape, leaf.dtype)
            for index, matrix in enumerate(_stacked_matrices(model, name)):
                if matrix in keys:
                    values[index] = file.get_tensor(keys[matrix]).T
                    if not (allow_nonfinite or np.isfinite(values[index]).all()):
                        raise ValueError(
                            f"adapter {path}: {keys[matrix]} has values that are not finite; restore the file, or "
                            "set model.allow_nonfinite=true to load it as it is"
                        )
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: values[index])

        abstract = abstract_adapter(model, mesh)
        leaves = [load(name, leaf) for name, leaf in named_leaves(abstract).items()]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def save_adapter(
    path: str | Path, model: Decoder, adapter: Tree, *, base_name: str | None, source: str | Path | None = None
) -> None:
    """Writes an adapter atomically as a PEFT folder, which PEFT, transformers and vLLM load.

    In a run of several processes, all processes call this function and the leader writes: an error of writing is raised
    there alone.

    Args:
      path: the new folder; it may exist if it is empty.
      model: the decoder, with the lora section of the adapter.
      adapter: the adapter, as `load_adapter` returns it.
      base_name: `base_model_name_or_path`: folder or Hub name of the base model.
      source: Hugging Face folder of the base, which tells whether the decoder is part of a multimodal model.

    Raises:
      FileExistsError: `path` exists and is not empty.
      ValueError: the adapter does not fit the model.
    """
    lora, leaves = model.config.lora, named_leaves(adapter)
    got, expected = {name: leaf.shape for name, leaf in leaves.items()}, _shapes(model)
    if lora is None or got != expected:
        raise ValueError(f"adapter does not fit the model: got {got}, expected {expected}")
    stacked = sorted({name.split(".")[-2] for name in leaves if ".experts." in name or f".mlp.{ROUTER}." in name})
    if stacked:
        raise ValueError(
            f"lora.targets: got {', '.join(stacked)} of a mixture of experts, which PEFT has no modules for in "
            f"transformers 5; export the merged weights (`{python_command()} -m train.export --merge`)"
        )
    prefix = f"base_model.model.{_prefix(source)}"
    leaves = to_host(leaves)
    if not is_leader():
        return
    with new_directory(Path(path)) as partial:
        tensors = {}
        for name, leaf in leaves.items():
            for (layer, inner), matrix in zip(
                _stacked_matrices(model, name), np.asarray(leaf, np.float32), strict=True
            ):
                tensors[f"{prefix}layers.{layer}.{inner}.weight"] = np.ascontiguousarray(matrix.T)
        # `save_file` makes the file private to its owner, but a server may run as another user.
        (partial / WEIGHTS_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
        text = json.dumps(_peft_config(lora, base_name), indent=2, sort_keys=True)
        write_text_atomic(partial / CONFIG_FILE, f"{text}\n")
        write_tensor_digests(partial)


def _prefix(source: str | Path | None) -> str:
    """Returns the prefix of the layers in the transformers model of a folder; it is longer in a multimodal model."""
    file = None if source is None else Path(source) / "config.json"
    nested = file is not None and file.is_file() and "text_config" in json.loads(file.read_text(encoding="utf-8"))
    return "model.language_model." if nested else "model."


def _peft_config(lora: LoraConfig, base_name: str | None) -> dict[str, Any]:
    """Builds the config that PEFT 0.21 writes for this adapter, without the fields at their defaults."""
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
    """Raises ValueError naming each difference between a folder and the lora section of the model."""
    saved = read_peft_config(path)
    problems = [
        f"{peft_field}: got {got!r}, but lora.{field} of the config is {want!r}"
        for peft_field, field, got, want in (
            ("r", "rank", saved.rank, lora.rank),
            ("lora_alpha", "alpha", saved.alpha, float(lora.alpha)),
            ("use_rslora", "rslora", saved.rslora, lora.rslora),
            ("target_modules", "targets", sorted(saved.targets), sorted(lora.targets)),
        )
        if got != want
    ]
    if problems:
        raise ValueError(f"adapter {path} does not fit the config: {'; '.join(problems)}")


def _mismatches(stored: list[StoredTensor], raw: Mapping[str, Any], model: Decoder) -> Iterator[str]:
    """Yields the tensors that are no part of the model, have another shape, or are ignored by PEFT."""
    shapes, layers = _matrices(model), model.config.layers
    wanted = targeted(raw, (tensor.module for tensor in stored))
    for tensor in stored:
        expected = shapes.get((tensor.layer, tensor.name))
        if expected is None:
            yield f"{tensor.key} is no part of the model, which has {layers} layers"
        elif tensor.shape != expected:
            yield f"{tensor.key}: got shape {tensor.shape}, expected {expected}"
        elif tensor.module not in wanted:
            yield f"{tensor.key}: not in target_modules"


def _missing_matrices(stored: list[StoredTensor], raw: Mapping[str, Any], model: Decoder) -> Iterator[str]:
    """Yields the matrices of the config that are missing in the file."""
    saved = {(tensor.layer, tensor.name) for tensor in stored}
    prefix = stored[0].module.split("layers.")[0]
    absent = [
        (f"{prefix}layers.{layer}.{module}", f"layers.{layer}.{module}.{name} is missing")
        for layer, matrix in _matrices(model)
        for module, _, name in [matrix.rpartition(".")]
        if (layer, matrix) not in saved
    ]
    wanted = targeted(raw, (module for module, _ in absent))
    yield from (text for module, text in absent if module in wanted)


@functools.cache
def _shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every leaf of the adapter, by dotted name."""
    return {name: leaf.shape for name, leaf in named_leaves(abstract_adapter(model, make_mesh())).items()}


@functools.cache
def _matrices(model: Decoder) -> dict[tuple[int, str], tuple[int, ...]]:
    """Returns the shape in a file of every matrix of the adapter, by its layer and its name there."""
    return {matrix: shape[:0:-1] for leaf, shape in _shapes(model).items() for matrix in _stacked_matrices(model, leaf)}


def _stacked_matrices(model: Decoder, leaf: str) -> list[tuple[int, str]]:
    """Lists layer and name of the matrices that a leaf of the adapter stacks."""
    stack, inner = split_path(model.config, tuple(leaf.split(".")))
    return [] if stack is None else [(layer, ".".join(inner)) for layer in stack.layers]


def _open_weights(path: str | Path) -> AbstractContextManager[Any]:
    """Opens the tensors of a folder; reads only the header."""
    file = Path(path) / WEIGHTS_FILE
    if not file.is_file():
        others = sorted(p.name for p in Path(path).glob("adapter_model*"))
        hint = f"; {others[0]} is not supported; save the adapter as safetensors with PEFT" if others else ""
        raise FileNotFoundError(f"adapter {path} has no {WEIGHTS_FILE}{hint}")
    return open_tensors(file)


def _list_tensors(path: str | Path, file: Any) -> list[StoredTensor]:
    """Lists the tensors of an open file; raises ValueError if there are none, or a tensor is no adapter matrix."""
    stored, unknown = [], []
    for key in sorted(file.keys()):
        match = KEY.fullmatch(key)
        if match is None or match[4] not in PROJECTIONS:
            unknown.append(key)
        else:
            shape = tuple(file.get_slice(key).get_shape())
            stored.append(StoredTensor(key, match[1], int(match[2]), f"{match[3]}.{match[5]}", shape))
    if unknown or not stored:
        listed = first_five(unknown, separator=", ") or "nothing"
        allowed = "layers.N.{self_attn,mlp}.PROJECTION.lora_{A,B}.weight, PROJECTION one of " + ", ".join(PROJECTIONS)
        raise ValueError(f"adapter {path}: got tensors {listed}; expected {allowed}")
    return stored
