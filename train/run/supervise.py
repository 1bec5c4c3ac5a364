"""`--supervise`: a parent process, without JAX, that runs the command as its child and restarts it after a loss."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from train.config.errors import LostProcessError, UserError, warn
from train.config.installation import child_environment
from train.process.interrupt import INTERRUPTED, handled
from train.run.paths import RunPaths
from train.storage.paths import as_path

RESTARTS = 5
"""Restarts in a row without a new checkpoint, by default."""
LONGEST_WAIT = 60.0
VARIABLE = "KLJAX_RUN_FILE"
"""Environment variable with the file in which a supervised command names its run directory."""
# The kernel kills with SIGKILL when memory is short; the others are crashes in compiled code.
CRASHES = tuple(getattr(signal, name) for name in ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS") if hasattr(signal, name))


def is_supervised() -> bool:
    """Whether this process runs under a supervisor."""
    return bool(os.environ.get(VARIABLE))


def tell_supervisor(root: Path) -> None:
    """Names the run directory to the supervisor, if there is one; a restart continues this run."""
    file = os.environ.get(VARIABLE)
    if file:
        Path(file).write_text(json.dumps(str(root.absolute())))


def tell_end() -> None:
    """Tells the supervisor, if there is one, that the command came to its end, so that exit code 0 is no accident."""
    file = os.environ.get(VARIABLE)
    if file:
        with contextlib.suppress(OSError):
            _end_of(Path(file)).touch()


def _end_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.ended")


class Supervisor:
    """Runs a command until it ends by itself, and restarts it with `--resume` after a loss.

    A loss is exit code 75, or the end by SIGKILL, SIGSEGV, SIGABRT or SIGBUS. The waits double from restart to restart;
    a new checkpoint starts the count and the waits anew. Exit code 0 counts only with `tell_end`, or a new summary:
    code of the user can end the process by `os._exit(0)`.

    Attributes:
      stopped: is set by the first signal; nothing is restarted after it.
    """

    def __init__(self, command: Sequence[str], file: Path, *, restarts: int = RESTARTS, wait: float = 1.0) -> None:
        """Takes the command without `--resume`, the file for the run directory, and the first wait in seconds."""
        self.stopped = threading.Event()
        self._command = tuple(command)
        self._file = file
        self._restarts = restarts
        self._first_wait = wait
        self._child: subprocess.Popen[bytes] | None = None
        self._early: int | None = None
        self._started = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Passes a signal on to the command."""
        self.stopped.set()
        if self._child is None:
            self._early = number
        else:
            self._child.send_signal(number)

    def run(self) -> int:
        """Returns the exit code of the last start; a signal that ended it counts 128 and its number."""
        restarts = 0
        best = (False, -1)
        arguments = self._command
        while True:
            code = self._start(arguments)
            is_loss = code == LostProcessError.code or -code in CRASHES
            if code == 0 and not self._has_ended():
                warn(
                    "the process ended with exit code 0 before the end of the command, as os._exit(0) in a function of "
                    "yours does: not started again"
                )
                return UserError.code
            if self.stopped.is_set() or not is_loss:
                return INTERRUPTED if -code in (signal.SIGINT, signal.SIGTERM) else _exit_code(code)
            directory = self._directory()
            progress = (False, -1) if directory is None else _progress(directory)
            restarts, best = (restarts + 1, best) if progress <= best else (1, progress)
            if restarts > self._restarts:
                warn(f"{_described(code)}, after {self._restarts} restarts without a new checkpoint: not started again")
                return _exit_code(code)
            seconds = min(self._first_wait * 2 ** (restarts - 1), LONGEST_WAIT)
            arguments = self._command if directory is None else _continued(self._command, directory)
            start = "from the beginning" if directory is None else f"{directory.root} with --resume"
            count = f"restart {restarts} of {self._restarts}"
            warn(f"{_described(code)}: {count} without a new checkpoint, in {seconds:g} s: {start}")
            if self.stopped.wait(seconds):
                return INTERRUPTED

    def _has_ended(self) -> bool:
        directory = self._directory()
        summary = None if directory is None else directory.summary
        new = summary is not None and summary.exists() and summary.stat().st_mtime >= self._started
        return new or _end_of(self._file).exists()

    def _start(self, command: Sequence[str]) -> int:
        self._started = time.time()
        _end_of(self._file).unlink(missing_ok=True)
        # Ctrl-C in a terminal comes to the whole process group: the command must get it once.
        environment = child_environment() | {VARIABLE: str(self._file)}
        self._child = subprocess.Popen(command, env=environment, process_group=0)
        try:
            if self._early is not None:
                self._child.send_signal(self._early)
            return self._child.wait()
        finally:
            self._child = None

    def _directory(self) -> RunPaths | None:
        return RunPaths(as_path(json.loads(self._file.read_text()))) if self._file.exists() else None


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _described(code: int) -> str:
    if code == LostProcessError.code:
        return "the run lost a process"
    name = signal.Signals(-code).name
    return f"the process was killed by {name}" + (", as it is without memory" if name == "SIGKILL" else "")


def _progress(directory: RunPaths) -> tuple[bool, int]:
    """Returns whether the run has a base, and its newest checkpoint."""
    return directory.has_base() or directory.base_record.is_file(), max(directory.steps(), default=-1)


def _continued(command: Sequence[str], directory: RunPaths) -> tuple[str, ...]:
    """Adds the name of the directory, which a first start may have numbered, and `--resume`."""
    return (*command, f"name={json.dumps(directory.root.name)}", "--resume")


def supervise(arguments: Sequence[str], *, restarts: int) -> int:
    """Runs `python -m train` with these arguments, which have no `--supervise`, under a supervisor."""
    command = [sys.executable, "-P", "-m", "train", *arguments]
    with tempfile.TemporaryDirectory() as directory:
        supervisor = Supervisor(command, Path(directory) / "run", restarts=restarts)
        with handled(supervisor):
            return supervisor.run()
