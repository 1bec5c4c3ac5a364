"""Puts the trainer and its commands through faults and counts the outcomes.

    python -m tests.faults                     all areas: the numbers of docs/reliability.md
    python -m tests.faults --areas server      some of them
    python -m tests.faults --markdown PATH     writes the table to a file too

The exit code is 1 if a fault ends in silence or in a traceback, and no reason says why that is right, or if the check
of a fault did not finish.
"""

import argparse
import collections
import importlib
import pathlib
import pkgutil
import sys
import tempfile
from collections.abc import Sequence

from tests import faults
from tests.faults.case import OUTCOMES, Fault, count
from tests.processes import hear_interrupts


def areas() -> dict[str, list[Fault]]:
    """Returns the faults of each module of this package that has any, by the name of the module."""
    names = sorted(
        module.name for module in pkgutil.iter_modules(faults.__path__) if not module.name.startswith("test_")
    )
    modules = {name: importlib.import_module(f"tests.faults.{name}") for name in names if name != "__main__"}
    return {name: list(module.FAULTS) for name, module in modules.items() if hasattr(module, "FAULTS")}


def table(counts: dict[str, collections.Counter[str]]) -> str:
    """Formats one row per area, one column per outcome."""
    lines = ["| area | faults | " + " | ".join(OUTCOMES) + " |", "|---|--:|" + "--:|" * len(OUTCOMES)]
    for area, counted in counts.items():
        cells = (str(counted[outcome] or "") for outcome in OUTCOMES)
        lines.append(f"| {area} | {counted.total()} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    hear_interrupts()
    actual = areas()
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--areas", nargs="+", choices=sorted(actual), default=sorted(actual))
    parser.add_argument("--markdown", type=pathlib.Path, help="file for the table, which is printed too")
    options = parser.parse_args(arguments)
    counts: dict[str, collections.Counter[str]] = {}
    bad = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.areas:
            directory = pathlib.Path(scratch) / name
            directory.mkdir()
            for fault, outcome in count(actual[name], directory):
                counts.setdefault(fault.area, collections.Counter())[outcome] += 1
                if fault.fails(outcome):
                    bad += 1
                    print(f"{outcome}: {fault.area}: {fault.name}", file=sys.stderr, flush=True)
    text = table(counts)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
