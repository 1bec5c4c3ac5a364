"""The two sides of the race, called in the same way: the contenders of this process, and those of another one."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Protocol

from benchmarks import _measure, _torch_env
from benchmarks._inputs import Options
from benchmarks._jax_contenders import Contenders
from benchmarks._measure import Agreement

ROOT = pathlib.Path(__file__).resolve().parents[1]


class RemoteError(RuntimeError):
    """What went wrong in the other process, in a line."""


class Side(Protocol):
    """Where contenders run."""

    def time(self, name: str) -> tuple[float, float]:
        """Wall-clock and CPU seconds of one run."""

    def compare(self, name: str, directory: pathlib.Path, baseline: str) -> Agreement:
        """How far the outputs are from those of the baseline, which the directory holds."""


class Local:
    """The contenders of this process."""

    def __init__(self, contenders: Contenders) -> None:
        self.contenders = contenders

    def time(self, name: str) -> tuple[float, float]:
        return _measure.timed(self.contenders, name)

    def compare(self, name: str, directory: pathlib.Path, baseline: str) -> Agreement:
        return _measure.compare(self.contenders, name, directory, baseline)


class Remote:
    """The contenders of a worker process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def ask(self, **request: Any) -> Any:
        """The result of a request.

        Raises:
          RemoteError: if the worker could not, or is gone.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError as error:
            raise RemoteError(f"its process is gone: {error}") from error
        if not line:
            raise RemoteError(f"its process ended with status {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise RemoteError(reply["error"])
        return reply["result"]

    def time(self, name: str) -> tuple[float, float]:
        wall, cpu = self.ask(do="time", name=name)
        return wall, cpu

    def compare(self, name: str, directory: pathlib.Path, baseline: str) -> Agreement:
        return Agreement(**self.ask(do="compare", name=name, directory=str(directory), baseline=baseline))


@contextlib.contextmanager
def worker(framework: str, inputs: pathlib.Path, options: Options, torch_env: pathlib.Path | None) -> Iterator[Remote]:
    """A fresh process that has loaded the arrays of the directory; ended on the way out."""
    python, releases = pathlib.Path(sys.executable), ""
    if framework == "torch":
        assert torch_env is not None
        python, releases = _torch_env.interpreter(torch_env), str(_torch_env.releases(torch_env))
    command = [str(python), "-m", "benchmarks._worker", framework]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        remote = Remote(process)
        fields = {"device": options.device, "dtype": options.dtype, "threads": options.threads, "tile": options.tile}
        remote.ask(do="load", inputs=str(inputs), options=fields, releases=releases)
        try:
            yield remote
        finally:
            assert process.stdin is not None
            process.stdin.close()
