"""Standard output and error that are closed, full, or a terminal that is gone: the command goes on without them."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

CLOSED = "standard output cannot be written ({reason}): the command goes on without it"


class GuardedStream:
    """A text stream whose first error is reported once; whatever is written after it is dropped.

    A reader that closes its end of a pipe, as `head` does, must not end a run that took a week.
    """

    def __init__(self, stream: TextIO, *, report: bool) -> None:
        """Wraps a stream; `report` says on standard error that it failed."""
        self._stream = stream
        self._report = report
        self._failed = False

    def __getattr__(self, name: str) -> Any:
        """Everything else is that of the stream."""
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text, or drops it if the stream has failed."""
        if not self._failed:
            try:
                return self._stream.write(text)
            except (OSError, ValueError) as error:
                self._fail(error)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream unless it has failed."""
        if not self._failed:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failed = True
        # What is still buffered is flushed at the end of the process, and must not fail again.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        if self._report:
            reason = getattr(error, "strerror", None) or str(error)
            print(f"warning: {CLOSED.format(reason=reason)}", file=sys.stderr)


@contextlib.contextmanager
def guarded_streams() -> Iterator[None]:
    """Guards standard output and error inside the block; a stream that was closed before is replaced by nothing."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nowhere:
        sys.stderr = GuardedStream(before[1] or nowhere, report=False)
        sys.stdout = GuardedStream(before[0] or nowhere, report=True)
        if before[0] is None:
            print(f"warning: {CLOSED.format(reason='it is closed')}", file=sys.stderr)
        try:
            yield
            sys.stdout.flush()
        finally:
            sys.stdout, sys.stderr = before
