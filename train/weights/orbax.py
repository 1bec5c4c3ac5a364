"""Orbax checkpoints of a run: saving the base and the state, and restoring the last complete state."""

import dataclasses
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from kljax import checkpoint
from kljax.checkpoint import first_five, named_leaves, read_metadata, seal, shape_and_dtype, tree_digests
from kljax.checkpoint._stores import commit_options, is_complete, temporary_path_class
from train.config.errors import UserError, field_errors
from train.config.schema import Checkpoint
from train.config.storage import is_address
from train.distributed.exchange import on_leader, run_together
from train.models.sharding import with_sharding
from train.rl.state import TrainState
from train.storage.paths import move_tree, remove_tree
from train.weights.emergency import EmergencyCheckpoints, abstract
from train.weights.saved_array import SavedArray

Tree = Any
SavedTree = tuple[checkpoint.CheckpointMetadata, Tree]
ITEM = "state"
REFERENCE = "reference"
BATCH = "batch"


def _layout(tree: Tree) -> dict[str, str]:
    """Maps the name of every leaf to its dtype and shape, for a state or the orbax metadata of a state."""
    return {name: shape_and_dtype(leaf) for name, leaf in named_leaves(tree).items()}


def _items(state: TrainState) -> dict[str, Tree]:
    """Splits a state into checkpoint items: the state, and an EMA or lagged reference beside it.

    Fields that are None are omitted, so that checkpoints from before a field existed can still be read.
    """
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    reference = fields.pop("reference")
    saved_fields = {name: value for name, value in fields.items() if value is not None}
    return {ITEM: saved_fields} if reference is None else {ITEM: saved_fields, REFERENCE: reference}


def _with_digests(tree: Tree, content: Mapping[str, Any] | None = None) -> ocp.args.StandardSave:
    """Makes the arguments of a save, with the digests of the arrays and further values sealed beside them."""
    sealed = seal({"arrays": tree_digests(tree), **(content or {})})
    return ocp.args.StandardSave(tree, custom_metadata=sealed)


def save_base(path: Path, params: Tree, content: Mapping[str, Any] | None = None) -> None:
    """Writes weights and their digests atomically: orbax renames the finished directory into place.

    In an object store, where nothing is renamed, a file that it writes last says that the directory is complete; what a
    killed process left there is deleted first.

    Args:
      content: further JSON values to seal beside the arrays.
    """
    options = {}
    if is_address(path):
        options["temporary_path_class"] = temporary_path_class()
        on_leader("base", lambda: None if is_complete(path) else remove_tree(path))
    with ocp.Checkpointer(ocp.StandardCheckpointHandler(), **options) as checkpointer:
        checkpointer.save(str(path.absolute()), args=_with_digests(params, content))


def carried_with(path: Path) -> dict[str, Any]:
    """Reads the values that lie beside the arrays of an orbax directory; empty if it has none."""
    return read_metadata(path).content or {}


def _read_together(label: str, read: Callable[[], Mapping[str, SavedTree]], item: str | None = None) -> dict[str, Tree]:
    """Reads trees in all processes and compares their arrays with the digests; warns of a tree without such digests.

    Args:
      label: names the trees in errors.
      read: returns the metadata and the arrays of every tree.
      item: dotted path of the subtree that was read, or None.

    Raises:
      ValueError: an array differs from its digest.
    """
    # All processes compare digests together, so each of them has to have its arrays by then.
    trees = run_together(label, read)
    for metadata, tree in trees.values():
        if not metadata.is_checked:
            digests = "no digests" if metadata.content is None else "digests of version 0.2, which are not compared"
            text = "%s has %s, so damage to its arrays would not be noticed"
            logging.getLogger(__name__).warning(text, metadata.path, digests)
        checkpoint.check_restored(metadata, tree, item=item)
    return {name: tree for name, (_, tree) in trees.items()}


def check_saved(step: int, saved: Sequence[int]) -> None:
    """Raises `UserError` naming `reference.step` unless the run has a checkpoint of `step`."""
    if step not in saved:
        allowed = ", ".join(map(str, sorted(saved))) or "none yet"
        raise UserError(f"reference.step: got {step}, but this run has no such checkpoint; there are: {allowed}")


