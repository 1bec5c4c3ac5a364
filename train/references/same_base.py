"""Whether the adapter of another run, as a reference, belongs to the base of this run: a shape that fits says nothing.

Bases are compared as they are saved: folders of Hugging Face by their digest, all else value by value.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from train.config.errors import UserError
from train.config.schema import Config
from train.references import is_recorded, locate, run_of
from train.run.console import warn
from train.run.directory import RunDirectory
from train.weights.base import RECORD, has_record
from train.weights.huggingface import folder_digest
from train.weights.peft import is_peft
from train.weights.saved_arrays import SavedArray, folder_arrays, orbax_arrays


@dataclasses.dataclass(frozen=True)
class Base:
    """Weights on disk that an adapter was, or will be, trained on.

    Attributes:
      path: a Hugging Face folder, or what orbax saved.
      item: dotted path inside what orbax saved, or None for all of it.
      digest: of a folder, as the run has it on record; None for what orbax saved.
    """

    path: Path
    item: str | None = None
    digest: str | None = None

    def arrays(self) -> dict[str, SavedArray]:
        """What is in it; raises FileNotFoundError, ValueError where it is gone or is a folder of something else."""
        if self.digest is None:
            return orbax_arrays(self.path, self.item)
        if folder_digest(self.path) != self.digest:
            raise ValueError(f"{self.path} is not what it was: its digest was {self.digest}")
        return folder_arrays(self.path)


@dataclasses.dataclass(frozen=True)
class Expected:
    """The base that the reference asks of this run.

    Attributes:
      path: of the reference; run: the one that saved it; base: that of this other run.
    """

    path: str
    run: Path
    base: Base

    def check(self, ours: Base, *, hint: str = "") -> None:
        """Raises `UserError` naming both bases if that of this run is another one."""
        try:
            told = _difference(self.base, ours)
        except (FileNotFoundError, ValueError) as error:
            raise UserError(
                f"reference.path: got {self.path}, an adapter of the run {self.run}, whose base cannot be compared "
                f"with that of this run: {error}"
            ) from error
        if told is None:
            return
        field = "warm_start.checkpoint" if self.base.digest is None else "model.path"
        raise UserError(
            f"reference.path: got {self.path}, an adapter of the run {self.run}, whose base is {self.base.path} "
            f"({told[0]}), but the base of this run is {ours.path} ({told[1]}); expected an adapter of this base, or a "
            f"run that starts from the other: {field}={self.base.path}{hint}"
        )

    def check_run(self, root: Path) -> None:
        """The same for a run that has made its base by now."""
        made = base_of(root)
        if made is None:
            raise RuntimeError(f"{root} has no base, although it is about to train")
        self.check(made, hint="; the base is saved, and --resume with another reference goes on from it")


def check_same_base(config: Config, own: RunDirectory | None) -> Expected | None:
    """Compares the base of the adapter at `reference.path` with that of this run, before anything is written.

    What is no checkpoint of a run, such as an adapter that orbax saved on its own, says nothing of its base.

    Args:
      own: the run that is continued; None for a new one.

    Returns:
      What is to be compared once this run has made its base; None if nothing is left to compare.

    Raises:
      UserError: the bases differ, naming both.
    """
    section = config.reference
    if not config.needs_reference() or section.source != "adapter" or is_peft(section.path):
        return None
    run = run_of(locate(section.path, "adapter")[0])
    if run is None or (own is not None and is_recorded(own.reference, config)):
        return None
    theirs, ours = base_of(run), _known(config, own)
    if theirs is None:
        warn(f"reference.path: the run {run} has no base any more, with which that of this run could be compared")
        return None
    expected = Expected(section.path, run, theirs)
    if ours is None:
        return expected
    expected.check(ours)
    return None


def base_of(root: Path) -> Base | None:
    """The base that a run has saved, or has on record; None where there is none."""
    if has_record(root):
        record = json.loads((root / RECORD).read_text(encoding="utf-8"))
        return Base(Path(record["folder"]), digest=record["digest"])
    base = RunDirectory(root).base
    return Base(base) if base.is_dir() else None


def _known(config: Config, own: RunDirectory | None) -> Base | None:
    """The base of this run, where it is on disk already."""
    saved = None if own is None else base_of(own.root)
    if saved is not None:
        return saved
    if config.warm_start.checkpoint is not None:
        return Base(*locate(config.warm_start.checkpoint, "params"))
    if config.model.path is not None and config.warm_start.steps == 0:
        return Base(Path(config.model.path), digest=folder_digest(config.model.path))
    return None


def _difference(theirs: Base, ours: Base) -> tuple[str, str] | None:
    """What tells two bases apart, in words for each; None if they are the same."""
    if theirs.digest is not None and theirs.digest == ours.digest:
        return None
    if theirs.digest is None and (theirs.path.resolve(), theirs.item) == (ours.path.resolve(), ours.item):
        return None
    first, second = theirs.arrays(), ours.arrays()
    for name in sorted(first.keys() | second.keys()):
        shapes = [f"{name}: {list(one[name].shape) if name in one else 'missing'}" for one in (first, second)]
        if shapes[0] != shapes[1]:
            return shapes[0], shapes[1]
    # A base that is held in bfloat16 was rounded to that.
    half = np.dtype(jnp.bfloat16)
    rounded = any(half == array.dtype for one in (first, second) for array in one.values())
    digests = [_digest(one, half if rounded else np.dtype(np.float32)) for one in (first, second)]
    return None if digests[0] == digests[1] else (f"digest {digests[0]}", f"digest {digests[1]}")


def _digest(arrays: Mapping[str, SavedArray], dtype: np.dtype) -> str:
    """16 hexadecimal digits of all values, each rounded to `dtype`."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        found.update(arrays[name].read().astype(dtype).tobytes())
    return found.hexdigest()[:16]
