"""The `main` that the commands share: options, files and the exit status."""

import argparse
import json
import os
import pathlib
import platform
import re
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from benchmarks.harness.measure import load
from benchmarks.harness.report import Report

Option = tuple[str, dict[str, Any]]
Fields = dict[str, Any]


class OptionError(ValueError):
    """Options that do not fit each other or this machine."""


class EndError(Exception):
    """The end of a command that has nothing to report: its text, which is an error unless the status is 0."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


def option(name: str, **settings: Any) -> Option:
    """Returns an option with its settings, as `add_argument` takes them."""
    return name, settings


OUTPUTS = (
    option("--json", type=pathlib.Path, metavar="PATH", help="write all measurements"),
    option("--markdown", type=pathlib.Path, metavar="PATH", help="write the table, which is printed too"),
)


def prepare_output(flag: str, path: pathlib.Path | None) -> None:
    """Makes the directory of a file to write; raises `OptionError` naming the flag if the file cannot be written."""
    if path is None:
        return
    # Workers in environments without JAX import this module.
    from kljax._files import check_output

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_output(path, option=f"argument {flag}")
    except OSError as error:
        raise OptionError(f"argument {flag}: cannot make {path.parent}: {error.strerror}") from error
    except ValueError as error:
        raise OptionError(str(error)) from error


def command(
    name: str,
    description: str | None,
    measure: Callable[[argparse.Namespace], Fields],
    report: Callable[[Fields], Report],
    *options: Option,
) -> Callable[..., int]:
    """Returns `main` of `python -m benchmarks.NAME`: `measure` returns the fields of the JSON file for `report`."""

    def main(arguments: Sequence[str] | None = None) -> int:
        """Measures, prints and writes; returns 1 if a contender failed, else 0."""
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{name}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for flag, settings in (*options, *OUTPUTS):
            parser.add_argument(flag, **settings)
        chosen = parser.parse_args(arguments)
        try:
            prepare_output("--json", chosen.json)
            prepare_output("--markdown", chosen.markdown)
            fields = measure(chosen)
        except OptionError as error:
            parser.error(str(error))
        except EndError as end:
            print(f"ERROR {end}" if end.status else end, file=sys.stderr if end.status else sys.stdout)
            return end.status
        if "load" in fields:
            fields["load"][1] = load()
        done = report(json.loads(json.dumps(fields)))
        if done.checks:
            fields["targets"] = [check.as_json() for check in done.checks]
        print(done.text, end="")
        from kljax._files import write_output

        for path, content in ((chosen.markdown, done.text), (chosen.json, json.dumps(fields, indent=1) + "\n")):
            if path is not None:
                write_output(path, content)
        for line in done.failures:
            print(f"ERROR {line}", file=sys.stderr)
        return 1 if done.failures else 0

    return main


def race_options(env: str, *, rounds: int, quick: str) -> list[Option]:
    """Returns the options of a command whose contenders have environments, in the directory of the option `env`."""
    return [
        option(f"--{env}", type=pathlib.Path, metavar="DIR", help=f"made with --make-{env}"),
        option(f"--make-{env}", type=pathlib.Path, metavar="DIR", help="make it, and measure nothing"),
        option("--rounds", type=int, default=rounds, help="interleaved rounds; the fastest counts"),
        option("--quick", action="store_true", help=f"a smoke test: {quick}"),
        option("--threads", type=int, default=2, help="of each process on the CPU; 0 sets no limit"),
    ]


def limit_threads(count: int) -> None:
    """Binds this process and its children to the first `count` cores, or warns where that cannot be; 0: no limit."""
    if not count:
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
    else:
        print(f"warning: --threads: {platform.system()} binds no process to cores: all are used", file=sys.stderr)


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


def some_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Returns the type of an option that takes known names, separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := sorted(set(names) - set(known)):
            raise argparse.ArgumentTypeError(f"got {unknown}, expected some of {sorted(known)}")
        return names

    return parse
