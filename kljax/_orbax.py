"""Reads checkpoints that orbax wrote: their metadata, and their arrays into a layout.

Orbax is imported on first use, so that the library does not need it.
"""

import dataclasses
import pathlib
from typing import Any

import jax

from kljax.digests import check_digests, open_sealed
from kljax.trees import first_five, named_leaves, shape_and_dtype

__all__ = [
    "CheckpointMetadata",
    "check_fits",
    "check_restored",
    "first_line",
    "read_metadata",
    "restore",
    "sharded_on_first_device",
]

Tree = Any
Path = str | pathlib.Path


@dataclasses.dataclass(frozen=True)
class CheckpointMetadata:
    """A checkpoint without its arrays.

    Attributes:
      path: absolute path of its directory.
      tree: its structure; the leaves have `shape` and `dtype`.
      content: the sealed values beside the arrays, as `arrays`: their digests; None for a checkpoint without any.
    """

    path: pathlib.Path
    tree: Tree
    content: dict[str, Any] | None

    def subtree(self, item: str | None) -> Tree:
        """Returns the structure below the dotted path `item`; raises ValueError if there is none."""
        tree = self.tree
        for key in _keys(item):
            if not isinstance(tree, dict) or key not in tree:
                raise ValueError(f"item: got {item!r}, which is no subtree of the checkpoint {self.path}")
            tree = tree[key]
        return tree


def read_metadata(path: Path) -> CheckpointMetadata:
    """Reads the metadata of a checkpoint, and no array.

    Args:
      path: directory that orbax wrote.

    Raises:
      FileNotFoundError: if there is no readable checkpoint at `path`.
      ValueError: if the sealed values are damaged, or disagree with the leaves.
    """
    directory = pathlib.Path(path).absolute()
    if not directory.is_dir():
        raise FileNotFoundError(f"no checkpoint at {directory}")
    with reader() as checkpointer:
        try:
            metadata = checkpointer.metadata(directory).item_metadata
        except Exception as error:
            raise FileNotFoundError(f"no readable checkpoint at {directory}: {first_line(error)}") from error
    if metadata is None:
        raise FileNotFoundError(f"no readable checkpoint at {directory}: its metadata cannot be read")
    tree, sealed = metadata.tree, metadata.custom_metadata
    content = open_sealed(f"checkpoint {directory}: its record of digests", sealed) if sealed else None
    _check_layout(directory, tree, content)
    return CheckpointMetadata(directory, tree, content)


def check_fits(metadata: CheckpointMetadata, abstract: Tree, item: str | None = None) -> None:
    """Checks that the leaves of `abstract` are in the checkpoint, below the dotted path `item`; others are ignored.

    Raises:
      ValueError: naming the first leaves that are missing, or of another shape or dtype.
    """
    saved, problems = named_leaves(metadata.tree), []
    for name, leaf in named_leaves(_nest(abstract, item)).items():
        got = shape_and_dtype(saved[name]) if name in saved else "no such leaf"
        if got != shape_and_dtype(leaf):
            problems.append(f"{name}: got {got}, expected {shape_and_dtype(leaf)}")
    if problems:
        raise ValueError(f"checkpoint {metadata.path} does not fit: {first_five(problems)}")


def restore(metadata: CheckpointMetadata, abstract: Tree, item: str | None = None) -> Tree:
    """Restores a tree, or the subtree `item`, into the shapes, dtypes and shardings of `abstract`.

    Raises:
      ValueError: if a leaf is missing or of another shape or dtype; if an array cannot be read or differs from its
        digest, naming it.
    """
    restored = read(metadata, abstract, item)
    check_restored(metadata, restored, item)
    return restored


def read(metadata: CheckpointMetadata, abstract: Tree, item: str | None = None) -> Tree:
    """Reads a tree as `restore`, without its digests; of several processes that read, none waits for another.

    Raises:
      ValueError: if a leaf is missing or of another shape or dtype, or if an array cannot be read.
    """
    import orbax.checkpoint as ocp

    check_fits(metadata, abstract, item)
    nested = _nest(abstract, item)
    with reader() as checkpointer:
        arguments = ocp.args.PyTreeRestore(
            item=nested, restore_args=ocp.checkpoint_utils.construct_restore_args(nested), partial_restore=True
        )
        try:
            restored = checkpointer.restore(metadata.path, args=arguments)
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # Orbax raises several types for damaged files, some of them bare `Exception`.
            raise ValueError(f"checkpoint {metadata.path} is damaged: {first_line(error)}") from error
    for key in _keys(item):
        restored = restored[key]
    return restored


def check_restored(metadata: CheckpointMetadata, restored: Tree, item: str | None = None) -> None:
    """Raises ValueError naming the arrays that differ from their digests, if the checkpoint has digests."""
    if metadata.content is not None:
        nested, digests = _nest(restored, item), metadata.content.get("arrays", {})
        check_digests(f"checkpoint {metadata.path}", nested, digests)


def sharded_on_first_device(tree: Tree) -> Tree:
    """Makes the abstract tree that restores every leaf whole onto the first device."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype, sharding=sharding), tree)


def first_line(error: Exception) -> str:
    """Returns the first line of an error, of which orbax writes many, or its type if it has no text."""
    lines = str(error).partition(". See full TensorStore details")[0].strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def reader() -> Any:
    """Makes a checkpointer that reads trees; of several processes that read, none waits for another."""
    import orbax.checkpoint as ocp

    this = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=this, active_processes={this})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _check_layout(directory: pathlib.Path, tree: Tree, content: dict[str, Any] | None) -> None:
    """Raises ValueError if orbax's metadata and the sealed values disagree on names, dtypes or shapes."""
    if content is None:
        return
    saved = {name: shape_and_dtype(leaf) for name, leaf in named_leaves(tree).items()}
    sealed = {name: digest.rpartition(" ")[0] for name, digest in content.get("arrays", {}).items()}
    differing = sorted(name for name in saved.keys() | sealed.keys() if saved.get(name) != sealed.get(name))
    if differing:
        raise ValueError(
            f"checkpoint {directory} is damaged: its metadata and its record of digests differ in "
            f"{first_five(differing, ', ')}"
        )


def _nest(tree: Tree, item: str | None) -> Tree:
    """Puts a tree below the dotted path `item`, as it lies in the checkpoint."""
    for key in reversed(_keys(item)):
        tree = {key: tree}
    return tree


def _keys(item: str | None) -> list[str]:
    return item.split(".") if item else []
