"""Errors of a full, limited or read-only disk, in Python and in the threads of orbax and TensorBoard, in one line."""

import errno
import logging
import os
import re
import threading
from pathlib import Path
from typing import Any

from train.config.storage import is_address
from train.storage.paths import SHOWN, is_store_error

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
REFUSED = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ESTALE)
TENSORSTORE = re.compile(r"\[http_response_code=|CURL error|(s3|gs)://.*\[tensorstore_spec=", re.DOTALL)
"""In an error of TensorStore that comes from a store."""
REMOVED = "its directory was removed"
NEXT_STEP = "complete checkpoints are intact: make room, then continue with --resume"


def disk_problem(error: BaseException | None) -> str | None:
    """Describes an error of the disk, also one that other errors were raised from; None for every other error.

    TensorStore reports errors of the disk as text alone.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if problem := store_problem(error):
            return problem
        if isinstance(error, OSError) and error.errno in (*FULL, *REFUSED):
            return f"cannot write{f' {error.filename}' if error.filename else ''}: {error.strerror}"
        if isinstance(error, FileNotFoundError) and error.filename and not Path(str(error.filename)).parent.exists():
            return f"cannot write {error.filename}: {REMOVED}"
        for number in FULL:
            if os.strerror(number) in str(error):
                return f"cannot write: {os.strerror(number)}"
        error = error.__cause__ or error.__context__
    return None


def store_problem(error: BaseException) -> str | None:
    """Describes an error of an object store, of its packages or of TensorStore; None for every other error."""
    if isinstance(error, OSError) and is_address(str(error.filename or "")):
        return f"cannot write {error.filename}: {error.strerror}"
    text = str(error)
    # TensorStore reports what a store has answered as text alone, with the answer or its own settings in brackets.
    if is_store_error(error) or TENSORSTORE.search(text):
        reason = re.sub(r"\s+", " ", text.partition(" [")[0]).rpartition("Error writing ")[2].strip(" :.")
        return f"cannot write to the store: {(reason or type(error).__name__)[:SHOWN]}"
    return None


class ThreadErrors:
    """A hook for errors in threads: errors of the disk are kept as one line, and none is shown in an ending process.

    Attributes:
      problem: the last error of the disk in a thread, or None.
      ending: whether the process is about to end, so that threads are cut short.
    """

    def __init__(self, previous: Any) -> None:
        self._previous = previous
        self.problem: str | None = None
        self.ending = False

    def __call__(self, arguments: "threading.ExceptHookArgs") -> None:
        """Handles an error that ended a thread."""
        if not self._handles(arguments.exc_value):
            self._previous(arguments)

    def filter(self, record: logging.LogRecord) -> bool:
        """Handles an error that a thread logged; returns whether the logger is to show it too."""
        return record.exc_info is None or not self._handles(record.exc_info[1])

    def _handles(self, error: BaseException | None) -> bool:
        problem = disk_problem(error)
        self.problem = problem or self.problem
        # The command itself says that a signal ended it.
        return self.ending or problem is not None or isinstance(error, KeyboardInterrupt)


def handle_thread_errors() -> ThreadErrors:
    """Installs the hook, which stays: threads outlive the command. A second call returns the same hook."""
    if not isinstance(threading.excepthook, ThreadErrors):
        threading.excepthook = ThreadErrors(threading.excepthook)
    hook = threading.excepthook
    assert isinstance(hook, ThreadErrors)
    return hook