class RunCheckpoints:
    """The numbered checkpoints of one run: `<directory>/<step>/state`, with `reference` and `batch` beside it.

    `reference` is there if it is updated, `batch` if batches of later steps were in flight at the save.

    Saves run in the background and become visible by one rename; in an object store by a file that is written last. A
    killed run leaves a complete checkpoint or a temporary directory, which the next start removes. The newest `keep`
    checkpoints are kept, checkpoints of steps that `keep_every` divides, and the steps that a reference may load: step
    0, the policy before RL, and the steps in `pinned`.

    Attributes:
      carry: returns JSON values to save beside each state, which `carried` reads; None for none.
      batch_of: returns the batches from a step on that are in flight before it begins, or None; None if none ever is.
    """

    carry: Callable[[], Mapping[str, Any]] | None = None
    batch_of: Callable[[int], Tree | None] | None = None

    def __init__(
        self, directory: Path, section: Checkpoint, pinned: Sequence[int] = (), *, run_id: str | None = None
    ) -> None:
        """Opens the directory.

        Args:
          directory: created if missing.
          section: of the config.
          pinned: steps to keep.
          run_id: sealed with each save and compared with what is read; None compares nothing.
        """
        self._directory = directory.absolute()
        self._run_id = run_id
        policies = [preservation_policy.LatestN(section.keep), preservation_policy.CustomSteps([0, *pinned])]
        if section.keep_every is not None:
            policies.append(preservation_policy.EveryNSteps(section.keep_every))
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
            cleanup_tmp_directories=True,
            **commit_options(self._directory),
        )
        self._manager = ocp.CheckpointManager(str(self._directory), options=self._options)
        self._emergency = None
        if section.emergency is not None:
            records = self._directory.parent / "emergency"
            self._emergency = EmergencyCheckpoints(section.emergency, run_id or "run", records)
        self._carried: dict[int, dict[str, Any]] = {}

    def steps(self) -> list[int]:
        """Lists the steps that have a checkpoint, in order."""
        return sorted(self._manager.all_steps())

    def path(self, step: int) -> Path:
        """Returns the directory of the state of a step; raises `UserError` listing the saved steps."""
        check_saved(step, self.steps())
        return self._directory / str(step) / ITEM

    def carried(self, step: int) -> dict[str, Any]:
        """Reads the values that were saved beside the state of a step, which is known to be undamaged."""
        return self._carried.get(step) or carried_with(self.path(step))

    def save(self, state: TrainState, step: int) -> None:
        """Starts a save; the arrays are copied before it returns, so the state may be donated afterwards."""
        trees = _items(state)
        batch = None if self.batch_of is None else self.batch_of(step)
        if batch is not None:
            trees[BATCH] = batch
        identity: dict[str, Any] = {"step": step} if self._run_id is None else {"step": step, "run": self._run_id}
        of_state = {**identity, **({} if self.carry is None else self.carry())}
        items = {name: _with_digests(item, of_state if name == ITEM else identity) for name, item in trees.items()}
        self._manager.save(step, args=ocp.args.Composite(**items))

    def save_in_memory(self, state: TrainState, step: int) -> None:
        """Starts to save a state in the memory of other slices, as `checkpoint.emergency` says."""
        if self._emergency is not None:
            self._emergency.save(_items(state), step, {} if self.carry is None else self.carry())

    def restore_from_memory(self, like: TrainState) -> TrainState | None:
        """Restores a state from the memory of a slice; None if none has a later one than the last checkpoint."""
        if self._emergency is None:
            return None
        found = self._emergency.restore_last(abstract(_items(like)), after=max(self.steps(), default=-1))
        if found is None:
            return None
        items, content = found
        self._carried[content["step"]] = content
        return TrainState(**items[ITEM], reference=items.get(REFERENCE))

    def restore_last(self, like: TrainState) -> TrainState | None:
        """Restores the newest readable state with the shardings of `like`; returns None if there is none.

        `reference` is None unless `like` and the checkpoint have a reference of the same layout. A checkpoint that
        cannot be read, or with an array that differs from its digest, is named in a warning, moved to `damaged` and
        skipped.

        Raises:
          UserError: a complete checkpoint has other names, shapes or dtypes than `like`; it is not moved.
        """
        # An unfinished save must not be taken for a damaged checkpoint.
        self.wait()
        for step in reversed(self.steps()):
            try:
                return self._restore(step, like)
            except (UserError, MemoryError, jax.errors.JaxRuntimeError):
                raise
            except Exception as error:
                # Orbax raises several types for damaged files, some of them bare `Exception`.
                self._set_aside(step, error)
        return None

    def restore_batch(self, step: int, sharding: jax.sharding.NamedSharding) -> Tree | None:
        """Restores the tree of `batch_of` beside the state of a step, all of one sharding; None if there is none.

        Raises:
          UserError: it is damaged.
        """
        directory = self._directory / str(step) / BATCH
        if not directory.is_dir():
            return None
        with field_errors("rollout.ahead"):
            like = run_together("rollout.ahead", lambda: with_sharding(read_metadata(directory).tree, sharding))
        return restore_base(directory, like, "rollout.ahead")

    def _restore(self, step: int, like: TrainState) -> TrainState:
        items = _read_together("checkpoint", lambda: self._read(step, _items(like)))
        return TrainState(**items[ITEM], reference=items.get(REFERENCE))

    def _read(self, step: int, expected: dict[str, Tree]) -> dict[str, SavedTree]:
        """Reads the metadata and the arrays of a step: its state, and its reference if that fits."""
        saved = {ITEM: read_metadata(self._directory / str(step) / ITEM)}
        self._check_origin(saved[ITEM])
        self._check_fits(step, saved[ITEM], expected[ITEM])
        if REFERENCE in expected and (reference := self._fitting_reference(step, expected[REFERENCE])) is not None:
            saved[REFERENCE] = reference
        return {
            name: (metadata, checkpoint.restore(metadata, abstract(expected[name]), verify=False))
            for name, metadata in saved.items()
        }

    def _fitting_reference(self, step: int, like: Tree) -> checkpoint.CheckpointMetadata | None:
        """Reads the metadata of the reference of a step; None if the step has none, or one of another layout."""
        directory = self._directory / str(step) / REFERENCE
        metadata = read_metadata(directory) if directory.is_dir() else None
        if metadata is not None:
            self._check_origin(metadata)
        return None if metadata is None or _layout(metadata.tree) != _layout(like) else metadata

    def _check_origin(self, metadata: checkpoint.CheckpointMetadata) -> None:
        """Raises UserError for a checkpoint of another run, and ValueError for one of another step."""
        saved = (metadata.content or {}).get("run")
        if metadata.content is not None and self._run_id is not None and saved != self._run_id:
            raise UserError(
                f"checkpoint {metadata.path.parent} is of another run: its id is {saved}, that of this run "
                f"{self._run_id}; move it out of {self._directory}"
            )
        _check_step(metadata)

    def _check_fits(self, step: int, metadata: checkpoint.CheckpointMetadata, like: Tree) -> None:
        saved = _layout(metadata.tree)
        expected = _layout(like)
        differing = (name for name in saved.keys() | expected.keys() if saved.get(name) != expected.get(name))
        # Weights first: their optimizer moments differ in the same way.
        names = sorted(differing, key=lambda name: (not name.startswith("trainable"), name))
        if names:
            problems = [f"{name}: got {saved.get(name)}, expected {expected.get(name)}" for name in names]
            raise UserError(
                f"checkpoint {self._directory / str(step)} does not fit this config: {first_five(problems)}"
            )

    def _set_aside(self, step: int, error: Exception) -> None:
        self._manager.close()

        def set_aside() -> str:
            damaged = self._directory.parent / "damaged"
            damaged.mkdir(exist_ok=True)
            target = damaged / f"{step}-{len(list(damaged.glob('*')))}"
            move = move_tree if is_address(damaged) else shutil.move
            move(self._directory / str(step), target)
            return str(target)

        target = on_leader("damaged checkpoint", set_aside)
        logging.getLogger(__name__).warning(
            "checkpoint %s is damaged and was skipped (moved to %s): %s",
            self._directory / str(step),
            target,
            checkpoint.first_line(error),
        )
        self._manager = ocp.CheckpointManager(str(self._directory), options=self._options)

    def wait(self) -> None:
        """Waits until every started save is complete on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the saves and stops the threads of orbax."""
        self._manager.close()
        if self._emergency is not None:
            self._emergency.close(max(self.steps(), default=-1))


