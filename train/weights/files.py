"""Atomic writes of directories, small files that carry a digest of themselves, and digests of other files."""

import functools
import hashlib
import json
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kljax._files import CONFIG_STARTS, check_outside_of_runs, write_text_atomic
from kljax.checkpoint import json_digest, text_hash
from train.config.errors import UserError, warn
from train.config.storage import is_address
from train.storage.paths import probe_store
from train.storage.uploads import upload_folder

SEAL = "digest_of_record"
FIRST_LINE = CONFIG_STARTS[0]
LAST = ("config.json", "adapter_config.json")
"""The files without which a folder is none of a model or an adapter."""


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a JSON object with a digest of its other fields, atomically."""
    sealed = {**record, SEAL: json_digest(record)}
    write_text_atomic(path, json.dumps(sealed, indent=2) + "\n")


def read_record(path: Path, hint: str) -> dict[str, Any]:
    """Reads a JSON object that `write_record` wrote.

    Raises:
      UserError: it cannot be read or was changed, with `hint` for the next step.
    """
    try:
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: it is not JSON; {hint}") from error
    if not isinstance(record, dict) or record.pop(SEAL, None) != json_digest(record):
        raise UserError(f"{path} is damaged: it differs from what was written; {hint}")
    return record


@functools.cache
def _warn_without_digest(path: Path) -> None:
    """Warns once of a text whose first line the user deleted, to change it on purpose."""
    warn(f"{path} has no digest, so damage to it would not be noticed")


def write_sealed_text(path: Path, text: str) -> None:
    """Writes a text below a comment with its digest, atomically."""
    write_text_atomic(path, f"{FIRST_LINE}{text_hash(text).hexdigest()}\n{text}")


def check_sealed_text(path: Path, hint: str) -> None:
    """Compares a text with the digest in its first line; warns if there is none.

    Raises:
      UserError: the text cannot be read or was changed, with `hint` for the next step.
    """
    try:
        first, _, rest = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if not first.startswith(FIRST_LINE.encode()):
        _warn_without_digest(path)
    elif first != f"{FIRST_LINE}{text_hash(rest).hexdigest()}".encode():
        raise UserError(f"{path} is damaged: it differs from what the run wrote; {hint}")


def file_digest(path: Path) -> str:
    """Computes the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_free(path: Path) -> None:
    """Raises FileExistsError unless `path` is free or an empty directory, and no place for files of a run."""
    try:
        check_outside_of_runs(path)
    except ValueError as error:
        raise FileExistsError(str(error)) from error
    if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
        raise FileExistsError(f"{path} is there already, and nothing is overwritten")


def usable_directory(path: Path) -> None:
    """Creates a directory if it is missing, and raises OSError if it is not writable."""
    if is_address(path):
        probe_store(path)
        return
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=path):
        pass


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yields a temporary directory that is renamed to `path` when the block ends, and removed after an error.

    For an address in a store it is one of this machine, whose files are uploaded, and the one that makes it a folder of
    a model or an adapter is the last.

    Raises:
      FileExistsError: `path` exists and is no empty directory.
    """
    check_free(path)
    if is_address(path):
        with tempfile.TemporaryDirectory(prefix="kljax-") as directory:
            partial = Path(directory) / path.name
            partial.mkdir()
            yield partial
            upload_folder(partial, path, LAST)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # `mkdtemp` would make it private to its owner, and the mask of the process cannot be read without a change of it.
    partial = path.parent / f".{path.name}.{secrets.token_hex(8)}.partial"
    partial.mkdir()
    try:
        yield partial
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
