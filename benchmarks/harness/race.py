"""Times contenders in interleaved rounds, and keeps going when one of them fails."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from benchmarks.harness.measure import Clock, Seconds
from benchmarks.harness.results import Result
from benchmarks.harness.worker import one_line


class MissingError(RuntimeError):
    """A contender whose environment was not made: its row says so, and the command does not fail."""


def race(results: Mapping[str, Result], rounds: int, run: Callable[[str], Mapping[str, Seconds]]) -> None:
    """Runs every contender once a round and adds the seconds to its result.

    Each round starts at another contender, so that none always follows the same one. The round before the first
    compiles and does not count.

    Args:
      results: by name; contenders with a problem are left out; run: returns the seconds of a run by part.
    """
    for index in range(rounds + 1):
        names = [name for name, _ in measurable(results)]
        start = index * max(len(names) // max(rounds, 1), 1) % max(len(names), 1)
        for name in names[start:] + names[:start]:
            with noted(results[name]):
                seconds = run(name)
                for part in seconds if index else ():
                    wall, cpu = seconds[part]
                    results[name].seconds.setdefault(part, []).append((wall, cpu))
        log(f"round {index} of {rounds}")


def race_programs(programs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Result]:
    """Times programs of this process by name, and waits for their results."""
    results = {name: Result(name) for name in programs}

    def run(name: str) -> dict[str, Seconds]:
        clock = Clock()
        with clock.part("run"):
            jax.block_until_ready(programs[name]())
        return clock.parts

    race(results, rounds, run)
    return results


def measurable(results: Mapping[str, Result]) -> list[tuple[str, Result]]:
    """Lists the results without a problem."""
    return [(name, result) for name, result in results.items() if result.problem is None]


@contextlib.contextmanager
def noted(result: Result) -> Iterator[None]:
    """Writes an error into the result of its contender, so that the others go on."""
    try:
        yield
    except MissingError as error:
        result.problem = str(error)
    except Exception as error:
        result.problem, result.failed = one_line(error, 300), True
    if result.problem is not None:
        log(f"{result.name}: {result.problem}")


def log(text: str) -> None:
    """Prints progress."""
    print(text, file=sys.stderr, flush=True)
