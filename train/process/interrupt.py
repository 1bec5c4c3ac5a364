"""Ctrl-C, SIGTERM and SIGHUP: RL stops and is saved; anything else ends at once.

A step is left while its completions are sampled, since they change no state; once its updates begin, it is ended.
"""

import _thread
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from train.config.errors import UserError

# SIGHUP comes when the terminal is closed; systems other than Unix have none.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
INTERRUPTED = 130
"""The exit code after a signal."""
SHUTDOWN_SECONDS = 5.0
"""After an error the interpreter shuts down within this time, or is ended."""
Handler = Callable[[int, FrameType | None], None]


class StepLeftError(UserError):
    """A step was left before its updates, because of a signal; the state is still that of the step before."""


class Interrupt:
    """A signal handler: the first signal stops as soon as the run can be continued from there, the second at once.

    Attributes:
      requested: whether a signal came.
    """

    def __init__(self) -> None:
        self.requested = False
        self._leaves = False

    @contextmanager
    def leaving_steps(self) -> Iterator[None]:
        """Lets the waits inside the block end by `StepLeftError`."""
        self._leaves = True
        try:
            yield
        finally:
            self._leaves = False

    def check(self, *, together: bool) -> None:
        """Raises `StepLeftError` if a signal came; `together`: every process asks at this place, and all raise it."""
        if not self._leaves:
            return
        # Imported late, so that an error in the config shows before JAX starts.
        from train.distributed.exchange import any_of, is_stopping

        if any_of("interrupt", self.requested) if together else is_stopping(self.requested):
            raise StepLeftError("the step was left before its updates")

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\nstopping; the run is saved first, press Ctrl-C again to stop at once", file=sys.stderr)


class Ending:
    """A signal handler: every signal ends the command at once, until the command is `over`."""

    def __init__(self) -> None:
        self.over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.over:
            raise KeyboardInterrupt


@contextmanager
def handled(handler: Handler) -> Iterator[None]:
    """Handles the signals inside the block, but for signals that the command was started to ignore, as by nohup."""
    try:
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, handler) for number in heard}
    except ValueError:  # only the main thread may
        before = {}
    show = sys.unraisablehook

    def raise_again(lost: "sys.UnraisableHookArgs") -> None:
        # Python drops what is raised in a callback of the garbage collector: once more, when that is over.
        if issubclass(lost.exc_type, KeyboardInterrupt):
            threading.Timer(0.05, _thread.interrupt_main).start()
        else:
            show(lost)

    sys.unraisablehook = raise_again
    try:
        yield
    finally:
        sys.unraisablehook = show
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def ending_at_once() -> Iterator[Ending]:
    """Turns every signal into KeyboardInterrupt while the block runs."""
    ending = Ending()
    with handled(ending):
        yield ending


def exit_with(code: int) -> NoReturn:
    """Ends the process with this code, also if a signal comes while the interpreter shuts down.

    After an error a thread may wait for what never comes, as those of orbax do for the directory of a save that failed;
    the interpreter would wait for it in turn.
    """

    def end(*_: object) -> None:
        os._exit(code)

    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):
            stream.flush()
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    if code != 0:
        watch = threading.Timer(SHUTDOWN_SECONDS, end)
        watch.daemon = True
        watch.start()
    sys.exit(code)


_listening: Interrupt | None = None


@contextmanager
def listening() -> Iterator[Interrupt]:
    """Catches the signals while the block runs."""
    global _listening  # noqa: PLW0603 (a process has one run)
    _listening = interrupt = Interrupt()
    try:
        with handled(interrupt):
            yield interrupt
    finally:
        _listening = None


def leave_if_stopping(*, together: bool = False) -> None:
    """Raises `StepLeftError` in a step that may be left, if a signal came; see `Interrupt.check`."""
    if _listening is not None:
        _listening.check(together=together)
