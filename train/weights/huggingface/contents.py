"""The tensors of a Hugging Face folder, and a check of their headers against the decoder."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from kljax.checkpoint import first_five
from train.config.installation import shell_command
from train.config.json_text import parse_json
from train.models.decoder import Decoder
from train.weights.huggingface.config import decoder_config
from train.weights.huggingface.fused import split_experts
from train.weights.huggingface.names import (
    EMBEDDINGS,
    HEAD,
    LeafMapping,
    canonical_name,
    find_prefix,
    full_name,
    leaf_mappings,
)
from train.weights.huggingface.safetensors import CHUNK_BYTES, DTYPES, Tensor, read_header
from train.weights.saved_array import SavedArray

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
# Tensors that are no weights of the decoder: rope tables saved by old releases, and the vision part of a multimodal
# model.
IGNORED_ENDINGS = (".rotary_emb.inv_freq",)
IGNORED_PREFIXES = ("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.")
LAYER = re.compile(r"\.\d+(?=\.)")


@dataclasses.dataclass(frozen=True)
class Contents:
    """The tensors of a folder.

    Attributes:
      tensors: tensors by name, without the prefix of the body.
      second_head: LM head of a checkpoint with a tied head; it must equal the embeddings.
    """

    tensors: Mapping[str, Tensor]
    second_head: Tensor | None


def is_folder(path: str | Path) -> bool:
    """Checks for a directory with a `config.json` and weights, as `save_pretrained` writes it."""
    directory = Path(path)
    return (directory / CONFIG).is_file() and any(
        next(directory.glob(pattern), None) is not None for pattern in ("*.safetensors", INDEX, "pytorch_model*.bin*")
    )


def weight_files(folder: Path) -> list[Path]:
    """Lists the safetensors files of a folder, in order.

    Raises:
      FileNotFoundError: the folder, its safetensors files or a file of the index are missing.
    """
    if not folder.is_dir():
        kind = "it is a file" if folder.exists() else "there is no such directory"
        raise FileNotFoundError(f"got {str(folder)!r}, expected a Hugging Face folder, but {kind}")
    if (folder / SINGLE).is_file():  # transformers reads it even if there is an index
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        files = sorted({folder / name for name in _read_index(folder / INDEX).values()})
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise FileNotFoundError(f"{folder}: {INDEX} names files that are not there: {_summary(missing)}")
        return files
    others = sorted(path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in folder.glob(pattern))
    models = sorted(path.name for path in folder.glob("*.gguf"))
    if others or models:
        advice = (
            "save the model again with transformers' save_pretrained, which writes safetensors"
            if others
            else f"import the file with {shell_command('train.import')} {folder / models[0]} --to FOLDER"
        )
        got = _summary(others or models)
        raise FileNotFoundError(f"{folder}: got {got}, expected {SINGLE} or {INDEX}; {advice}")
    raise FileNotFoundError(f"{folder}: expected {SINGLE} or {INDEX}, but there is neither")


def _read_index(path: Path) -> dict[str, str]:
    try:
        names = parse_json(path.read_bytes())["weight_map"]
        files = {str(tensor): str(file) for tensor, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected a JSON object with weight_map ({error})") from None
    outside = sorted({name for name in files.values() if Path(name).is_absolute() or ".." in Path(name).parts})
    if outside:
        raise ValueError(f"{path}: weight_map: got {_summary(outside)}, expected files inside the folder")
    return files


def read_contents(folder: str | Path, model: Decoder) -> Contents:
    """Lists the tensors of the parameters from the headers, without reading them.

    Raises:
      FileNotFoundError: as `weight_files`.
      ValueError: tensors are missing, left over, or of another shape or dtype; names them.
    """
    folder = Path(folder)
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        tensors |= {canonical_name(name): tensor for name, tensor in read_header(path).items()}
    tensors = split_experts(tensors, model.config)
    prefix = find_prefix(frozenset(tensors))
    expected = {
        full_name(name, prefix): (name, mapping.shape) for mapping in leaf_mappings(model) for name in mapping.names
    }
    head = full_name(HEAD, prefix)
    second = tensors.get(head) if model.config.tie_embeddings else None
    extra = {name for name in tensors.keys() - expected.keys() if not _ignored(name)} - {head if second else None}
    problems = [*_differences(tensors, expected, extra)]
    if second and second.shape != tensors.get(full_name(EMBEDDINGS, prefix), second).shape:
        problems.append(f"of another shape than the tied embeddings: {head} {list(second.shape)}")
    if problems:
        raise ValueError(f"{folder} does not fit the model of its {CONFIG}: {'; '.join(problems)}")
    return Contents({short: tensors[name] for name, (short, _) in expected.items()}, second)


def check_folder(folder: str | Path, model: Decoder) -> None:
    """Checks a folder against the model from the headers of its files. Only a second head is read.

    Args:
      folder: a directory as `save_pretrained` writes it.
      model: the decoder of its `config.json`.

    Raises:
      FileNotFoundError: the folder or its safetensors files are missing.
      ValueError: tensors are missing, left over, or of another shape or dtype; or the head is tied, and the file has
        an LM head that differs from the embeddings; names them.
    """
    check_tied(Path(folder), read_contents(folder, model))


def check_tied(folder: Path, contents: Contents, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Raises ValueError if the head is tied, and the file has an LM head that differs from the embeddings."""
    head = contents.second_head
    embeddings = contents.tensors[EMBEDDINGS]
    if head is None:
        return
    for start, count in head.pieces(chunk_bytes):
        rows, head_rows = (tensor.rows(start, count).astype(np.float32) for tensor in (embeddings, head))
        if not np.array_equal(rows, head_rows, equal_nan=True):
            raise ValueError(
                f"{folder}: {CONFIG} ties the output head to the embeddings (tie_word_embeddings), but {head.name} "
                f"differs from {embeddings.name}; set it to false, or remove the tensor"
            )


