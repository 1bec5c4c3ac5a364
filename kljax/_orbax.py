"""Reads checkpoints that orbax wrote: the shapes of leaves on disk, and restores into a layout.

Orbax is imported on first use, so that the library does not need it.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from kljax.digests import check_digests, open_sealed
from kljax.trees import first_five, named_leaves, shape_and_dtype

__all__ = ["check_leaves", "first_line", "restore", "saved_content", "saved_tree", "sharded_on_first_device"]

Tree = Any
Path = str | pathlib.Path


def check_leaves(label: str, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Checks that every expected leaf is saved with its shape and dtype; further saved leaves are ignored.

    Raises:
      ValueError: with `label`, naming the first leaves that differ.
    """
    problems = []
    for name, leaf in expected.items():
        got = shape_and_dtype(saved[name]) if name in saved else "no such leaf"
        if got != shape_and_dtype(leaf):
            problems.append(f"{name}: got {got}, expected {shape_and_dtype(leaf)}")
    if problems:
        raise ValueError(f"{label} does not fit: {first_five(problems)}")


def saved_tree(path: Path, item: str | None = None) -> Tree:
    """Reads the structure of a checkpoint from its metadata; the leaves have `shape` and `dtype`, and no array is read.

    Args:
      path: directory that orbax wrote.
      item: dotted path of a subtree; None means the whole checkpoint.

    Raises:
      FileNotFoundError: if there is no readable checkpoint at `path`.
      ValueError: if the checkpoint has no subtree `item`.
    """
    metadata = _metadata(path)
    tree = metadata.tree
    check_layout(path, tree, read_content(path, metadata))
    for key in _keys(item):
        if not isinstance(tree, dict) or key not in tree:
            raise ValueError(
                f"item: got {item!r}, which is no subtree of the checkpoint {pathlib.Path(path).absolute()}"
            )
        tree = tree[key]
    return tree


def saved_content(path: Path) -> dict[str, Any] | None:
    """Reads the sealed values that lie beside the arrays of a checkpoint, as `arrays`: their digests.

    Args:
      path: directory that orbax wrote.

    Returns:
      The values, or None for a checkpoint without any.

    Raises:
      FileNotFoundError: if there is no readable checkpoint at `path`.
      ValueError: if the values are damaged.
    """
    return read_content(path, _metadata(path))


def read_content(path: Path, metadata: Any) -> dict[str, Any] | None:
    """Opens the sealed values in the metadata that orbax read, as `saved_content` does."""
    sealed = metadata.custom_metadata
    if not sealed:
        return None
    return open_sealed(f"checkpoint {pathlib.Path(path).absolute()}: its record of digests", sealed)


def check_layout(path: Path, tree: Tree, content: dict[str, Any] | None) -> None:
    """Raises ValueError if orbax's metadata and the sealed values disagree on names, dtypes or shapes."""
    if content is None:
        return
    saved = {name: shape_and_dtype(leaf) for name, leaf in named_leaves(tree).items()}
    sealed = {name: digest.rpartition(" ")[0] for name, digest in content.get("arrays", {}).items()}
    differing = sorted(name for name in saved.keys() | sealed.keys() if saved.get(name) != sealed.get(name))
    if differing:
        raise ValueError(
            f"checkpoint {pathlib.Path(path).absolute()} is damaged: its metadata and its record of digests differ in "
            f"{first_five(differing, ', ')}"
        )


def restore(path: Path, abstract: Tree, item: str | None = None) -> Tree:
    """Restores a tree, or the subtree `item`, into the shapes, dtypes and shardings of `abstract`.

    Raises:
      ValueError: if an array cannot be read or differs from its digest, naming it.
    """
    import orbax.checkpoint as ocp

    nested, directory, content = nest(abstract, item), pathlib.Path(path).absolute(), saved_content(path)
    with ocp.PyTreeCheckpointer() as checkpointer:
        arguments = ocp.args.PyTreeRestore(
            item=nested, restore_args=ocp.checkpoint_utils.construct_restore_args(nested), partial_restore=True
        )
        try:
            restored = checkpointer.restore(directory, args=arguments)
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # Orbax raises several types for damaged files, some of them bare `Exception`.
            raise ValueError(f"checkpoint {directory} is damaged: {first_line(error)}") from error
    if content is not None:
        check_digests(f"checkpoint {directory}", restored, content.get("arrays", {}))
    for key in _keys(item):
        restored = restored[key]
    return restored


def nest(tree: Tree, item: str | None) -> Tree:
    """Puts a tree below the dotted path `item`, as it lies in the checkpoint."""
    for key in reversed(_keys(item)):
        tree = {key: tree}
    return tree


def sharded_on_first_device(tree: Tree) -> Tree:
    """Makes the abstract tree that restores every leaf whole onto the first device."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype, sharding=sharding), tree)


def first_line(error: Exception) -> str:
    """Returns the first line of an error, of which orbax writes many, or its type if it has no text."""
    lines = str(error).partition(". See full TensorStore details")[0].strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _metadata(path: Path) -> Any:
    import orbax.checkpoint as ocp

    directory = pathlib.Path(path).absolute()
    if not directory.is_dir():
        raise FileNotFoundError(f"no checkpoint at {directory}")
    with ocp.PyTreeCheckpointer() as checkpointer:
        try:
            metadata = checkpointer.metadata(directory).item_metadata
        except Exception as error:
            raise FileNotFoundError(f"no readable checkpoint at {directory}: {first_line(error)}") from error
    if metadata is None:
        raise FileNotFoundError(f"no readable checkpoint at {directory}: its metadata cannot be read")
    return metadata


def _keys(item: str | None) -> list[str]:
    return item.split(".") if item else []
