"""Detects lost processes. Every survivor names the lost one and exits with code 75.

Each process writes its step and phase to the coordination service of JAX every second, and reads the others'.
JAX decides that a process is gone: by the heartbeats of a thread in C++, which goes on while Python is busy, by the
closed connection to process 0, or by a collective that fails. It then aborts without a name. The watch names the
process that is silent. A process that is slow is warned of, and nothing else.
"""

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import jax

from train.config.errors import LostProcessError, UserError, warn
from train.distributed.exchange import ProcessError, exchange_json, failed_process, report_failure, rounds_begun
from train.distributed.joining import before_abort, coordinator_answers
from train.distributed.peers import HEARTBEAT_SECONDS, coordination, is_leader, process, processes

BEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0
"""A process that has not written for this long is named, if something says that a process is lost."""
SLOW_SECONDS = 60.0
"""The leader names a process that all others have waited for this long."""
GRACE_SECONDS = 2.5
"""A process ends this long after it has read of a failure or a loss, unless its main thread has ended it."""
LEADER_SECONDS = 2.5
"""The leader ends this much later than the others, which read the name from the service that ends with it."""
LOST = "kljax/lost"
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


class Progress(NamedTuple):
    """How far a process is: the number of phases and exchanges begun, the step, and the phase."""

    moves: int
    step: int
    phase: str


@dataclasses.dataclass
class Peer:
    """Another process: its host and pid, its progress, when it last wrote and moved on (s), and how often it wrote."""

    name: str
    progress: Progress
    heard: float
    moved: float
    beats: int = 0

    def hear(self, beats: int, progress: Progress, now: float) -> None:
        """Takes over what the process has written."""
        if beats != self.beats:
            self.heard = now
        if progress.moves != self.progress.moves:
            self.moved = now
        self.beats = beats
        self.progress = progress


class PeerWatch:
    """The progress of all processes, as this process has read them.

    Attributes:
      ending: the message and exit code of an error of this process, which come before the loss of another.
    """

    def __init__(self, names: Iterable[str], service: Any, number: int) -> None:
        """Takes the host and pid of every process, the coordination service, and the number of this process."""
        now = time.monotonic()
        first = Progress(0, 0, "start")
        self.peers = {peer: Peer(name, first, now, now) for peer, name in enumerate(names)}
        self.ending: tuple[str, int] | None = None
        self._service = service
        self._number = number
        self._reason: UserError | None = None
        self._told: float | None = None
        self._beaten = now
        self._slow = SLOW_SECONDS
        self._phases = 0

    def enter(self, step: int, phase: str) -> None:
        """Notes that this process begins a phase of a step."""
        self._phases += 1
        me = self.peers[self._number]
        me.progress = me.progress._replace(step=step, phase=phase)

    def beat(self) -> None:
        """Writes the progress of this process and reads that of the others."""
        me = self.peers[self._number]
        now = time.monotonic()
        me.hear(me.beats + 1, me.progress._replace(moves=self._phases + rounds_begun()), now)
        text = json.dumps([me.beats, *me.progress])
        self._service.key_value_set(f"{PROGRESS}/{self._number}", text, allow_overwrite=True)
        if now - self._beaten > SILENT_SECONDS / 2:
            # This process was stopped, so the silence of the others says nothing.
            for peer in self.peers.values():
                peer.heard = now
        self._beaten = now
        for key, text in self._service.key_value_dir_get(PROGRESS):
            number = int(key.rpartition("/")[2])
            if number != self._number:
                beats, *progress = json.loads(text)
                self.peers[number].hear(beats, Progress(*progress), now)
        self._reason = failed_process(self._service, len(self.peers)) or self._reason
        for _, text in self._service.key_value_dir_get(LOST):
            self._reason = LostProcessError(text)
        if self._reason is not None and self._told is None:
            self._told = now

    def told_for(self) -> float:
        """Returns how long this process has known of a failure or a loss that another told of, in seconds."""
        return 0.0 if self._told is None else time.monotonic() - self._told

    def end(self, reason: UserError | None) -> None:
        """Ends the process with its own error, if it has one, or for a reason; without either it goes on."""
        if self.ending is None and reason is not None:
            self.ending = (f"error: {reason}", reason.code)
        if self.ending is not None:
            # Not through sys.stderr, whose lock the main thread may hold.
            os.write(2, f"{self.ending[0]}\n".encode())
            os._exit(self.ending[1])

    def reason(self) -> UserError | None:
        """Returns why this process has to end: a failed or lost process that another told of, or a silent one."""
        return self._reason or self._silent(SILENT_SECONDS)

    def reason_of_abort(self, reachable: Callable[[], bool]) -> UserError | None:
        """Returns why JAX may have aborted: `reason`, the most silent process, or process 0 if it is not reachable."""
        # The heartbeats of JAX stop no later than what it writes, and are missed five seconds later.
        reason = self._reason or self._silent(SILENT_SECONDS / 2)
        return self._lost(0) if reason is None and self._number != 0 and not reachable() else reason

    def _silent(self, seconds: float) -> UserError | None:
        others = [number for number in self.peers if number != self._number]
        last = min(others, key=lambda number: self.peers[number].heard)
        return self._lost(last) if time.monotonic() - self.peers[last].heard > seconds else None

    def _lost(self, number: int) -> LostProcessError:
        peer = self.peers[number]
        seconds = time.monotonic() - peer.heard
        return LostProcessError(
            f"{self._described(number)} is lost: nothing was heard from it for {seconds:.0f} s, last at "
            f"{_text(peer.progress)}; start all processes again with --resume, or use --supervise"
        )

    def _described(self, number: int) -> str:
        return f"process {number} of {len(self.peers)} ({self.peers[number].name})"

    def slow(self) -> str | None:
        """Describes the process that all others wait for, once it is longer than a limit that doubles every time.

        They wait for it in an exchange of the same phase, or in a collective of a later one.
        """
        now = time.monotonic()
        last = min(self.peers, key=lambda n: self.peers[n].progress.moves)
        others = [peer for number, peer in self.peers.items() if number != last]
        if any(peer.progress.moves <= self.peers[last].progress.moves for peer in others):
            self._slow = SLOW_SECONDS
            return None
        waited = min(now - peer.moved for peer in others)
        if waited < self._slow:
            return None
        self._slow *= 2
        progress = self.peers[last].progress
        silent = now - self.peers[last].heard
        more = f", and silent for {silent:.0f} s" if silent > SILENT_SECONDS else ""
        since = f"the others have waited {waited:.0f} s for it"
        return f"{self._described(last)} is slow: {since}; it is at {_text(progress)}{more}"


