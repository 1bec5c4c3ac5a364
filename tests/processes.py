"""The settings of this process that the processes it starts take over, and the state of others."""

import signal
import subprocess
from pathlib import Path

PROC = Path("/proc")


def hear_interrupts() -> None:
    """Hears Ctrl-C also where a shell started this process, as a background job, to ignore it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def child_of(pid: int) -> int | None:
    """Returns the one process that a process has started, or None while there is none."""
    listed = PROC / f"{pid}/task/{pid}/children"
    children = listed.read_text() if listed.exists() else _said("pgrep", "-P", str(pid))
    return int(children.split()[0]) if children.split() else None


def state_of(pid: int) -> str:
    """Returns the letter of a process's state: T if it is stopped, Z or X if it has ended."""
    try:
        if PROC.exists():
            return (PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return _said("ps", "-o", "state=", "-p", str(pid)).strip()[:1] or "X"


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