def _check_step(metadata: checkpoint.CheckpointMetadata) -> None:
    """Raises ValueError if a checkpoint lies in the directory of another step than it was saved after."""
    saved = (metadata.content or {}).get("step")
    named = metadata.path.parent
    in_run = named.parent.name == "checkpoints" and named.name.isdigit()
    if saved is not None and in_run and int(named.name) != saved:
        raise ValueError(f"checkpoint {metadata.path.parent} is a copy: it was saved after step {saved}")


def restore_base(path: Path, abstract_params: Tree, field: str, *, item: str | None = None) -> Tree:
    """Restores base weights from a `save_base` directory or a checkpoint; raises `UserError` naming `field`."""

    def read() -> dict[str, SavedTree]:
        metadata = read_metadata(path)
        _check_step(metadata)
        return {ITEM: (metadata, checkpoint.restore(metadata, abstract_params, item=item, verify=False))}

    with field_errors(field):
        return _read_together(field, read, item)[ITEM]


def orbax_arrays(path: Path, item: str | None) -> dict[str, SavedArray]:
    """Lists the arrays of an orbax directory, or of the subtree at the dotted path `item`, without reading them.

    Raises:
      FileNotFoundError: there is no readable checkpoint.
      ValueError: it is damaged; reading an array raises this too.
    """
    metadata = read_metadata(path)
    prefix = "" if item is None else f"{item}."

    def lazy_array(name: str, leaf: Any) -> SavedArray:
        return SavedArray(tuple(leaf.shape), np.dtype(leaf.dtype), partial(checkpoint.read_array, metadata, name))

    leaves = {name: leaf for name, leaf in named_leaves(metadata.tree).items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): lazy_array(name, leaf) for name, leaf in leaves.items()}
