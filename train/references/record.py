"""What a run was measured against, on record: checked when it is continued, and proven unchanged at its end."""

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
from train.references.moving import moves
from train.rl.reference import Reference
from train.weights.files import write_text_atomic


@dataclasses.dataclass(frozen=True)
class Entry:
    """One reference of a run.

    Attributes:
      from_step: RL steps that were done when it was first loaded.
      identity: the source, what it names, and whether it moves.
      digest: of all weights that stay what they are, 16 hexadecimal digits; None where there are none.
    """

    from_step: int
    identity: dict[str, Any]
    digest: str | None


def reference_fingerprint(reference: Reference | None) -> np.ndarray | None:
    """A checksum of every weight of the reference, on the host; None where it has none that stay what they are."""
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
    """What goes on record of the reference of this config, found with this fingerprint after so many steps."""
    section = config.reference
    named: dict[str, Any] = {name: getattr(section, name) for name in ("step", "path") if hasattr(section, name)}
    if "path" in named:
        named["path"] = str(Path(named["path"]).absolute())
    identity = {"source": section.source, **named, "moves": moves(config)}
    digest = None if fingerprint is None else hashlib.sha256(fingerprint.astype("<u4").tobytes()).hexdigest()[:16]
    return Entry(step, identity, digest)


def read_record(path: Path) -> list[Entry]:
    """The references that the run has had, the present one last."""
    return [Entry(**entry) for entry in json.loads(path.read_text())] if path.is_file() else []


def is_recorded(path: Path, config: Config) -> bool:
    """Whether the run had the reference that this config names when it stopped."""
    entries = read_record(path)
    return bool(entries) and entries[-1].identity == entry_of(config, None, 0).identity


def record_reference(path: Path, config: Config, fingerprint: np.ndarray | None, step: int) -> None:
    """Puts the reference on record, or checks it where it is the one that the run has had.

    Raises:
      UserError: if what the config names holds other weights than when the run loaded it first.
    """
    entries, entry = read_record(path), entry_of(config, fingerprint, step)
    if is_recorded(path, config):
        before = entries[-1]
        if before.digest != entry.digest:
            field, value = next((n, v) for n, v in reversed(entry.identity.items()) if n != "moves")
            raise UserError(
                f"reference.{field}: got {value}, whose weights are not those that this run has been measured against "
                f"since step {before.from_step} (digest {entry.digest}, expected {before.digest}); put them back, or "
                "name another reference, which is then on record from here on"
            )
        return
    text = json.dumps([dataclasses.asdict(item) for item in [*entries, entry]], indent=2)
    write_text_atomic(path, text + "\n")
