"""What the reads left behind by a failed one say after it, kept off the screen."""

import logging
import sys
from typing import Any

CLOSED = "Event loop is closed"
NEVER_RETRIEVED = ("Future exception was never retrieved", "Task exception was never retrieved")


class _Hook:
    """An unraisable hook that drops reports of a closed event loop and hands on every other."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == CLOSED):
            self._before(unraisable)


def _was_retrieved(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(NEVER_RETRIEVED)


def quiet_abandoned_reads() -> None:
    """Keeps what follows a failed read from printing a traceback each, from now on.

    A read that fails ends orbax's event loop while others are on their way. Those that complete later report to
    `sys.unraisablehook` that the loop is closed; those that failed too are logged by asyncio when they are collected.
    Either can be any time after the first failure was caught and handled, and there is nothing to wait for: so this
    stays in place. Calling it again changes nothing.
    """
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)
    # Adding a filter a second time is a no-op.
    logging.getLogger("asyncio").addFilter(_was_retrieved)
