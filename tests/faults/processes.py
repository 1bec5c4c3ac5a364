"""A run in two processes: one is killed, stopped or preempted, a checkpoint is damaged, two starts meet.

python -m tests.faults.processes    seconds until the other processes have ended, by moment and victim
"""

import functools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests import lost
from tests.faults import numbers, runs
from tests.faults.case import Fault
from train.run.lock import locked

AREA = "processes"
VICTIMS = {0: "process 0", 1: "process 1"}


@functools.cache
def _whole() -> Path:
    return lost.uninterrupted(runs.scratch() / "two-processes", runs.command_environment())


def _same(root: Path) -> bool:
    return runs.same_run(root, _whole(), lost.STEPS)


def _continued(place: Path, errors: str) -> str:
    """Continues the run in two processes: "refused" if it then ends as the one without a fault."""
    if "Traceback" in errors:
        return "traceback"
    done = lost.go_on(place, env=runs.command_environment())
    return "refused" if all(code == 0 for code, _, _ in done) and _same(place / lost.NAME) else "silent"


def killed(place: Path, moment: str, victim: int, number: signal.Signals) -> str:
    """Kills or stops a process: the other names it within 15 seconds, and the run can be continued."""
    ended = lost.signalled(place, moment, victim, number, env=runs.command_environment())
    return _continued(place, "".join(ended.errors)) if lost.names_the_lost(ended, victim) else "silent"


def preempted(place: Path, moment: str, victim: int, times: int) -> str:
    """Sends SIGTERM to one process: both end with code 130, and the run can be continued."""
    ended = lost.signalled(place, moment, victim, *[signal.SIGTERM] * times, env=runs.command_environment())
    said = all("interrupted" in text or "stopping; the run is saved first" in text for text in ended.errors)
    return _continued(place, "".join(ended.errors)) if ended.codes == (130, 130) and said else "silent"


def damaged(place: Path) -> str:
    """Cuts the data of the newest checkpoint: it is set aside once, and both go on from the one before."""
    root = _copied(place)
    for path in root.glob(f"checkpoints/{lost.STEPS}/state/**/d/*"):
        os.truncate(path, path.stat().st_size // 2)
    done = lost.go_on(place, env=runs.command_environment())
    if any("Traceback" in errors for _, _, errors in done):
        return "traceback"
    said = [errors.count("is damaged and was skipped") for _, _, errors in done] == [1, 0]
    moved = [path.name for path in (root / "damaged").iterdir()] == [f"{lost.STEPS}-0"]
    return "repaired" if said and moved and all(code == 0 for code, _, _ in done) and _same(root) else "silent"


def two_writers(place: Path) -> str:
    """Continues a run in two processes while another process writes it: both refuse."""
    root = _copied(place)
    with locked(root):
        done = lost.go_on(place, env=runs.command_environment())
    if any("Traceback" in errors for _, _, errors in done):
        return "traceback"
    return "refused" if all(code == 2 and "another process" in errors for code, _, errors in done) else "silent"


def skipped(place: Path) -> str:
    """Makes every loss infinite: the updates are skipped in both processes, which is said once, and none is saved."""
    more = ("kl.loss.coef=3e38", "guard.max_skipped=2")
    done = lost.go_on(place, *more, env=runs.command_environment(), resume=False)
    if any("Traceback" in errors for _, _, errors in done):
        return "traceback"
    said = [errors.count("an update was skipped") for _, _, errors in done] == [2, 0]
    return "refused" if said and all(code == 3 for code, _, _ in done) else "silent"


def nonfinite_reference(place: Path) -> str:
    """Starts a run in two processes from a reference with a NaN: both refuse it."""
    numbers.save_nonfinite(_whole() / "base", place / "reference", float("nan"))
    source = f"reference={{source: checkpoint, path: {place}/reference}}"
    done = lost.go_on(place, source, env=runs.command_environment(), resume=False)
    if any("Traceback" in errors for _, _, errors in done):
        return "traceback"
    said = all("reference.path" in errors and numbers.NOT_FINITE in errors for _, _, errors in done)
    return "refused" if said and all(code == 2 for code, _, _ in done) else "silent"


def _copied(place: Path) -> Path:
    return Path(shutil.copytree(_whole(), place / lost.NAME))


def _faults() -> Iterator[Fault]:
    for moment in lost.MOMENTS:
        for victim, name in VICTIMS.items():
            run = functools.partial(killed, moment=moment, victim=victim, number=signal.SIGKILL)
            yield Fault(AREA, f"SIGKILL of {name} {moment}", run)
    stop = functools.partial(killed, moment="in a step", victim=1, number=signal.SIGSTOP)
    yield Fault(AREA, "SIGSTOP of process 1 in a step", stop)
    for moment, times in (("in a step", 1), ("in a step", 2), ("in the warm start", 1)):
        run = functools.partial(preempted, moment=moment, victim=1, times=times)
        yield Fault(AREA, f"SIGTERM of process 1 {moment}, {times} times", run)
    yield Fault(AREA, "a damaged checkpoint", damaged)
    yield Fault(AREA, "a run that another process writes", two_writers)
    yield Fault(AREA, "a loss that is not finite", skipped)
    yield Fault(AREA, "a reference with a NaN", nonfinite_reference)


FAULTS = list(_faults())


def main() -> int:
    """Prints a table: seconds until the others have ended, by moment and victim."""
    print(
        "| moment | " + " | ".join(f"{name} killed" for name in VICTIMS.values()) + " |\n|---|" + "--:|" * len(VICTIMS)
    )
    late = 0
    for moment in lost.MOMENTS:
        cells = []
        for victim in VICTIMS:
            with tempfile.TemporaryDirectory() as output:
                env = runs.command_environment()
                ended = lost.signalled(Path(output), moment, victim, signal.SIGKILL, env=env)
            named = lost.names_the_lost(ended, victim)
            late += not named
            cells.append(f"{ended.seconds:.1f} s" if named else f"{ended.codes}, {ended.seconds:.1f} s")
        print(f"| {moment} | " + " | ".join(cells) + " |", flush=True)
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
