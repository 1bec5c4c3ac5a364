"""Base weights on disk, one array at a time on the host, whoever wrote them: by name, shape and value."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from train.models import Decoder
from train.models.leaves import named_leaves
from train.weights.huggingface.config import decoder_config
from train.weights.huggingface.contents import Contents, read_contents
from train.weights.huggingface.names import Slot, slots


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """An array that is read when it is asked for."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


def folder_arrays(folder: Path) -> dict[str, SavedArray]:
    """The weights of a Hugging Face folder under our names, in float32.

    Raises:
      FileNotFoundError, ValueError: it is gone, or is not what its `config.json` says.
    """
    model = Decoder(decoder_config(folder))
    contents = read_contents(folder, model)

    def lazily(slot: Slot) -> SavedArray:
        own = slot.shape[::-1] if slot.transposed else slot.shape
        shape = (len(slot.names), *own) if slot.stacked else own
        return SavedArray(shape, np.dtype(np.float32), lambda: _of_slot(contents, slot))

    return {".".join(slot.path): lazily(slot) for slot in slots(model)}


def orbax_arrays(path: Path, item: str | None) -> dict[str, SavedArray]:
    """What orbax saved in a directory, or below the dotted path `item` in it.

    Raises:
      FileNotFoundError: there is nothing that orbax saved.
    """
    directory = path.absolute()
    with ocp.PyTreeCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(directory).item_metadata if directory.is_dir() else None
    if metadata is None:
        raise FileNotFoundError(f"no readable checkpoint at {directory}")
    prefix = "" if item is None else f"{item}."

    def lazily(name: str, leaf: Any) -> SavedArray:
        shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
        return SavedArray(shape, dtype, lambda: _of_orbax(directory, name, jax.ShapeDtypeStruct(shape, dtype)))

    leaves = {name: leaf for name, leaf in named_leaves(metadata.tree).items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): lazily(name, leaf) for name, leaf in leaves.items()}


def _of_slot(contents: Contents, slot: Slot) -> np.ndarray:
    found = [contents.tensors[name].rows(0, slot.shape[0]).astype(np.float32) for name in slot.names]
    turned = [tensor.T if slot.transposed else tensor for tensor in found]
    return np.stack(turned) if slot.stacked else turned[0]


def _of_orbax(directory: Path, name: str, like: jax.ShapeDtypeStruct) -> np.ndarray:
    wanted: Any = like
    how: Any = ocp.RestoreArgs(restore_type=np.ndarray)
    for key in reversed(name.split(".")):
        wanted, how = {key: wanted}, {key: how}
    with ocp.PyTreeCheckpointer() as checkpointer:
        arguments = ocp.args.PyTreeRestore(item=wanted, restore_args=how, partial_restore=True)
        (leaf,) = jax.tree.leaves(checkpointer.restore(directory, args=arguments))
    return np.asarray(leaf)
