"""Lines that say what a command waits for, where code of the user has no limit of time."""

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from train.config.errors import warn

FIRST_SECONDS = 60.0
"""A wait is told after this time, and whenever it has doubled."""
POLL_SECONDS = 1.0


class _Waits:
    """The waits under way, and the thread that tells of them, which starts with the first and stays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: dict[int, list] = {}
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def begin(self, text: str) -> int:
        """Notes a wait; returns its number."""
        number = next(self._numbers)
        with self._lock:
            self._waits[number] = [text, time.monotonic(), FIRST_SECONDS]
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._tell, name="waits", daemon=True)
                self._thread.start()
        return number

    def end(self, number: int) -> None:
        """Forgets a wait."""
        with self._lock:
            del self._waits[number]

    def _tell(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            with self._lock:
                late = [wait for wait in self._waits.values() if time.monotonic() - wait[1] >= wait[2]]
            for wait in late:
                warn(f"still waiting for {wait[0]}, {time.monotonic() - wait[1]:.0f} s by now")
                wait[2] *= 2


_WAITS = _Waits()


@contextmanager
def waiting_for(text: str) -> Iterator[None]:
    """Warns "still waiting for TEXT" if the block takes a minute, and again after two, four and so on."""
    number = _WAITS.begin(text)
    try:
        yield
    finally:
        _WAITS.end(number)
