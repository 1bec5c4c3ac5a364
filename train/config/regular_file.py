"""Reading of regular files only."""

import errno
from pathlib import Path


def read_regular(path: Path) -> bytes:
    """Reads a file.

    Raises:
      OSError: it cannot be read, or is a pipe or a device, which has no end.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path.read_bytes()