def folder_arrays(folder: Path) -> dict[str, SavedArray]:
    """Lists the weights of a folder by the names of our parameters, in float32, without reading them.

    Raises:
      FileNotFoundError: the folder or its safetensors files are missing.
      ValueError: the tensors do not fit the model of `config.json`.
    """
    model = Decoder(decoder_config(folder))
    contents = read_contents(folder, model)

    def lazy_array(mapping: LeafMapping) -> SavedArray:
        layer_shape = mapping.shape[::-1] if mapping.transposed else mapping.shape
        shape = (*mapping.lead, *layer_shape)
        return SavedArray(shape, np.dtype(np.float32), lambda: _read_leaf(contents, mapping))

    return {".".join(mapping.path): lazy_array(mapping) for mapping in leaf_mappings(model)}


def _read_leaf(contents: Contents, mapping: LeafMapping) -> np.ndarray:
    tensors = [contents.tensors[name].rows(0, mapping.shape[0]).astype(np.float32) for name in mapping.names]
    matrices = [tensor.T if mapping.transposed else tensor for tensor in tensors]
    return np.stack(matrices).reshape(*mapping.lead, *matrices[0].shape)


def _differences(
    tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[str, tuple[int, ...]]], extra: set[str]
) -> Iterable[str]:
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        tied = "; is the head tied (tie_word_embeddings)?" if missing == [HEAD] else ""
        yield f"missing: {_summary(missing)}{tied}"
    if extra:
        yield f"left over: {_summary(sorted(extra))}"
    shared = sorted(expected.keys() & tensors.keys())
    shapes = [
        f"{name}: got {list(tensors[name].shape)}, expected {list(expected[name][1])}"
        for name in shared
        if tensors[name].shape != expected[name][1]
    ]
    if shapes:
        yield f"of another shape: {_summary(shapes)}"
    dtypes = [f"{name}: got {tensors[name].dtype}" for name in shared if tensors[name].dtype not in DTYPES]
    if dtypes:
        yield f"of an unsupported dtype (expected {', '.join(DTYPES)}; no quantized weights): {_summary(dtypes)}"


def _ignored(name: str) -> bool:
    return name.endswith(IGNORED_ENDINGS) or name.startswith(IGNORED_PREFIXES)


def _summary(names: list[str]) -> str:
    """Joins the first five names; a name that repeats in several layers counts once."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(LAYER.sub(".*", name), []).append(name)
    lines = [same[0] if len(same) == 1 else f"{same[0]} (and in {len(same) - 1} more)" for same in layers.values()]
    return first_five(lines, separator=", ")
