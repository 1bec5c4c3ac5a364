"""Disks that fill up, limits on the size of a file, and paths that cannot hold a run."""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.faults import runs
from tests.faults.case import Fault, refused, run_command
from tests.integration.command import ROOT, TIMEOUT
from train.__main__ import main
from train.eval import main as evaluate
from train.export import main as export
from train.report.__main__ import main as report

FULL, TOO_LARGE = "No space left on device", "File too large"
SIZES = ("24k", "100k", "180k", "260k", "480k", "700k")
FILES = (6, 25, 80)
LIMITS = (2_000, 12_000, 40_000)
CAP_SYS_ADMIN = 21


@contextmanager
def small_disk(place: Path, size: str, files: int = 10_000) -> Iterator[Path]:
    """Mounts a file system of a size and a number of files, which only the superuser may."""
    disk, options = place / "disk", f"size={size},nr_inodes={files}"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True, capture_output=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def can_mount() -> bool:
    """Whether this process may mount file systems, which in a container the superuser often may not."""
    status = Path("/proc/self/status")
    match = re.search(r"^CapEff:\s*(\w+)$", status.read_text() if status.exists() else "", re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> CAP_SYS_ADMIN & 1)


def full_disk(place: Path, size: str) -> str:
    """Runs into a full disk, makes room, and continues."""
    with small_disk(place, size) as disk:
        done = runs.started_run(*runs.RECIPE, f"output={disk}")
        outcome = _one_line(done.returncode, done.stderr, FULL)
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        return outcome if outcome != "refused" else _continued(disk)


def no_more_files(place: Path, files: int) -> str:
    """Runs into the limit on the number of files, raises it, and continues."""
    with small_disk(place, "64m", files) as disk:
        done = runs.started_run(*runs.RECIPE, f"output={disk}")
        outcome = _one_line(done.returncode, done.stderr, FULL)
        subprocess.run(["mount", "-o", "remount,nr_inodes=10000", str(disk)], check=True)
        return outcome if outcome != "refused" else _continued(disk)


def resumed_read_only(place: Path) -> str:
    """Continues a run whose disk has become read-only: one line, and nothing changes."""
    with small_disk(place, "64m") as disk:
        root = runs.copied_run(disk)
        before = sorted(path.stat().st_mtime_ns for path in root.rglob("*"))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        done = runs.resume(disk, f"steps={runs.STEPS + 1}")
        if done.traceback:
            return "traceback"
        same = sorted(path.stat().st_mtime_ns for path in root.rglob("*")) == before
        return "refused" if done.code == 2 and "ead-only" in done.text and same else "silent"


