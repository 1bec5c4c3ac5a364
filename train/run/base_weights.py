"""The base of a run: the weights before RL, made once, saved or recorded, read back, and compared with other runs'.

A base that a warm start trained, or that was drawn, is saved in the run directory. A Hugging Face folder that is used
as it is stays where it is: `base.json` records its path and digest.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from train.config.errors import UserError, field_errors, warn
from train.config.plan import Plan
from train.config.schema import Config
from train.distributed.exchange import on_leader
from train.models import Decoder
from train.models.experts import CHOICE_BIAS
from train.models.int8 import quantise_params
from train.models.parameters import abstract_params
from train.references.find import locate, run_directory_of
from train.references.record import is_recorded
from train.run.directory import RunDirectory
from train.storage.copies import local_copy, origin_of
from train.weights.files import read_record, write_record
from train.weights.huggingface import folder_arrays, folder_digest, load_params
from train.weights.model import unquantized
from train.weights.orbax import carried_with, orbax_arrays, restore_base
from train.weights.peft import is_peft
from train.weights.saved_array import SavedArray

Tree = Any
RECORD_HINT = "restore it from a copy, or start a new run"


@dataclasses.dataclass(frozen=True)
class SavedBase:
    """Base weights on disk.

    Attributes:
      path: a Hugging Face folder, or an orbax directory.
      item: dotted path inside the orbax directory, or None for all of it.
      digest: of the folder, as the run recorded it; None for an orbax directory.
    """

    path: Path
    item: str | None = None
    digest: str | None = None

    def arrays(self) -> dict[str, SavedArray]:
        """Lists the arrays by name; raises FileNotFoundError or ValueError if the folder is gone or has changed."""
        if self.digest is None:
            return orbax_arrays(self.path, self.item)
        if folder_digest(self.path) != self.digest:
            raise ValueError(f"{self.path} is not what it was: its digest was {self.digest}")
        return folder_arrays(self.path)


@dataclasses.dataclass(frozen=True)
class ExpectedBase:
    """The base that a reference adapter of another run was trained on.

    Attributes:
      path: `reference.path`.
      run: the run that saved the adapter.
      base: the base of that run.
    """

    path: str
    run: Path
    base: SavedBase

    def check(self, ours: SavedBase, *, hint: str = "") -> None:
        """Raises `UserError` naming both bases if the base of this run differs."""
        try:
            difference = _difference(self.base, ours)
        except (FileNotFoundError, ValueError) as error:
            raise UserError(
                f"reference.path: got {self.path}, an adapter of the run {self.run}, whose base cannot be compared "
                f"with that of this run: {error}"
            ) from error
        if difference is None:
            return
        field = "warm_start.checkpoint" if self.base.digest is None else "model.path"
        raise UserError(
            f"reference.path: got {self.path}, an adapter of the run {self.run}, whose base is {self.base.path} "
            f"({difference[0]}), but the base of this run is {ours.path} ({difference[1]}); expected an adapter of "
            f"this base, or a run that starts from the other: {field}={self.base.path}{hint}"
        )

    def check_run(self, root: Path) -> None:
        """Checks the base that the run at `root` has made by now.

        Raises:
          UserError: it is not the expected base.
          RuntimeError: there is none.
        """
        made = saved_base(root)
        if made is None:
            raise RuntimeError(f"{root} has no base, although it is about to train")
        self.check(made, hint="; the base is saved, and --resume with another reference goes on from it")


def record_folder(root: Path, folder: str | Path) -> None:
    """Records in the run directory `root` that its base is a folder, with the digest of the folder."""

    def write() -> None:
        directory = RunDirectory(root)
        record = {"folder": origin_of(folder), "digest": folder_digest(folder), **directory.identity}
        write_record(directory.base_record, record)

    on_leader("base", write)


def saved_base(root: Path) -> SavedBase | None:
    """Locates the base that a run saved or recorded, or returns None if it has none yet.

    Raises:
      UserError: the record is damaged.
    """
    directory = RunDirectory(root)
    if directory.base_record.is_file():
        record = read_record(directory.base_record, RECORD_HINT)
        return SavedBase(local_copy(record["folder"], "model.path"), digest=record["digest"])
    return SavedBase(directory.base) if directory.has_base() else None


def load_base(directory: RunDirectory, model: Decoder, mesh: Mesh) -> Tree:
    """Loads the base of a run that continues: from the run directory, or from the recorded folder.

    Raises:
      UserError: the folder is gone, its digest is not the recorded one, or the base is of another run.
    """
    root = directory.root
    base = saved_base(directory.root)
    if base is None or base.digest is None:
        restored = restore_weights(directory.base, model, mesh, "base")
        directory.check_origin(directory.base, carried_with(directory.base))
        return restored
    directory.check_origin(directory.base_record, read_record(directory.base_record, RECORD_HINT))
    try:
        digest = on_leader("base", lambda: folder_digest(base.path))
        if digest != base.digest:
            raise UserError(
                f"model.path: {origin_of(base.path)} is not what {root} began with: its digest is {digest}, that of "
                f"the run {base.digest} ({directory.base_record}); restore the weights, or start a new run"
            )
        # These are the values that the run began with, whatever they are.
        return load_params(str(base.path), model, mesh, allow_nonfinite=True)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"model.path: {error}; {root} began with the weights in {base.path}") from error


def load_initial_base(config: Config, model: Decoder, mesh: Mesh) -> Tree | None:
    """Loads the saved weights that the config starts from, or returns None if they are to be drawn."""
    if config.warm_start.checkpoint is not None:
        path, item = locate(config.warm_start.checkpoint, "params")
        with field_errors("warm_start.checkpoint"):
            saved = _as_saved(model, orbax_arrays(path, item))
        restored = restore_weights(path, saved, mesh, "warm_start.checkpoint", item=item)
        return _with_zeros(abstract_params(model, mesh), restored)
    if config.model.path is not None:
        with field_errors("model.path"):
            return load_params(config.model.path, model, mesh, allow_nonfinite=config.model.allow_nonfinite)
    return None


def _as_saved(model: Decoder, arrays: Mapping[str, SavedArray]) -> Decoder:
    """Returns the decoder without the bias of the choice of experts if saved weights have none: it begins at 0."""
    experts = model.config.experts
    if experts is None or not experts.choice_bias or any(name.endswith(CHOICE_BIAS) for name in arrays):
        return model
    return Decoder(dataclasses.replace(model.config, experts=dataclasses.replace(experts, choice_bias=False)))


def _with_zeros(like: Tree, params: Tree) -> Tree:
    """Adds zeros for the leaves that weights lack."""
    if isinstance(like, Mapping):
        return {name: _with_zeros(leaf, (params or {}).get(name)) for name, leaf in like.items()}
    return jnp.zeros(like.shape, like.dtype, device=like.sharding) if params is None else params


def restore_weights(path: Path, model: Decoder, mesh: Mesh, field: str, *, item: str | None = None) -> Tree:
    """Restores weights that orbax saved, which are never quantized, and quantizes them if the model does."""
    return quantize_if_needed(model, restore_base(path, abstract_params(unquantized(model), mesh), field, item=item))


def quantize_if_needed(model: Decoder, params: Tree) -> Tree:
    """Quantizes weights, which it donates, if the model is quantized."""
    return params if model.config.quantization is None else quantise_params(params)


def check_same_base(plan: Plan, continued: RunDirectory | None) -> ExpectedBase | None:
    """Compares the base of the adapter at `reference.path` with that of this run, before anything is written.

    An adapter fits every base of its shape, so shapes say nothing. Folders are compared by digest, everything else
    value by value. An adapter that lies in no run cannot be checked.

    Args:
      continued: the run that is continued; None for a new one.

    Returns:
      The base to compare once this run has made its own; None if nothing is left to compare.

    Raises:
      UserError: the bases differ, naming both.
    """
    config = plan.config
    section = plan.config.reference
    if not plan.reference or section.source != "adapter" or is_peft(section.path):
        return None
    run = run_directory_of(locate(section.path, "adapter")[0])
    if run is None or (continued is not None and is_recorded(continued.reference, config)):
        return None
    run_base = saved_base(run)
    existing = _existing_base(config, continued)
    if run_base is None:
        warn(f"reference.path: the run {run} has no base any more, with which that of this run could be compared")
        return None
    expected = ExpectedBase(section.path, run, run_base)
    if existing is None:
        return expected
    expected.check(existing)
    return None


def _existing_base(config: Config, continued: RunDirectory | None) -> SavedBase | None:
    """Locates the base of this run if it is on disk already."""
    saved = None if continued is None else saved_base(continued.root)
    if saved is not None:
        return saved
    if config.warm_start.checkpoint is not None:
        return SavedBase(*locate(config.warm_start.checkpoint, "params"))
    if config.model.path is not None and config.warm_start.steps == 0:
        return SavedBase(Path(config.model.path), digest=folder_digest(config.model.path))
    return None


def _difference(theirs: SavedBase, ours: SavedBase) -> tuple[str, str] | None:
    """Describes how two bases differ, in words for each; None if they are equal."""
    if theirs.digest is not None and theirs.digest == ours.digest:
        return None
    if theirs.digest is None and (theirs.path.resolve(), theirs.item) == (ours.path.resolve(), ours.item):
        return None
    first = theirs.arrays()
    second = ours.arrays()
    for name in sorted(first.keys() | second.keys()):
        shapes = [f"{name}: {list(arrays[name].shape) if name in arrays else 'missing'}" for arrays in (first, second)]
        if shapes[0] != shapes[1]:
            return shapes[0], shapes[1]
    # A base stored in bfloat16 was rounded to it.
    half = np.dtype(jnp.bfloat16)
    rounded = any(half == array.dtype for arrays in (first, second) for array in arrays.values())
    digests = [_digest(arrays, half if rounded else np.dtype(np.float32)) for arrays in (first, second)]
    return None if digests[0] == digests[1] else (f"digest {digests[0]}", f"digest {digests[1]}")


def _digest(arrays: Mapping[str, SavedArray], dtype: np.dtype) -> str:
    """Hashes all values, each rounded to `dtype`, to 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(arrays[name].read().astype(dtype).tobytes())
    return digest.hexdigest()[:16]
