"""The parent's side of worker processes: questions with limits of time, and a pool of processes."""

import contextlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import weakref
from collections.abc import Collection, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from train.config.installation import child_environment

START_SECONDS = 120.0
# Longest wait for an answer whose limit is CPU time: a busy machine gives a process little of it.
BUSY_SECONDS = 600.0


class NoAnswer(Exception):
    """Raised when a worker process did not answer in time, or ended; the text tells which."""


class TooLate(NoAnswer):
    """Raised when a worker process did not answer in time; it is ended, with the processes that it started."""


class NotStarted(Exception):
    """Raised when a worker process does not answer its first question."""


class WorkerProcess:
    """One process that runs a module of `train.data.workers`."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        output: bool = False,
        environment: Mapping[str, str],
        hidden: Collection[str] = (),
    ) -> None:
        """Starts the process.

        Args:
          module: of `train.data.workers`.
          *arguments: of the module.
          output: whether what it prints is shown on standard error.
          environment: variables that it gets besides those of this process.
          hidden: variables of this process that it does not get, as keys.
        """
        variables = {name: value for name, value in child_environment().items() if name not in hidden}
        self._pipe, child_end = Pipe()
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"train.data.workers.{module}", *arguments, str(child_end.fileno())],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2 if output else subprocess.DEVNULL,
                stderr=2 if output else subprocess.DEVNULL,
                env=variables | dict(environment),
                process_group=0,
            )
        self.close = weakref.finalize(self, _end, self._process, self._pipe)

    def ask(self, question: Any, *, seconds: float, cpu_seconds: float = 0) -> Any:
        """Returns the answer to a question.

        Args:
          question: any value that can be pickled; the answer is a JSON value, as the process may run foreign code.
          seconds: limit of the time.
          cpu_seconds: limit of the CPU time of the process; 0: none.

        Raises:
          NoAnswer: the process did not answer in time, or ended; it is closed, as after any other interruption.
          Exception: the question cannot be pickled.
        """
        request = pickle.dumps({"question": question, "seconds": seconds, "cpu_seconds": cpu_seconds})
        try:
            self._pipe.send_bytes(request)
            if self._pipe.poll(seconds):
                return json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self._stop(cpu_seconds)
        except BaseException:
            # Its answer would be taken for that of the next question.
            self.close()
            raise
        self.close()
        raise TooLate(f"no answer within {seconds:g} s")

    def _stop(self, cpu_seconds: float) -> NoReturn:
        """Closes a process that has ended, and raises with its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        self.close()
        if code == -signal.SIGPROF:
            raise TooLate(f"no answer within {cpu_seconds:g} s of CPU time")
        if code is not None and code < 0:
            raise NoAnswer(f"its process was ended by signal {-code}")
        raise NoAnswer(f"its process ended with exit code {code}")


def _end(process: subprocess.Popen, pipe: Connection) -> None:
    # Its group has the processes that it started.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    pipe.close()


class WorkerPool:
    """Worker processes of one kind, started on first use; safe to call from several threads.

    Attributes:
      workers: number of processes.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        workers: int = 1,
        output: bool = False,
        environment: Mapping[str, str] | None = None,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """Describes the processes, which answer their first question within `start_seconds`; see `WorkerProcess`."""
        self.workers = workers
        self._start_seconds = start_seconds
        self._command = (module, *arguments)
        self._output = output
        self._environment = dict(environment or {})
        self._free: queue.LifoQueue[WorkerProcess | None] = queue.LifoQueue()
        for _ in range(workers):
            self._free.put(None)

    def ask(self, question: Any, *, seconds: float = BUSY_SECONDS, cpu_seconds: float = 0) -> Any:
        """Asks a process that is free.

        The first question to a process, None, is answered when it is ready.

        Raises:
          NoAnswer: as `WorkerProcess.ask`; the next question gets a new process.
          NotStarted: a process does not start.
        """
        worker = self._free.get()
        try:
            if worker is None:
                worker = self._start()
            return worker.ask(question, seconds=seconds, cpu_seconds=cpu_seconds)
        finally:
            self._free.put(worker if worker is not None and worker.close.alive else None)

    def _start(self) -> WorkerProcess:
        worker = WorkerProcess(*self._command, output=self._output, environment=self._environment)
        try:
            worker.ask(None, seconds=self._start_seconds)
        except NoAnswer as error:
            raise NotStarted(f"{' '.join(self._command)}: {error}") from None
        return worker

    def close(self) -> None:
        """Ends the processes; the next question starts them again."""
        idle = [self._free.get() for _ in range(self._free.qsize())]
        for worker in idle:
            if worker is not None:
                worker.close()
            self._free.put(None)
