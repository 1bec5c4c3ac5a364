"""The references of a run on record: compared when the run continues, checked to be unchanged when it ends."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kljax
from train.config.errors import UserError, warn
from train.config.plan import follows_policy
from train.config.schema import Config
from train.distributed.global_arrays import to_host
from train.rl.reference import FrozenWeights
from train.storage.copies import origin_of
from train.weights.files import read_record, write_record


@dataclasses.dataclass(frozen=True)
class RecordedReference:
    """One reference of a run.

    Attributes:
      from_step: RL steps done when it was first loaded.
      identity: the source, the fields that the source names, and whether it follows the policy.
      digest: of all frozen weights, 16 hexadecimal digits; None without frozen weights.
    """

    from_step: int
    identity: dict[str, Any]
    digest: str | None


def reference_fingerprint(frozen: FrozenWeights) -> np.ndarray | None:
    """Computes a checksum of every frozen weight of the reference, on the host; None without frozen weights."""
    leaves = [] if frozen.reference is None else jax.tree.leaves(frozen.reference.on_base(frozen.base))
    return to_host(jax.jit(kljax.fingerprint)(leaves)) if leaves else None


def assert_unchanged(frozen: FrozenWeights, before: np.ndarray | None) -> None:
    """Raises RuntimeError if a single bit of the reference differs from when `before` was taken."""
    after = reference_fingerprint(frozen)
    if before is None or after is None:
        return
    if not np.array_equal(before, after):
        raise RuntimeError("the reference policy changed during the run: every KL that was measured against it is void")


def entry_of(config: Config, fingerprint: np.ndarray | None, step: int) -> RecordedReference:
    """Makes the record entry of this config's reference with this fingerprint, loaded at this step."""
    section = config.reference
    named: dict[str, Any] = {name: getattr(section, name) for name in ("step", "path") if hasattr(section, name)}
    if "path" in named:
        named["path"] = origin_of(named["path"])
    identity = {"source": section.source, **named, "moves": follows_policy(config)}
    digest = None if fingerprint is None else hashlib.sha256(fingerprint.astype("<u4").tobytes()).hexdigest()[:16]
    return RecordedReference(step, identity, digest)


def read_entries(path: Path) -> list[RecordedReference]:
    """Reads the references that the run has had, the present one last.

    Raises:
      UserError: the record is damaged.
    """
    if not path.is_file():
        return []
    hint = "restore it from a copy, or delete it if the weights of the reference are certain"
    return [RecordedReference(**entry) for entry in read_record(path, hint)["references"]]


def saved_entries(path: Path) -> list[dict[str, Any]]:
    """Lists the recorded references as JSON values, for a checkpoint to carry."""
    return [dataclasses.asdict(entry) for entry in read_entries(path)]


def restore_record(path: Path, carried: Sequence[dict[str, Any]]) -> None:
    """Writes the record again from the entries that a checkpoint carries, if it is gone or damaged, and says so.

    Raises:
      UserError: the record is damaged, and the checkpoint carries none.
    """
    if not carried:
        read_entries(path)
        return
    problem = None if path.is_file() else f"{path} is gone"
    try:
        read_entries(path)
    except UserError as error:
        problem = str(error).partition(";")[0]
    if problem is not None:
        warn(f"{problem}; it is written again from the checkpoint")
        write_record(path, {"references": list(carried)})


def is_recorded(path: Path, config: Config) -> bool:
    """Whether the last recorded reference of the run is the one that this config names."""
    entries = read_entries(path)
    return bool(entries) and entries[-1].identity == entry_of(config, None, 0).identity


def record_reference(path: Path, config: Config, fingerprint: np.ndarray | None, step: int) -> None:
    """Records the reference, or compares it with the record if it is the recorded one.

    Raises:
      UserError: the weights differ from the weights that the run loaded first.
    """
    entries = read_entries(path)
    entry = entry_of(config, fingerprint, step)
    if entries and entries[-1].identity == entry.identity:
        before = entries[-1]
        if before.digest != entry.digest:
            field, value = next((n, v) for n, v in reversed(entry.identity.items()) if n != "moves")
            raise UserError(
                f"reference.{field}: got {value}, whose weights are not those that this run has been measured against "
                f"since step {before.from_step} (digest {entry.digest}, expected {before.digest}); restore the "
                "weights, or set `reference` to another source"
            )
        return
    write_record(path, {"references": [dataclasses.asdict(item) for item in [*entries, entry]]})
