"""Contenders in processes of their own."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
# No compiled program is read from a cache, so that the first run compiles.
SETTINGS = {"PYTHONDONTWRITEBYTECODE": "1", "JAX_ENABLE_COMPILATION_CACHE": "false"}


class RemoteError(RuntimeError):
    """A failure in another process, in one line."""


class Remote:
    """A contender of another process, which is asked as `worker.Worker` is; its stderr may go to a log."""

    def __init__(self, process: "subprocess.Popen[str]", log: pathlib.Path | None = None) -> None:
        self._process, self._log = process, log

    def ask(self, **request: Any) -> Any:
        """Returns the result of a request."""
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None and replies is not None  # noqa: PT018
        try:
            print(json.dumps(request), file=requests, flush=True)
            line = replies.readline()
        except OSError as error:
            raise RemoteError(f"its process is gone: {error}{self._tail()}") from error
        if not line:
            raise RemoteError(f"its process ended with status {self._process.wait()}{self._tail()}")
        reply = json.loads(line)
        if "error" in reply:
            raise RemoteError(reply["error"])
        return reply["result"]

    def kill(self) -> None:
        """Ends the process at once; what it is asked fails."""
        self._process.kill()

    @property
    def alive(self) -> bool:
        """Tells whether the process still runs."""
        return self._process.poll() is None

    def _tail(self) -> str:
        return "" if self._log is None else f"\n{self._log.read_text(errors='replace').strip()[-2000:]}"


@contextlib.contextmanager
def start(
    module: str,
    *,
    python: pathlib.Path | None = None,
    settings: Mapping[str, str] = {},
    quiet: bool = False,
) -> Iterator[Remote]:
    """Starts a process for the contender that `load` of a module makes, and ends it on the way out.

    Without `python`, its interpreter is this one; `settings` are environment variables; `quiet` shows stderr in errors.
    """
    with contextlib.ExitStack() as stack:
        log = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()), "stderr") if quiet else None
        process = stack.enter_context(
            subprocess.Popen(
                [str(python or sys.executable), "-m", "benchmarks.harness.worker", module],
                cwd=ROOT,
                env={**os.environ, **SETTINGS, **settings},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if log is None else stack.enter_context(log.open("w")),
                text=True,
            )
        )
        assert process.stdin is not None
        try:
            yield Remote(process, log)
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()