def _text(progress: Progress) -> str:
    return f"step {progress.step} ({progress.phase})"


_watch: PeerWatch | None = None


class LastProgress(NamedTuple):
    """The step and phase that this process is in, and when the phase began: by the monotonic clock, and Unix time."""

    step: int
    phase: str
    moved: float
    time: float


_last = LastProgress(0, "start", time.monotonic(), time.time())


def enter(step: int, phase: str) -> None:
    """Notes that this process begins a phase of a step, which the others name if it is lost or slow."""
    global _last  # noqa: PLW0603 (a process has one run)
    _last = LastProgress(step, phase, time.monotonic(), time.time())
    if _watch is not None:
        _watch.enter(step, phase)


def last_progress() -> LastProgress:
    """Returns where this process is, and since when."""
    return _last


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Watches the other processes inside the block; all processes enter it together. A no-op for one process."""
    global _watch  # noqa: PLW0603 (a process has one watch)
    if processes() == 1:
        yield
        return
    names = exchange_json("the names of the processes", f"{socket.gethostname()}, pid {os.getpid()}")
    _watch = PeerWatch(names, coordination(), process())
    over = threading.Event()
    thread = threading.Thread(target=_beat_until, args=(_watch, over), name="watch", daemon=True)
    watch = _watch
    with before_abort(lambda: watch.end(watch.reason_of_abort(coordinator_answers))):
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            _watch = None


def _beat_until(watch: PeerWatch, over: threading.Event) -> None:
    # The service answers some ten thousand values a second.
    seconds = BEAT_SECONDS * max(1.0, len(watch.peers) / 128)
    while not over.wait(seconds):
        # If process 0 is gone, JAX aborts; after the end of the service there is nothing to write.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            watch.beat()
        text = watch.slow() if is_leader() else None
        if text is not None:
            warn(text)
        if watch.told_for() > GRACE_SECONDS + (LEADER_SECONDS if is_leader() else 0):
            watch.end(watch.reason())


def cause(error: BaseException) -> UserError | None:
    """Waits for the loss or failure of another process that explains an error; None if there is none."""
    if _watch is None or not _is_of_connections(error):
        return None
    until = time.monotonic() + HEARTBEAT_SECONDS + SILENT_SECONDS
    while time.monotonic() < until:
        reason = _watch.reason()
        if reason is not None:
            return reason
        time.sleep(BEAT_SECONDS / 10)
    return None


def _is_of_connections(error: BaseException | None) -> bool:
    if error is None or isinstance(error, UserError):
        return False
    if isinstance(error, (jax.errors.JaxRuntimeError, ValueError)) and any(x in str(error) for x in OF_CONNECTIONS):
        return True
    return _is_of_connections(error.__cause__ or error.__context__)


def leave(text: str, code: int, reason: BaseException) -> NoReturn:
    """Prints a message and ends this process at once, after telling the others the reason."""
    try:
        if _watch is not None:
            _watch.ending = (text, code)
        # Another process may have told it first, or the service may be gone.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if isinstance(reason, LostProcessError):
                coordination().key_value_set(f"{LOST}/reason", str(reason))
            elif not isinstance(reason, ProcessError):
                report_failure(_short(reason), code)
        if is_leader():
            time.sleep(LEADER_SECONDS)
        print(text, file=sys.stderr, flush=True)
        sys.stdout.flush()
    finally:
        os._exit(code)


def _short(reason: BaseException) -> str:
    if isinstance(reason, UserError):
        return str(reason)
    if isinstance(reason, KeyboardInterrupt):
        return "interrupted"
    return f"{type(reason).__name__}: {str(reason).strip()[:300]}"
