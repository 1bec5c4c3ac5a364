"""Names lost, failed and slow processes. The survivors of a loss exit with code 75.

The coordination service of JAX decides that a process is lost: for ten seconds it hears no heartbeat of it, which a
thread of C++ sends while Python is busy. Every process is a recoverable task of the service, which would abort the
others otherwise. It runs in process 0, without which JAX still aborts them.
"""

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax

from train.config.errors import LostProcessError, UserError, warn
from train.distributed.exchange import ProcessError, exchange_json, failed_process, report_failure, rounds_begun
from train.distributed.peers import HEARTBEAT_SECONDS, coordination, is_leader, process, processes

BEAT_SECONDS = 1.0
SLOW_SECONDS = 60.0
"""The leader names a process that all others have waited for this long."""
GRACE_SECONDS = 2.0
"""A process ends this long after another has failed, unless its main thread has ended it. The leader, in which the
service runs, ends this much later than the others."""
PROGRESS = "kljax/progress"
# Collectives of CPU devices raise ValueError with the text of Gloo.
OF_CONNECTIONS = (
    "Gloo",
    "UNAVAILABLE",
    "onnection",
    "Socket closed",
    "DEADLINE_EXCEEDED",
    "NCCL",
    "heartbeat",
    "ABORTED",
)


class LastProgress(NamedTuple):
    """The step and phase that this process is in, and when the phase began: by the monotonic clock, and Unix time."""

    step: int
    phase: str
    moved: float
    time: float
    phases: int = 0


_last = LastProgress(0, "start", time.monotonic(), time.time())


def enter(step: int, phase: str) -> None:
    """Notes that this process begins a phase of a step, which the others name if it is lost or slow."""
    global _last  # noqa: PLW0603 (a process has one run)
    _last = LastProgress(step, phase, time.monotonic(), time.time(), _last.phases + 1)


def last_progress() -> LastProgress:
    """Returns where this process is, and since when."""
    return _last


@dataclasses.dataclass
class Progress:
    """How far a process was when it last wrote: phases and exchanges begun, step, phase; and when it last moved (s)."""

    moves: int
    step: int
    phase: str
    moved: float


class PeerWatch:
    """The progress of all processes, as this process has read it, and why it has to end, if it has.

    Attributes:
      reason: the failure or loss of another process.
    """

    def __init__(self, names: Sequence[str], service: Any, number: int) -> None:
        """Takes the host and pid of every process, the coordination service, and the number of this process."""
        self.reason: UserError | None = None
        self._names = names
        self._service = service
        self._number = number
        self._progress = [Progress(0, 0, "start", time.monotonic()) for _ in names]
        self._slow = SLOW_SECONDS

    def beat(self) -> None:
        """Writes the progress of this process, reads that of the others, and asks JAX which of them live.

        JAX answers when all processes that live have asked.
        """
        mine = [_last.phases + rounds_begun(), _last.step, _last.phase]
        try:
            self._service.key_value_set(f"{PROGRESS}/{self._number}", json.dumps(mine), allow_overwrite=True)
            for key, text in self._service.key_value_dir_get(PROGRESS):
                moves, step, phase = json.loads(text)
                peer = self._progress[int(key.rpartition("/")[2])]
                peer.moved = peer.moved if moves == peer.moves else time.monotonic()
                peer.moves = moves
                peer.step = step
                peer.phase = phase
            self.reason = failed_process(self._service, len(self._names))
            live = self._service.get_live_nodes(list(range(len(self._names))))
            lost = [number for number in range(len(self._names)) if number not in live]
            # A process that ends after it has told of its failure is not lost.
            self.reason = self.reason or failed_process(self._service, len(self._names))
        except jax.errors.JaxRuntimeError:
            lost = [0]
        if self.reason is None and lost:
            self.reason = LostProcessError(
                f"{self._described(lost[0])} is lost, last at {self._place(lost[0])}; start all processes again with "
                "--resume"
            )

    def slow(self) -> str | None:
        """Describes the process that all others wait for, once it is longer than a limit that doubles every time.

        They wait for it in an exchange of the same phase, or in a collective of a later one.
        """
        last = min(range(len(self._names)), key=lambda number: self._progress[number].moves)
        others = [peer for number, peer in enumerate(self._progress) if number != last]
        if any(peer.moves <= self._progress[last].moves for peer in others):
            self._slow = SLOW_SECONDS
            return None
        waited = time.monotonic() - max(peer.moved for peer in others)
        if waited < self._slow:
            return None
        self._slow *= 2
        since = f"the others have waited {waited:.0f} s for it"
        return f"{self._described(last)} is slow: {since}; it is at {self._place(last)}"

    def _described(self, number: int) -> str:
        return f"process {number} of {len(self._names)} ({self._names[number]})"

    def _place(self, number: int) -> str:
        return f"step {self._progress[number].step} ({self._progress[number].phase})"


