"""Checks of the place of a run, before anything starts: the path, its length, and whether it can be written."""

import errno
import os
from pathlib import Path

from kljax._files import check_outside_of_runs
from train.config.errors import UserError
from train.config.schema import Config
from train.config.storage import is_address
from train.storage.paths import as_path, check_bucket

# Orbax looks for its own files with patterns, in which these have a meaning.
PATTERN_CHARACTERS = "[\\"


def check_output(config: Config) -> None:
    """Raises `UserError` naming `output` if the directory of the run cannot be made or written."""
    root = as_path(config.output, "output").absolute() / config.name
    try:
        check_outside_of_runs(root, option="output")
    except ValueError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"output: cannot read {_shown(root)}: {error.strerror}") from error
    if is_address(root):
        check_bucket(root.parent, "output")
        return
    if wrong := sorted(set(PATTERN_CHARACTERS) & set(str(root))):
        raise UserError(
            f"output: got {_shown(root)}, in which orbax takes {' and '.join(wrong)} for a pattern; expected a path "
            "without it"
        )
    try:
        existing = next(path for path in (root, *root.parents) if _exists(path))
    except OSError as error:
        raise UserError(f"output: cannot create {_shown(root)}: {error.strerror}") from error
    longest = os.pathconf(existing, "PC_NAME_MAX")
    if too_long := [part for part in root.parts if len(os.fsencode(part)) > longest]:
        raise UserError(
            f"output: cannot create {_shown(root)}: a name of {len(os.fsencode(too_long[0]))} bytes, expected at most "
            f"{longest}"
        )
    if not existing.is_dir():
        if existing != root:
            raise UserError(f"output: cannot create {_shown(root)}: {_shown(existing)} is not a directory")
        existing = existing.parent
    if not os.access(existing, os.W_OK | os.X_OK):
        reason = "is on a read-only file system" if os.statvfs(existing).f_flag & os.ST_RDONLY else "is not writable"
        raise UserError(f"output: cannot create {_shown(root)}: {_shown(existing)} {reason}")


def _exists(path: Path) -> bool:
    """Whether a path exists; raises OSError if it cannot be told."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False
    return True


def _shown(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-97:]}"
