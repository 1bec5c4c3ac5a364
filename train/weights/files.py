"""Files and directories that are whole at any moment."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_text_atomic(path: Path, text: str) -> None:
    """Write `path` so that a process killed at any moment leaves the old file or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def check_free(path: Path) -> None:
    """Raises FileExistsError unless there is nothing, or an empty directory, at `path`."""
    if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
        raise FileExistsError(f"{path} is there already, and nothing is overwritten")


def usable_directory(path: Path) -> None:
    """Makes a directory where there is none, and raises OSError unless something can be made in it."""
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=path):
        pass


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to write into that becomes `path`, by one rename, when the block ends; nothing of it after an error.

    Raises:
      FileExistsError: something is at `path` already.
    """
    check_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    try:
        # What mkdtemp makes is for its owner alone.
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
