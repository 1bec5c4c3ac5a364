"""Reads checkpoints that orbax wrote: their metadata, and their arrays into a layout."""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np

from kljax.checkpoint._digests import are_of_this_kind, check_digests, open_sealed
from kljax.checkpoint._stores import checkpoint_directory
from kljax.checkpoint._trees import first_five, named_leaves, shape_and_dtype

Tree = Any


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

    @property
    def is_checked(self) -> bool:
        """Whether its arrays are compared with digests; digests of version 0.2, of another kind, are not compared."""
        return self.content is not None and are_of_this_kind(self.content.get("arrays", {}))

    def subtree(self, item: str | None) -> Tree:
        """Returns the structure below a dotted path.

        Args:
          item: dotted path of a subtree, such as "trainable.adapter"; None returns the whole tree.

        Returns:
          A pytree, whose leaves have `shape` and `dtype`.

        Raises:
          ValueError: if the checkpoint has no such subtree.
        """
        tree = self.tree
        for key in _keys(item):
            if not isinstance(tree, dict) or key not in tree:
                raise ValueError(f"item: got {item!r}, which is no subtree of the checkpoint {self.path}")
            tree = tree[key]
        return tree


def read_metadata(path: str | pathlib.Path) -> CheckpointMetadata:
    """Reads the metadata of a checkpoint, and no array.

    Args:
      path: directory that orbax wrote; of this machine, or an address of gs:// or s3://.

    Returns:
      Its structure and the sealed values beside its arrays.

    Raises:
      FileNotFoundError: if there is no readable checkpoint at `path`.
      ValueError: if the sealed values are damaged, or disagree with the leaves.

    Example:
      >>> import tempfile, jax.numpy as jnp, kljax, orbax.checkpoint as ocp
      >>> path = tempfile.mkdtemp() + "/tree"
      >>> with ocp.StandardCheckpointer() as checkpointer:
      ...     checkpointer.save(path, {"policy": {"w": jnp.ones(2)}})
      >>> metadata = kljax.checkpoint.read_metadata(path)
      >>> metadata.subtree("policy")["w"].shape, metadata.content
      ((2,), None)
    """
    directory = checkpoint_directory(path)
    if not directory.is_dir():
        raise FileNotFoundError(f"no checkpoint at {directory}")
    with _reader() as checkpointer:
        try:
            metadata = checkpointer.metadata(directory).item_metadata
        except Exception as error:
            raise FileNotFoundError(f"no readable checkpoint at {directory}: {first_line(error)}") from error
    if metadata is None:
        raise FileNotFoundError(f"no readable checkpoint at {directory}: its metadata cannot be read")
    tree = metadata.tree
    sealed = metadata.custom_metadata
    content = open_sealed(f"checkpoint {directory}: its record of digests", sealed) if sealed else None
    _check_layout(directory, tree, content)
    return CheckpointMetadata(directory, tree, content)


def check_fits(metadata: CheckpointMetadata, abstract: Tree, *, item: str | None = None) -> None:
    """Checks that the checkpoint has the leaves of `abstract`; further leaves are ignored.

    Args:
      metadata: that of the checkpoint.
      abstract: pytree of `jax.ShapeDtypeStruct`, or of anything with `shape` and `dtype`.
      item: dotted path of the subtree to compare with; None compares with the whole checkpoint.

    Returns:
      Nothing.

    Raises:
      ValueError: naming the first leaves that are missing, or of another shape or dtype.

    Example:
      >>> import pathlib, jax, jax.numpy as jnp, kljax
      >>> scalar, pair = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((), (2,)))
      >>> metadata = kljax.checkpoint.CheckpointMetadata(pathlib.Path("/runs/1"), {"w": pair}, None)
      >>> kljax.checkpoint.check_fits(metadata, {"w": scalar})
      Traceback (most recent call last):
      ValueError: checkpoint /runs/1 does not fit: w: got float32[2], expected float32[]
    """
    saved = named_leaves(metadata.tree)
    problems = []
    for name, leaf in named_leaves(_nest(abstract, item)).items():
        got = shape_and_dtype(saved[name]) if name in saved else "no such leaf"
        if got != shape_and_dtype(leaf):
            problems.append(f"{name}: got {got}, expected {shape_and_dtype(leaf)}")
    if problems:
        raise ValueError(f"checkpoint {metadata.path} does not fit: {first_five(problems)}")


