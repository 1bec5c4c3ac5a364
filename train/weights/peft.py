"""Loading and saving of PEFT adapters: folders of `adapter_config.json` and `adapter_model.safetensors`."""

import dataclasses
import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save

from kljax._files import write_text_atomic
from kljax.checkpoint import first_five, named_leaves
from train.config.adapter import PARAMETERS, parameters_of
from train.config.installation import shell_command
from train.distributed.exchange import on_leader
from train.distributed.global_arrays import to_host
from train.distributed.peers import is_leader
from train.models import Decoder, LoraConfig
from train.models.blocks import split_path
from train.models.config import PROJECTIONS, ROUTER
from train.models.parameters import abstract_adapter
from train.models.sharding import make_mesh
from train.storage.paths import as_path
from train.weights.files import new_directory
from train.weights.huggingface.names import EXPERTS
from train.weights.huggingface.safetensors import open_tensors
from train.weights.peft_config import CONFIG_FILE, read_config, targeted
from train.weights.peft_experts import (
    config_fields,
    has_pairs,
    join,
    module_of,
    parameter_in_file,
    parameter_of,
    shape_in_file,
    split,
    stacked_targets,
)
from train.weights.tensor_digests import check_tensors, write_tensor_digests

Tree = Any

_MERGE = f"export the merged weights (`{shell_command('train.export')} --merge`)"
WEIGHTS_FILE = "adapter_model.safetensors"
# The decoder inside a causal language model, or inside a multimodal Gemma 3.
KEY = re.compile(
    r"base_model\.model\.((?:model\.|model\.language_model\.|language_model\.model\.)"
    r"layers\.(\d+)\.)((?:self_attn|mlp)\.\w+(?:\.base_layer)?)\.(lora_[AB])\.weight"
)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: its key, module or parameter, layer, name there, and shape, [rank, in] or [out, rank]."""

    key: str
    module: str
    layer: int
    name: str
    shape: tuple[int, ...]


def is_peft(path: str | Path) -> bool:
    """Checks whether a folder has a PEFT adapter."""
    return (as_path(path) / CONFIG_FILE).is_file()


def base_model(path: str | Path) -> str | None:
    """Reads the name of the base model from a PEFT folder; None if it has no name."""
    return read_config(path).get("base_model_name_or_path") or None


def read_peft_config(path: str | Path) -> LoraConfig:
    """Reads rank, alpha and targets of a PEFT folder; targets are the projections with a matrix in some layer.

    Raises:
      FileNotFoundError: there is no adapter.
      ValueError: the adapter is no plain LoRA or rsLoRA on projections of a decoder; names the field or tensor.
    """
    return _lora_of(*_read_folder(path))


def check_adapter(path: str | Path, model: Decoder) -> None:
    """Checks an adapter against the model from its config and header, without reading tensors.

    Raises:
      FileNotFoundError: there is no adapter.
      ValueError: the folder differs from the model or its lora section; names each difference.
    """
    _read_fitting(path, model)


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
    raw, stored = _read_fitting(path, model)
    on_leader("adapter", lambda: check_tensors(path))
    keys = {(tensor.layer, tensor.name): tensor.key for tensor in stored}
    with _open_weights(path) as file:

        def load(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            values = np.zeros(leaf.shape, leaf.dtype)
            for index, (layer, inner) in enumerate(_stacked_matrices(model, name)):
                key = keys.get((layer, _name_in_file(model, inner)))
                if key is not None:
                    try:
                        values[index] = _from_file(model, inner, file.get_tensor(key), pairs=has_pairs(raw))
                    except ValueError as error:
                        raise ValueError(f"adapter {path}: {key}: {error}") from None
                    if not (allow_nonfinite or np.isfinite(values[index]).all()):
                        raise ValueError(
                            f"adapter {path}: {key} has values that are not finite; restore the file, or "
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
    lora = model.config.lora
    leaves = named_leaves(adapter)
    got = {name: leaf.shape for name, leaf in leaves.items()}
    expected = _shapes(model)
    if lora is None or got != expected:
        raise ValueError(f"adapter does not fit the model: got {got}, expected {expected}")
    try:
        fields = config_fields(model.config)
    except ValueError as error:
        raise ValueError(f"{error}; {_MERGE}") from None
    prefix = f"base_model.model.{_prefix(source)}"
    leaves = to_host(leaves)
    if not is_leader():
        return
    matrices = _matrices_to_write(model, leaves, fields.get("target_parameters", ()))
    with new_directory(as_path(path)) as partial:
        tensors = {f"{prefix}layers.{layer}.{name}.weight": matrix for (layer, name), matrix in matrices.items()}
        # `save_file` makes the file private to its owner, but a server may run as another user.
        (partial / WEIGHTS_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
        text = json.dumps(_peft_config(lora, base_name) | fields, indent=2, sort_keys=True)
        write_text_atomic(partial / CONFIG_FILE, f"{text}\n")
        write_tensor_digests(partial)


def _matrices_to_write(
    model: Decoder, leaves: Mapping[str, np.ndarray], parameters: Collection[str]
) -> dict[tuple[int, str], np.ndarray]:
    """Returns the matrices of a file by their layer and their name there; `parameters` are the targets of PEFT.

    Raises:
      ValueError: a dense MLP beside experts has an adapter that is not zero.
    """
    config = model.config
    matrices = dict[tuple[int, str], np.ndarray]()
    joined: dict[tuple[int, str, str], dict[str, np.ndarray]] = {}
    stacked = stacked_targets(config)
    for leaf, values in leaves.items():
        for (layer, inner), matrix in zip(_stacked_matrices(model, leaf), np.asarray(values, np.float32), strict=True):
            module, _, kind = inner.rpartition(".")
            parameter = parameter_of(config, module)
            name = module.rpartition(".")[2]
            if parameter is None and name in stacked:
                if matrix.any():
                    raise ValueError(
                        f"lora.targets: got {name}, which layers.{layer}.{module} has too: PEFT gives it to the "
                        f"experts alone; {_MERGE}"
                    )
            elif parameter is None or matrix.ndim == 2:
                stored = module if parameter is None else module_of(parameter, parameters)
                matrices[layer, f"{stored}.{kind}"] = np.ascontiguousarray(matrix.T)
            else:
                joined.setdefault((layer, parameter, kind), {})[name] = matrix
    for (layer, parameter, kind), parts in joined.items():
        matrices[layer, f"{module_of(parameter, parameters)}.{kind}"] = join(config, parameter, kind, parts)
    return matrices


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
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": lora.rslora,
    }


def _read_folder(path: str | Path) -> tuple[dict[str, Any], list[StoredTensor]]:
    """Reads the config of a folder, and lists its tensors, as `read_peft_config` does."""
    raw = read_config(path)
    with _open_weights(path) as file:
        return raw, _list_tensors(path, file, raw)


def _lora_of(raw: Mapping[str, Any], stored: list[StoredTensor]) -> LoraConfig:
    """Returns the lora section of a folder; targets are the projections with a matrix in some layer."""
    modules = {tensor.name.rpartition(".")[0] for tensor in stored}
    projections = {name for module in modules for name in PARAMETERS.get(module, (module.rpartition(".")[2],))}
    targets = tuple(name for name in (*PROJECTIONS, ROUTER) if name in projections)
    return LoraConfig(int(raw["r"]), float(raw["lora_alpha"]), targets, bool(raw.get("use_rslora")))


def _read_fitting(path: str | Path, model: Decoder) -> tuple[dict[str, Any], list[StoredTensor]]:
    """Reads the config and the tensors of a folder as `_read_folder` does, and checks them as `check_adapter` does."""
    if model.config.lora is None:
        raise ValueError("lora: got null, expected a lora section for the adapter; set lora.rank")
    raw, stored = _read_folder(path)
    _check_lora(path, _lora_of(raw, stored), model.config.lora)
    problems = [*_mismatches(stored, raw, model), *_missing_matrices(stored, raw, model)]
    if problems:
        raise ValueError(f"adapter {path} does not fit the model: {first_five(problems)}")
    return raw, stored


def _check_lora(path: str | Path, saved: LoraConfig, lora: LoraConfig) -> None:
    """Raises ValueError naming each difference between a folder and the lora section of the model."""
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
    shapes = _matrices(model, has_pairs(raw))
    layers = model.config.layers
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
        for layer, matrix in _matrices(model, has_pairs(raw))
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
def _matrices(model: Decoder, pairs: bool) -> dict[tuple[int, str], tuple[int, ...]]:
    """Returns the shape in a file of every matrix of the adapter, by its layer and its name in `StoredTensor`."""
    shapes = {}
    for leaf, shape in _shapes(model).items():
        for layer, inner in _stacked_matrices(model, leaf):
            name = _name_in_file(model, inner)
            module, _, kind = name.rpartition(".")
            stacked = len(shape) == 4
            shapes[layer, name] = shape_in_file(module, kind, shape[1:], pairs=pairs) if stacked else shape[:0:-1]
    return shapes


def _name_in_file(model: Decoder, inner: str) -> str:
    """Returns the name in `StoredTensor` of a matrix of the adapter: of its parameter, if transformers has one."""
    module, _, kind = inner.rpartition(".")
    return f"{parameter_of(model.config, module) or module}.{kind}"


def _from_file(model: Decoder, inner: str, matrix: np.ndarray, *, pairs: bool) -> np.ndarray:
    """Returns a matrix of the adapter from that of a file; of all experts, if it has them."""
    *modules, projection, kind = inner.split(".")
    return split(model.config, projection, kind, matrix, pairs=pairs) if EXPERTS in modules else matrix.T


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


def _list_tensors(path: str | Path, file: Any, raw: Mapping[str, Any]) -> list[StoredTensor]:
    """Lists the tensors of an open file; raises ValueError if there are none, or a tensor is no adapter matrix."""
    stored = []
    unknown = []
    parameters = parameters_of(raw.get("target_parameters") or ())
    for key in sorted(file.keys()):
        match = KEY.fullmatch(key)
        if match is None:
            unknown.append(key)
            continue
        prefix, layer, module, kind = match.groups()
        name = parameter_in_file(module, parameters) or module
        if name == module and module.rpartition(".")[2] not in PROJECTIONS:
            unknown.append(key)
        else:
            shape = tuple(file.get_slice(key).get_shape())
            stored.append(StoredTensor(key, f"{prefix}{name}", int(layer), f"{name}.{kind}", shape))
    if unknown or not stored:
        listed = first_five(unknown, separator=", ") or "nothing"
        allowed = (
            "layers.N.{self_attn,mlp}.PROJECTION.lora_{A,B}.weight, PROJECTION one of "
            f"{', '.join(PROJECTIONS)}, or matrices of target_parameters, some of {', '.join(PARAMETERS)}"
        )
        raise ValueError(f"adapter {path}: got tensors {listed}; expected {allowed}")
    return stored
