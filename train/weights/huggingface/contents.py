"""What a Hugging Face folder holds, and whether it is what the decoder needs: from the headers alone."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from train.models.decoder import Decoder
from train.weights.huggingface.names import EMBEDDINGS, HEAD, find_prefix, full_name, slots
from train.weights.huggingface.safetensors import DTYPES, Tensor, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
# Tensors that no weight of the text depends on: tables of the rotary embedding that old releases saved, and the part of
# a multimodal model that sees.
IGNORED_ENDINGS = (".rotary_emb.inv_freq",)
IGNORED_PREFIXES = ("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.")
SHOWN = 5
LAYER = re.compile(r"\.\d+\.")


@dataclasses.dataclass(frozen=True)
class Contents:
    """The tensors of a folder by the name they have without the prefix of the body.

    Attributes:
      second_head: the output head of a checkpoint whose head is tied; it must hold the embeddings again.
    """

    tensors: Mapping[str, Tensor]
    second_head: Tensor | None


def is_folder(path: str | Path) -> bool:
    """Whether this is a directory with a `config.json` and weights, as `save_pretrained` writes it."""
    directory = Path(path)
    return (directory / CONFIG).is_file() and any(
        next(directory.glob(pattern), None) is not None for pattern in ("*.safetensors", INDEX, "pytorch_model*.bin*")
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in order.

    Raises:
      FileNotFoundError: no such folder, no weights in it, weights of another format, or a file that the index names is
        missing.
    """
    if not folder.is_dir():
        kind = "it is a file" if folder.exists() else "there is no such directory"
        raise FileNotFoundError(f"got {str(folder)!r}, expected a Hugging Face folder, but {kind}")
    if (folder / INDEX).is_file():
        files = sorted({folder / name for name in _read_index(folder / INDEX).values()})
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise FileNotFoundError(f"{folder}: {INDEX} names files that are not there: {_some(missing)}")
        return files
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    others = sorted(path.name for pattern in ("*.bin", "*.pth", "*.pt", "*.gguf") for path in folder.glob(pattern))
    if others:
        raise FileNotFoundError(
            f"{folder}: got {_some(others)}, expected {SINGLE} or {INDEX}; save the model again with transformers' "
            "save_pretrained, which writes safetensors"
        )
    raise FileNotFoundError(f"{folder}: expected {SINGLE} or {INDEX}, but there is neither")


def _read_index(path: Path) -> dict[str, str]:
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(tensor): str(file) for tensor, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected a JSON object with weight_map ({error})") from None


def read_contents(folder: str | Path, model: Decoder) -> Contents:
    """The tensors that fill the parameters of the model, none of them read yet.

    Raises:
      FileNotFoundError: as `weight_files`.
      ValueError: names the tensors that are missing, left over, of another shape, or of a dtype that is not read.
    """
    folder = Path(folder)
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        found |= read_header(path)
    prefix = find_prefix(frozenset(found))
    wanted = {full_name(name, prefix): (name, slot.shape) for slot in slots(model) for name in slot.names}
    head = full_name(HEAD, prefix)
    second = found.get(head) if model.config.tie_embeddings else None
    extra = {name for name in found.keys() - wanted.keys() if not _ignored(name)} - {head if second else None}
    problems = [*_differences(found, wanted, extra)]
    if second and second.shape != found.get(full_name(EMBEDDINGS, prefix), second).shape:
        problems.append(f"of another shape than the embeddings it is tied to: {head} {list(second.shape)}")
    if problems:
        raise ValueError(f"{folder} does not fit the model of its {CONFIG}: {'; '.join(problems)}")
    return Contents({short: found[name] for name, (short, _) in wanted.items()}, second)


def check_folder(folder: str | Path, model: Decoder) -> None:
    """Finds what is wrong with a folder from the headers of its files, before a weight is read.

    Args:
      folder: a directory as `save_pretrained` writes it.
      model: the decoder that its `config.json` describes.

    Raises:
      FileNotFoundError: no folder, or no safetensors in it.
      ValueError: names the tensors that are missing, left over, of another shape, or of a dtype that is not read.
    """
    read_contents(folder, model)


def _differences(
    found: Mapping[str, Tensor], wanted: Mapping[str, tuple[str, tuple[int, ...]]], extra: set[str]
) -> Iterable[str]:
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        tied = "; is the head tied (tie_word_embeddings)?" if missing == [HEAD] else ""
        yield f"missing: {_some(missing)}{tied}"
    if extra:
        yield f"left over: {_some(sorted(extra))}"
    shared = sorted(wanted.keys() & found.keys())
    shapes = [
        f"{name}: got {list(found[name].shape)}, expected {list(wanted[name][1])}"
        for name in shared
        if found[name].shape != wanted[name][1]
    ]
    if shapes:
        yield f"of another shape: {_some(shapes)}"
    dtypes = [f"{name}: got {found[name].dtype}" for name in shared if found[name].dtype not in DTYPES]
    if dtypes:
        yield f"of a dtype that is not read (expected {', '.join(DTYPES)}; quantised weights are not): {_some(dtypes)}"


def _ignored(name: str) -> bool:
    return name.endswith(IGNORED_ENDINGS) or name.startswith(IGNORED_PREFIXES)


def _some(names: list[str]) -> str:
    """The first few; what is said of many layers alike is said once."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(LAYER.sub(".*.", name, count=1), []).append(name)
    said = [found[0] if len(found) == 1 else f"{found[0]} (and in {len(found) - 1} more)" for found in layers.values()]
    more = f" and {len(said) - SHOWN} others" if len(said) > SHOWN else ""
    return ", ".join(said[:SHOWN]) + more