_watch: PeerWatch | None = None
_last_words = threading.Lock()
"""Whoever ends the process takes it, and never gives it back."""


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Watches the other processes inside the block; all enter and leave it together. A no-op for one process."""
    global _watch  # noqa: PLW0603 (a process has one watch)
    if processes() == 1:
        yield
        return
    names = exchange_json("the names of the processes", f"{socket.gethostname()}, pid {os.getpid()}")
    _watch = PeerWatch(names, coordination(), process())
    over = threading.Event()
    threading.Thread(target=_beat_until, args=(_watch, over), name="watch", daemon=True).start()
    try:
        yield
    finally:
        # Another process may still write files; a signal or a loss ends the wait.
        exchange_json("end", None)
        over.set()
        _watch = None


def _beat_until(watch: PeerWatch, over: threading.Event) -> None:
    # The service answers some ten thousand values a second.
    seconds = BEAT_SECONDS * max(1.0, processes() / 128)
    while not over.wait(seconds):
        watch.beat()
        if over.is_set():
            return
        if watch.reason is not None:
            if isinstance(watch.reason, ProcessError):
                time.sleep(GRACE_SECONDS)
            _end(f"error: {watch.reason}", watch.reason.code)
        if is_leader() and (text := watch.slow()) is not None:
            warn(text)


def _end(text: str, code: int) -> NoReturn:
    """Prints a message and ends this process at once, the leader a little later."""
    # Never given back: the other threads must not end the process as well.
    _last_words.acquire()
    try:
        if is_leader():
            time.sleep(GRACE_SECONDS)
        # Not through sys.stderr, whose lock a thread may hold.
        os.write(2, f"{text}\n".encode())
    finally:
        os._exit(code)


def cause(error: BaseException) -> UserError | None:
    """Waits for the loss or failure of another process that explains an error; None if there is none."""
    if _watch is None or not _is_of_connections(error):
        return None
    until = time.monotonic() + HEARTBEAT_SECONDS + 5
    while _watch.reason is None and time.monotonic() < until:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            failed = failed_process(coordination(), processes())
            if failed is not None:
                return failed
        time.sleep(BEAT_SECONDS / 10)
    return _watch.reason


def _is_of_connections(error: BaseException | None) -> bool:
    if error is None or isinstance(error, UserError):
        return False
    if isinstance(error, (jax.errors.JaxRuntimeError, ValueError)) and any(x in str(error) for x in OF_CONNECTIONS):
        return True
    return _is_of_connections(error.__cause__ or error.__context__)


def leave(text: str, code: int, reason: BaseException) -> NoReturn:
    """Prints a message and ends this process at once, after telling the others the reason if it is of this process."""
    # Another process may have told it first, or the service may be gone.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        if not isinstance(reason, (LostProcessError, ProcessError)):
            report_failure(_short(reason), code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    _end(text, code)


def _short(reason: BaseException) -> str:
    if isinstance(reason, UserError):
        return str(reason)
    if isinstance(reason, KeyboardInterrupt):
        return "interrupted"
    return f"{type(reason).__name__}: {str(reason).strip()[:300]}"