def file_too_large(place: Path, limit: int) -> str:
    """Runs with a limit on the size of each file, and continues without it."""
    script = (
        "import resource, sys; from train.__main__ import main; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY)); sys.exit(main(sys.argv[1:]))"
    )
    # Files that others read, bytecode and compiled programs, must not be cut by the limit.
    env = {name: text for name, text in runs.command_environment().items() if "CACHE" not in name}
    done = subprocess.run(
        [sys.executable, "-B", "-c", script, *runs.RECIPE, f"output={place}"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    outcome = _one_line(done.returncode, done.stderr, TOO_LARGE)
    return outcome if outcome != "refused" else _continued(place)


def _one_line(code: int, errors: str, reason: str) -> str:
    if "Traceback" in errors:
        return "traceback"
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    return "refused" if code == 2 and len(lines) == 1 and reason in lines[0] else "silent"


def _continued(output: Path) -> str:
    """Continues the run, or starts it if there was none yet: "refused" if it ends as the uninterrupted one."""
    root = output / runs.NAME
    flags = ["--resume"] if (root / "config.yaml").is_file() else []
    done = runs.started_run(*runs.RECIPE, f"output={output}", *flags)
    if done.returncode != 0:
        return "traceback" if "Traceback" in done.stderr else "silent"
    return "refused" if runs.same_run(done.root, runs.finished_run().root, runs.STEPS) else "silent"


def bad_path(place: Path, output: str, *overrides: str) -> str:
    """Starts a run where none can be: nothing is made, and `output` or `name` is named."""
    (place / "file").write_text("")
    read_only = place / "read-only"
    read_only.mkdir()
    before = sorted(place.rglob("*"))
    done = run_command(main, *runs.RECIPE, f"output={json.dumps(str(place / output))}", *overrides)
    if done.traceback:
        return "traceback"
    clear = done.code == 2 and ("output: " in done.text or "name: " in done.text)
    return "refused" if clear and sorted(place.rglob("*")) == before else "silent"


def read_only_disk(place: Path) -> str:
    """Starts a run on a file system that is mounted read-only."""
    with small_disk(place, "1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        done = run_command(main, *runs.RECIPE, f"output={disk}/runs")
        if done.traceback:
            return "traceback"
        return "refused" if done.code == 2 and "output: " in done.text and "read-only" in done.text else "silent"


def start_without_files(place: Path) -> str:
    """Starts a run on a file system that has no more files."""
    with small_disk(place, "1m", files=1) as disk:
        return refused(run_command(main, *runs.RECIPE, f"output={disk}/runs"), "error: output: ", FULL)


def read_only_output(place: Path, name: str) -> str:
    """Runs a command whose output is on a read-only file system: one line that names the option."""
    main, option, *arguments = OUTPUTS[name]
    with small_disk(place, "1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for word, path in {"RUN": runs.finished_run().root, "DISK": disk, "PLACE": place}.items():
            arguments = [argument.replace(word, str(path)) for argument in arguments]
        done = run_command(main, *arguments)
        return refused(done, f"error: {option}: cannot write", str(disk))


def output_without_files(place: Path, name: str) -> str:
    """Runs a command whose output is on a file system that has no more files: one line that names the option."""
    main, option, *arguments = OUTPUTS[name]
    with small_disk(place, "1m", files=1) as disk:
        for word, path in {"RUN": runs.finished_run().root, "DISK": disk, "PLACE": place}.items():
            arguments = [argument.replace(word, str(path)) for argument in arguments]
        done = run_command(main, *arguments)
        return refused(done, f"error: {option}: cannot write", FULL)


OUTPUTS: dict[str, tuple[Any, ...]] = {
    "an export": (export, "--to", "RUN", "--to", "DISK/x"),
    "the numbers of an evaluation": (evaluate, "--json", "RUN", "--json", "DISK/x.json"),
    "a report": (report, "--output", "RUN", "--output", "DISK/x.html"),
    "a recording": (main, "rollout.record", *runs.RECIPE, "output=PLACE/runs", "rollout.record=DISK/x"),
}
PATHS = {
    "the output is a file": ("file",),
    "below a file": ("file/below",),
    "a path with [": ("a[x]",),
    "a path with \\": ("a\\b",),
    "a name of 300 characters in the path": ("x" * 300 + "/runs",),
    "the run's name is a path": ("runs", "name=../x"),
    "the run's name begins with a dot": ("runs", "name=.x"),
    "the run has no name": ("runs", "name=''"),
    "the run's name has 101 characters": ("runs", f"name={'x' * 101}"),
    "the run's name is not ASCII": ("runs", "name=läuft"),
    "the run's name has a space": ("runs", "name='a b'"),
    "the run's name is a number": ("runs", "name=12"),
}


def _faults() -> Iterator[Fault]:
    if can_mount():
        for size in SIZES:
            run: Callable[[Path], str] = functools.partial(full_disk, size=size)
            yield Fault("disk full / file-size limit", f"a disk of {size}", run)
        for files in FILES:
            run = functools.partial(no_more_files, files=files)
            yield Fault("disk full / file-size limit", f"a disk of {files} files", run)
        yield Fault("places to write", "a read-only file system", read_only_disk)
        yield Fault("places to write", "a run whose disk has become read-only", resumed_read_only)
        for name in OUTPUTS:
            run = functools.partial(read_only_output, name=name)
            yield Fault("places to write", f"{name} on a read-only file system", run)
            run = functools.partial(output_without_files, name=name)
            yield Fault("places to write", f"{name} on a file system without more files", run)
    for limit in LIMITS:
        run = functools.partial(file_too_large, limit=limit)
        yield Fault("disk full / file-size limit", f"files of at most {limit} bytes", run)
    for name, (output, *overrides) in PATHS.items():
        yield Fault("places to write", name, functools.partial(_bad_path, output=output, overrides=tuple(overrides)))


def _bad_path(place: Path, output: str, overrides: tuple[str, ...]) -> str:
    return bad_path(place, output, *overrides)


FAULTS = list(_faults())
