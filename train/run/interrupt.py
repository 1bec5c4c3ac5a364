"""Ctrl-C and SIGTERM: stop at the end of the step."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """A signal handler: the first signal stops at the end of the step, the second at once."""

    def __init__(self) -> None:
        self.requested = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\nstopping after this step; press Ctrl-C again to stop at once", file=sys.stderr)


@contextmanager
def listening() -> Iterator[Interrupt]:
    """Catches SIGINT and SIGTERM while the block runs."""
    interrupt = Interrupt()
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
