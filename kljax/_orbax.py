"""Reads checkpoints that orbax wrote: the shapes of leaves on disk, and restores into a layout.

Orbax is imported on first use, so that the library does not need it.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from kljax.trees import first_five, shape_and_dtype

__all__ = ["check_leaves", "restore", "saved_tree", "sharded_on_first_device"]

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
    import orbax.checkpoint as ocp

    directory = pathlib.Path(path).absolute()
    if not directory.is_dir():
        raise FileNotFoundError(f"no checkpoint at {directory}")
    with ocp.PyTreeCheckpointer() as checkpointer:
        try:
            tree = checkpointer.metadata(directory).item_metadata.tree
        except (AttributeError, FileNotFoundError, ValueError) as error:
            raise FileNotFoundError(f"no readable checkpoint at {directory}: {error}") from error
    for key in _keys(item):
        if not isinstance(tree, dict) or key not in tree:
            raise ValueError(f"item: got {item!r}, which is no subtree of the checkpoint {directory}")
        tree = tree[key]
    return tree


def restore(path: Path, abstract: Tree, item: str | None = None) -> Tree:
    """Restores a tree, or the subtree `item`, into the shapes, dtypes and shardings of `abstract`, unchecked."""
    import orbax.checkpoint as ocp

    nested = nest(abstract, item)
    with ocp.PyTreeCheckpointer() as checkpointer:
        arguments = ocp.args.PyTreeRestore(
            item=nested, restore_args=ocp.checkpoint_utils.construct_restore_args(nested), partial_restore=True
        )
        restored = checkpointer.restore(pathlib.Path(path).absolute(), args=arguments)
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


def _keys(item: str | None) -> list[str]:
    return item.split(".") if item else []
