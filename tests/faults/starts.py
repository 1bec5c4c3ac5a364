"""Two processes that start a run of one name at one moment, or continue one that is alive."""

import contextlib
import functools
import multiprocessing
import os
import queue
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests import tiny
from tests.faults.case import Fault, raised
from train.run.directory import RunDirectory, open_run, start_run

ROUNDS = 30
STARTS = 20


def _start_often(output: str, barrier: Any, names: Any) -> None:
    for number in range(ROUNDS):
        config = tiny.config_of(f"output={output}/{number}", "name=run")
        barrier.wait()
        try:
            names.put((number, start_run(config).root.name))
        except BaseException as error:
            names.put((number, f"{type(error).__name__}: {error}"))


@functools.cache
def names_of_starts() -> dict[int, list[str]]:
    """Starts a run in two processes at one moment, 30 times; returns the names that they got until one hangs."""
    context = multiprocessing.get_context("spawn")
    barrier, names = context.Barrier(2), context.Queue()
    with tempfile.TemporaryDirectory() as output:
        processes = [context.Process(target=_start_often, args=(output, barrier, names)) for _ in range(2)]
        for process in processes:
            process.start()
        got = []
        with contextlib.suppress(queue.Empty):
            while len(got) < 2 * ROUNDS:
                got.append(names.get(timeout=120))
        for process in processes:
            process.terminate() if len(got) < 2 * ROUNDS else process.join()
    return {number: sorted(name for other, name in got if other == number) for number in range(ROUNDS)}


def one_moment(_: Path, number: int) -> str:
    """Tells the outcome of one of the starts at one moment: each process gets a name of its own."""
    names = names_of_starts()[number]
    if names == ["run", "run-2"]:
        return "identical"
    if len(names) < 2:
        return "unfinished"
    return "traceback" if any(":" in name for name in names) else "silent"


def many_starts(place: Path) -> str:
    """Starts a run of one name 20 times at one moment: each start has a name and a config of its own."""
    config = tiny.config_of(f"output={place}", "name=run")
    barrier = threading.Barrier(STARTS)

    def start(_: int) -> str:
        barrier.wait()
        return start_run(config).root.name

    try:
        with ThreadPoolExecutor(STARTS) as pool:
            names = list(pool.map(start, range(STARTS)))
    except Exception:
        return "traceback"
    expected = ["run", *(f"run-{number}" for number in range(2, STARTS + 1))]
    ids = {RunDirectory(place / name).run_id for name in names}
    return "identical" if sorted(names) == sorted(expected) and len(ids) == STARTS else "silent"


def two_writers(place: Path) -> str:
    """Continues a run that another process writes."""
    config = tiny.config_of(f"output={place}", "name=run")
    root = start_run(config).root

    def again() -> None:
        with open_run(config, resume=True):
            pass

    with open_run(config, resume=True):
        before = sorted(os.listdir(root))
        outcome = raised(again, str(root), "another process")
        return outcome if sorted(os.listdir(root)) == before else "silent"


FAULTS = [
    *(
        Fault("two starts", f"two starts at one moment, {number}", functools.partial(one_moment, number=number))
        for number in range(ROUNDS)
    ),
    Fault("two starts", f"{STARTS} starts at one moment", many_starts),
    Fault("two starts", "--resume while the run is alive", two_writers),
]
