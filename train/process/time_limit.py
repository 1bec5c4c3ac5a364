"""Limits of the time that a call of code of the user may take in this process."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

AGAIN_SECONDS = 1.0
"""A block that catches the interrupt is interrupted again this often."""
SHORTEST_SECONDS = 0.05
"""The timer of the CPU time is set to no less."""


class TookTooLongError(Exception):
    """Raised when a block took longer than its limit."""


class _Ring(BaseException):
    """Raised inside a block whose time is over."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `TookTooLongError` if the block takes longer than `seconds`, and in the main thread interrupts it then.

    The block may use SIGALRM and its timer for itself. Python code, waiting, and functions of C that look for signals,
    as `re` and integers do, are interrupted. Other functions of C end first, and so does a block in another thread.
    """
    deadline = time.monotonic() + seconds
    in_main_thread = threading.current_thread() is threading.main_thread()
    try:
        with _interrupted_at(deadline) if in_main_thread else nullcontext():
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # The block may raise another error than the one that interrupted it.
        if time.monotonic() >= deadline:
            raise TookTooLongError(f"no answer within {seconds:g} s") from error
        raise
    if time.monotonic() >= deadline:
        raise TookTooLongError(f"no answer within {seconds:g} s")


@contextmanager
def _interrupted_at(deadline: float) -> Iterator[None]:
    """Raises `_Ring` in the block, which runs in the main thread, at a time of `time.monotonic`, and again after it.

    A thread sends SIGPROF, which ends a sleep. It needs the lock of the interpreter, which a regular expression holds:
    then the timer of the CPU time sends it. SIGALRM would be simpler, but math-verify and decorators for time limits
    take it, and switch off the alarm of others.
    """
    running = True
    next_ring = deadline
    over = threading.Event()
    main = threading.get_ident()

    def ring(*_: Any) -> None:
        nonlocal next_ring
        remaining = next_ring - time.monotonic()
        if running:
            # The CPU time is that of all threads, so it may have rung too early.
            signal.setitimer(signal.ITIMER_PROF, AGAIN_SECONDS if remaining <= 0 else max(remaining, SHORTEST_SECONDS))
            if remaining <= 0:
                # Timer and thread may ring at once: the block is left to handle the first.
                next_ring = time.monotonic() + AGAIN_SECONDS / 2
                raise _Ring

    def watch() -> None:
        wait = deadline - time.monotonic()
        while not over.wait(wait):
            signal.pthread_kill(main, signal.SIGPROF)
            wait = AGAIN_SECONDS

    before = signal.signal(signal.SIGPROF, ring)
    thread = threading.Thread(target=watch, name="time limit", daemon=True)
    try:
        signal.setitimer(signal.ITIMER_PROF, max(deadline - time.monotonic(), SHORTEST_SECONDS))
        thread.start()
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        over.set()
        # Without a handler, a signal that comes late would end the process: then the one of the block stays.
        if callable(before):
            signal.signal(signal.SIGPROF, before)
