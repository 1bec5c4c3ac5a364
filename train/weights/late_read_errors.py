"""Suppression of late error reports from concurrent reads that a failed read abandoned."""

import logging
import sys
from typing import Any

CLOSED = "Event loop is closed"
FAILED_READ = "Encountered error while reading array index"
NEVER_RETRIEVED = ("Future exception was never retrieved", "Task exception was never retrieved")


class _Hook:
    """An unraisable hook that drops reports of abandoned reads and forwards all others."""

    def __init__(self, previous: Any) -> None:
        self._previous = previous

    def __call__(self, unraisable: "sys.UnraisableHookArgs") -> None:
        text = str(unraisable.exc_value)
        closed = unraisable.exc_type is RuntimeError and text == CLOSED
        if not closed and not text.startswith(FAILED_READ):
            self._previous(unraisable)


def _was_retrieved(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(NEVER_RETRIEVED)


def quiet_abandoned_reads() -> None:
    """Installs a hook and a log filter that drop the late errors of reads abandoned by a failed read.

    A failed read closes the event loop of orbax while other reads are pending. A read that completes later reports the
    closed loop to `sys.unraisablehook`. A read that fails later is reported there, or logged by asyncio when it is
    collected. Both can happen long after the first error was handled, so the hook and the filter stay installed. A
    second call is a no-op.
    """
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)
    # Adding a filter a second time is a no-op.
    logging.getLogger("asyncio").addFilter(_was_retrieved)
