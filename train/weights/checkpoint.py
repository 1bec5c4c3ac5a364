"""Checkpoints of a run, by orbax: the base once, the state every few steps, the last complete one on resume."""

import dataclasses
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

import kljax
from train.config.errors import UserError
from train.config.schema import Checkpoint
from train.models.leaves import named_leaves
from train.rl.state import TrainState

Tree = Any
ITEM = "state"
REFERENCE = "reference"


def abstract(tree: Tree) -> Tree:
    """Shapes, dtypes and shardings of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _layout(tree: Tree) -> dict[str, str]:
    """Name, dtype and shape of every leaf, the same for a state and for what orbax says of a saved one."""
    return {name: f"{np.dtype(leaf.dtype)}{list(leaf.shape)}" for name, leaf in named_leaves(tree).items()}


def _items(state: TrainState) -> dict[str, Tree]:
    """What is saved of a state, by item: a reference that moves is one of its own, so that every state looks alike.

    A field that is None is left out. What an earlier version wrote, which had fewer of them, can so be read.
    """
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    moving = fields.pop("reference")
    kept = {name: value for name, value in fields.items() if value is not None}
    return {ITEM: kept} if moving is None else {ITEM: kept, REFERENCE: moving}


def save_base(path: Path, params: Tree) -> None:
    """Writes the base weights once, whole or not at all; orbax renames the finished directory into place."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), params)


def check_saved(step: int, saved: Sequence[int]) -> None:
    """Raises `UserError` naming `reference.step` unless `step` is one of the `saved` steps of the run."""
    if step not in saved:
        allowed = ", ".join(map(str, sorted(saved))) or "none yet"
        raise UserError(f"reference.step: got {step}, but this run has no such checkpoint; there are: {allowed}")


class Checkpoints:
    """The numbered checkpoints of one run: `<directory>/<step>/state`, and `reference` beside it where that moves.

    A save happens in the background and becomes visible by one rename, so a run that is killed leaves either a
    complete checkpoint or a temporary directory that is removed at the next start. The newest `keep` stay, and so do
    the steps that a reference may be read from again: step 0, the policy before RL, and those in `pinned`.
    """

    def __init__(self, directory: Path, section: Checkpoint, pinned: Sequence[int] = ()) -> None:
        self._directory = directory.absolute()
        policies = preservation_policy.LatestN(section.keep), preservation_policy.CustomSteps([0, *pinned])
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.AnyPreservationPolicy(policies), cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(self._directory, options=self._options)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in order."""
        return sorted(self._manager.all_steps())

    def path(self, step: int) -> Path:
        """The directory that holds the state of a step; raises `UserError` listing the steps that exist."""
        check_saved(step, self.steps())
        return self._directory / str(step) / ITEM

    def save(self, state: TrainState, step: int) -> None:
        """Starts saving; the arrays are copied before this returns, so the state may be donated afterwards."""
        items = {name: ocp.args.StandardSave(item) for name, item in _items(state).items()}
        self._manager.save(step, args=ocp.args.Composite(**items))

    def restore_last(self, like: TrainState) -> TrainState | None:
        """The newest state that can be read, laid out like `like`; None if there is none.

        Its `reference` is None unless `like` has one and the checkpoint has one of the same layout. A checkpoint that
        cannot be read is named in a warning, moved aside and skipped.

        Raises:
          UserError: if a checkpoint is whole but of other names, shapes or dtypes than `like`; it stays where it is.
        """
        # A save that is still being written is not damage.
        self.wait()
        for step in reversed(self.steps()):
            try:
                return self._restore(step, like)
            except UserError:
                raise
            except Exception as error:
                # Orbax reports damage with exceptions of several types, some of them bare `Exception`.
                self._set_aside(step, error)
        return None

    def _restore(self, step: int, like: TrainState) -> TrainState:
        wanted = _items(like)
        self._check_fits(step, wanted[ITEM])
        if REFERENCE in wanted and self._saved_layout(step, REFERENCE) != _layout(wanted[REFERENCE]):
            del wanted[REFERENCE]
        args = {name: ocp.args.StandardRestore(abstract(item)) for name, item in wanted.items()}
        items = self._manager.restore(step, args=ocp.args.Composite(**args))
        return TrainState(**items[ITEM], reference=items[REFERENCE] if REFERENCE in wanted else None)

    def _saved_layout(self, step: int, item: str) -> dict[str, str] | None:
        """The layout of an item of a step; None where the step has no such item."""
        directory = self._directory / str(step) / item
        if item != ITEM and not directory.is_dir():
            return None
        with ocp.PyTreeCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(directory).item_metadata
        if metadata is None:
            raise ValueError("its metadata cannot be read")
        return _layout(metadata.tree)

    def _check_fits(self, step: int, like: Tree) -> None:
        saved, wanted = self._saved_layout(step, ITEM) or {}, _layout(like)
        differing = (name for name in saved.keys() | wanted.keys() if saved.get(name) != wanted.get(name))
        # The weights before the moments of the optimizer, which only follow them.
        wrong = sorted(differing, key=lambda name: (not name.startswith("trainable"), name))
        if wrong:
            shown = "; ".join(f"{name}: got {saved.get(name)}, expected {wanted.get(name)}" for name in wrong[:5])
            more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise UserError(f"checkpoint {self._directory / str(step)} does not fit this config: {shown}{more}")

    def _set_aside(self, step: int, error: Exception) -> None:
        self._manager.close()
        damaged = self._directory.parent / "damaged"
        damaged.mkdir(exist_ok=True)
        target = damaged / f"{step}-{len(list(damaged.iterdir()))}"
        shutil.move(self._directory / str(step), target)
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        logging.getLogger(__name__).warning(
            "checkpoint %s is damaged and was skipped (moved to %s): %s", self._directory / str(step), target, reason
        )
        self._manager = ocp.CheckpointManager(self._directory, options=self._options)

    def wait(self) -> None:
        """Returns when every save that was started is complete on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for saves and frees the threads."""
        self._manager.close()


def restore_base(path: Path, abstract_params: Tree, field: str, *, item: str | None = None) -> Tree:
    """Base weights from a directory that `save_base` wrote, or from a checkpoint; raises `UserError` naming `field`."""
    try:
        return kljax.restore_tree(path, abstract_params, item=item)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"{field}: {error}") from error
