"""The references of a run on record: compared when the run continues, checked to be unchanged when it ends."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kljax
from train.config.errors import UserError
from train.config.schema import Config
from train.references.follow import follows_policy
from train.rl.reference import Reference
from train.weights.files import write_text_atomic


@dataclasses.dataclass(frozen=True)
class Entry:
    """One reference of a run.

    Attributes:
      from_step: RL steps done when it was first loaded.
      identity: the source, the fields that the source names, and whether it follows the policy.
      digest: of all frozen weights, 16 hexadecimal digits; None without frozen weights.
    """

    from_step: int
    identity: dict[str, Any]
    digest: str | None


def reference_fingerprint(reference: Reference | None) -> np.ndarray | None:
    """Computes a checksum of every frozen weight of the reference, on the host; None without frozen weights."""
    leaves = [] if reference is None else jax.tree.leaves(reference.policy)
    return np.asarray(jax.jit(kljax.fingerprint)(leaves)) if leaves else None


def assert_unchanged(reference: Reference | None, before: np.ndarray | None) -> None:
    """Raises RuntimeError if a single bit of the reference differs from when `before` was taken."""
    after = reference_fingerprint(reference)
    if before is None or after is None:
        return
    if not np.array_equal(before, after):
        raise RuntimeError("the reference policy changed during the run: every KL that was measured against it is void")


def entry_of(config: Config, fingerprint: np.ndarray | None, step: int) -> Entry:
    """Makes the record entry of this config's reference with this fingerprint, loaded at this step."""
    section = config.reference
    named: dict[str, Any] = {name: getattr(section, name) for name in ("step", "path") if hasattr(section, name)}
    if "path" in named:
        named["path"] = str(Path(named["path"]).absolute())
    identity = {"source": section.source, **named, "moves": follows_policy(config)}
    digest = None if fingerprint is None else hashlib.sha256(fingerprint.astype("<u4").tobytes()).hexdigest()[:16]
    return Entry(step, identity, digest)


def read_record(path: Path) -> list[Entry]:
    """Reads the references that the run has had, the present one last."""
    return [Entry(**entry) for entry in json.loads(path.read_text())] if path.is_file() else []


def is_recorded(path: Path, config: Config) -> bool:
    """Whether the last recorded reference of the run is the one that this config names."""
    entries = read_record(path)
    return bool(entries) and entries[-1].identity == entry_of(config, None, 0).identity


def record_reference(path: Path, config: Config, fingerprint: np.ndarray | None, step: int) -> None:
    """Records the reference, or compares it with the record if it is the recorded one.

    Raises:
      UserError: the weights differ from those that the run loaded first.
    """
    entries, entry = read_record(path), entry_of(config, fingerprint, step)
    if is_recorded(path, config):
        before = entries[-1]
        if before.digest != entry.digest:
            field, value = next((n, v) for n, v in reversed(entry.identity.items()) if n != "moves")
            raise UserError(
                f"reference.{field}: got {value}, whose weights are not those that this run has been measured against "
                f"since step {before.from_step} (digest {entry.digest}, expected {before.digest}); restore the "
                "weights, or set `reference` to another source"
            )
        return
    text = json.dumps([dataclasses.asdict(item) for item in [*entries, entry]], indent=2)
    write_text_atomic(path, text + "\n")
