"""Several processes of one command on this machine, which find one another on the loopback address."""

import contextlib
import dataclasses
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

from tests import xla

ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass
class StartedProcess:
    """One started process, and the files that take its output."""

    process: subprocess.Popen[bytes]
    out: pathlib.Path
    err: pathlib.Path

    @property
    def stdout(self) -> str:
        """The output so far."""
        return self.out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """The errors so far."""
        return self.err.read_text(errors="replace")

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self.process.poll()


def free_port() -> int:
    """Returns a port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def started(
    module: str,
    *arguments: object,
    processes: int,
    devices: int,
    env: Mapping[str, str],
    variables: bool = False,
) -> Iterator[list[StartedProcess]]:
    """Starts `python -m MODULE ARGUMENTS` as processes with `devices` virtual CPU devices each; kills those left over.

    With more than one process each gets `--coordinator`, `--process` and `--processes`; with `variables` the last one
    has the variables of a pod of an Indexed Job in place of these flags.
    """
    address = f"127.0.0.1:{free_port()}"
    settings = {**env, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla.flags(devices=devices)}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        peers = []
        for number in range(processes):
            flags: list[object] = ["--coordinator", address, "--process", number, "--processes", processes]
            pod: dict[str, str] = {}
            if variables and number == processes - 1:
                pod = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
                pod["JOB_COMPLETION_INDEX"] = str(number)
            command = [sys.executable, "-m", module, *arguments, *(flags if processes > 1 and not pod else ())]
            out, err = (pathlib.Path(scratch) / f"{number}.{name}" for name in ("out", "err"))
            with out.open("wb") as stdout, err.open("wb") as stderr:
                process = subprocess.Popen(
                    list(map(str, command)),
                    cwd=ROOT,
                    env=settings | pod,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                )
            stack.callback(process.wait)
            stack.callback(process.kill)
            peers.append(StartedProcess(process, out, err))
        yield peers


def wait(peers: Sequence[StartedProcess], seconds: float) -> None:
    """Waits until all processes have ended.

    Raises:
      TimeoutError: with the output of all, if one of them goes on.
    """
    until = time.monotonic() + seconds
    while any(peer.returncode is None for peer in peers):
        if time.monotonic() > until:
            texts = (f"process {n}: {p.returncode}\n{p.stdout}\n{p.stderr}" for n, p in enumerate(peers))
            raise TimeoutError("\n".join(texts))
        time.sleep(0.05)


def run(
    module: str,
    *arguments: object,
    processes: int,
    devices: int,
    env: Mapping[str, str],
    seconds: float = 900,
    variables: bool = False,
) -> list[tuple[int, str, str]]:
    """Runs processes to their end; returns exit code, output and errors of each.

    Two processes with little of a busy machine take ten minutes for what they do in half a minute alone.
    """
    with started(module, *arguments, processes=processes, devices=devices, env=env, variables=variables) as peers:
        wait(peers, seconds)
        return [(int(peer.returncode or 0), peer.stdout, peer.stderr) for peer in peers]
