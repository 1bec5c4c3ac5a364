"""Ctrl-C and SIGTERM as a wish to stop at the end of the step."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether the user asked to stop. The first signal is a wish, the second one stops at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("\nstopping after this step; once more to stop at once", file=sys.stderr)


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
