"""Signals at any moment, and a standard output that nobody reads."""

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults import runs
from tests.faults.case import Fault
from tests.integration.command import ROOT, TIMEOUT, finish, lines_written, start, wait_for

MOMENTS = {"in the warm start": "warm_start", "in RL": "train"}
SIGNALS = {
    "SIGINT": (signal.SIGINT,),
    "SIGTERM": (signal.SIGTERM,),
    "SIGHUP": (signal.SIGHUP,),
    "SIGTERM twice": (signal.SIGTERM,) * 2,
    "SIGINT four times": (signal.SIGINT,) * 4,
}


def signalled(place: Path, moment: str, numbers: Sequence[int]) -> str:
    """Sends signals to a run: it ends with code 130, one line that says so, no traceback, and can be continued."""
    root = place / runs.NAME
    # Under `nohup` a process is started to ignore a hang-up, and so are those that it starts.
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    process = start(runs.command_environment(), *runs.RECIPE, f"output={place}", "steps=400")
    signal.signal(signal.SIGHUP, ignored)
    wait_for(process, lambda: lines_written(root, moment) > 1)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.05)
    ended = finish(process)
    if "Traceback" in ended.stderr:
        return "traceback"
    if ended.returncode != 130 or "interrupted" not in ended.stderr:
        return "silent"
    done = runs.started_run(*runs.RECIPE, f"output={place}", f"steps={max(1, _saved(root))}", "--resume")
    return "refused" if done.returncode == 0 and "Traceback" not in done.stderr else "silent"


def _saved(root: Path) -> int:
    return max((int(path.name) for path in root.glob("checkpoints/*") if path.name.isdigit()), default=0)


def unread(place: Path, redirection: str) -> str:
    """Runs with a standard output that is closed or full: the run goes on to its end, and a line says so."""
    command = " ".join([sys.executable, "-m", "train", *(f"'{text}'" for text in runs.RECIPE), f"'output={place}'"])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} {redirection}"],
        cwd=ROOT,
        env=runs.command_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if "Traceback" in done.stderr or "Exception ignored" in done.stderr:
        return "traceback"
    finished = done.returncode == 0 and (place / runs.NAME / "summary.json").is_file()
    return "repaired" if finished and "standard output cannot be written" in done.stderr else "silent"


def _faults() -> Iterator[Fault]:
    for moment, phase in MOMENTS.items():
        for name, numbers in SIGNALS.items():
            run = functools.partial(signalled, moment=phase, numbers=numbers)
            yield Fault("signals", f"{name} {moment}", run)
    for redirection in ("| head -1", ">&-", "> /dev/full") if os.path.exists("/dev/full") else ("| head -1", ">&-"):
        yield Fault("standard output", redirection, functools.partial(unread, redirection=redirection))


FAULTS = list(_faults())
