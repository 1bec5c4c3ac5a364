"""Mathematical equality of answers, by math-verify in worker processes that can be killed."""

import contextlib
import functools
import json
import logging
import os
import queue
import selectors
import subprocess
import sys
import time
import weakref
from pathlib import Path

_LOG = logging.getLogger(__name__)

WORKER = Path(__file__).with_name("equality_worker.py")
START_SECONDS = 120.0
SECONDS = 8.0
WORKERS = 2


class _NoReply(Exception):
    """Raised when a worker did not answer in time or has died."""


class _Worker:
    """One worker process: a line of JSON per question and per answer."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._unread = b""
        self.close = weakref.finalize(self, _end, self._process)
        self._line(START_SECONDS)

    def _line(self, seconds: float) -> bytes:
        pipe, until = self._process.stdout, time.monotonic() + seconds
        assert pipe is not None
        with selectors.DefaultSelector() as answers:
            answers.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                ready = answers.select(max(0.0, until - time.monotonic()))
                more = os.read(pipe.fileno(), 65536) if ready else b""
                if not more:
                    self.close()
                    raise _NoReply
                self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def ask(self, gold: str, text: str, seconds: float) -> bool:
        question = self._process.stdin
        assert question is not None
        try:
            question.write(json.dumps({"gold": gold, "text": text}).encode() + b"\n")
            question.flush()
        except OSError as error:
            self.close()
            raise _NoReply from error
        return bool(json.loads(self._line(seconds))["equal"])


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()


class Judge:
    """A pool of worker processes, started on first use; safe to call from several threads.

    Attributes:
      workers: maximum number of concurrent questions.
      gave_up: number of answers that timed out and count as wrong.
    """

    def __init__(self, workers: int = WORKERS, seconds: float = SECONDS) -> None:
        """Limits the pool to `workers` processes and each answer to `seconds`; a timed-out answer is wrong."""
        self.workers, self._seconds = workers, seconds
        self._free: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._free.put(None)
        self.gave_up = 0

    def equal(self, gold: str, text: str) -> bool:
        """Checks whether the last mathematical expression of `text` (a box first) is equal to `gold`.

        Args:
          gold: LaTeX or plain text, without dollar signs or a box.
          text: the completion.

        Raises:
          RuntimeError: a worker does not start.
        """
        worker = self._free.get()
        try:
            if worker is None:
                worker = _start_worker()
            return worker.ask(gold, text, self._seconds)
        except _NoReply:
            worker = None
            self.gave_up += 1
            _LOG.warning(
                "an answer took math-verify longer than %g s and counts as wrong: %r", self._seconds, text[-80:]
            )
            return False
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """Ends the processes; the next question starts them again."""
        idle = [self._free.get() for _ in range(self._free.qsize())]
        for worker in idle:
            if worker is not None:
                worker.close()
            self._free.put(None)


def _start_worker() -> _Worker:
    try:
        return _Worker()
    except _NoReply:
        raise RuntimeError(f"math-verify does not start: {sys.executable} {WORKER} gave no answer") from None


@functools.cache
def shared_judge() -> Judge:
    """Returns the pool of workers that all tasks of this process share."""
    return Judge()
