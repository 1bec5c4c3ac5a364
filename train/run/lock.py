"""The lock on a run directory: one process writes a run at a time, and the lock ends with its process."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from train.config.errors import UserError, warn
from train.config.storage import is_address
from train.distributed.peer_watch import leave
from train.storage.lease import claim_lock, leased

FILE_NAME = ".lock"
# Errors of file systems that have no locks, such as some network mounts.
# On macOS, ENOTSUP and EOPNOTSUPP differ.
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def claim(root: Path) -> bool:
    """Makes an empty run directory with its lock file; returns False if the name is taken.

    In an object store the lock is a lease, which this process holds from then on.

    Of two processes that try at one moment, one gets the name: the lock file is created by one of them alone.

    Raises:
      OSError: the directory cannot be created or written.
    """
    if is_address(root):
        return not root.exists() and claim_lock(root / FILE_NAME)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        return False
    root.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(root / FILE_NAME, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except FileExistsError:
        return False
    return True


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Holds the lock of a run directory inside the block; the system releases it if the process dies.

    In an object store it is a lease: one that nobody renews ends by itself.

    A directory that does not exist is not locked, so that nothing is created. Where the system or the file system has
    no locks, a warning says so.

    Raises:
      UserError: another process has the lock.
    """
    if not root.is_dir():
        yield
        return
    if is_address(root):
        with leased(root / FILE_NAME, _end_without_lock):
            yield
        return
    try:
        import fcntl
    except ImportError:
        warn("this system has no file locks, so a second process that writes the same run is not noticed")
        yield
        return
    try:
        file = (root / FILE_NAME).open("a")
    except OSError as error:
        raise UserError(f"output: cannot write in {root}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{root} is being written by another process; wait until it ends, or give this run another name"
            ) from None
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            warn(f"the file system of {root} has no locks, so a second process that writes the run is not noticed")
        yield


def _end_without_lock(text: str) -> None:
    """Ends this process, and with it the run, before it writes into a directory that is that of another one."""
    error = UserError(text)
    leave(f"error: {text}", error.code, error)