def restore(metadata: CheckpointMetadata, abstract: Tree, *, item: str | None = None, verify: bool = True) -> Tree:
    """Restores a tree, or a subtree of the checkpoint, into the shapes, dtypes and shardings of `abstract`.

    Args:
      metadata: that of the checkpoint.
      abstract: pytree of `jax.ShapeDtypeStruct` with shardings. Shapes and dtypes must equal the ones on disk.
      item: dotted path of a subtree; None restores the whole checkpoint.
      verify: whether to compare the arrays with their digests, which the processes that share an array do together.
        Without it no process waits for another; `check_restored` makes the comparison later.

    Returns:
      A pytree of arrays, each created directly in its sharding.

    Raises:
      ValueError: if a leaf is missing or of another shape or dtype; if an array cannot be read or differs from its
        digest, naming it.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, kljax, orbax.checkpoint as ocp
      >>> from kljax.checkpoint import read_metadata, restore, seal, tree_digests
      >>> path, tree = tempfile.mkdtemp() + "/tree", {"w": jnp.ones(2)}
      >>> with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
      ...     sealed = seal({"arrays": tree_digests(tree)})
      ...     checkpointer.save(path, args=ocp.args.StandardSave(tree, custom_metadata=sealed))
      >>> abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
      >>> print(restore(read_metadata(path), abstract)["w"])
      [1. 1.]
    """
    import orbax.checkpoint as ocp

    check_fits(metadata, abstract, item=item)
    nested = _nest(abstract, item)
    restored = _read(metadata, nested, ocp.checkpoint_utils.construct_restore_args(nested))
    for key in _keys(item):
        restored = restored[key]
    if verify:
        check_restored(metadata, restored, item=item)
    return restored


def check_restored(metadata: CheckpointMetadata, restored: Tree, *, item: str | None = None) -> None:
    """Compares restored arrays with their digests, if the checkpoint has digests of the present kind.

    Args:
      metadata: that of the checkpoint.
      restored: pytree of arrays that `restore` returned.
      item: the subtree that was restored, as in `restore`.

    Returns:
      Nothing.

    Raises:
      ValueError: naming the first arrays that differ.

    Example:
      >>> import pathlib, numpy as np, kljax
      >>> saved = {"w": np.ones(2, np.float32)}
      >>> content = {"arrays": kljax.checkpoint.tree_digests(saved)}
      >>> metadata = kljax.checkpoint.CheckpointMetadata(pathlib.Path("/runs/1"), saved, content)
      >>> kljax.checkpoint.check_restored(metadata, saved)
    """
    if metadata.content is not None and metadata.is_checked:
        nested = _nest(restored, item)
        digests = metadata.content.get("arrays", {})
        check_digests(f"checkpoint {metadata.path}", nested, digests)


def read_array(metadata: CheckpointMetadata, name: str) -> np.ndarray:
    """Reads one array onto the host, and compares it with its digest, if the checkpoint has digests.

    Args:
      metadata: that of the checkpoint.
      name: dotted name of the array, as `named_leaves(metadata.tree)` has it.

    Returns:
      The array, in its dtype on disk.

    Raises:
      ValueError: if the array cannot be read, or differs from its digest.

    Example:
      >>> import tempfile, jax.numpy as jnp, kljax, orbax.checkpoint as ocp
      >>> path = tempfile.mkdtemp() + "/tree"
      >>> with ocp.StandardCheckpointer() as checkpointer:
      ...     checkpointer.save(path, {"policy": {"w": jnp.ones(2)}})
      >>> kljax.checkpoint.read_array(kljax.checkpoint.read_metadata(path), "policy.w")
      array([1., 1.], dtype=float32)
    """
    import orbax.checkpoint as ocp

    saved = named_leaves(metadata.tree)[name]
    abstract = jax.ShapeDtypeStruct(tuple(saved.shape), np.dtype(saved.dtype))
    nested_args = _nest(ocp.RestoreArgs(restore_type=np.ndarray), name)
    (leaf,) = jax.tree.leaves(_read(metadata, _nest(abstract, name), nested_args))
    array = np.asarray(leaf)
    check_restored(metadata, array, item=name)
    return array


def first_line(error: Exception) -> str:
    """Shortens an error of orbax, which has many lines, to the first one.

    Args:
      error: any exception.

    Returns:
      At most 200 characters; the type of an error without a text.

    Raises:
      Nothing.

    Example:
      >>> import kljax
      >>> kljax.checkpoint.first_line(ValueError("no such file. See full TensorStore details: ..."))
      'no such file'
    """
    lines = str(error).partition(". See full TensorStore details")[0].strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _reader() -> Any:
    """Makes a checkpointer that reads trees; of several processes that read, none waits for another."""
    import orbax.checkpoint as ocp

    this = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=this, active_processes={this})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _read(metadata: CheckpointMetadata, nested: Tree, restore_args: Tree) -> Tree:
    import orbax.checkpoint as ocp

    arguments = ocp.args.PyTreeRestore(item=nested, restore_args=restore_args, partial_restore=True)
    with _reader() as checkpointer:
        try:
            return checkpointer.restore(metadata.path, args=arguments)
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # Orbax raises several types for damaged files, some of them bare `Exception`.
            raise ValueError(f"checkpoint {metadata.path} is damaged: {first_line(error)}") from error


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
            f"{first_five(differing, separator=', ')}"
        )


def _nest(tree: Tree, item: str | None) -> Tree:
    """Puts a tree below the dotted path `item`, as it lies in the checkpoint."""
    for key in reversed(_keys(item)):
        tree = {key: tree}
    return tree


def _keys(item: str | None) -> list[str]:
    return item.split(".") if item else []
