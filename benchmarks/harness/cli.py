"""Options, files and the exit status that the commands share."""

import argparse
import json
import os
import pathlib
import platform
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any


def make_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of `python -m benchmarks.COMMAND`."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def race_parser(command: str, description: str | None, env: str, *, rounds: int, quick: str) -> argparse.ArgumentParser:
    """Returns the parser of a command that times contenders.

    Args:
      env: option that names the directory of the contenders' environments.
      rounds: the default; quick: describes the smoke test.
    """
    parser = make_parser(command, description)
    add = parser.add_argument
    add(f"--{env}", type=pathlib.Path, metavar="DIR", help=f"made with --make-{env}")
    add(f"--make-{env}", type=pathlib.Path, metavar="DIR", help="make it, and measure nothing")
    add("--rounds", type=int, default=rounds, help="interleaved rounds; the fastest counts")
    add("--contenders", type=names, metavar="NAMES", help="names separated by commas")
    add("--quick", action="store_true", help=f"a smoke test: {quick}")
    add("--threads", type=int, default=2, help="of each process on the CPU; 0 sets no limit")
    add_outputs(parser)
    return parser


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Adds the files that a command writes."""
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH", help="write all measurements")
    parser.add_argument("--markdown", type=pathlib.Path, metavar="PATH", help="write the table, which is printed too")


def limit_threads(count: int) -> None:
    """Binds this process and its children to the first `count` cores; 0 sets no limit.

    Where the system binds no process to cores, as macOS, a warning says that the limit does not hold.
    """
    if not count:
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
    else:
        print(f"warning: --threads: {platform.system()} binds no process to cores: all are used", file=sys.stderr)


def finish(options: argparse.Namespace, text: str, report: dict[str, Any], failures: Sequence[str]) -> int:
    """Prints and writes the results; returns 1 if a contender failed, else 0."""
    print(text, end="")
    for path, content in ((options.markdown, text), (options.json, json.dumps(report, indent=1) + "\n")):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    for line in failures:
        print(f"ERROR {line}", file=sys.stderr)
    return 1 if failures else 0


def numbers(example: str) -> Callable[[str], tuple[int, ...]]:
    """Returns the type of an option that is written as the example, such as `2048x1024x32768`."""
    count = example.count("x") + 1

    def parse(text: str) -> tuple[int, ...]:
        if not re.fullmatch(r"x".join([r"[1-9]\d*"] * count), text):
            expected = f"{count} positive numbers" if count > 1 else "a positive number"
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected} such as {example}")
        return tuple(int(part) for part in text.split("x"))

    return parse


def positive(text: str) -> int:
    """Parses a positive number."""
    return numbers("8")(text)[0]


def increasing(text: str) -> tuple[int, ...]:
    """Parses positive numbers that are separated by commas, the smallest first."""
    found = tuple(map(positive, names(text)))
    if list(found) != sorted(set(found)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected increasing numbers such as 256,512")
    return found


def names(text: str) -> tuple[str, ...]:
    """Parses names that are separated by commas."""
    return tuple(text.split(","))
