"""Atomic writes of files and directories."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_text_atomic(path: Path, text: str) -> None:
    """Writes a file atomically: a killed process leaves the old file or the new file."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def check_free(path: Path) -> None:
    """Raises FileExistsError unless `path` is free or an empty directory."""
    if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
        raise FileExistsError(f"{path} is there already, and nothing is overwritten")


def usable_directory(path: Path) -> None:
    """Creates a directory if it is missing, and raises OSError if it is not writable."""
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=path):
        pass


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yields a temporary directory that is renamed to `path` when the block ends, and removed after an error.

    Raises:
      FileExistsError: `path` exists and is no empty directory.
    """
    check_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    try:
        # mkdtemp makes the directory private to its owner.
        partial.chmod(0o777 & ~_umask())
        yield partial
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
