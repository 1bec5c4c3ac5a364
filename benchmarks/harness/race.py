"""Times contenders in interleaved rounds, and keeps going when one of them fails."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from benchmarks.harness.environments import MissingError
from benchmarks.harness.measure import Clock, Seconds
from benchmarks.harness.process import Remote
from benchmarks.harness.report import ContenderResult
from benchmarks.harness.worker import Worker, one_line


class Contenders:
    """The contenders of one size by their process, which several may share; `start` begins one that has loaded."""

    def __init__(
        self, processes: Mapping[str, str], start: Callable[[str], AbstractContextManager[Remote | Worker]]
    ) -> None:
        self.results = {name: ContenderResult(name) for name in processes}
        self.processes = dict(processes)
        self.start = start
        self.remotes: dict[str, Remote | Worker] = {}

    def begin(self, stack: contextlib.ExitStack) -> dict[str, str]:
        """Starts each process, and returns the versions of all libraries; an error is a problem of its contenders."""
        versions: dict[str, str] = {}
        for process in dict.fromkeys(self.processes.values()):
            with self.noted_for(process):
                log(f"{process}: starts")
                self.remotes[process] = stack.enter_context(self.start(process))
                versions |= self.remotes[process].ask(do="versions")
        return versions

    @contextlib.contextmanager
    def noted_for(self, process: str) -> Iterator[None]:
        """Writes an error into the results of all contenders of a process that have no problem yet."""
        common = ContenderResult(process)
        with noted(common):
            yield
        for name, result in measurable(self.results):
            if self.processes[name] == process:
                result.problem, result.failed = common.problem, common.failed

    def ask(self, contender: str, /, do: str, **arguments: Any) -> Any:
        """Returns the result of a request."""
        return self.remotes[self.processes[contender]].ask(do=do, **arguments)


def race(results: Mapping[str, ContenderResult], rounds: int, run: Callable[[str], Mapping[str, Seconds]]) -> None:
    """Runs every contender without a problem once a round, and adds the seconds of each part to its result."""
    # The round before the first compiles and does not count.
    for index in range(rounds + 1):
        names = [name for name, _ in measurable(results)]
        # Each round starts at another contender, so that none always follows the same one.
        start = index * max(len(names) // max(rounds, 1), 1) % max(len(names), 1)
        for name in names[start:] + names[:start]:
            with noted(results[name]):
                seconds = run(name)
                for part in seconds if index else ():
                    wall, cpu = seconds[part]
                    results[name].seconds.setdefault(part, []).append((wall, cpu))
        log(f"round {index} of {rounds}")


def race_programs(
    programs: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]], rounds: int
) -> tuple[dict[str, ContenderResult], dict[str, Callable[[], Any]]]:
    """Compiles functions for their arguments, and times them; returns the results and the compiled programs by name."""
    results = {name: ContenderResult(name) for name in programs}
    compiled = dict[str, Callable[[], Any]]()
    for name, (function, arguments) in programs.items():
        with noted(results[name]):
            program = jax.jit(function).lower(*arguments).compile()
            plan = program.memory_analysis()
            results[name].temp_bytes = None if plan is None else int(plan.temp_size_in_bytes)
            compiled[name] = functools.partial(program, *arguments)

    def run(name: str) -> dict[str, Seconds]:
        clock = Clock()
        with clock.part("run"):
            jax.block_until_ready(compiled[name]())
        return clock.parts

    race(results, rounds, run)
    return results, compiled


def measurable(results: Mapping[str, ContenderResult]) -> list[tuple[str, ContenderResult]]:
    """Lists the results without a problem."""
    return [(name, result) for name, result in results.items() if result.problem is None]


@contextlib.contextmanager
def noted(result: ContenderResult) -> Iterator[None]:
    """Writes an error into the result of its contender, so that the others go on."""
    try:
        yield
    except MissingError as error:
        result.problem = str(error)
    except Exception as error:
        result.problem = one_line(error, 300)
        result.failed = True
    if result.problem is not None:
        log(f"{result.name}: {result.problem}")


def log(text: str) -> None:
    """Prints progress."""
    print(text, file=sys.stderr, flush=True)
